"""Float32 operands as pairs of float16 tensors, so that tensor cores multiply them at nearly float32's accuracy.

x·s = high + low with s a power of two: 22 bits of x. A product of two such numbers is three products of float16 on the
tensor cores (low·low is below what float32 resolves): a third of their float16 speed, where TF32 in three products
reaches a sixth. Ootomo and Yokota 2022, "Recovering single precision accuracy from Tensor Cores while surpassing the
FP32 theoretical peak performance", sections 3 and 4. s, of one head of one tensor, brings the largest element near
float16's end, so that only elements 2**-40 times smaller lose bits.

Two kernels bound by memory come before attention's: one measures each tensor, one splits it.
"""

import triton
import triton.language as tl

from cs336_systems.attention.triton_tiles import load_tile, power_of_two_below, reciprocal_of_power_of_two

# Blocks of rows that a head is measured in, at most.
MAX_BLOCKS = 64
_SMALLEST_LARGEST = tl.constexpr(2.0**-80)  # an all-zero tensor must not have an infinite s
_TARGET = tl.constexpr(2.0**14)  # x·s is at most twice that; float16 ends at 65,504


@triton.jit
def _measure(
    x,
    strides,
    largest_ptr,
    batch_head,
    block,
    heads,
    n_rows,
    rows_per_block,
    NORM_OFFSET,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Largest finite magnitude of one block of rows of one head, and the largest norm of its rows."""
    largest = tl.full((), 0.0, tl.float32)
    norm = tl.full((), 0.0, tl.float32)
    begin = block * rows_per_block
    for start in range(begin, tl.minimum(begin + rows_per_block, n_rows), BLOCK_ROWS):
        batch, head = batch_head // heads, batch_head % heads
        tile = load_tile(x, strides, batch, head, start, n_rows, BLOCK_ROWS, HEAD_DIM, BLOCK_D, True, False)
        tile = tl.abs(tile)
        tile = tl.where(tile < float("inf"), tile, 0.0)
        tile_largest = tl.maximum(tl.max(tl.max(tile, 1), 0), 1e-37)
        scaled = tile / tile_largest  # whose squares do not overflow
        norm = tl.maximum(norm, tile_largest * tl.sqrt(tl.max(tl.sum(scaled * scaled, 1), 0)))
        largest = tl.maximum(largest, tile_largest)
    tl.store(largest_ptr + batch_head * BLOCKS + block, largest)
    tl.store(largest_ptr + NORM_OFFSET + batch_head * BLOCKS + block, norm)


@triton.jit(do_not_specialize=["batch_size", "heads", "n_queries", "n_keys", "rows_per_block", "n_programs_each"])
def measure_kernel(
    q_ptr,  # (batch, heads, n_queries, head_dim) float32
    k_ptr,  # (batch, heads // GROUP, n_keys, head_dim) float32
    v_ptr,
    do_ptr,  # like q; any pointer where there is none
    measures_ptr,  # (2, 4, batch·heads, BLOCKS) float32: largest magnitudes and largest norms; q, k, v, do
    q_strides,
    k_strides,
    v_strides,
    do_strides,
    batch_size,
    heads,
    n_queries,
    n_keys,
    rows_per_block,
    n_programs_each,  # programs of each of the tensors: batch·heads·blocks
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """One program measures one block of rows of one head of one tensor."""
    tensor = tl.program_id(0) // n_programs_each
    n_blocks = n_programs_each // (batch_size * heads)
    batch_head = tl.program_id(0) % n_programs_each // n_blocks
    block = tl.program_id(0) % n_blocks
    all_heads = batch_size * heads * BLOCKS
    out_ptr = measures_ptr + tensor * all_heads
    norms = 4 * all_heads
    kv_heads = heads // GROUP
    if tensor == 0:
        _measure(
            q_ptr, q_strides, out_ptr, batch_head, block, heads, n_queries, rows_per_block, norms,
            HEAD_DIM, BLOCK_D, BLOCK_ROWS, BLOCKS,
        )  # fmt: skip
    elif tensor == 3:
        _measure(
            do_ptr, do_strides, out_ptr, batch_head, block, heads, n_queries, rows_per_block, norms,
            HEAD_DIM, BLOCK_D, BLOCK_ROWS, BLOCKS,
        )  # fmt: skip
    elif batch_head < batch_size * kv_heads:
        if tensor == 1:
            _measure(
                k_ptr, k_strides, out_ptr, batch_head, block, kv_heads, n_keys, rows_per_block, norms,
                HEAD_DIM, BLOCK_D, BLOCK_ROWS, BLOCKS,
            )  # fmt: skip
        else:
            _measure(
                v_ptr, v_strides, out_ptr, batch_head, block, kv_heads, n_keys, rows_per_block, norms,
                HEAD_DIM, BLOCK_D, BLOCK_ROWS, BLOCKS,
            )  # fmt: skip


@triton.jit
def _split(
    x,
    strides,
    split_ptr,
    split_strides,
    scales_ptr,  # of this tensor: s, then, n_scales each further on, 1/s and the largest norm of a row of x·s
    largest_ptr,
    norms,
    n_scales,
    batch_size,
    batch_head,
    start,
    heads,
    n_rows,
    n_blocks,
    MEMBERS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """high and low of some rows of one head. MEMBERS query heads, those that share a key head, share one s."""
    kv_head = batch_head // MEMBERS
    blocks = tl.arange(0, BLOCKS)
    largest = tl.full((), _SMALLEST_LARGEST, tl.float32)
    norm = tl.full((), 0.0, tl.float32)
    for member in range(MEMBERS):
        pointers = largest_ptr + (kv_head * MEMBERS + member) * BLOCKS + blocks
        largest = tl.maximum(largest, tl.max(tl.load(pointers, mask=blocks < n_blocks, other=0.0), 0))
        norm = tl.maximum(norm, tl.max(tl.load(pointers + norms, mask=blocks < n_blocks, other=0.0), 0))
    s = reciprocal_of_power_of_two(power_of_two_below(largest)) * _TARGET
    if (start == 0) & (batch_head % MEMBERS == 0):
        tl.store(scales_ptr + kv_head, s)
        tl.store(scales_ptr + n_scales + kv_head, reciprocal_of_power_of_two(s))
        tl.store(scales_ptr + 2 * n_scales + kv_head, norm * s)
    batch = batch_head // heads
    head = batch_head % heads
    tile = load_tile(x, strides, batch, head, start, n_rows, BLOCK_ROWS, HEAD_DIM, BLOCK_D, True, False) * s
    high = tile.to(tl.float16)
    low = (tile - high.to(tl.float32)).to(tl.float16)
    rows = tl.arange(0, BLOCK_ROWS)
    cols = tl.arange(0, BLOCK_D)
    mask = (start + rows < n_rows)[:, None] & (cols < HEAD_DIM)[None, :]
    offsets = (start + rows).to(tl.int64)[:, None] * split_strides[2] + cols[None, :]
    split_ptr += batch.to(tl.int64) * split_strides[0] + head.to(tl.int64) * split_strides[1]
    tl.store(split_ptr + offsets, high, mask=mask)
    tl.store(split_ptr + batch_size.to(tl.int64) * split_strides[0] + offsets, low, mask=mask)


@triton.jit(do_not_specialize=["batch_size", "heads", "n_queries", "n_keys", "n_blocks", "n_programs_each"])
def split_kernel(
    q_ptr,  # (batch, heads, n_queries, head_dim) float32
    k_ptr,  # (batch, heads // GROUP, n_keys, head_dim) float32
    v_ptr,
    do_ptr,  # like q; any pointer where there is none
    q_split_ptr,  # (2·batch, heads, n_queries, head_dim) float16: high of all batches, then low
    k_split_ptr,  # (2·batch, heads // GROUP, n_keys, head_dim) float16
    v_split_ptr,
    do_split_ptr,
    measures_ptr,  # what `measure_kernel` wrote
    scales_ptr,  # (3, 4, batch·heads // GROUP) float32: s, 1/s and the largest norm of a row of x·s; q, k, v, do
    q_strides,
    k_strides,
    v_strides,
    do_strides,
    q_split_strides,
    k_split_strides,
    batch_size,
    heads,
    n_queries,
    n_keys,
    n_blocks,  # that each head was measured in
    n_programs_each,  # programs of each of the tensors: batch·heads·(tiles of rows)
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """One program splits BLOCK_ROWS rows of one head of one tensor."""
    tensor = tl.program_id(0) // n_programs_each
    n_tiles = n_programs_each // (batch_size * heads)
    batch_head = tl.program_id(0) % n_programs_each // n_tiles
    start = tl.program_id(0) % n_tiles * BLOCK_ROWS
    kv_heads = heads // GROUP
    all_heads = batch_size * heads * BLOCKS
    n_scales = 4 * batch_size * kv_heads
    scales_ptr += tensor * batch_size * kv_heads
    measures_ptr += tensor * all_heads
    if (tensor == 0) & (start < n_queries):
        _split(
            q_ptr, q_strides, q_split_ptr, q_split_strides, scales_ptr, measures_ptr, 4 * all_heads, n_scales,
            batch_size, batch_head, start, heads, n_queries, n_blocks, GROUP, HEAD_DIM, BLOCK_D, BLOCK_ROWS, BLOCKS,
        )  # fmt: skip
    if (tensor == 3) & (start < n_queries):
        _split(
            do_ptr, do_strides, do_split_ptr, q_split_strides, scales_ptr, measures_ptr, 4 * all_heads, n_scales,
            batch_size, batch_head, start, heads, n_queries, n_blocks, GROUP, HEAD_DIM, BLOCK_D, BLOCK_ROWS, BLOCKS,
        )  # fmt: skip
    if (batch_head < batch_size * kv_heads) & (start < n_keys):
        if tensor == 1:
            _split(
                k_ptr, k_strides, k_split_ptr, k_split_strides, scales_ptr, measures_ptr, 4 * all_heads, n_scales,
                batch_size, batch_head, start, kv_heads, n_keys, n_blocks, 1, HEAD_DIM, BLOCK_D, BLOCK_ROWS, BLOCKS,
            )  # fmt: skip
        elif tensor == 2:
            _split(
                v_ptr, v_strides, v_split_ptr, k_split_strides, scales_ptr, measures_ptr, 4 * all_heads, n_scales,
                batch_size, batch_head, start, kv_heads, n_keys, n_blocks, 1, HEAD_DIM, BLOCK_D, BLOCK_ROWS, BLOCKS,
            )  # fmt: skip


@triton.jit
def scale_of(scales_ptr, what: tl.constexpr, tensor: tl.constexpr, kv_head, n_kv_heads):
    """s (0), 1/s (1) or the largest norm (2) of q, k, v or do (0 … 3), of one key head of one batch."""
    return tl.load(scales_ptr + (what * 4 + tensor) * n_kv_heads + kv_head)


@triton.jit
def scores_scale_of(scale_log2, scales_ptr, kv_head, n_kv_heads):
    """scale_log2 for scores of split queries and keys: times 1/s of both."""
    scale_log2 *= scale_of(scales_ptr, 1, 0, kv_head, n_kv_heads)
    return scale_log2 * scale_of(scales_ptr, 1, 1, kv_head, n_kv_heads)


@triton.jit
def parts_of(x, DTYPE: tl.constexpr, PARTS: tl.constexpr):
    """x in DTYPE and, with two PARTS, what that leaves out (else x again)."""
    high = x.to(DTYPE)
    low = high
    if PARTS == 2:
        low = (x - high.to(tl.float32)).to(DTYPE)
    return high, low


@triton.jit
def dot_parts(a, a_low, b, b_low, PARTS: tl.constexpr, PRECISION: tl.constexpr):
    """a·b; with two PARTS (a + a_low)·(b + b_low) but for low·low, the small terms first."""
    if PARTS == 2:
        return tl.dot(a, b, tl.dot(a, b_low, tl.dot(a_low, b)))
    else:
        return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def add_dot_parts(acc, a, a_low, b, b_low, PARTS: tl.constexpr, PRECISION: tl.constexpr):
    """acc + a·b, as `dot_parts` has it.

    Tensor cores cut off what does not fit a sum, instead of rounding it: over thousands of keys that is a bias, of one
    part in 2**24 a product of 16. So the parts' products are summed from zero, and added to acc in float32's rounding.
    """
    if PARTS == 2:
        return acc + dot_parts(a, a_low, b, b_low, PARTS, PRECISION)
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def load_parts(
    x,  # pointer or descriptor: (batch, heads, length, head_dim), or with two PARTS (2·batch, …), high and low
    strides,
    batch,
    batch_size,
    head,
    start,
    n_rows,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    USE_TMA: tl.constexpr,
    PARTS: tl.constexpr,
):
    """A tile as `load_tile` gives it, and its low part (without one, the tile again)."""
    tile = load_tile(x, strides, batch, head, start, n_rows, ROWS, HEAD_DIM, BLOCK_D, MASK_ROWS, USE_TMA)
    low = tile
    if PARTS == 2:
        low = load_tile(
            x, strides, batch + batch_size, head, start, n_rows, ROWS, HEAD_DIM, BLOCK_D, MASK_ROWS, USE_TMA
        )
    return tile, low
