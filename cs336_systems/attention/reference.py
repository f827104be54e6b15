"""Plain attention that also returns its logsumexp: what "right" means for every other implementation.

It builds the whole (n_queries, n_keys) matrix and lets PyTorch differentiate it. In float64 it is the tests' oracle.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def causal_mask(n_queries: int, n_keys: int, device: torch.device | str | None = None) -> Bool[Tensor, "q k"]:
    """True where query i may see key j: j <= i, also where the two lengths differ (as in PyTorch's SDPA).

    Example: causal_mask(2, 3) is [[True, False, False], [True, True, False]].
    """
    return torch.ones(n_queries, n_keys, dtype=torch.bool, device=device).tril()


def attention_reference(
    q: Float[Tensor, "batch *heads n_queries head_dim"],
    k: Float[Tensor, "batch *kv_heads n_keys head_dim"],
    v: Float[Tensor, "batch *kv_heads n_keys head_dim"],
    is_causal: bool = False,
    scale: float | None = None,
    mask: Bool[Tensor, "*mask_shape"] | None = None,
    dropout_p: float = 0.0,
    keep: Bool[Tensor, "*mask_shape"] | None = None,
) -> tuple[Float[Tensor, "batch *heads n_queries head_dim"], Float[Tensor, "batch *heads n_queries"]]:
    """softmax(q kᵀ · scale) v, and the natural-log logsumexp of each row of scaled scores; both differentiable.

    Inputs are 3-D (batch, length, head_dim) or 4-D (batch, heads, length, head_dim) in any floating dtype; with 4-D
    inputs, heads may be a multiple of kv_heads: query head h then reads key head h // (heads / kv_heads).

    `scale` is 1/sqrt(head_dim) unless given. `mask` (True is kept) broadcasts to the scores, and adds to `is_causal`.
    `keep` is dropout's mask over the probabilities (True is kept); those kept are divided by 1 - dropout_p, and the
    logsumexp does not change. Without `keep`, a positive `dropout_p` draws one from the device's default generator.

    A query that may see no key has an output of 0 and a logsumexp of -inf, with zero gradients.
    The logsumexp is float32 for float16, bfloat16 and float32 inputs, float64 for float64.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if q.ndim == 4 and q.shape[1] != k.shape[1]:
        group_size = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group_size, dim=1) for x in (k, v))

    scores = (q @ k.mT * scale).to(torch.promote_types(q.dtype, torch.float32))
    if is_causal:
        causal = causal_mask(q.shape[-2], k.shape[-2], q.device)
        mask = causal if mask is None else mask & causal
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)

    lse = torch.logsumexp(scores, dim=-1)
    # softmax gives a row of NaN where it has nothing to sum; masked_fill keeps those NaN out of the gradients as well.
    probabilities = torch.softmax(scores, dim=-1).masked_fill((lse == -math.inf).unsqueeze(-1), 0)
    if dropout_p > 0:
        if keep is None:
            keep = torch.rand(probabilities.shape, device=q.device) >= dropout_p
        probabilities = probabilities * keep / (1 - dropout_p)
    return probabilities.to(q.dtype) @ v, lse
