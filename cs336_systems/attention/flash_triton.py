"""FlashAttention-2 in Triton: forward, backward and the autograd Function, from tensors to launches.

The kernels, and Triton itself, are imported at the first call, so that this module imports on machines without Triton.
"""

import functools
import importlib.util
from types import ModuleType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from cs336_systems.attention.checks import check_inputs
from cs336_systems.attention.implementations import WITHOUT_TRITON


@functools.cache
def _launchers() -> ModuleType:
    """The module that launches the kernels."""
    if importlib.util.find_spec("triton") is None:
        raise RuntimeError(WITHOUT_TRITON)
    from cs336_systems.attention import triton_launch

    return triton_launch


def flash_forward(
    q: Float[Tensor, "batch *heads n_queries head_dim"],
    k: Float[Tensor, "batch *kv_heads n_keys head_dim"],
    v: Float[Tensor, "batch *kv_heads n_keys head_dim"],
    is_causal: bool,
    scale: float,
    dropout_p: float = 0.0,
    seed: int = 0,
    offset: int = 0,
    is_hopper: bool = False,
) -> tuple[Float[Tensor, "batch *heads n_queries head_dim"], Float[Tensor, "batch *heads n_queries"]]:
    """softmax(q kᵀ·scale) v and the natural-log logsumexp of the scores, by FlashAttention-2's algorithm 1.

    q, k, v: one of float32, float16, bfloat16, any strides, head_dim 1 to 256; heads a multiple of kv_heads. float32
    products honour `torch.backends.cuda.matmul.fp32_precision`. With is_causal query i attends to keys 0 … i. With
    dropout_p, probabilities are dropped by a counter-based generator: seed and offset name the mask, which covers
    batch·heads·n_queries·n_keys counts from offset on. is_hopper: see `flash_hopper.py`.

    Returns o in q's dtype and lse in float32. A query with no key gets o = 0 and lse = -inf. Raises RuntimeError
    where the kernels cannot run (no Triton, no CUDA device) and ValueError for another dtype or head_dim.
    """
    launchers = _launchers()
    o = torch.empty_like(q)
    lse = torch.empty(*q.shape[:-1], dtype=torch.float32, device=q.device)  # one by one they are parsed faster
    if q.numel() == 0 or k.numel() == 0:
        return o.zero_(), lse.fill_(float("-inf"))
    if scale < 0.0:  # the kernels take the maximum of q·k before scaling it
        q, scale = -q, -scale
    launchers.launch_flash_forward(q, k, v, o, lse, is_causal, scale, dropout_p, seed, offset, is_hopper)
    return o, lse


def flash_backward(
    do: Float[Tensor, "batch *heads n_queries head_dim"],
    q: Float[Tensor, "batch *heads n_queries head_dim"],
    k: Float[Tensor, "batch *kv_heads n_keys head_dim"],
    v: Float[Tensor, "batch *kv_heads n_keys head_dim"],
    o: Float[Tensor, "batch *heads n_queries head_dim"],
    lse: Float[Tensor, "batch *heads n_queries"],
    is_causal: bool,
    scale: float,
    dropout_p: float = 0.0,
    seed: int = 0,
    offset: int = 0,
    needs: tuple[bool, bool, bool] = (True, True, True),
    is_hopper: bool = False,
) -> tuple[
    Float[Tensor, "batch *heads n_queries head_dim"] | None,
    Float[Tensor, "batch *kv_heads n_keys head_dim"] | None,
    Float[Tensor, "batch *kv_heads n_keys head_dim"] | None,
]:
    """Gradients of `flash_forward`'s o for q, k, v (those that `needs` names), by FlashAttention-2's algorithm 2.

    do: the gradient of o, any strides (expanded too). o, lse: what `flash_forward` returned for the same arguments.
    Bit for bit the same from run to run.
    """
    launchers = _launchers()
    needs_dq, needs_dk, needs_dv = needs
    needs_dkdv = needs_dk or needs_dv
    # What is not needed is not written: q, k and v only lend their strides.
    dq = torch.empty_like(q) if needs_dq else q
    dk, dv = (torch.empty_like(k), torch.empty_like(v)) if needs_dkdv else (k, v)
    if q.numel() == 0 or k.numel() == 0:
        for grad, needed in ((dq, needs_dq), (dk, needs_dkdv), (dv, needs_dkdv)):
            if needed:
                grad.zero_()
    else:
        is_negative = scale < 0.0
        launchers.launch_flash_backward(
            do, -q if is_negative else q, k, v, o, lse.contiguous(), dq, dk, dv, is_causal, abs(scale), dropout_p, seed,
            offset, needs_dq, needs_dkdv, is_hopper,
        )  # fmt: skip
        if is_negative and needs_dq:
            dq.neg_()
    return dq if needs_dq else None, dk if needs_dk else None, dv if needs_dv else None


class FlashAttentionTriton(torch.autograd.Function):
    """`FlashAttentionTriton.apply(q, k, v, is_causal)`: attention with scale 1/sqrt(head_dim), in Triton.

    q (batch, n_queries, head_dim) and k, v (batch, n_keys, head_dim), or with a heads dimension after batch, as
    `flash_forward` takes them. Returns o like q. For the backward pass it keeps q, k, v, o and the natural-log
    logsumexp, (batch, n_queries) or (batch, heads, n_queries) float32. Differentiating twice raises RuntimeError.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        check_inputs(q, k, v)
        ctx.is_causal, ctx.scale = is_causal, q.shape[-1] ** -0.5
        o, lse = flash_forward(q, k, v, is_causal, ctx.scale)
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        needs = ctx.needs_input_grad[:3]
        return *flash_backward(do, *ctx.saved_tensors, ctx.is_causal, ctx.scale, needs=needs), None
