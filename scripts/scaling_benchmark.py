"""Measure how data parallelism and sharding scale with the number of GPUs, beside PyTorch's own.

    python scripts/scaling_benchmark.py --size xl --processes 1 2 4 8 --out results/scaling/weak
    python scripts/scaling_benchmark.py --size xl --processes 1 2 4 8 --total-batch-size 8 --out results/scaling/strong

Weak scaling gives each rank `--batch-size` sequences, strong scaling divides `--total-batch-size` among them. Prints
steps, efficiency against one rank that communicates nothing, and memory beside the formula.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cs336_systems.benchmarking.rank_arguments import RankArguments
from cs336_systems.cli import command_line, parse


@dataclass(frozen=True)
class Arguments(RankArguments):
    processes: tuple[int, ...] = ()
    """Numbers of ranks, one a GPU. Default: 1, 2, 4 and 8, or those of them for which there are GPUs or, on a CPU,
    cores."""
    implementation: tuple[str, ...] = (
        "none",
        "ddp",
        "torch-ddp",
        "sharded-optimizer",
        "torch-zero",
        "fsdp",
        "torch-fsdp2",
    )
    """none (no communication, on the fewest ranks), ddp, sharded-optimizer, fsdp, and PyTorch's: torch-ddp, torch-zero,
    torch-fsdp2."""
    profile: bool = False
    """Profile one step of each, for the timeline and the communication that nothing covers."""
    out: Path = Path("out/scaling")
    """Folder for rows, tables and pictures; an earlier run's are moved aside, unless resumed."""


def main() -> None:
    options = dict(vars(parse(Arguments, __doc__, on_ranks=True)))
    from cs336_systems.benchmarking.run_sharding import run_sharding_benchmark
    from cs336_systems.profiling.step_profilers import profile_sharded_step

    profile_step = profile_sharded_step if options.pop("profile") else None
    run_sharding_benchmark(command_line(), profile_step, name="scaling", default_processes=(1, 2, 4, 8), **options)


if __name__ == "__main__":
    main()
