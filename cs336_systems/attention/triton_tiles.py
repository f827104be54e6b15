"""What the forward and backward FlashAttention-2 kernels share: loading a tile, masks, the online softmax, dropout.

Each helper is a small `@triton.jit` function that the compiler inlines; none of them is launched by itself.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_tile(
    x,  # pointer to element (0, 0, 0, 0) of a (batch, heads, length, head_dim) tensor, or a descriptor of the tensor
    strides,  # the tensor's four strides, in elements
    batch,
    head,
    start,
    n_rows,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    USE_TMA: tl.constexpr,
):
    """Rows start … start + ROWS of one head as a (ROWS, BLOCK_D) tile, zero past HEAD_DIM and (MASK_ROWS) past n_rows.

    A descriptor's tile is fetched by the tensor memory accelerator, which zero-fills whatever is outside the tensor.
    """
    if USE_TMA:
        return x.load([batch, head, start, 0]).reshape(ROWS, BLOCK_D)
    else:
        rows = tl.arange(0, ROWS)
        cols = tl.arange(0, BLOCK_D)
        # int64 before each product: all four can pass 2**31 elements.
        x += batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1] + tl.cast(start, tl.int64) * strides[2]
        pointers = x + (rows.to(tl.int64)[:, None] * strides[2] + cols.to(tl.int64)[None, :] * strides[3])
        if MASK_ROWS:
            mask = (start + rows < n_rows)[:, None]
            if HEAD_DIM != BLOCK_D:
                mask = mask & (cols < HEAD_DIM)[None, :]
            return tl.load(pointers, mask=mask, other=0.0)
        elif HEAD_DIM != BLOCK_D:
            return tl.load(pointers, mask=(cols < HEAD_DIM)[None, :], other=0.0)
        else:
            return tl.load(pointers)


@triton.jit
def load_row(x, row, start, row_length, SIZE: tl.constexpr, USE_TMA: tl.constexpr):
    """x[row, start : start + SIZE] of a contiguous matrix, or of a descriptor of it; nothing is masked.

    Without a descriptor each thread of a warp group fetches its own copy of every element that it needs.
    """
    if USE_TMA:
        return x.load([row, start]).reshape(SIZE)
    else:
        return tl.load(x + row.to(tl.int64) * row_length + start + tl.arange(0, SIZE))


@triton.jit
def store_tile(
    x_ptr,  # (batch, heads, length, head_dim)
    strides,  # the tensor's four strides, in elements
    tile,  # (ROWS, BLOCK_D), any float dtype
    batch,
    head,
    start,
    n_rows,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write the part of a tile that is inside the tensor, in the tensor's dtype."""
    rows = tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_D)
    x_ptr += batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1] + tl.cast(start, tl.int64) * strides[2]
    pointers = x_ptr + (rows.to(tl.int64)[:, None] * strides[2] + cols.to(tl.int64)[None, :] * strides[3])
    mask = (start + rows < n_rows)[:, None]
    if HEAD_DIM != BLOCK_D:
        mask = mask & (cols < HEAD_DIM)[None, :]
    tl.store(pointers, tile.to(x_ptr.dtype.element_ty), mask=mask)


@triton.jit
def is_visible(query_index, key_index, n_keys, IS_CAUSAL: tl.constexpr):
    """Which keys a query may attend to; the two index tensors broadcast against each other."""
    if IS_CAUSAL:
        return (key_index < n_keys) & (key_index <= query_index)
    else:
        return key_index < n_keys


@triton.jit
def online_softmax_update(scores, row_max, row_sum, scale_log2, P_EXPONENT: tl.constexpr):
    """One step of the online softmax (FlashAttention-2, algorithm 1, lines 8 and 9), in base 2.

    scores are raw products q·k; scale_log2 > 0 is the softmax scale times log2(e), applied here so that scaling and
    subtracting the maximum are one fused multiply-add an element. Returns P (at most 2**P_EXPONENT, not yet divided by
    its row's sum), the new maximum (scaled) and sum, and the factor by which earlier accumulations shrink.
    """
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
    if P_EXPONENT == 0:
        p = tl.exp2(scores * scale_log2 - new_max[:, None])
    else:
        p = tl.exp2(scores * scale_log2 - (new_max - P_EXPONENT)[:, None])
    correction = tl.exp2(row_max - new_max)
    return p, new_max, row_sum * correction + tl.sum(p, 1), correction


@triton.jit
def is_kept(query_index, key_index, batch_head, n_queries, n_keys, dropout):
    """Dropout's mask: a counter-based random number (Philox) for each element of the (batch·heads, n_queries, n_keys)
    probabilities, counted from `offset`. It depends on the element alone, so forward and backward draw the same mask
    whatever their tile sizes are, and nothing is stored."""
    probability, seed, offset = dropout
    row = batch_head.to(tl.int64) * n_queries + query_index
    return tl.rand(seed, offset + row * n_keys + key_index) >= probability


@triton.jit
def power_of_two_below(x):
    """The largest power of two that is not above x, a positive, normal float32: x without its mantissa."""
    return (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def reciprocal_of_power_of_two(x):
    """1/x, exactly, of a power of two between 2**-126 and 2**126, in float32."""
    return (0x7F000000 - x.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
