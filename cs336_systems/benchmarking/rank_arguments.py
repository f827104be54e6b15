"""Arguments that the scripts share which train a model on several ranks; they read them before torch is imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cs336_systems.configs import Attention, Optimizer, check


@dataclass(frozen=True)
class RankArguments:
    size: str | None = None
    """A named size: tiny, small, medium, large, xl, 2.7b, 10b, 8b. Default: xl on GPUs and tiny on a CPU."""
    ctx: int | None = None
    """Context length, in tokens. Default: 512 on GPUs and 64 on a CPU."""
    batch_size: int = 4
    """Sequences on each rank."""
    total_batch_size: int | None = None
    """Sequences over all ranks, in the place of --batch-size: several numbers of processes then give strong scaling.
    Default: --batch-size on each."""
    processes: tuple[int, ...] = ()
    """Numbers of ranks, one a GPU; several give weak scaling. Default: 2."""
    precision: tuple[Literal["fp32", "tf32", "bf16"], ...] = ("fp32",)
    """bf16 is autocast over float32 weights, with float32 gradients."""
    optimizer: Optimizer = "adamw-fused"
    """The project's AdamW, or PyTorch's fused one."""
    attention: Attention = "naive"
    """The attention that the model calls."""
    max_ctas: tuple[int, ...] = (0,)
    """NCCL's largest number of CTAs, each of which takes a multiprocessor from the kernels that compute; 0 leaves it to
    NCCL. Several are compared."""
    high_priority: tuple[Literal["off", "on"], ...] = ("off",)
    """Have the GPU schedule NCCL's blocks before those of the kernels that compute."""
    warmup: int = 5
    """Steps before measuring."""
    steps: int = 10
    """Measured steps."""
    seed: int = 0
    """Seed of the random weights and tokens."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """cpu (gloo), cuda (NCCL), or auto: GPUs if there are any."""
    profile: bool = True
    """Profile one step of each, for the timeline and the communication that nothing covers."""
    timeout_s: float = 600.0
    """The limit of one collective, in seconds: ranks that wait longer for another end the run, and name it."""
    resume: bool = False
    """Keep the rows under --out and skip their cells."""


LARGEST_MB = 1e9  # a petabyte: torch counts bytes in 63 bits


def check_mb(name: str, value: float, least: float, in_words: str) -> None:
    """Raises ValueError for a size in MB that no buffer has: infinite, not a number, or less than `least`."""
    check(least <= value <= LARGEST_MB, name, value, f"must be {in_words} and at most {LARGEST_MB:g}")
