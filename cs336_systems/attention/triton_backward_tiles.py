"""The inner loops of FlashAttention-2's backward pass: what a stretch of queries adds to one tile of dK and dV, and
what a stretch of keys adds to one tile of dQ.

Dao 2023, "FlashAttention-2", algorithm 2, with P recomputed from the logsumexp: P = exp(S·scale - lse); dV = Pᵀ dO;
dP = dO vᵀ; dS = P ∘ (dP - D) with D = rowsum(O ∘ dO); dK = dSᵀ q·scale; dQ = dS k·scale.
"""

import triton
import triton.language as tl

from cs336_systems.attention.triton_split import add_dot_parts, dot_parts, load_parts, parts_of
from cs336_systems.attention.triton_tiles import LOG2_E, is_kept, is_visible, load_row, load_tile


@triton.jit
def load_lse(
    rows,
    batch_head,
    start_m,
    n_queries,
    n_rows,
    BLOCK_M: tl.constexpr,
    INLINE_D: tl.constexpr,
    USE_TMA: tl.constexpr,
):
    """The logsumexp of a tile of queries in units of log2, inf past n_queries: P is then exp2(S - inf) = 0 there.

    With INLINE_D `rows` is the forward pass's own (batch·heads, n_queries), of natural logs; else it is what
    `flash_preprocess_kernel` wrote.
    """
    if INLINE_D:
        index = start_m + tl.arange(0, BLOCK_M)
        pointers = rows + batch_head.to(tl.int64) * n_queries + index
        return tl.load(pointers, mask=index < n_queries, other=float("inf")) * LOG2_E
    else:
        return load_row(rows, batch_head, start_m, n_rows, BLOCK_M, USE_TMA)


@triton.jit
def delta_of(
    do_tile,  # (BLOCK_M, BLOCK_D)
    o,  # with INLINE_D, pointer to the forward pass's whole output
    o_strides,
    rows,
    n_heads,
    n_rows,
    batch,
    head,
    batch_head,
    start_m,
    n_queries,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    INLINE_D: tl.constexpr,
    USE_TMA: tl.constexpr,
):
    """D = rowsum(O ∘ dO) of a tile of queries: computed here, or read where `flash_preprocess_kernel` wrote it."""
    if INLINE_D:
        o_tile = load_tile(o, o_strides, batch, head, start_m, n_queries, BLOCK_M, HEAD_DIM, BLOCK_D, True, False)
        return tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
    else:
        return load_row(rows, n_heads + batch_head, start_m, n_rows, BLOCK_M, USE_TMA)


@triton.jit
def accumulate_dkdv(
    dk,  # (BLOCK_N, BLOCK_D) float32
    dv,  # (BLOCK_N, BLOCK_D) float32
    k,  # (BLOCK_N, BLOCK_D), and its low part
    k_low,
    v,  # (BLOCK_N, BLOCK_D), and its low part
    v_low,
    q,  # the whole tensors: pointers or descriptors
    do,
    o,
    q_strides,
    do_strides,
    o_strides,
    rows,  # (2·batch·heads, n_rows) float32, pointer or descriptor, see `load_lse` and `delta_of`
    n_heads,  # batch·heads: the row of `rows` at which D starts
    n_rows,
    batch,
    batch_size,
    head,
    batch_head,
    start_n,
    begin,
    end,
    n_queries,
    n_keys,
    scale_log2,
    dropout_scale,
    ds_scale,  # with two PARTS, a power of two that keeps dS in float16's range
    dropout,
    MASKED: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    PARTS: tl.constexpr,
    USE_TMA: tl.constexpr,
    INLINE_D: tl.constexpr,
    RUN_DK: tl.constexpr,
    RUN_DV: tl.constexpr,
):
    """Add what queries begin … end contribute to dV (RUN_DV) and to dK (RUN_DK; not yet scaled) of one tile of keys.

    Scores are transposed, (keys, queries): Pᵀ and dSᵀ are then left operands straight from registers. The order of
    the products matters on sm_90: with dV's issued before dS is known, ptxas makes every wgmma wait for the last.
    """
    key_index = start_n + tl.arange(0, BLOCK_N)[:, None]
    for start_m in tl.range(begin, end, BLOCK_M):
        query_index = start_m + tl.arange(0, BLOCK_M)[None, :]
        q_tile, q_low = load_parts(
            q, q_strides, batch, batch_size, head, start_m, n_queries, BLOCK_M, HEAD_DIM, BLOCK_D, True, USE_TMA, PARTS
        )
        scores_t = dot_parts(k, k_low, q_tile.T, q_low.T, PARTS, PRECISION)
        do_tile, do_low = load_parts(
            do, do_strides, batch, batch_size, head, start_m, n_queries, BLOCK_M, HEAD_DIM, BLOCK_D, True,
            USE_TMA, PARTS,
        )  # fmt: skip
        if RUN_DK:
            dp_t = dot_parts(v, v_low, do_tile.T, do_low.T, PARTS, PRECISION)
        lse = load_lse(rows, batch_head, start_m, n_queries, n_rows, BLOCK_M, INLINE_D, USE_TMA)
        p_t = tl.exp2(scores_t * scale_log2 - lse[None, :])
        if MASKED:
            p_t = tl.where(is_visible(query_index, key_index, n_keys, IS_CAUSAL), p_t, 0.0)
        p_kept_t = p_t
        if HAS_DROPOUT:
            kept = is_kept(query_index, key_index, batch_head, n_queries, n_keys, dropout)
            p_kept_t = tl.where(kept, p_t, 0.0)
            if RUN_DK:
                dp_t = tl.where(kept, dp_t * dropout_scale, 0.0)
        if RUN_DK:
            delta = delta_of(
                do_tile, o, o_strides, rows, n_heads, n_rows, batch, head, batch_head, start_m, n_queries, HEAD_DIM,
                BLOCK_M, BLOCK_D, INLINE_D, USE_TMA,
            )  # fmt: skip
            ds_t = p_t * (dp_t - delta[None, :])
            if PARTS == 2:
                ds_t *= ds_scale
        if RUN_DV:
            p_high_t, p_low_t = parts_of(p_kept_t, do_tile.dtype, PARTS)
            dv = add_dot_parts(dv, p_high_t, p_low_t, do_tile, do_low, PARTS, PRECISION)
        if RUN_DK:
            ds_high_t, ds_low_t = parts_of(ds_t, q_tile.dtype, PARTS)
            dk = add_dot_parts(dk, ds_high_t, ds_low_t, q_tile, q_low, PARTS, PRECISION)
    return dk, dv


