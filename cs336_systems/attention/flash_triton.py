"""FlashAttention-2 in Triton: forward, backward and the autograd Function, from tensors to launches.

The kernels, and Triton itself, are imported at the first call, so that this module imports on machines without Triton.
"""

import contextlib
import functools
import importlib.util
import os
from types import ModuleType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MAX_HEAD_DIM = 256
_TRUE = ("1", "true", "yes", "on", "y")  # as Triton reads its environment


@functools.cache
def _launchers() -> ModuleType:
    """The module that launches the kernels."""
    if importlib.util.find_spec("triton") is None:
        raise RuntimeError("the Triton kernels need the package triton (Linux only), which is not installed")
    from cs336_systems.attention import triton_launch

    return triton_launch


def _launchers_for(q: Tensor) -> ModuleType:
    launchers = _launchers()
    if not q.is_cuda and not (q.is_cpu and os.environ.get("TRITON_INTERPRET", "").lower() in _TRUE):
        raise RuntimeError(
            f"the Triton kernels need a CUDA device, and q is on {q.device}; on a CPU they run in Triton's "
            "interpreter: set TRITON_INTERPRET=1 before Triton is imported"
        )
    if q.dtype not in _DTYPES or q.shape[-1] > _MAX_HEAD_DIM:
        raise ValueError(
            f"the Triton kernels take float32, float16 or bfloat16 and head_dim 1 to {_MAX_HEAD_DIM}; q is {q.dtype} "
            f"of shape {tuple(q.shape)}"
        )
    return launchers


def _forward_into(
    o: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, *dropout: float | int
) -> None:
    """Fill o and lse; all tensors with four (lse: three) dimensions."""
    launchers = _launchers_for(q)
    if q.numel() == 0:
        return
    if k.shape[2] == 0:
        o.zero_()
        lse.fill_(float("-inf"))
        return
    if scale < 0.0:  # the kernels take the maximum of q·k before scaling it
        q, scale = -q, -scale
    with _on_device_of(q):
        launchers.launch_flash_forward(q, k, v, o, lse, is_causal, scale, *dropout)


def _backward_into(
    grads: tuple[Tensor, Tensor, Tensor],
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
    dropout: tuple[float, int, int],
    needs: tuple[bool, bool, bool],
) -> None:
    """Fill the gradients that are needed; all tensors with four (lse: three) dimensions."""
    launchers = _launchers_for(q)
    if q.numel() == 0 or k.numel() == 0:
        for grad in grads:
            grad.zero_()
        return
    negative = scale < 0.0
    if negative:
        q, scale = -q, -scale
    needs_dq, needs_dkdv = needs[0], needs[1] or needs[2]
    with _on_device_of(q):
        launchers.launch_flash_backward(
            do, q, k, v, o, lse, *grads, is_causal, scale, *dropout, needs_dq=needs_dq, needs_dkdv=needs_dkdv
        )
    if negative and needs_dq:
        grads[0].neg_()


_NOTHING = contextlib.nullcontext()


def _on_device_of(x: Tensor) -> Any:
    """Triton launches on the current device; make it x's where it isn't."""
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return _NOTHING


def flash_forward(
    q: Float[Tensor, "batch heads n_queries head_dim"],
    k: Float[Tensor, "batch kv_heads n_keys head_dim"],
    v: Float[Tensor, "batch kv_heads n_keys head_dim"],
    is_causal: bool,
    scale: float,
    dropout_p: float = 0.0,
    seed: int = 0,
    offset: int = 0,
) -> tuple[Float[Tensor, "batch heads n_queries head_dim"], Float[Tensor, "batch heads n_queries"]]:
    """softmax(q kᵀ·scale) v and the natural-log logsumexp of the scores, by FlashAttention-2's algorithm 1.

    q, k, v: one of float32, float16, bfloat16, any strides, head_dim 1 to 256; heads a multiple of kv_heads. float32
    products honour `torch.backends.cuda.matmul.fp32_precision`. With is_causal query i attends to keys 0 … i. With
    dropout_p, probabilities are dropped by a counter-based generator: seed and offset name the mask, which covers
    batch·heads·n_queries·n_keys counts from offset on.

    Returns o in q's dtype and lse in float32. A query with no key gets o = 0 and lse = -inf. Raises RuntimeError
    where the kernels cannot run (no Triton, no CUDA device) and ValueError for another dtype or head_dim.
    """
    o = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    _forward_into(o, lse, q, k, v, is_causal, scale, dropout_p, seed, offset)
    return o, lse


