"""Measure the sharded optimizer: memory by what it holds, beside the formula, and the time of a step, both ways.

    python scripts/sharded_optimizer_benchmark.py --size xl --ctx 512

Prints the step with a whole and a divided optimizer state, the project's and PyTorch's, and what each rank's memory
holds after the build and before and after the optimizer's step. Also runs under torchrun and srun.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cs336_systems.cli import command_line, parse
from cs336_systems.configs import Attention, Optimizer


@dataclass(frozen=True)
class Arguments:
    size: str = "xl"
    """A named size: tiny, small, medium, large, xl, 2.7b, 10b, 8b."""
    ctx: int = 512
    """Context length, in tokens."""
    batch_size: int = 4
    """Sequences on each rank."""
    processes: tuple[int, ...] = ()
    """Numbers of ranks, one a GPU. Default: 2."""
    precision: tuple[Literal["fp32", "tf32", "bf16"], ...] = ("fp32",)
    """bf16 is autocast over float32 weights."""
    implementation: tuple[str, ...] = ("ddp", "sharded-optimizer", "torch-ddp", "torch-zero")
    """none (no communication), ddp, sharded-optimizer, fsdp, and PyTorch's: torch-ddp, torch-zero, torch-fsdp2."""
    optimizer: Optimizer = "adamw-fused"
    """The project's AdamW, or PyTorch's fused one."""
    attention: Attention = "naive"
    """The attention that the model calls."""
    max_ctas: int | None = None
    """NCCL's largest number of CTAs, each of which takes a multiprocessor from the kernels that compute."""
    high_priority: bool = False
    """Have the GPU schedule NCCL's blocks before those of the kernels that compute."""
    warmup: int = 5
    """Steps before measuring."""
    steps: int = 10
    """Measured steps."""
    seed: int = 0
    """Of the random weights and tokens."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """cpu (gloo), cuda (NCCL), or auto: GPUs if there are any."""
    profile: bool = True
    """Profile one step of each, for the timeline and the communication that nothing covers."""
    out: Path = Path("out/sharded_optimizer")
    """Folder for rows (JSON, CSV), tables (Markdown, LaTeX) and the picture."""


def main() -> None:
    options = dict(vars(parse(Arguments, __doc__)))
    from cs336_systems.benchmarking.run_sharding import run_sharding_benchmark
    from cs336_systems.profiling.gather_timing import profile_sharded_step

    profile_step = profile_sharded_step if options.pop("profile") else None
    run_sharding_benchmark(command_line(), profile_step, name="sharded_optimizer", **options)


if __name__ == "__main__":
    main()
