"""What the attention tests share: inputs, a float64 oracle, and a record of the memory that an operation uses."""

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from cs336_systems.attention.implementations import IMPLEMENTATIONS
from cs336_systems.attention.reference import attention_reference

NEEDS_TRITON = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed here (it exists for Linux only)"
)
# NumPy's, about how Triton's interpreter reads a loop's bounds.
IGNORE_INTERPRETER = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
TRITON = pytest.param("triton", marks=[NEEDS_TRITON, IGNORE_INTERPRETER])
# Hopper's kernels run on a CPU in a simulator only: test_hopper_simulated.py, and on a card test_flash_hopper.py.
PORTABLE = [
    pytest.param(name, marks=TRITON.marks if name == "triton" else []) for name in IMPLEMENTATIONS if name != "hopper"
]


def make_inputs(
    *shape: int,
    kv_heads: int | None = None,
    n_keys: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor]:
    """Normal q, k and v that require gradients; q of `shape`, (batch, length, head_dim) or with heads after batch."""
    kv_shape = list(shape)
    if kv_heads is not None:
        kv_shape[1] = kv_heads
    if n_keys is not None:
        kv_shape[-2] = n_keys
    q, k, v = (torch.randn(s, dtype=torch.float32).to(device, dtype) for s in (shape, kv_shape, kv_shape))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def oracle(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, is_causal: bool, scale: float | None = None, **options
) -> tuple[Tensor, ...]:
    """o, dq, dk, dv, lse: plain attention in float64 on the same numbers."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    o, lse = attention_reference(q, k, v, is_causal, scale, **options)
    return o.detach(), *torch.autograd.grad(o, (q, k, v), do.double()), lse.detach()


def two_passes(problem: Any, use_tma: bool) -> tuple:
    """In the place of `choose_backward`: two passes for short problems too."""
    from cs336_systems.attention.triton_tuning import choose

    return tuple((name, choose(name, problem, use_tma)) for name in ("dkdv", "dq"))


def output_and_gradients(
    attention: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor, do: Tensor
) -> tuple[Tensor, ...]:
    """o, dq, dk, dv."""
    o = attention(q, k, v)
    return o.detach(), *torch.autograd.grad(o, (q, k, v), do)


def largest_error(actual: Tensor, expected: Tensor) -> float:
    """max |actual - expected|; infinite if a NaN or infinity stands where the oracle has none."""
    assert actual.shape == expected.shape
    if expected.numel() == 0:
        return 0.0
    return (actual.double() - expected.double()).abs().nan_to_num(nan=torch.inf).max().item()


class PeakMemory(TorchDispatchMode):
    """Records `peak_bytes`, the most that the tensors made inside it have held at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        inputs = {x.untyped_storage()._cdata for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)}
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        for x in tree_iter(result):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                if storage._cdata not in inputs:  # a view of an input holds nothing more
                    self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._live.values()))
        return result
