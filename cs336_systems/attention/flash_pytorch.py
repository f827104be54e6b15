"""FlashAttention-2 in tiled PyTorch, forward and backward: the algorithm without a kernel language, on any device.

Dao 2023, "FlashAttention-2", Algorithms 1 and 2. One step of the Python loops handles a (query tile, key tile) pair of
all batches and heads at once, so that the loops cost little beside the matrix products; the memory in use grows with
the length, not with its square. Query heads that share a key head are stacked along the rows of their tile: one matrix
product serves them all, and in backward it also sums their gradients.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from cs336_systems.attention.checks import check_inputs

QUERY_TILE_SIZE = 256
KEY_TILE_SIZE = 256


def _on_four_dimensions(function: Callable) -> Callable:
    """Adds a dimension of heads to tensors that have none. Neither autograd (it would keep every tile) nor autocast (it
    would round the float32 accumulators' terms) sees the inside."""

    @functools.wraps(function)
    def wrapped(first: Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad(), torch.autocast(first.device.type, enabled=False):
            if first.ndim == 4:
                return function(first, *args, **kwargs)
            with_heads = (x.unsqueeze(1) if isinstance(x, Tensor) else x for x in (first, *args))
            results = function(*with_heads, **kwargs)
            return tuple(x if x is None else x.squeeze(1) for x in results)

    return wrapped


def _tiles(length: int, tile_size: int, start: int = 0) -> Iterator[slice]:
    """slice(start, start + tile_size), … up to length, the last one cut short. `start` is a multiple of tile_size."""
    for tile_start in range(start, length, tile_size):
        yield slice(tile_start, min(tile_start + tile_size, length))


def _mask_above_diagonal(scores: Tensor, query_tile: slice, key_tile: slice) -> None:
    """Set the scores of keys after their query to -inf, in place.

    scores (batch, kv_heads, group_size · query tile, key tile). Tiles wholly below the diagonal are left alone.
    """
    if key_tile.stop - 1 <= query_tile.start:
        return
    query = torch.arange(query_tile.start, query_tile.stop, device=scores.device)
    key = torch.arange(key_tile.start, key_tile.stop, device=scores.device)
    scores.unflatten(2, (-1, len(query))).masked_fill_(key > query[:, None], -math.inf)


def _dropout_factor(
    like: Tensor, dropout_p: float, seed: int, offset: int, query_tile: slice, key_tile: slice
) -> Tensor:
    """1 / (1 - dropout_p) where a probability is kept, 0 where it is dropped; equal arguments give equal factors.

    Each tile has a generator of its own, so that backward, which visits the tiles in another order, draws the same.
    """
    # The CPU's generator reads 32 bits of its seed only: hash, so that each tile differs in those.
    name = f"{seed} {offset} {query_tile.start} {key_tile.start}".encode()
    tile_seed = int.from_bytes(hashlib.blake2b(name, digest_size=4).digest(), "little")
    generator = torch.Generator(like.device).manual_seed(tile_seed)
    return torch.empty_like(like).bernoulli_(1 - dropout_p, generator=generator).div_(1 - dropout_p)


@_on_four_dimensions
def flash_forward_pytorch(
    q: Float[Tensor, "batch *heads n_queries head_dim"],
    k: Float[Tensor, "batch *kv_heads n_keys head_dim"],
    v: Float[Tensor, "batch *kv_heads n_keys head_dim"],
    is_causal: bool,
    scale: float,
    dropout_p: float = 0.0,
    seed: int = 0,
    offset: int = 0,
    query_tile_size: int = QUERY_TILE_SIZE,
    key_tile_size: int = KEY_TILE_SIZE,
) -> tuple[Float[Tensor, "batch *heads n_queries head_dim"], Float[Tensor, "batch *heads n_queries"]]:
    """Output and natural-log logsumexp of softmax(q kᵀ · scale) v, by Algorithm 1.

    `heads` is a multiple of `kv_heads`; with `is_causal` query i sees keys 0 … i. Any strides. The output has q's
    dtype; the logsumexp and all accumulators are float32 (float64 for float64 inputs). A query with nothing to attend
    has output 0 and logsumexp -inf. Dropout's mask follows from seed, offset and the two tile sizes.
    """
    batch, heads, n_queries = q.shape[:3]
    kv_heads, n_keys = k.shape[1:3]
    group_size = heads // kv_heads
    dtype = torch.promote_types(q.dtype, torch.float32)
    lowest = torch.finfo(dtype).min

    grouped_q = q.unflatten(1, (kv_heads, group_size))
    o = torch.empty_like(q)
    lse = q.new_empty((batch, heads, n_queries), dtype=dtype)
    grouped_o, grouped_lse = o.unflatten(1, (kv_heads, group_size)), lse.unflatten(1, (kv_heads, group_size))
    for query_tile in _tiles(n_queries, query_tile_size):
        # (batch, kv_heads, rows, head_dim), rows = group_size · query tile
        q_tile = grouped_q[..., query_tile, :].flatten(2, 3).to(dtype) * scale
        # Not -inf, so that rows that are -inf in a whole tile don't meet -inf - (-inf).
        row_max = q_tile.new_full(q_tile.shape[:-1], lowest)
        row_sum = torch.zeros_like(row_max)
        accumulator = torch.zeros_like(q_tile)
        for key_tile in _tiles(min(n_keys, query_tile.stop) if is_causal else n_keys, key_tile_size):
            scores = q_tile @ k[..., key_tile, :].mT.to(dtype)
            if is_causal:
                _mask_above_diagonal(scores, query_tile, key_tile)
            new_max = torch.maximum(row_max, scores.amax(-1))
            probabilities = scores.sub_(new_max.unsqueeze(-1)).exp_()
            correction = row_max.sub_(new_max).exp_()
            row_sum.mul_(correction).add_(probabilities.sum(-1))
            if dropout_p > 0:
                probabilities *= _dropout_factor(probabilities, dropout_p, seed, offset, query_tile, key_tile)
            accumulator.mul_(correction.unsqueeze(-1)).add_(probabilities @ v[..., key_tile, :].to(dtype))
            row_max = new_max
        accumulator /= row_sum.masked_fill(row_sum == 0, 1).unsqueeze(-1)
        grouped_o[..., query_tile, :] = accumulator.unflatten(2, (group_size, -1))
        grouped_lse[..., query_tile] = row_max.add_(row_sum.log_()).unflatten(2, (group_size, -1))
    return o, lse


@_on_four_dimensions
def flash_backward_pytorch(
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
    query_tile_size: int = QUERY_TILE_SIZE,
    key_tile_size: int = KEY_TILE_SIZE,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of q, k and v, by Algorithm 2; None (and no work) for those that `needs` says are not wanted.

    Takes what `flash_forward_pytorch` took and returned, and the gradient `do` of its output. The probabilities are
    recomputed tile by tile from the scores and the logsumexp. Sums are float32 (float64 for float64 inputs), the
    gradients have their input's dtype.
    """
    needs_dq, needs_dk, needs_dv = needs
    kv_heads, n_keys = k.shape[1:3]
    heads, n_queries = q.shape[1:3]
    group_size = heads // kv_heads
    dtype = torch.promote_types(q.dtype, torch.float32)

    grouped_q, grouped_do, grouped_o, grouped_lse = (x.unflatten(1, (kv_heads, group_size)) for x in (q, do, o, lse))
    # A row with nothing to attend has probabilities exp(-inf - inf) = 0.
    grouped_lse = grouped_lse.masked_fill(grouped_lse == -math.inf, math.inf)
    row_dot = (grouped_o.to(dtype) * grouped_do).sum(-1)  # D in the paper: rowsum(O ∘ dO)

    dq = torch.zeros_like(q, dtype=dtype) if needs_dq else None
    dk = torch.empty_like(k) if needs_dk else None
    dv = torch.empty_like(v) if needs_dv else None
    for key_tile in _tiles(n_keys, key_tile_size):
        k_tile, v_tile = k[..., key_tile, :].to(dtype), v[..., key_tile, :].to(dtype)
        dk_tile, dv_tile = torch.zeros_like(k_tile), torch.zeros_like(v_tile)
        first_query = key_tile.start // query_tile_size * query_tile_size if is_causal else 0
        for query_tile in _tiles(n_queries, query_tile_size, start=first_query):
            # Scaled as in forward, so that the scores round as they did there.
            q_tile = grouped_q[..., query_tile, :].flatten(2, 3).to(dtype) * scale
            do_tile = grouped_do[..., query_tile, :].flatten(2, 3).to(dtype)
            scores = q_tile @ k_tile.mT
            if is_causal:
                _mask_above_diagonal(scores, query_tile, key_tile)
            probabilities = scores.sub_(grouped_lse[..., query_tile].flatten(2, 3).unsqueeze(-1)).exp_()
            factor = None
            if dropout_p > 0:
                factor = _dropout_factor(probabilities, dropout_p, seed, offset, query_tile, key_tile)
            if needs_dv:
                dv_tile += (probabilities if factor is None else probabilities * factor).mT @ do_tile
            if not (needs_dq or needs_dk):
                continue
            dp = do_tile @ v_tile.mT
            if factor is not None:
                dp *= factor
            ds = dp.sub_(row_dot[..., query_tile].flatten(2, 3).unsqueeze(-1)).mul_(probabilities)
            if dq is not None:
                dq_tile = (ds @ k_tile).unflatten(2, (group_size, -1))
                dq.unflatten(1, (kv_heads, group_size))[..., query_tile, :] += dq_tile
            if needs_dk:
                dk_tile += ds.mT @ q_tile
        if dk is not None:
            dk[..., key_tile, :] = dk_tile
        if dv is not None:
            dv[..., key_tile, :] = dv_tile
    return None if dq is None else dq.mul_(scale).to(q.dtype), dk, dv


class FlashAttentionPyTorch(torch.autograd.Function):
    """FlashAttention-2 in tiled PyTorch: `.apply(q, k, v, is_causal)`; scale and tile sizes may follow.

    q (batch, n_queries, head_dim), k and v (batch, n_keys, head_dim), or all with a dimension of heads after the batch.
    Backward needs q, k, v, the output, and one more tensor: the logsumexp, (batch, n_queries) or
    (batch, heads, n_queries).

    Raises:
        ValueError: inputs that don't fit together (as `flash_attention` has it), or a tile size below 1.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_causal: bool = False,
        scale: float | None = None,
        query_tile_size: int = QUERY_TILE_SIZE,
        key_tile_size: int = KEY_TILE_SIZE,
    ) -> Tensor:
        check_inputs(q, k, v)
        if query_tile_size < 1 or key_tile_size < 1:
            raise ValueError(f"query_tile_size {query_tile_size}, key_tile_size {key_tile_size}: both must be positive")
        ctx.is_causal = is_causal
        ctx.scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        ctx.tile_sizes = {"query_tile_size": query_tile_size, "key_tile_size": key_tile_size}
        o, lse = flash_forward_pytorch(q, k, v, is_causal, ctx.scale, **ctx.tile_sizes)
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        grads = flash_backward_pytorch(
            do, *ctx.saved_tensors, ctx.is_causal, ctx.scale, needs=ctx.needs_input_grad[:3], **ctx.tile_sizes
        )
        return *grads, None, None, None, None
