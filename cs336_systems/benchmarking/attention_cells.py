"""What the three attention benchmarks have in common: a cell's parameters and checks, its inputs, and its memory.

No torch at import, so that a command line can be parsed, refused or explained at once.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from cs336_systems.configs import MAX_HEAD_DIM, Precision, check, check_choices, check_device

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Every implementation (see attention_peers.PEERS), and those that are something without torch.compile.
PeerName = Literal[
    "flash-triton",
    "sdpa-flash",
    "sdpa-cudnn",
    "sdpa-efficient",
    "flex",
    "naive",
    "naive-compiled",
    "flash-pytorch",
    "flash-hopper",
]
EagerPeerName = Literal[
    "flash-triton", "flash-hopper", "sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "naive", "flash-pytorch"
]


# Those that have no backward pass, or nothing at all, elsewhere.
CUDA_ONLY = ("sdpa-cudnn", "sdpa-efficient", "flex")
# The project's own, by their names in attention/implementations.py.
OURS = {"flash-triton": "triton", "flash-hopper": "hopper", "flash-pytorch": "pytorch"}


def cuda_only(name: str, device: str) -> str:
    """Why one of `CUDA_ONLY` does not run on another device."""
    return f"{name} runs on NVIDIA GPUs, and the device is {device}"


@dataclass(frozen=True)
class AttentionCell:
    """Which attention runs on what: the parameters that all three benchmarks have.

    `precision` is the inputs' dtype; tf32 is float32 with tensor cores where an implementation uses
    `torch.set_float32_matmul_precision`. `length` counts tokens, of queries and keys alike.

    Raises:
        ValueError: a value out of its range, or a precision that the device lacks.
    """

    implementation: PeerName
    precision: Precision
    head_dim: int
    length: int
    is_causal: bool = True
    device: str = "cpu"
    seed: int = 0

    def missing_here(self) -> str:
        """The implementation, and what is missing to run it on the cell's device; "" where nothing is known to be.
        Imports torch."""
        import torch

        from cs336_systems.attention.implementations import IMPLEMENTATIONS

        missing = None
        if self.implementation in CUDA_ONLY and not self.device.startswith("cuda"):
            missing = cuda_only(self.implementation, self.device)
        elif self.implementation in OURS:
            implementation = IMPLEMENTATIONS[OURS[self.implementation]]
            missing = implementation.why_not(torch.device(self.device), torch_dtype(self.precision))
        return f"implementation={self.implementation!r}: {missing}" if missing else ""

    def __post_init__(self) -> None:
        check_choices(self)
        check(1 <= self.head_dim <= MAX_HEAD_DIM, "head_dim", self.head_dim, f"must be from 1 to {MAX_HEAD_DIM}")
        check(self.length >= 1, "length", self.length, "must be at least 1")
        check(0 <= self.seed < 2**63, "seed", self.seed, "must be between 0 and 2**63 - 1")
        check_device(self)


def check_not_empty(**flags: object) -> None:
    """Raises ValueError for the first flag that was given no value."""
    for name, values in flags.items():
        check(values != (), name, "", "needs at least one value")


def torch_dtype(precision: Precision) -> torch.dtype:
    """The inputs' dtype; tf32 inputs are float32."""
    import torch

    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)


def prepare_device(cell: AttentionCell) -> torch.device:
    """Makes the cell's device current, seeds its random numbers and sets float32's precision there."""
    import torch

    device = torch.device(cell.device)
    if device.index is not None:
        torch.cuda.set_device(device)
    torch.manual_seed(cell.seed)
    torch.set_float32_matmul_precision("high" if cell.precision == "tf32" else "highest")
    return device


def make_inputs(cell: AttentionCell, *leading: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k and v, which require grad, and dO: standard normal, each (*leading, length, head_dim)."""
    import torch

    def random(requires_grad: bool) -> Tensor:
        shape = (*leading, cell.length, cell.head_dim)
        dtype = torch_dtype(cell.precision)
        return torch.randn(shape, dtype=dtype, device=cell.device, requires_grad=requires_grad)

    return random(True), random(True), random(True), random(False)


Values = TypeVar("Values", bound=dict[str, Any])


def without_leftovers(measure: Callable[[], Values], device: torch.device) -> Values:
    """Calls `measure` and takes from each of its "…_gib" values what is still allocated when all its tensors are gone.

    What stays is not the cell's: cuBLAS's workspaces, which the first matrix product of a process leaves behind.
    """
    values = measure()
    leftover = 0.0
    if device.type == "cuda":
        gc.collect()
        leftover = allocated_gib(device) or 0.0
    for name, value in values.items():
        if name.endswith("_gib") and value is not None:
            values[name] = value - leftover
    return values


def allocated_gib(device: torch.device) -> float | None:
    """What the allocator has given out on a GPU, GiB; None elsewhere, where PyTorch keeps no such count."""
    import torch

    return torch.cuda.memory_allocated(device) / 2**30 if device.type == "cuda" else None


def peak_allocated_gib(device: torch.device) -> float | None:
    """The most that was allocated at once since `reset_peak`, GiB; None without a GPU."""
    import torch

    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None


def reset_peak(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
