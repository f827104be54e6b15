"""FlashAttention-2's backward kernels in Triton: a preprocess for D, then two passes without atomics or one with.

Two passes: a program owns a tile of keys and sums dK and dV over queries, or owns a tile of queries and sums dQ over
keys. Seven matrix products a pair of tiles, no atomics, so that equal inputs give equal bits. One pass: the program
that owns a tile of keys also adds its part of dQ to a float32 buffer, which a last kernel converts: five products.
"""

import triton
import triton.language as tl

from cs336_systems.attention.triton_backward_tiles import accumulate_dkdv, accumulate_dq, add_dkdv
from cs336_systems.attention.triton_tiles import LOG2_E, load_tile, same_width_int, store_tile


# do_not_specialize: see _flash_forward_kernel.
@triton.jit(do_not_specialize=["heads", "n_queries", "n_rows"])
def _flash_preprocess_kernel(
    o_ptr,  # (batch, heads, n_queries, head_dim)
    do_ptr,  # (batch, heads, n_queries, head_dim)
    lse_ptr,  # (batch, heads, n_queries) float32, contiguous
    rows_ptr,  # (2, batch·heads, n_rows) float32, contiguous: lse in units of log2, then D
    dq_sum_ptr,  # (batch·heads, n_rows, BLOCK_D) float32, contiguous: set to 0 if ZERO_DQ
    o_strides,
    do_strides,
    heads,
    n_queries,
    n_rows,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ZERO_DQ: tl.constexpr,
):
    """One program computes D = rowsum(O ∘ dO) for BLOCK_M rows of one (batch, head).

    n_rows is n_queries padded; a padded row gets lse = inf, so that its P is exp2(S - inf) = 0 and the kernels that
    follow need no mask for it.
    """
    n_blocks = n_rows // BLOCK_M
    batch_head = tl.program_id(0) // n_blocks
    start_m = tl.program_id(0) % n_blocks * BLOCK_M
    batch = batch_head // heads
    head = batch_head % heads
    rows = start_m + tl.arange(0, BLOCK_M)
    o = load_tile(o_ptr, o_strides, batch, head, start_m, n_queries, BLOCK_M, HEAD_DIM, BLOCK_D, True, False)
    do = load_tile(do_ptr, do_strides, batch, head, start_m, n_queries, BLOCK_M, HEAD_DIM, BLOCK_D, True, False)
    lse_ptr += batch_head.to(tl.int64) * n_queries
    lse = tl.load(lse_ptr + rows, mask=rows < n_queries, other=float("inf"))
    rows_ptr += batch_head.to(tl.int64) * n_rows
    tl.store(rows_ptr + rows, lse * LOG2_E)
    rows_ptr += (tl.num_programs(0) // n_blocks).to(tl.int64) * n_rows
    tl.store(rows_ptr + rows, tl.sum(o.to(tl.float32) * do.to(tl.float32), 1))
    if ZERO_DQ:
        dq_sum_ptr += (batch_head.to(tl.int64) * n_rows + start_m) * BLOCK_D
        tile = tl.arange(0, BLOCK_M)[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
        tl.store(dq_sum_ptr + tile, tl.zeros((BLOCK_M, BLOCK_D), tl.float32))


@triton.jit(do_not_specialize=["heads", "n_queries", "n_rows"])
def _flash_convert_dq_kernel(
    dq_sum_ptr,  # (batch·heads, n_rows, BLOCK_D) float32, contiguous
    dq_ptr,  # (batch, heads, n_queries, head_dim)
    dq_strides,
    heads,
    n_queries,
    n_rows,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """One program scales BLOCK_M rows of the one-pass kernel's sum and writes them in dQ's dtype."""
    n_blocks = tl.cdiv(n_queries, BLOCK_M)
    batch_head = tl.program_id(0) // n_blocks
    start_m = tl.program_id(0) % n_blocks * BLOCK_M
    dq_sum_ptr += (batch_head.to(tl.int64) * n_rows + start_m) * BLOCK_D
    tile = tl.arange(0, BLOCK_M)[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    dq = tl.load(dq_sum_ptr + tile) * scale
    batch = batch_head // heads
    head = batch_head % heads
    store_tile(dq_ptr, dq_strides, dq, batch, head, start_m, n_queries, BLOCK_M, HEAD_DIM, BLOCK_D)


@triton.jit(do_not_specialize=["batch_size", "heads", "n_queries", "n_keys", "n_rows", "seed", "offset"])
def _flash_backward_kernel(
    q_ptr,  # (batch, heads, n_queries, head_dim)
    k_ptr,  # (batch, heads // GROUP, n_keys, head_dim)
    v_ptr,  # (batch, heads // GROUP, n_keys, head_dim)
    do_ptr,  # (batch, heads, n_queries, head_dim)
    q_step,  # these and rows_ptr once more, pointers or descriptors: what a program steps through
    k_step,
    v_step,
    do_step,
    rows_step,
    rows_ptr,  # (2, batch·heads, n_rows) float32, contiguous: lse in units of log2, then D
    dq_ptr,  # (batch, heads, n_queries, head_dim)
    dk_ptr,  # (batch, heads // GROUP, n_keys, head_dim)
    dv_ptr,  # (batch, heads // GROUP, n_keys, head_dim)
    dq_sum,  # with ONE_PASS: float32 (batch·heads·n_rows, BLOCK_D), contiguous, zero; pointer or descriptor
    q_strides,
    k_strides,
    v_strides,
    do_strides,
    dq_strides,
    dk_strides,
    dv_strides,
    batch_size,
    heads,
    n_queries,
    n_keys,
    n_rows,
    scale,
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
    BLOCK_OWN: tl.constexpr,
    BLOCK_STEP: tl.constexpr,
    USE_TMA: tl.constexpr,
    RUN_DKDV: tl.constexpr,
    RUN_DQ: tl.constexpr,
    ONE_PASS: tl.constexpr,
    REDUCE_BY_TMA: tl.constexpr,
    DELAY: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One program computes BLOCK_OWN rows of dK and dV (RUN_DKDV) or of dQ (RUN_DQ) of one (batch, head).

    With both, the first programs take dK and dV and the others dQ: one launch, and twice as many programs for short
    sequences that would leave most of the card idle. In each part the longest programs under a causal mask come first.
    """
    pid = tl.program_id(0)
    n_key_blocks = tl.cdiv(n_keys, BLOCK_OWN)
    n_query_blocks = tl.cdiv(n_queries, BLOCK_OWN)
    dropout = (dropout_p, seed, offset)
    n_dkdv = 0
    if RUN_DKDV:
        n_dkdv = n_key_blocks * batch_size * (heads // GROUP)
    delta_ptr = rows_ptr + (batch_size * heads).to(tl.int64) * n_rows

    if RUN_DKDV and pid < n_dkdv:
        start_n = pid % n_key_blocks * BLOCK_OWN
        batch = pid // n_key_blocks // (heads // GROUP)
        kv_head = pid // n_key_blocks % (heads // GROUP)
        k = load_tile(k_ptr, k_strides, batch, kv_head, start_n, n_keys, BLOCK_OWN, HEAD_DIM, BLOCK_D, True, False)
        v = load_tile(v_ptr, v_strides, batch, kv_head, start_n, n_keys, BLOCK_OWN, HEAD_DIM, BLOCK_D, True, False)
        dk = tl.zeros((BLOCK_OWN, BLOCK_D), tl.float32)
        dv = tl.zeros((BLOCK_OWN, BLOCK_D), tl.float32)
        # Queries before begin see none of these keys, those from full_begin on see all of them. A last, ragged tile
        # of keys masks every tile of queries: its padded keys must add nothing to dQ.
        begin = 0
        full_begin = 0
        if IS_CAUSAL:
            begin = tl.minimum(start_n, n_queries) // BLOCK_STEP * BLOCK_STEP
            full_begin = tl.cdiv(start_n + BLOCK_OWN - 1, BLOCK_STEP) * BLOCK_STEP
        if start_n + BLOCK_OWN > n_keys:
            full_begin = n_queries
        full_begin = tl.minimum(full_begin, n_queries)
        for member in range(GROUP):
            head = kv_head * GROUP + member
            batch_head = batch * heads + head
            p_t = tl.zeros((BLOCK_OWN, BLOCK_STEP), same_width_int(k.dtype))
            ds_t = tl.zeros((BLOCK_OWN, BLOCK_STEP), same_width_int(k.dtype))
            dk, dv, p_t, ds_t = accumulate_dkdv(
                dk, dv, p_t, ds_t, k, v, q_step, do_step, q_strides, do_strides, rows_step, batch_size * heads, n_rows, dq_sum,
                batch, head, batch_head, start_n, begin, full_begin,
                n_queries, n_keys, scale_log2, dropout_scale, dropout, True, ONE_PASS, REDUCE_BY_TMA, DELAY, NUM_STAGES,
                IS_CAUSAL, HAS_DROPOUT, HEAD_DIM, BLOCK_STEP, BLOCK_OWN, BLOCK_D, PRECISION, USE_TMA,
            )  # fmt: skip
            dk, dv, p_t, ds_t = accumulate_dkdv(
                dk, dv, p_t, ds_t, k, v, q_step, do_step, q_strides, do_strides, rows_step, batch_size * heads, n_rows, dq_sum,
                batch, head, batch_head, start_n, full_begin, n_queries,
                n_queries, n_keys, scale_log2, dropout_scale, dropout, False, ONE_PASS, REDUCE_BY_TMA, DELAY, NUM_STAGES,
                IS_CAUSAL, HAS_DROPOUT, HEAD_DIM, BLOCK_STEP, BLOCK_OWN, BLOCK_D, PRECISION, USE_TMA,
            )  # fmt: skip
            if DELAY:
                last_m = tl.maximum((n_queries - 1) // BLOCK_STEP * BLOCK_STEP, 0)
                last_q = load_tile(
                    q_step, q_strides, batch, head, last_m, n_queries, BLOCK_STEP, HEAD_DIM, BLOCK_D, True, USE_TMA
                )
                last_do = load_tile(
                    do_step, do_strides, batch, head, last_m, n_queries, BLOCK_STEP, HEAD_DIM, BLOCK_D, True, USE_TMA
                )
                dk, dv = add_dkdv(
                    dk, dv, p_t, ds_t, last_q, last_do, k, dq_sum, batch_head * n_rows + last_m,
                    ONE_PASS, REDUCE_BY_TMA, BLOCK_STEP, BLOCK_D, PRECISION,
                )  # fmt: skip
        dk *= scale
        if HAS_DROPOUT:
            dv *= dropout_scale
        store_tile(dk_ptr, dk_strides, dk, batch, kv_head, start_n, n_keys, BLOCK_OWN, HEAD_DIM, BLOCK_D)
        store_tile(dv_ptr, dv_strides, dv, batch, kv_head, start_n, n_keys, BLOCK_OWN, HEAD_DIM, BLOCK_D)
    elif RUN_DQ:
        batch_head = (pid - n_dkdv) // n_query_blocks
        start_m = (n_query_blocks - 1 - (pid - n_dkdv) % n_query_blocks) * BLOCK_OWN
        batch = batch_head // heads
        head = batch_head % heads
        q = load_tile(q_ptr, q_strides, batch, head, start_m, n_queries, BLOCK_OWN, HEAD_DIM, BLOCK_D, True, False)
        do = load_tile(do_ptr, do_strides, batch, head, start_m, n_queries, BLOCK_OWN, HEAD_DIM, BLOCK_D, True, False)
        rows = batch_head.to(tl.int64) * n_rows + start_m + tl.arange(0, BLOCK_OWN)
        lse = tl.load(rows_ptr + rows)
        delta = tl.load(delta_ptr + rows)
        dq = tl.zeros((BLOCK_OWN, BLOCK_D), tl.float32)
        end = n_keys
        full_end = n_keys // BLOCK_STEP * BLOCK_STEP
        if IS_CAUSAL:
            end = tl.minimum(n_keys, start_m + BLOCK_OWN)
            full_end = tl.minimum(n_keys, start_m + 1) // BLOCK_STEP * BLOCK_STEP
        dq = accumulate_dq(
            dq, q, do, lse, delta, k_step, v_step, k_strides, v_strides, batch, head // GROUP, batch_head, start_m,
            0, full_end, n_queries, n_keys, scale_log2, dropout_scale, dropout, False,
            IS_CAUSAL, HAS_DROPOUT, HEAD_DIM, BLOCK_OWN, BLOCK_STEP, BLOCK_D, PRECISION, USE_TMA,
        )  # fmt: skip
        dq = accumulate_dq(
            dq, q, do, lse, delta, k_step, v_step, k_strides, v_strides, batch, head // GROUP, batch_head, start_m,
            full_end, end, n_queries, n_keys, scale_log2, dropout_scale, dropout, True,
            IS_CAUSAL, HAS_DROPOUT, HEAD_DIM, BLOCK_OWN, BLOCK_STEP, BLOCK_D, PRECISION, USE_TMA,
        )  # fmt: skip
        store_tile(dq_ptr, dq_strides, dq * scale, batch, head, start_m, n_queries, BLOCK_OWN, HEAD_DIM, BLOCK_D)
