"""What the fused kernels share: Triton where it is installed, where kernels can run, and operators that torch.compile
leaves whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

try:
    import triton
    import triton.language as tl

    IS_INSTALLED = True
except ImportError:  # none for this platform (macOS): modules with kernels can be imported, and say what is missing
    IS_INSTALLED = False
    triton = SimpleNamespace(jit=lambda function=None, **options: function or (lambda kernel: kernel))
    tl = SimpleNamespace(constexpr=object)

SUPPORTED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_LIBRARY = torch.library.Library("cs336", "FRAGMENT")
_PLAIN = frozenset((Tensor, Parameter))


def why_not(device: torch.device | str, dtype: torch.dtype = torch.float32) -> str | None:
    """What is missing to run the kernels on a device, as for attention's; None where they can run."""
    from cs336_systems.attention.implementations import IMPLEMENTATIONS

    return IMPLEMENTATIONS["triton"].why_not(torch.device(device), dtype)


def check_tensors(kernel: str, **tensors: Tensor | None) -> None:
    """Raises ValueError, naming the tensor, unless all have a supported dtype and lie on one device that can run
    kernels. A meta tensor passes: it is asked about shapes only."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in SUPPORTED_DTYPES:
            raise ValueError(f"{kernel}: {name} is {tensor.dtype}; it must be float32, float16 or bfloat16")
    check_device(kernel, **tensors)


def check_device(kernel: str, **tensors: Tensor | None) -> None:
    """Raises ValueError unless all tensors lie on one device, and kernels can run there."""
    given = [tensor for tensor in tensors.values() if tensor is not None]
    device = given[0].device
    for tensor in given:
        if tensor.device != device:
            places = ", ".join(f"{name} on {tensor.device}" for name, tensor in tensors.items() if tensor is not None)
            raise ValueError(f"{kernel}: all tensors must be on one device, got {places}")
    if device.type == "cuda" and IS_INSTALLED:  # nothing is missing: asking would take longer than all the rest here
        return
    missing = None if device.type == "meta" else why_not(device)
    if missing is not None:
        raise ValueError(f"{kernel}: cannot run on {device}: {missing}")


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Autocast's dtype where it is on, else None."""
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def is_intercepted(*tensors: Any) -> bool:
    """Whether a compiler, a mode (fake tensors, a FLOP counter), a transform, a tensor subclass or a meta tensor needs
    an operator; else its function is called without the dispatcher, which takes tens of microseconds."""
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
    ):
        return True
    for x in tensors:  # noqa: SIM110  a generator would take as long as all the rest here
        if isinstance(x, Tensor) and (type(x) not in _PLAIN or x.is_meta):
            return True
    return False


@functools.cache
def n_multiprocessors(device: torch.device) -> int:
    """Of the GPU; 1 elsewhere, in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def as_rows(x: Tensor) -> Tensor:
    """(..., d) -> (n_rows, d) whose rows are contiguous, with any stride between them: a view where that can be."""
    if x.is_contiguous() and x.numel() > 0:
        return x.view(-1, x.shape[-1])
    rows = x.unsqueeze(0).flatten(0, -2)
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def launch(kernel: Any, n_programs: int, *arguments: Any, **constants: Any) -> None:
    """Starts `n_programs` of a Triton kernel, if any, on the device of its first argument, which need not be the
    current one; `constants` are the kernel's constexprs and Triton's options."""
    if n_programs <= 0:
        return
    device = arguments[0].get_device()
    if device < 0 or device == torch._C._cuda_getDevice():
        kernel[(n_programs,)](*arguments, **constants)
    else:
        with torch.cuda.device(device):
            kernel[(n_programs,)](*arguments, **constants)


def operator(function: Any, fake: Callable) -> Callable:
    """`function`, also registered as `cs336::<its name>`: opaque to torch.compile, without a derivative of its own.

    `function` takes and returns what its annotations say (as `torch.library.infer_schema` reads them), new tensors
    only; `fake` takes the same and returns empty tensors of the same shapes, dtypes and strides. Autograd Functions
    call what this returns.
    """
    name = function.__name__.lstrip("_")
    schema = torch.library.infer_schema(function, mutates_args=())
    _LIBRARY.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"cs336::{name}", fake, lib=_LIBRARY)
    registered = getattr(torch.ops.cs336, name).default

    def call(*args: Any) -> Any:
        return registered(*args) if is_intercepted(*args) else function(*args)

    return call