def flash_backward(
    do: Float[Tensor, "batch heads n_queries head_dim"],
    q: Float[Tensor, "batch heads n_queries head_dim"],
    k: Float[Tensor, "batch kv_heads n_keys head_dim"],
    v: Float[Tensor, "batch kv_heads n_keys head_dim"],
    o: Float[Tensor, "batch heads n_queries head_dim"],
    lse: Float[Tensor, "batch heads n_queries"],
    is_causal: bool,
    scale: float,
    dropout_p: float = 0.0,
    seed: int = 0,
    offset: int = 0,
    needs: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[
    Float[Tensor, "batch heads n_queries head_dim"] | None,
    Float[Tensor, "batch kv_heads n_keys head_dim"] | None,
    Float[Tensor, "batch kv_heads n_keys head_dim"] | None,
]:
    """Gradients of `flash_forward`'s o for q, k, v (those that `needs` names), by FlashAttention-2's algorithm 2.

    do: the gradient of o, any strides (expanded too). o, lse: what `flash_forward` returned for the same arguments.
    Bit for bit the same from run to run where the two-pass kernels run: always under
    `torch.use_deterministic_algorithms(True)`, and wherever one pass is not faster (`triton_tuning.py`).
    """
    lse = lse.contiguous()
    grads = (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
    _backward_into(grads, do, q, k, v, o, lse, is_causal, scale, (dropout_p, seed, offset), needs)
    dq, dk, dv = (grad if needed else None for grad, needed in zip(grads, needs, strict=True))
    return dq, dk, dv


class FlashAttentionTriton(torch.autograd.Function):
    """`FlashAttentionTriton.apply(q, k, v, is_causal)`: attention with scale 1/sqrt(head_dim), in Triton.

    q (batch, n_queries, head_dim) and k, v (batch, n_keys, head_dim), or with a heads dimension after batch, as
    `flash_forward` takes them. Returns o like q. For the backward pass it keeps q, k, v, o and the natural-log
    logsumexp, (batch, n_queries) or (batch, heads, n_queries) float32. Differentiating twice raises RuntimeError.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        if q.ndim not in (3, 4) or not q.ndim == k.ndim == v.ndim:
            raise ValueError(
                "q, k and v need three dimensions (batch, length, head_dim) or four (batch, heads, length, head_dim); "
                f"their shapes are {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
            )
        o = torch.empty_like(q)
        lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        ctx.is_causal, ctx.scale = is_causal, q.shape[-1] ** -0.5
        o4, lse4, q4, k4, v4 = _with_heads(o, lse, q, k, v)
        _forward_into(o4, lse4, q4, k4, v4, is_causal, ctx.scale, 0.0, 0, 0)
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        q, k, v, o, lse = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        dq4, dk4, dv4, do4, q4, k4, v4, o4, lse4 = _with_heads(dq, dk, dv, do, q, k, v, o, lse)
        _backward_into(
            (dq4, dk4, dv4), do4, q4, k4, v4, o4, lse4, ctx.is_causal, ctx.scale, (0.0, 0, 0), ctx.needs_input_grad[:3]
        )
        needs_dq, needs_dk, needs_dv, _ = ctx.needs_input_grad
        return dq if needs_dq else None, dk if needs_dk else None, dv if needs_dv else None, None


def _with_heads(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The same memory with a heads dimension of one after batch, if the first tensor has three dimensions."""
    return tensors if tensors[0].ndim == 4 else tuple(x.unsqueeze(1) for x in tensors)
