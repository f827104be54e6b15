"""Time a train step under data parallelism: naive, flat, overlapped, bucketed, PyTorch's, and without communication.

    python scripts/ddp_benchmark.py --size xl --ctx 512 --precision fp32 bf16 --bucket-size-mb 1 10 100 1000

Prints each implementation's step, by how much it is longer than the one without communication (none), and the overhead
model's prediction beside it; draws when each computed and communicated. Also runs under torchrun and srun, with the
launcher's number of processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cs336_systems.benchmarking.rank_arguments import RankArguments
from cs336_systems.cli import command_line, parse
from cs336_systems.configs import Compile


@dataclass(frozen=True)
class Arguments(RankArguments):
    implementation: tuple[str, ...] = ("naive", "flat", "overlapped", "bucketed", "bucketed-in-place", "torch-ddp")
    """naive, flat, overlapped, bucketed, bucketed-zeroed, bucketed-in-place, torch-ddp. The step without
    communication is always measured."""
    bucket_size_mb: tuple[float, ...] | None = None
    """Bucket sizes in MB (10**6 bytes). Default: 1, 10, 100 and 1000 on GPUs, and 0.1 and 1 on a CPU."""
    comm_dtype: Literal["bf16", "fp16"] | None = None
    """Send the buckets in two bytes an element. Default: as they are."""
    compile: Compile = "off"
    """torch.compile: off, on (the whole model), or blocks."""
    out: Path = Path("out/ddp")
    """Folder for rows, tables and pictures; an earlier run's are moved aside, unless resumed."""


def main() -> None:
    options = dict(vars(parse(Arguments, __doc__, on_ranks=True)))
    from cs336_systems.benchmarking.run_data_parallel import run_data_parallel_benchmark
    from cs336_systems.profiling.step_profilers import profile_step

    run_data_parallel_benchmark(command_line(), profile_step if options.pop("profile") else None, **options)


if __name__ == "__main__":
    main()
