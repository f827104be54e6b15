"""FlashAttention-2's backward kernels in Triton: a preprocess for D, then two passes without atomics.

A program owns a tile of keys and sums dK and dV over queries, or owns a tile of queries and sums dQ over keys: seven
matrix products a pair of tiles, and equal inputs give equal bits. One pass, in which the owner of a tile of keys also
adds its part of dQ to a float32 buffer (by atomics, or by the tensor memory accelerator's reduction), needs five, but
serialises on its memory traffic. Measured on an H200, bfloat16, length 16,384, best configuration of each, ms:

| | dK, dV pass | dQ pass | two passes and D | one pass and D |
|---|---|---|---|---|
| 16 heads x 64, causal | 1.78 | 1.33 | 3.14 | 3.61 |
| 8 heads x 128, causal | 1.54 | 1.32 | 2.89 | 4.05 |
| 16 heads x 64 | 3.50 | 2.53 | 6.05 | 7.18 |
| 8 heads x 128 | 3.18 | 2.48 | 5.68 | 8.34 |

Two passes won in every shape measured, so the one-pass kernel was removed. (`hopper_backward.py` is another, in which
products, exponentials and additions to memory have warps of their own.)
"""

import triton
import triton.language as tl

from cs336_systems.attention.triton_backward_tiles import accumulate_dkdv, accumulate_dq, delta_of, load_lse
from cs336_systems.attention.triton_forward import P_EXPONENT_OF_PARTS, P_FACTOR_OF_PARTS
from cs336_systems.attention.triton_split import load_parts, scale_of, scores_scale_of
from cs336_systems.attention.triton_tiles import (
    LOG2_E,
    load_tile,
    power_of_two_below,
    reciprocal_of_power_of_two,
    store_tile,
)