@triton.jit
def accumulate_dq(
    dq,  # (BLOCK_M, BLOCK_D) float32
    q,  # (BLOCK_M, BLOCK_D), and its low part
    q_low,
    do,  # (BLOCK_M, BLOCK_D), and its low part
    do_low,
    lse,  # (BLOCK_M,) float32, in units of log2
    delta,  # (BLOCK_M,) float32: D
    k,  # the whole tensors: pointers or descriptors
    v,
    k_strides,
    v_strides,
    batch,
    batch_size,
    kv_head,
    batch_head,
    start_m,
    begin,
    end,
    n_queries,
    n_keys,
    scale_log2,
    dropout_scale,
    ds_scale,  # with two PARTS, a power of two that keeps dS in float16's range
    dropout,
    MASKED: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    PARTS: tl.constexpr,
    USE_TMA: tl.constexpr,
):
    """Add what keys begin … end contribute to dQ (not yet scaled) of one tile of queries."""
    query_index = start_m + tl.arange(0, BLOCK_M)[:, None]
    for start_n in tl.range(begin, end, BLOCK_N):
        key_index = start_n + tl.arange(0, BLOCK_N)[None, :]
        k_tile, k_low = load_parts(
            k, k_strides, batch, batch_size, kv_head, start_n, n_keys, BLOCK_N, HEAD_DIM, BLOCK_D, MASKED,
            USE_TMA, PARTS,
        )  # fmt: skip
        scores = dot_parts(q, q_low, k_tile.T, k_low.T, PARTS, PRECISION)
        p = tl.exp2(scores * scale_log2 - lse[:, None])
        if MASKED:
            p = tl.where(is_visible(query_index, key_index, n_keys, IS_CAUSAL), p, 0.0)
        v_tile, v_low = load_parts(
            v, v_strides, batch, batch_size, kv_head, start_n, n_keys, BLOCK_N, HEAD_DIM, BLOCK_D, MASKED,
            USE_TMA, PARTS,
        )  # fmt: skip
        dp = dot_parts(do, do_low, v_tile.T, v_low.T, PARTS, PRECISION)
        if HAS_DROPOUT:
            kept = is_kept(query_index, key_index, batch_head, n_queries, n_keys, dropout)
            dp = tl.where(kept, dp * dropout_scale, 0.0)
        ds = p * (dp - delta[:, None])
        if PARTS == 2:
            ds *= ds_scale
        ds_high, ds_low = parts_of(ds, k_tile.dtype, PARTS)
        dq = add_dot_parts(dq, ds_high, ds_low, k_tile, k_low, PARTS, PRECISION)
    return dq
