"""The last step of Hopper's one backward pass (`hopper_backward.py`): dQ, summed in float32, is scaled and rounded."""

import triton
import triton.language as tl

from cs336_systems.attention.triton_tiles import load_tile, store_tile


@triton.jit(do_not_specialize=["heads", "n_queries"])
def hopper_scale_dq_kernel(
    sum_ptr,  # (batch, heads, n_queries, head_dim) float32
    dq_ptr,  # (batch, heads, n_queries, head_dim)
    sum_strides,
    dq_strides,
    heads,
    n_queries,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """One program writes BLOCK_M rows of dQ of one (batch, head): scale times their sum, rounded."""
    n_blocks = tl.cdiv(n_queries, BLOCK_M)
    start_m = tl.program_id(0) % n_blocks * BLOCK_M
    batch = tl.program_id(0) // n_blocks // heads
    head = tl.program_id(0) // n_blocks % heads
    dq = load_tile(sum_ptr, sum_strides, batch, head, start_m, n_queries, BLOCK_M, HEAD_DIM, BLOCK_D, True, False)
    store_tile(dq_ptr, dq_strides, dq * scale, batch, head, start_m, n_queries, BLOCK_M, HEAD_DIM, BLOCK_D)
