"""Measure FSDP: memory beside the formula, the time of a step, and whether communication finishes in time.

    python scripts/fsdp_benchmark.py --size xl --ctx 512 --precision fp32 bf16

Prints the implementations' steps, the gathers that ended after their layers could have begun, and what each rank's
memory holds; draws when each computed and communicated. Also runs under torchrun and srun.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cs336_systems.benchmarking.rank_arguments import RankArguments
from cs336_systems.cli import command_line, parse


@dataclass(frozen=True)
class Arguments(RankArguments):
    precision: tuple[Literal["fp32", "tf32", "bf16"], ...] = ("fp32",)
    """bf16: weights and gradients travel, and layers compute, in bfloat16, with float32 masters (ddp: autocast)."""
    implementation: tuple[str, ...] = ("ddp", "fsdp", "torch-fsdp2")
    """none (no communication), ddp, sharded-optimizer, fsdp, and PyTorch's: torch-ddp, torch-zero, torch-fsdp2."""
    out: Path = Path("out/fsdp")
    """Folder for rows, tables and pictures; an earlier run's are moved aside, unless resumed."""


def main() -> None:
    options = dict(vars(parse(Arguments, __doc__, on_ranks=True)))
    from cs336_systems.benchmarking.run_sharding import run_sharding_benchmark
    from cs336_systems.profiling.step_profilers import profile_sharded_step

    profile_step = profile_sharded_step if options.pop("profile") else None
    run_sharding_benchmark(command_line(), profile_step, name="fsdp", **options)


if __name__ == "__main__":
    main()
