"""FlashAttention-2's forward pass in Triton: one program a tile of queries, online softmax over tiles of keys.

Dao 2023, "FlashAttention-2", algorithm 1. Per tile: S = q kᵀ; m' = max(m, rowmax S·scale); P = exp(S·scale - m');
l = exp(m - m')·l + rowsum P; O = exp(m - m')·O + P v; at the end O /= l and lse = m + log l.
"""

import triton
import triton.language as tl

from cs336_systems.attention.triton_tiles import LN_2, is_kept, is_visible, load_tile, online_softmax_update, same_width_int, store_tile


@triton.jit
def _add_pv(
    acc,  # (BLOCK_M, BLOCK_D) float32
    p,  # (BLOCK_M, BLOCK_N)
    correction,  # (BLOCK_M,) float32
    v,  # the whole tensor: pointer or descriptor
    v_strides,
    batch,
    kv_head,
    start_n,
    n_keys,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    USE_TMA: tl.constexpr,
    MASKED: tl.constexpr,
):
    """acc · correction + P v for the values from start_n on."""
    start_n = tl.maximum(start_n, 0)  # with DELAY the first P is all zeros and belongs to no tile
    tile = load_tile(v, v_strides, batch, kv_head, start_n, n_keys, BLOCK_N, HEAD_DIM, BLOCK_D, MASKED, USE_TMA)
    p = p.to(tile.dtype, bitcast=True)
    return tl.dot(p, tile, acc * correction[:, None], input_precision=PRECISION)


@triton.jit
def _attend(
    acc,  # (BLOCK_M, BLOCK_D) float32
    row_max,  # (BLOCK_M,) float32, of scores in units of log2
    row_sum,  # (BLOCK_M,) float32
    p,  # (BLOCK_M, BLOCK_N), q's dtype: with DELAY the last tile's P, whose product with v is still to be added
    correction,  # (BLOCK_M,) float32: with DELAY the factor that acc is still to be multiplied by
    q,  # (BLOCK_M, BLOCK_D)
    k,  # the whole tensors: pointers or descriptors
    v,
    k_strides,
    v_strides,
    batch,
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
    USE_TMA: tl.constexpr,
    DELAY: tl.constexpr,
):
    """Attend from one tile of queries to keys begin … end; without MASKED every pair is visible and in range."""
    query_index = start_m + tl.arange(0, BLOCK_M)[:, None]
    for start_n in tl.range(begin, end, BLOCK_N):
        key_index = start_n + tl.arange(0, BLOCK_N)[None, :]
        k_tile = load_tile(k, k_strides, batch, kv_head, start_n, n_keys, BLOCK_N, HEAD_DIM, BLOCK_D, MASKED, USE_TMA)
        scores = tl.dot(q, k_tile.T, input_precision=PRECISION)
        if DELAY:
            acc = _add_pv(
                acc, p, correction, v, v_strides, batch, kv_head, start_n - BLOCK_N, n_keys,
                HEAD_DIM, BLOCK_N, BLOCK_D, PRECISION, USE_TMA, MASKED
            )  # fmt: skip
        if MASKED:
            scores = tl.where(is_visible(query_index, key_index, n_keys, IS_CAUSAL), scores, float("-inf"))
        p_now, row_max, row_sum, shrink = online_softmax_update(scores, row_max, row_sum, scale_log2)
        if HAS_DROPOUT:
            p_now = tl.where(is_kept(query_index, key_index, batch_head, n_queries, n_keys, dropout), p_now, 0.0)
        p_bits = p_now.to(q.dtype).to(p.dtype, bitcast=True)
        if DELAY:
            p = p_bits
            correction = shrink
        else:
            acc = _add_pv(
                acc, p_bits, shrink, v, v_strides, batch, kv_head, start_n, n_keys,
                HEAD_DIM, BLOCK_N, BLOCK_D, PRECISION, USE_TMA, MASKED
            )  # fmt: skip
    return acc, row_max, row_sum, p, correction


