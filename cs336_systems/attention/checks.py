"""What every attention function asks of its inputs, checked before any work, at about a microsecond a call."""

from __future__ import annotations

import torch
from torch import Tensor

from cs336_systems.configs import MAX_HEAD_DIM

_DTYPES = frozenset((torch.float32, torch.float16, torch.bfloat16, torch.float64))


def _mismatch(problem: str, q: Tensor, k: Tensor, v: Tensor) -> ValueError:
    inputs = zip("qkv", (q, k, v), strict=True)
    described = ", ".join(f"{name} {tuple(x.shape)} {x.dtype} on {x.device}" for name, x in inputs)
    return ValueError(f"attention: {problem}; got {described}")


def check_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    """ValueError, naming all shapes, for inputs that don't belong together. The order makes the message fit."""
    shape, kv_shape = q.shape, k.shape
    rank = len(shape)
    if rank not in (3, 4) or len(kv_shape) != rank:
        raise _mismatch(
            "q, k and v must all be (batch, length, head_dim) or all (batch, heads, length, head_dim)", q, k, v
        )
    if kv_shape != v.shape:
        raise _mismatch("k and v must have the same shape", q, k, v)
    dtype = q.dtype
    if not (dtype == k.dtype == v.dtype):
        raise _mismatch("q, k and v must have the same dtype", q, k, v)
    if dtype not in _DTYPES:
        raise _mismatch("q, k and v must be float32, float16, bfloat16 or float64", q, k, v)
    if not (q.device == k.device == v.device):
        raise _mismatch("q, k and v must be on the same device", q, k, v)
    if shape[-1] != kv_shape[-1] or not 1 <= shape[-1] <= MAX_HEAD_DIM:
        raise _mismatch(
            f"q, k and v must have the same head_dim (their last dimension), from 1 to {MAX_HEAD_DIM}", q, k, v
        )
    if shape[0] != kv_shape[0]:
        raise _mismatch("q, k and v must have the same batch size (their first dimension)", q, k, v)
    if rank == 4 and shape[1] != kv_shape[1] and (kv_shape[1] == 0 or shape[1] % kv_shape[1] != 0):
        raise _mismatch("the heads of q (its second dimension) must be a multiple of the heads of k and v", q, k, v)
