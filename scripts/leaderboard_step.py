"""Time the 2026 leaderboard's step: the 8b model, 32,768 tokens on each of two GPUs, forward, loss, backward, AdamW.

Prints the plan for memory first: how many blocks keep all that backward needs, and how many compute it again. Then the
step with this project's parts, and with PyTorch's.

    python scripts/leaderboard_step.py
    python scripts/leaderboard_step.py --implementation fused --memory-gib 75
    torchrun --nproc-per-node 2 scripts/leaderboard_step.py --implementation fused

On a CPU it is, for a look, the tiny model and PyTorch's parts; with TRITON_INTERPRET=1 in the environment
--implementation fused runs there too, in minutes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cs336_systems.cli import command_line, parse


@dataclass(frozen=True)
class Arguments:
    size: str | None = None
    """A named size: tiny, small, medium, large, xl, 2.7b, 10b, 8b. Default: 8b on GPUs and tiny on a CPU."""
    ctx: int | None = None
    """Context length, in tokens. Default: 32,768 on GPUs and 16 on a CPU."""
    batch_size: int = 1
    """Sequences on each rank."""
    processes: tuple[int, ...] = ()
    """Numbers of ranks, one a GPU. Default: 2."""
    implementation: tuple[Literal["fused", "torch"], ...] | None = None
    """fused: this project's kernels, attention, FSDP and AdamW. torch: FSDP2, SDPA, torch.compile, fused AdamW.
    Default: both on GPUs and torch on a CPU."""
    precision: Literal["bf16", "fp32"] | None = None
    """Dtype of parameters, gradients and AdamW's moments. Default: bf16 on GPUs and fp32 on a CPU."""
    memory_gib: float | None = None
    """What the plan may use of each card, or for each rank on a CPU. Default: 95% of what other processes leave of a
    card, and any amount on a CPU."""
    kept_blocks: tuple[int, ...] = ()
    """Numbers of blocks that keep all that backward needs, in the plan's place, and for both implementations. Default:
    the plan's."""
    max_ctas: tuple[int, ...] = (0,)
    """NCCL's largest number of CTAs, each of which takes a multiprocessor from the kernels that compute; 0 leaves it to
    NCCL. Several are compared."""
    high_priority: tuple[Literal["off", "on"], ...] = ("off",)
    """Have the GPU schedule NCCL's blocks before those of the kernels that compute."""
    warmup: int = 3
    """Steps before measuring."""
    steps: int = 10
    """Measured steps."""
    seed: int = 0
    """Seed of the random weights and tokens."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """cpu (gloo), cuda (NCCL), or auto: GPUs if there are any."""
    timeout_s: float = 600.0
    """The limit of one collective, in seconds: ranks that wait longer for another end the run, and name it."""
    resume: bool = False
    """Keep the rows under --out and skip their cells."""
    out: Path = Path("out/leaderboard_step")
    """Folder for rows and tables; an earlier run's are moved aside, unless resumed."""


def main() -> None:
    arguments = parse(Arguments, __doc__, on_ranks=True)
    from cs336_systems.benchmarking.run_leaderboard_step import run_leaderboard_step

    run_leaderboard_step(command_line(), **vars(arguments))


if __name__ == "__main__":
    main()