# Lengths, head counts and the seed change from call to call; specialising on them would compile a kernel for each of
# "is 1", "divisible by 16" and "neither". Strides stay specialised: contiguity and alignment decide how tiles load.
@triton.jit(do_not_specialize=["heads", "n_queries", "n_keys", "seed", "offset"])
def _flash_forward_kernel(
    q_ptr,  # (batch, heads, n_queries, head_dim)
    k,  # (batch, heads // GROUP, n_keys, head_dim), pointer or descriptor
    v,  # (batch, heads // GROUP, n_keys, head_dim), pointer or descriptor
    o_ptr,  # (batch, heads, n_queries, head_dim)
    lse_ptr,  # (batch, heads, n_queries) float32, contiguous
    q_strides,
    k_strides,
    v_strides,
    o_strides,
    heads,
    n_queries,
    n_keys,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    USE_TMA: tl.constexpr,
    DELAY: tl.constexpr,
):
    """One program computes BLOCK_M rows of o and lse of one (batch, head).

    Programs are ordered head by head, so that those in flight share keys and values in the L2 cache, and within a
    head from the last rows up: under a causal mask those are the longest, and short ones fill the gaps at the end.
    """
    n_blocks = tl.cdiv(n_queries, BLOCK_M)
    batch_head = tl.program_id(0) // n_blocks
    start_m = (n_blocks - 1 - tl.program_id(0) % n_blocks) * BLOCK_M
    batch = batch_head // heads
    head = batch_head % heads
    kv_head = head // GROUP
    dropout = (dropout_p, seed, offset)

    q = load_tile(q_ptr, q_strides, batch, head, start_m, n_queries, BLOCK_M, HEAD_DIM, BLOCK_D, True, False)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    p = tl.zeros((BLOCK_M, BLOCK_N), same_width_int(q.dtype))
    correction = tl.full((BLOCK_M,), 1.0, tl.float32)

    # Keys before full_end are visible to every query of the tile; those from end on are visible to none. Keys run
    # upwards, so a row meets key 0 first and its maximum is finite from the first tile on: no NaN from inf - inf.
    end = n_keys
    full_end = n_keys // BLOCK_N * BLOCK_N
    if IS_CAUSAL:
        end = tl.minimum(n_keys, start_m + BLOCK_M)
        full_end = tl.minimum(n_keys, start_m + 1) // BLOCK_N * BLOCK_N
    acc, row_max, row_sum, p, correction = _attend(
        acc, row_max, row_sum, p, correction, q, k, v, k_strides, v_strides, batch, kv_head, batch_head, start_m, 0, full_end,
        n_queries, n_keys, scale_log2, dropout,
        False, IS_CAUSAL, HAS_DROPOUT, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, PRECISION, USE_TMA, DELAY,
    )  # fmt: skip
    acc, row_max, row_sum, p, correction = _attend(
        acc, row_max, row_sum, p, correction, q, k, v, k_strides, v_strides, batch, kv_head, batch_head, start_m, full_end, end,
        n_queries, n_keys, scale_log2, dropout,
        True, IS_CAUSAL, HAS_DROPOUT, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, PRECISION, USE_TMA, DELAY,
    )  # fmt: skip

    if DELAY:
        last_n = (end - 1) // BLOCK_N * BLOCK_N
        acc = _add_pv(
            acc, p, correction, v, v_strides, batch, kv_head, last_n, n_keys,
            HEAD_DIM, BLOCK_N, BLOCK_D, PRECISION, USE_TMA, True
        )  # fmt: skip

    # With no keys at all row_sum is 0 and row_max -inf: o is 0 and lse -inf.
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    o = acc * (dropout_scale / row_sum)[:, None]
    store_tile(o_ptr, o_strides, o, batch, head, start_m, n_queries, BLOCK_M, HEAD_DIM, BLOCK_D)
    rows = start_m + tl.arange(0, BLOCK_M)
    lse_ptr += batch_head.to(tl.int64) * n_queries
    tl.store(lse_ptr + rows, (row_max + tl.log2(row_sum)) * LN_2, mask=rows < n_queries)
