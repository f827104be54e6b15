"""FlashAttention-2's forward pass in Triton: one program a tile of queries, online softmax over tiles of keys.

Dao 2023, "FlashAttention-2", algorithm 1. Per tile: S = q kᵀ; m' = max(m, rowmax S·scale); P = exp(S·scale - m');
l = exp(m - m')·l + rowsum P; O = exp(m - m')·O + P v; at the end O /= l and lse = m + log l.

Where queries make too few programs to fill the card, the keys are cut into chunks as well ("Flash-Decoding", Dao et
al. 2023): a program attends from a tile of queries to one chunk, and a second kernel weighs the partial results by
their logsumexp.
"""

import triton
import triton.language as tl

from cs336_systems.attention.triton_split import (
    add_dot_parts,
    dot_parts,
    load_parts,
    parts_of,
    scale_of,
    scores_scale_of,
)
from cs336_systems.attention.triton_tiles import LN_2, is_kept, is_visible, load_tile, online_softmax_update, store_tile

# Float32 in two parts: P is computed 2**14 times as large, so that what float16 cannot hold of it is too small to see.
P_EXPONENT_OF_PARTS = tl.constexpr(14)
P_FACTOR_OF_PARTS = tl.constexpr(2.0**-14)


@triton.jit
def _attend(
    acc,  # (BLOCK_M, BLOCK_D) float32
    row_max,  # (BLOCK_M,) float32, of scores in units of log2
    row_sum,  # (BLOCK_M,) float32
    q,  # (BLOCK_M, BLOCK_D)
    q_low,
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
    """Attend from one tile of queries to keys begin … end; without MASKED every pair is visible and in range."""
    P_EXPONENT: tl.constexpr = P_EXPONENT_OF_PARTS * (PARTS - 1)
    query_index = start_m + tl.arange(0, BLOCK_M)[:, None]
    for start_n in tl.range(begin, end, BLOCK_N):
        key_index = start_n + tl.arange(0, BLOCK_N)[None, :]
        k_tile, k_low = load_parts(
            k, k_strides, batch, batch_size, kv_head, start_n, n_keys, BLOCK_N, HEAD_DIM, BLOCK_D, MASKED,
            USE_TMA, PARTS,
        )  # fmt: skip
        scores = dot_parts(q, q_low, k_tile.T, k_low.T, PARTS, PRECISION)
        if MASKED:
            scores = tl.where(is_visible(query_index, key_index, n_keys, IS_CAUSAL), scores, float("-inf"))
        p, row_max, row_sum, correction = online_softmax_update(scores, row_max, row_sum, scale_log2, P_EXPONENT)
        if HAS_DROPOUT:
            p = tl.where(is_kept(query_index, key_index, batch_head, n_queries, n_keys, dropout), p, 0.0)
        v_tile, v_low = load_parts(
            v, v_strides, batch, batch_size, kv_head, start_n, n_keys, BLOCK_N, HEAD_DIM, BLOCK_D, MASKED,
            USE_TMA, PARTS,
        )  # fmt: skip
        p, p_low = parts_of(p, v_tile.dtype, PARTS)
        acc = add_dot_parts(acc * correction[:, None], p, p_low, v_tile, v_low, PARTS, PRECISION)
    return acc, row_max, row_sum


# Lengths, head counts and the seed change from call to call; specialising on them would compile a kernel for each of
# "is 1", "divisible by 16" and "neither". Strides stay specialised: contiguity and alignment decide how tiles load.
@triton.jit(do_not_specialize=["batch_size", "heads", "n_queries", "n_keys", "chunk_keys", "seed", "offset"])
def flash_forward_kernel(
    q_ptr,  # (batch, heads, n_queries, head_dim)
    k,  # (batch, heads // GROUP, n_keys, head_dim), pointer or descriptor
    v,  # (batch, heads // GROUP, n_keys, head_dim), pointer or descriptor
    o_ptr,  # (n_chunks·batch, heads, n_queries, head_dim), float32 if there are several chunks
    lse_ptr,  # (n_chunks·batch, heads, n_queries) float32, contiguous
    scales_ptr,  # with two PARTS, `split_kernel`'s
    q_strides,
    k_strides,
    v_strides,
    o_strides,
    batch_size,
    heads,
    n_queries,
    n_keys,
    chunk_keys,  # keys that a program attends to at most: a multiple of BLOCK_M and BLOCK_N, or all of them
    scale_log2,
    dropout_p,
    dropout_scale,  # 1 / (1 - dropout_p)
    seed: tl.int64,
    offset: tl.int64,
    GROUP: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    PARTS: tl.constexpr,  # 2: q, k and v are `split_kernel`'s float16 pairs, (2·batch, …)
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    USE_TMA: tl.constexpr,
):
    """One program computes BLOCK_M rows of o and lse of one (batch, head), from one chunk of its keys.

    Programs are ordered head by head, so that those in flight share keys and values in the L2 cache, and within a
    head from the last rows up: under a causal mask those are the longest, and short ones fill the gaps at the end.
    """
    n_blocks = tl.cdiv(n_queries, BLOCK_M)
    start_m = (n_blocks - 1 - tl.program_id(0) % n_blocks) * BLOCK_M
    batch_head = tl.program_id(0) // n_blocks % (batch_size * heads)
    chunk = tl.program_id(0) // n_blocks // (batch_size * heads)
    batch = batch_head // heads
    head = batch_head % heads
    kv_head = head // GROUP
    dropout = (dropout_p, seed, offset)

    P_EXPONENT: tl.constexpr = P_EXPONENT_OF_PARTS * (PARTS - 1)
    if PARTS == 2:
        n_scales = batch_size * (heads // GROUP)
        scaled_head = batch * (heads // GROUP) + kv_head
        scale_log2 = scores_scale_of(scale_log2, scales_ptr, scaled_head, n_scales)
        scale_log2 = tl.maximum(scale_log2, 1e-37)  # -inf·0, of a masked score, would be NaN
        dropout_scale *= scale_of(scales_ptr, 1, 2, scaled_head, n_scales)

    q, q_low = load_parts(
        q_ptr, q_strides, batch, batch_size, head, start_m, n_queries, BLOCK_M, HEAD_DIM, BLOCK_D, True, False, PARTS
    )
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)

    # Keys before full_end are visible to every query of the tile; those from end on are visible to none. Keys run
    # upwards, so a row meets a visible key first and its maximum is finite from the first tile on: no inf - inf.
    begin = chunk * chunk_keys
    end = tl.minimum(n_keys, begin + chunk_keys)
    full_end = end // BLOCK_N * BLOCK_N
    if IS_CAUSAL:
        end = tl.minimum(end, start_m + BLOCK_M)
        full_end = tl.minimum(end, start_m + 1) // BLOCK_N * BLOCK_N
    full_end = tl.maximum(begin, full_end)
    acc, row_max, row_sum = _attend(
        acc, row_max, row_sum, q, q_low, k, v, k_strides, v_strides, batch, batch_size, kv_head, batch_head, start_m,
        begin, full_end, n_queries, n_keys, scale_log2, dropout,
        False, IS_CAUSAL, HAS_DROPOUT, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, PRECISION, PARTS, USE_TMA,
    )  # fmt: skip
    acc, row_max, row_sum = _attend(
        acc, row_max, row_sum, q, q_low, k, v, k_strides, v_strides, batch, batch_size, kv_head, batch_head, start_m,
        full_end, end, n_queries, n_keys, scale_log2, dropout,
        True, IS_CAUSAL, HAS_DROPOUT, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, PRECISION, PARTS, USE_TMA,
    )  # fmt: skip

    # A chunk of which the tile sees no key gives o = 0 and lse = -inf.
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    o = acc * (dropout_scale / row_sum)[:, None]
    o_batch = chunk * batch_size + batch
    store_tile(o_ptr, o_strides, o, o_batch, head, start_m, n_queries, BLOCK_M, HEAD_DIM, BLOCK_D)
    rows = start_m + tl.arange(0, BLOCK_M)
    lse_ptr += (o_batch * heads + head).to(tl.int64) * n_queries
    tl.store(lse_ptr + rows, (row_max + tl.log2(row_sum) - P_EXPONENT) * LN_2, mask=rows < n_queries)


@triton.jit(do_not_specialize=["batch_size", "heads", "n_queries", "n_chunks"])
def flash_combine_kernel(
    o_chunks_ptr,  # (n_chunks·batch, heads, n_queries, head_dim) float32, contiguous
    lse_chunks_ptr,  # (n_chunks·batch, heads, n_queries) float32, contiguous
    o_ptr,  # (batch, heads, n_queries, head_dim)
    lse_ptr,  # (batch, heads, n_queries) float32, contiguous
    o_chunks_strides,
    o_strides,
    batch_size,
    heads,
    n_queries,
    n_chunks,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """One program combines the chunks' results for BLOCK_M rows of one (batch, head): the online softmax again, with
    logsumexps as scores and partial outputs as values."""
    n_blocks = tl.cdiv(n_queries, BLOCK_M)
    start_m = tl.program_id(0) % n_blocks * BLOCK_M
    batch_head = tl.program_id(0) // n_blocks
    batch = batch_head // heads
    head = batch_head % heads
    rows = start_m + tl.arange(0, BLOCK_M)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    for chunk in range(n_chunks):
        o_batch = chunk * batch_size + batch
        pointers = lse_chunks_ptr + (o_batch * heads + head).to(tl.int64) * n_queries + rows
        chunk_lse = tl.load(pointers, mask=rows < n_queries, other=0.0)
        o = load_tile(
            o_chunks_ptr, o_chunks_strides, o_batch, head, start_m, n_queries, BLOCK_M, HEAD_DIM, BLOCK_D, True, False
        )
        new_max = tl.maximum(row_max, chunk_lse)  # finite: every query sees a key of the first chunk
        weight = tl.exp(chunk_lse - new_max)
        correction = tl.exp(row_max - new_max)
        acc = acc * correction[:, None] + o * weight[:, None]
        row_sum = row_sum * correction + weight
        row_max = new_max
    store_tile(o_ptr, o_strides, acc / row_sum[:, None], batch, head, start_m, n_queries, BLOCK_M, HEAD_DIM, BLOCK_D)
    lse_ptr += batch_head.to(tl.int64) * n_queries
    tl.store(lse_ptr + rows, row_max + tl.log(row_sum), mask=rows < n_queries)