# do_not_specialize: see flash_forward_kernel.
@triton.jit(do_not_specialize=["heads", "n_queries", "n_rows"])
def flash_preprocess_kernel(
    o_ptr,  # (batch, heads, n_queries, head_dim)
    do_ptr,  # (batch, heads, n_queries, head_dim)
    lse_ptr,  # (batch, heads, n_queries) float32, contiguous
    rows_ptr,  # (2, batch·heads, n_rows) float32, contiguous: lse in units of log2, then D; with HAS_TURNS 3, then 0
    scales_ptr,  # with two PARTS, `split_kernel`'s
    o_strides,
    do_strides,
    heads,
    n_queries,
    n_rows,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_TURNS: tl.constexpr,  # of `hopper_backward_kernel`'s programs, which count from zero
):
    """One program computes D = rowsum(O ∘ dO) for BLOCK_M rows of one (batch, head).

    n_rows is n_queries padded; a padded row gets lse = inf, so that its P is exp2(S - inf) = 0 and the kernels that
    follow need no mask for it. With two PARTS, lse and D are those of the scaled P, V and dO.
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
    lse *= LOG2_E
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    n_heads = tl.num_programs(0) // n_blocks
    if PARTS == 2:
        lse -= P_EXPONENT_OF_PARTS
        delta *= scale_of(scales_ptr, 0, 2, batch_head // GROUP, n_heads // GROUP)
        delta *= scale_of(scales_ptr, 0, 3, batch_head // GROUP, n_heads // GROUP)
    tl.store(rows_ptr + rows, lse)
    tl.store(rows_ptr + n_heads.to(tl.int64) * n_rows + rows, delta)
    if HAS_TURNS:
        tl.store(rows_ptr + 2 * n_heads.to(tl.int64) * n_rows + rows, tl.zeros_like(delta))


@triton.jit
def _factors_of_parts(scales_ptr, scaled_head, n_scales, dropout_scale):
    """ds_scale, and 1/s of the stored P, V and dO together: of what dS is summed from, as the kernel has it.

    |dP - D| is at most twice the product of the longest rows of V and dO (Cauchy-Schwarz; D is an average of dP's
    row), and P at most 1 / P_FACTOR: with ds_scale, dS is at most 2**15, and float16 ends at 65,504.
    """
    bound = scale_of(scales_ptr, 2, 2, scaled_head, n_scales) * scale_of(scales_ptr, 2, 3, scaled_head, n_scales)
    bound = power_of_two_below(tl.maximum(bound * dropout_scale, 1.0)) * 4.0
    ds_scale = reciprocal_of_power_of_two(bound) * (32768.0 * P_FACTOR_OF_PARTS)
    vdo_factor = scale_of(scales_ptr, 1, 2, scaled_head, n_scales) * scale_of(scales_ptr, 1, 3, scaled_head, n_scales)
    return ds_scale, P_FACTOR_OF_PARTS * vdo_factor * reciprocal_of_power_of_two(ds_scale)


@triton.jit(do_not_specialize=["batch_size", "heads", "n_queries", "n_keys", "n_rows", "seed", "offset"])
def flash_backward_kernel(
    q_ptr,  # (batch, heads, n_queries, head_dim)
    k_ptr,  # (batch, heads // GROUP, n_keys, head_dim)
    v_ptr,  # (batch, heads // GROUP, n_keys, head_dim)
    do_ptr,  # (batch, heads, n_queries, head_dim)
    o_ptr,  # with INLINE_D, (batch, heads, n_queries, head_dim)
    q_step,  # these and rows_ptr once more, pointers or descriptors: what a program steps through
    k_step,
    v_step,
    do_step,
    rows_step,
    rows_ptr,  # (2, batch·heads, n_rows) float32, contiguous: lse in units of log2, then D; with INLINE_D, lse only
    dq_ptr,  # (batch, heads, n_queries, head_dim)
    dk_ptr,  # (batch, heads // GROUP, n_keys, head_dim)
    dv_ptr,  # (batch, heads // GROUP, n_keys, head_dim)
    scales_ptr,  # with two PARTS, `split_kernel`'s
    q_strides,
    k_strides,
    v_strides,
    do_strides,
    o_strides,
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
    PARTS: tl.constexpr,  # 2: q, k, v and do are `split_kernel`'s float16 pairs, (2·batch, …)
    BLOCK_OWN: tl.constexpr,
    BLOCK_STEP: tl.constexpr,
    USE_TMA: tl.constexpr,
    RUN_DK: tl.constexpr,
    RUN_DV: tl.constexpr,
    RUN_DQ: tl.constexpr,
    INLINE_D: tl.constexpr,  # compute D from o here, from the forward pass's own lse: there was no preprocess
):
    """One program computes BLOCK_OWN rows of dK (RUN_DK) and dV (RUN_DV), or of dQ (RUN_DQ), of one (batch, head).

    With all, the first programs take dK and dV and the others dQ: one launch, and twice as many programs for short
    sequences that would leave most of the card idle. In each part the longest programs under a causal mask come first.
    """
    pid = tl.program_id(0)
    n_key_blocks = tl.cdiv(n_keys, BLOCK_OWN)
    n_query_blocks = tl.cdiv(n_queries, BLOCK_OWN)
    dropout = (dropout_p, seed, offset)
    # A descriptor knows one tile shape; where it is that of the owned tile too, no address arithmetic of the prologue
    # stays in registers until the epilogue.
    OWN_BY_TMA: tl.constexpr = USE_TMA and BLOCK_OWN == BLOCK_STEP and IS_CAUSAL
    n_dkdv = 0
    if RUN_DK or RUN_DV:
        n_dkdv = n_key_blocks * batch_size * (heads // GROUP)
    q_own = q_step if OWN_BY_TMA else q_ptr
    k_own = k_step if OWN_BY_TMA else k_ptr
    v_own = v_step if OWN_BY_TMA else v_ptr
    do_own = do_step if OWN_BY_TMA else do_ptr

    if (RUN_DK or RUN_DV) and pid < n_dkdv:
        start_n = pid % n_key_blocks * BLOCK_OWN
        batch = pid // n_key_blocks // (heads // GROUP)
        kv_head = pid // n_key_blocks % (heads // GROUP)
        ds_scale = 1.0
        dk_scale = scale
        dv_scale = dropout_scale
        if PARTS == 2:
            n_scales = batch_size * (heads // GROUP)
            scaled_head = batch * (heads // GROUP) + kv_head
            ds_scale, ds_factor = _factors_of_parts(scales_ptr, scaled_head, n_scales, dropout_scale)
            dk_scale = ds_factor * scale * scale_of(scales_ptr, 1, 0, scaled_head, n_scales)
            dv_scale *= P_FACTOR_OF_PARTS * scale_of(scales_ptr, 1, 3, scaled_head, n_scales)
            scale_log2 = scores_scale_of(scale_log2, scales_ptr, scaled_head, n_scales)
        k, k_low = load_parts(
            k_own, k_strides, batch, batch_size, kv_head, start_n, n_keys, BLOCK_OWN, HEAD_DIM, BLOCK_D, True,
            OWN_BY_TMA, PARTS,
        )  # fmt: skip
        v, v_low = load_parts(
            v_own, v_strides, batch, batch_size, kv_head, start_n, n_keys, BLOCK_OWN, HEAD_DIM, BLOCK_D, True,
            OWN_BY_TMA, PARTS,
        )  # fmt: skip
        dk = tl.zeros((BLOCK_OWN, BLOCK_D), tl.float32)
        dv = tl.zeros((BLOCK_OWN, BLOCK_D), tl.float32)
        # Queries before begin see none of these keys, those from full_begin on see all of them. What a last, ragged
        # tile sums for keys past n_keys is never stored; masking all of it costs nothing and spares ptxas, on sm_90,
        # from making every wgmma of the pointer path wait for the last.
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
            if IS_CAUSAL:
                dk, dv = accumulate_dkdv(
                    dk, dv, k, k_low, v, v_low, q_step, do_step, o_ptr, q_strides, do_strides, o_strides, rows_step,
                    batch_size * heads, n_rows, batch, batch_size, head, batch_head, start_n, begin, full_begin,
                    n_queries, n_keys, scale_log2, dropout_scale, ds_scale, dropout, True,
                    IS_CAUSAL, HAS_DROPOUT, HEAD_DIM, BLOCK_STEP, BLOCK_OWN, BLOCK_D, PRECISION, PARTS, USE_TMA,
                    INLINE_D, RUN_DK, RUN_DV,
                )  # fmt: skip
            dk, dv = accumulate_dkdv(
                dk, dv, k, k_low, v, v_low, q_step, do_step, o_ptr, q_strides, do_strides, o_strides, rows_step,
                batch_size * heads, n_rows, batch, batch_size, head, batch_head, start_n, full_begin, n_queries,
                n_queries, n_keys, scale_log2, dropout_scale, ds_scale, dropout, False,
                IS_CAUSAL, HAS_DROPOUT, HEAD_DIM, BLOCK_STEP, BLOCK_OWN, BLOCK_D, PRECISION, PARTS, USE_TMA,
                INLINE_D, RUN_DK, RUN_DV,
            )  # fmt: skip
        if RUN_DK:
            dk *= dk_scale
            store_tile(dk_ptr, dk_strides, dk, batch, kv_head, start_n, n_keys, BLOCK_OWN, HEAD_DIM, BLOCK_D)
        if RUN_DV:
            if HAS_DROPOUT or PARTS == 2:
                dv *= dv_scale
            store_tile(dv_ptr, dv_strides, dv, batch, kv_head, start_n, n_keys, BLOCK_OWN, HEAD_DIM, BLOCK_D)
    elif RUN_DQ:
        batch_head = (pid - n_dkdv) // n_query_blocks
        start_m = (n_query_blocks - 1 - (pid - n_dkdv) % n_query_blocks) * BLOCK_OWN
        batch = batch_head // heads
        head = batch_head % heads
        ds_scale = 1.0
        dq_scale = scale
        if PARTS == 2:
            n_scales = batch_size * (heads // GROUP)
            scaled_head = batch_head // GROUP
            ds_scale, ds_factor = _factors_of_parts(scales_ptr, scaled_head, n_scales, dropout_scale)
            dq_scale = ds_factor * scale * scale_of(scales_ptr, 1, 1, scaled_head, n_scales)
            scale_log2 = scores_scale_of(scale_log2, scales_ptr, scaled_head, n_scales)
        q, q_low = load_parts(
            q_own, q_strides, batch, batch_size, head, start_m, n_queries, BLOCK_OWN, HEAD_DIM, BLOCK_D, True,
            OWN_BY_TMA, PARTS,
        )  # fmt: skip
        do, do_low = load_parts(
            do_own, do_strides, batch, batch_size, head, start_m, n_queries, BLOCK_OWN, HEAD_DIM, BLOCK_D, True,
            OWN_BY_TMA, PARTS,
        )  # fmt: skip
        lse = load_lse(rows_ptr, batch_head, start_m, n_queries, n_rows, BLOCK_OWN, INLINE_D, False)
        delta = delta_of(
            do, o_ptr, o_strides, rows_ptr, batch_size * heads, n_rows, batch, head, batch_head, start_m, n_queries,
            HEAD_DIM, BLOCK_OWN, BLOCK_D, INLINE_D, False,
        )  # fmt: skip
        dq = tl.zeros((BLOCK_OWN, BLOCK_D), tl.float32)
        end = n_keys
        full_end = n_keys // BLOCK_STEP * BLOCK_STEP
        if IS_CAUSAL:
            end = tl.minimum(n_keys, start_m + BLOCK_OWN)
            full_end = tl.minimum(n_keys, start_m + 1) // BLOCK_STEP * BLOCK_STEP
        dq = accumulate_dq(
            dq, q, q_low, do, do_low, lse, delta, k_step, v_step, k_strides, v_strides, batch, batch_size,
            head // GROUP, batch_head, start_m,
            0, full_end, n_queries, n_keys, scale_log2, dropout_scale, ds_scale, dropout, False,
            IS_CAUSAL, HAS_DROPOUT, HEAD_DIM, BLOCK_OWN, BLOCK_STEP, BLOCK_D, PRECISION, PARTS, USE_TMA,
        )  # fmt: skip
        dq = accumulate_dq(
            dq, q, q_low, do, do_low, lse, delta, k_step, v_step, k_strides, v_strides, batch, batch_size,
            head // GROUP, batch_head, start_m,
            full_end, end, n_queries, n_keys, scale_log2, dropout_scale, ds_scale, dropout, True,
            IS_CAUSAL, HAS_DROPOUT, HEAD_DIM, BLOCK_OWN, BLOCK_STEP, BLOCK_D, PRECISION, PARTS, USE_TMA,
        )  # fmt: skip
        store_tile(dq_ptr, dq_strides, dq * dq_scale, batch, head, start_m, n_queries, BLOCK_OWN, HEAD_DIM, BLOCK_D)
