"""Measure the sharded optimizer: memory by what it holds, beside the formula, and the time of a step, both ways.

    python scripts/sharded_optimizer_benchmark.py --size xl --ctx 512

Prints the step with a whole and a divided optimizer state, the project's and PyTorch's, and what each rank's memory
holds after the build and before and after the optimizer's step. Also runs under torchrun and srun.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cs336_systems.benchmarking.rank_arguments import RankArguments
from cs336_systems.cli import command_line, parse


@dataclass(frozen=True)
class Arguments(RankArguments):
    implementation: tuple[str, ...] = ("ddp", "sharded-optimizer", "torch-ddp", "torch-zero")
    """none (no communication), ddp, sharded-optimizer, fsdp, and PyTorch's: torch-ddp, torch-zero, torch-fsdp2."""
    out: Path = Path("out/sharded_optimizer")
    """Folder for rows, tables and pictures; an earlier run's are moved aside, unless resumed."""


def main() -> None:
    options = dict(vars(parse(Arguments, __doc__, on_ranks=True)))
    from cs336_systems.benchmarking.run_sharding import run_sharding_benchmark
    from cs336_systems.profiling.step_profilers import profile_sharded_step

    profile_step = profile_sharded_step if options.pop("profile") else None
    run_sharding_benchmark(command_line(), profile_step, name="sharded_optimizer", **options)


if __name__ == "__main__":
    main()
