"""The table of attention implementations: to add one, add a line to `IMPLEMENTATIONS`.

An implementation is either a pair of functions (forward, backward) that `operators.py` makes differentiable, or one
function built of PyTorch's own operators. Modules are imported at the first call, so that Triton need not be installed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from cs336_systems.attention.reference import attention_reference

_TRITON_IS_INSTALLED = importlib.util.find_spec("triton") is not None
WITHOUT_TRITON = "the package triton is not installed (it comes with PyTorch on Linux)"
_KNOWN_TRITON = "3.6"
# Triton itself reads the variable when it defines a kernel, so setting it later would have no effect there either.
_TRITON_IS_INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def _why_not_triton(device: torch.device, dtype: torch.dtype) -> str | None:
    if not _TRITON_IS_INSTALLED:
        return WITHOUT_TRITON
    if device.type != "cuda" and not _TRITON_IS_INTERPRETED:
        return (
            f"Triton compiles for GPUs, and the tensors are on {device.type}; move them to a GPU, or set "
            "TRITON_INTERPRET=1 in the environment before Python starts, for Triton's (slow) interpreter"
        )
    if dtype == torch.float64:
        return "its kernels take float32, float16 and bfloat16, and the tensors are float64"
    if dtype == torch.bfloat16 and _TRITON_IS_INTERPRETED:
        return "Triton's interpreter multiplies bfloat16 wrongly (3.6 does, by its raw bits); take float32 or float16"
    return None


def _has_known_triton() -> bool:
    try:
        return importlib.metadata.version("triton").startswith(f"{_KNOWN_TRITON}.")
    except importlib.metadata.PackageNotFoundError:
        return False


# Whether Triton is the version whose private or experimental interfaces are known: Gluon, in which the kernels for
# Hopper are written, and the launcher that `triton_direct.py` calls.
HAS_KNOWN_TRITON = _has_known_triton()


def _is_hopper(device: torch.device) -> bool:
    return HAS_KNOWN_TRITON and _capability(device) == (9, 0)


# All that `torch.compiler.assume_constant_result` does, which imports torch._dynamo to do it: seconds of every start.
_is_hopper._dynamo_marked_constant = True  # ty: ignore[missing-attribute]


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    is_gpu = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_capability(device) if is_gpu else (0, 0)


def _why_not_hopper(device: torch.device, dtype: torch.dtype) -> str | None:
    if not _is_hopper(device):
        where = f"the tensors are on {device.type}" if device.type != "cuda" else "one of the two is another"
        needed = f"GPUs of compute capability 9.0 (H100, H200) and Triton {_KNOWN_TRITON}"
        return f"its kernels are for {needed}, and {where}"
    return _why_not_triton(device, dtype)


def _reference(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, dropout_p: float) -> Tensor:
    return attention_reference(q, k, v, is_causal, scale, dropout_p=dropout_p)[0]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, dropout_p: float) -> Tensor:
    if q.ndim == 3:  # SDPA's fused kernels take four dimensions only
        return _sdpa(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), is_causal, scale, dropout_p).squeeze(1)
    has_groups = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=has_groups
    )


@dataclass(frozen=True)
class Implementation:
    """Where an implementation's functions are, and when it can run.

    `module`, `forward` and `backward` name functions with the signatures of `flash_forward_pytorch` and
    `flash_backward_pytorch` (to `needs`). `composite` stands in their place where PyTorch can differentiate the
    implementation itself. `why_not(device, dtype)` is None where it can run, else what is missing.
    """

    module: str = ""
    forward: str = ""
    backward: str = ""
    composite: Callable[[Tensor, Tensor, Tensor, bool, float, float], Tensor] | None = None
    why_not: Callable[[torch.device, torch.dtype], str | None] = lambda device, dtype: None


IMPLEMENTATIONS: dict[str, Implementation] = {
    "triton": Implementation(
        "cs336_systems.attention.flash_triton", "flash_forward", "flash_backward", why_not=_why_not_triton
    ),
    "hopper": Implementation(
        "cs336_systems.attention.flash_hopper", "hopper_forward", "hopper_backward", why_not=_why_not_hopper
    ),
    "pytorch": Implementation(
        "cs336_systems.attention.flash_pytorch", "flash_forward_pytorch", "flash_backward_pytorch"
    ),
    "reference": Implementation(composite=_reference),
    "sdpa": Implementation(composite=_sdpa),
}


@functools.cache
def kernels(name: str) -> tuple[Callable, Callable]:
    """The forward and the backward function of an implementation that is not composite."""
    implementation = IMPLEMENTATIONS[name]
    module = importlib.import_module(implementation.module)
    return getattr(module, implementation.forward), getattr(module, implementation.backward)


def choose(q: Tensor) -> str:
    """What "auto" stands for: on a GPU where Triton can run "hopper" or "triton", else tiled PyTorch."""
    if not q.is_cuda or _why_not_triton(q.device, q.dtype) is not None:
        return "pytorch"
    return "hopper" if _is_hopper(q.device) else "triton"
