"""A first Triton kernel: the weighted sum of each row, y = (x * w).sum(-1), forward and backward.

Read this before the attention kernels. It has what they have (tiles, masks, strides, float32 accumulators, a backward
pass in kernels, an autograd.Function around them) around arithmetic that leaves nothing to explain. Top to bottom, each
layer calls the one above it:

    _weighted_sum_forward_kernel   what one program instance does on the GPU
    _launch_weighted_sum_forward   allocates the output and starts one instance per tile of rows
    WeightedSum                    tells autograd which backward goes with which forward
    weighted_sum                   what people call: checks its arguments, any number of dimensions

Why one kernel? In PyTorch `(x * w).sum(-1)` is two: the first writes x * w to memory, the second reads it back. Both
are limited by memory traffic, not by arithmetic: 3 passes over an x-sized tensor, where the fused kernel makes 1.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

try:
    import triton
    import triton.language as tl

    TRITON_IS_INSTALLED = True
except ImportError:
    # None for this platform (macOS). The module can still be imported, and weighted_sum says what is missing.
    TRITON_IS_INSTALLED = False
    triton = SimpleNamespace(jit=lambda function: function)

SUPPORTED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# A tile is a rectangle of x that one program instance holds in registers at a time: here at most 16 x 256 elements,
# 32 for each of the 128 threads (4 warps, Triton's default). Rows are few, so that matrices with few rows still give
# the GPU many instances; columns are many, because neighbouring columns are neighbours in memory and are fetched
# together. Sides of a tile must be powers of two.
ROW_TILE = 16
MAX_COLUMN_TILE = 256


# ---- Layer 1: the kernels --------------------------------------------------------------------------------------------
# A kernel is written for one *program instance*. The launch starts many, each learns which one it is from
# tl.program_id, and they run in any order on whatever multiprocessor is free, so none may depend on another. Unlike
# CUDA, nothing below names a thread: every variable is a whole block (a vector or a tile), and the compiler divides the
# work on it among the instance's threads.
#
# Arguments: a tensor arrives as a pointer to its first element; its shape and strides have to be passed as well.
# Arguments marked tl.constexpr are known when the kernel is compiled (one compilation for each combination of values):
# block shapes have to be.


@triton.jit
def _weighted_sum_forward_kernel(
    x_ptr,  # (n_rows, d)
    w_ptr,  # (d,)
    y_ptr,  # (n_rows,), contiguous
    x_row_stride,
    x_column_stride,
    w_stride,
    n_rows,
    d,
    ROW_TILE: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
):
    """One instance: ROW_TILE elements of y. It walks over its rows from left to right, a tile of columns at a time."""
    # int64: row * stride passes 2**31 once x has more elements than that, and int32 would wrap to a wrong address.
    rows = tl.program_id(0).to(tl.int64) * ROW_TILE + tl.arange(0, ROW_TILE)
    row_is_valid = rows < n_rows

    # Sums are kept in float32 whatever the inputs are: a float16 running sum stops growing when a term is less than
    # half of its last bit.
    y = tl.zeros((ROW_TILE,), dtype=tl.float32)
    for first_column in range(0, d, COLUMN_TILE):
        columns = first_column + tl.arange(0, COLUMN_TILE).to(tl.int64)
        column_is_valid = columns < d

        # A block of pointers makes a block of loads. [:, None] and [None, :] broadcast as in NumPy, so this is a
        # (ROW_TILE, COLUMN_TILE) block of addresses. The last tile sticks out of the matrix whenever n_rows or d is no
        # multiple of the tile: the mask keeps those addresses from being touched, and `other` stands in for them. 0 is
        # right here, as it adds nothing to a sum.
        x_pointers = x_ptr + rows[:, None] * x_row_stride + columns[None, :] * x_column_stride
        x = tl.load(x_pointers, mask=row_is_valid[:, None] & column_is_valid[None, :], other=0.0)
        w = tl.load(w_ptr + columns * w_stride, mask=column_is_valid, other=0.0)

        y += tl.sum(x.to(tl.float32) * w.to(tl.float32)[None, :], axis=1)

    # Rounded once, from float32 to the output's dtype.
    tl.store(y_ptr + rows, y.to(y_ptr.dtype.element_ty), mask=row_is_valid)


# With the gradient of the loss with respect to y, (n_rows,), in hand, the chain rule on y_i = sum_j x_ij w_j gives
#
#     grad_x_ij = grad_y_i w_j            an outer product: each element of it has one term
#     grad_w_j  = sum_i grad_y_i x_ij     a sum over *all* rows
#
# and the second is the difficult one: every instance has a part of each sum. Adding the parts to one grad_w with
# tl.atomic_add would work, but atomics arrive in any order, floating-point addition gives another result in another
# order, and the same step run twice would differ in its last bits. So each instance writes the part from its own rows
# to a row of its own in a (n_row_tiles, d) buffer, and the launch adds up the rows of that. The buffer has 1/ROW_TILE
# of x's elements, so the second pass over it costs little.


@triton.jit
def _weighted_sum_backward_kernel(
    x_ptr,  # (n_rows, d)
    w_ptr,  # (d,)
    grad_y_ptr,  # (n_rows,)
    grad_x_ptr,  # (n_rows, d), contiguous; None when not needed
    partial_grad_w_ptr,  # (n_row_tiles, d) float32, contiguous; None when not needed
    x_row_stride,
    x_column_stride,
    w_stride,
    grad_y_stride,
    n_rows,
    d,
    NEEDS_GRAD_X: tl.constexpr,
    NEEDS_GRAD_W: tl.constexpr,
    ROW_TILE: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
):
    """One instance: ROW_TILE rows of grad_x, and the part of grad_w that those rows contribute."""
    row_tile = tl.program_id(0).to(tl.int64)
    rows = row_tile * ROW_TILE + tl.arange(0, ROW_TILE)
    row_is_valid = rows < n_rows
    # Loaded once, used for every tile of columns.
    grad_y = tl.load(grad_y_ptr + rows * grad_y_stride, mask=row_is_valid, other=0.0).to(tl.float32)

    for first_column in range(0, d, COLUMN_TILE):
        columns = first_column + tl.arange(0, COLUMN_TILE).to(tl.int64)
        column_is_valid = columns < d
        tile_is_valid = row_is_valid[:, None] & column_is_valid[None, :]

        # These conditions are on constexprs: the branch that is not taken is not compiled, so that a frozen input's
        # gradient costs nothing.
        if NEEDS_GRAD_X:
            w = tl.load(w_ptr + columns * w_stride, mask=column_is_valid, other=0.0).to(tl.float32)
            grad_x = grad_y[:, None] * w[None, :]
            grad_x_pointers = grad_x_ptr + rows[:, None] * d + columns[None, :]
            tl.store(grad_x_pointers, grad_x.to(grad_x_ptr.dtype.element_ty), mask=tile_is_valid)

        if NEEDS_GRAD_W:
            x_pointers = x_ptr + rows[:, None] * x_row_stride + columns[None, :] * x_column_stride
            x = tl.load(x_pointers, mask=tile_is_valid, other=0.0).to(tl.float32)
            partial_grad_w = tl.sum(x * grad_y[:, None], axis=0)
            tl.store(partial_grad_w_ptr + row_tile * d + columns, partial_grad_w, mask=column_is_valid)


# With TRITON_INTERPRET=1 the decorator made Python functions, which run the kernel with NumPy, instance after instance.
KERNELS_ARE_INTERPRETED = TRITON_IS_INSTALLED and not isinstance(_weighted_sum_forward_kernel, triton.JITFunction)


# ---- Layer 2: the launches -------------------------------------------------------------------------------------------


def _column_tile(d: int) -> int:
    return min(triton.next_power_of_2(max(d, 1)), MAX_COLUMN_TILE)


def _launch_weighted_sum_forward(x: Tensor, w: Tensor) -> Tensor:
    """x (n_rows, d) and w (d,), any strides -> y (n_rows,) in the promoted dtype of the two."""
    n_rows, d = x.shape
    # Not zeros: the kernel writes every element, and filling the tensor first would be another pass over it.
    y = torch.empty(n_rows, dtype=torch.promote_types(x.dtype, w.dtype), device=x.device)
    if n_rows == 0:
        return y  # CUDA refuses a grid of no instances
    grid = (triton.cdiv(n_rows, ROW_TILE),)
    # Triton launches on the current device, which need not be the one that x is on.
    with torch.cuda.device_of(x):
        _weighted_sum_forward_kernel[grid](
            x,
            w,
            y,
            *x.stride(),
            *w.stride(),
            n_rows,
            d,
            ROW_TILE,  # ty: ignore[invalid-argument-type]
            _column_tile(d),  # ty: ignore[invalid-argument-type]
        )
    return y


def _launch_weighted_sum_backward(
    x: Tensor, w: Tensor, grad_y: Tensor, needs_grad_x: bool, needs_grad_w: bool
) -> tuple[Tensor | None, Tensor | None]:
    """x (n_rows, d), w (d,), grad_y (n_rows,), any strides -> grad_x (n_rows, d) in x's dtype and grad_w (d,) in w's;
    None for one that is not needed."""
    n_rows, d = x.shape
    n_row_tiles = triton.cdiv(n_rows, ROW_TILE)
    grad_x = torch.empty((n_rows, d), dtype=x.dtype, device=x.device) if needs_grad_x else None
    partial_grad_w = torch.empty((n_row_tiles, d), dtype=torch.float32, device=x.device) if needs_grad_w else None
    if n_row_tiles > 0 and (needs_grad_x or needs_grad_w):
        with torch.cuda.device_of(x):
            _weighted_sum_backward_kernel[(n_row_tiles,)](
                x,
                w,
                grad_y,
                grad_x,
                partial_grad_w,
                *x.stride(),
                *w.stride(),
                *grad_y.stride(),
                n_rows,
                d,
                needs_grad_x,  # ty: ignore[invalid-argument-type]
                needs_grad_w,  # ty: ignore[invalid-argument-type]
                ROW_TILE,  # ty: ignore[invalid-argument-type]
                _column_tile(d),  # ty: ignore[invalid-argument-type]
            )
    # Always in the same order, so two runs agree to the last bit. With no rows at all the sum is zeros, which is right.
    grad_w = partial_grad_w.sum(dim=0).to(w.dtype) if partial_grad_w is not None else None
    return grad_x, grad_w


# ---- Layer 3: autograd -----------------------------------------------------------------------------------------------


def _as_rows(x: Tensor) -> Tensor:
    """(..., d) -> (n_rows, d). A view as long as one stride can describe the leading dimensions, else (some permuted
    inputs) a copy."""
    return x.unsqueeze(0).flatten(0, -2)


class WeightedSum(torch.autograd.Function):
    """`WeightedSum.apply(x, w)`: x (..., d), w (d,) -> (...). Autograd cannot look into a kernel, so here it is told
    what the backward pass is. Arguments are checked in `weighted_sum`."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return _launch_weighted_sum_forward(_as_rows(x), w).view(x.shape[:-1])

    @staticmethod
    @once_differentiable  # the gradients that it returns cannot be differentiated again: an error, not a wrong number
    def backward(ctx, grad_y: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, w = ctx.saved_tensors
        # grad_y can be any view: y.sum() hands back a single 1 with strides of 0. So its stride is passed, not assumed.
        grad_x, grad_w = _launch_weighted_sum_backward(_as_rows(x), w, grad_y.reshape(-1), *ctx.needs_input_grad)
        return grad_x.view(x.shape) if grad_x is not None else None, grad_w


# ---- Layer 4: what people call ---------------------------------------------------------------------------------------


def weighted_sum(x: Float[Tensor, "... d"], w: Float[Tensor, " d"]) -> Float[Tensor, "..."]:
    """The sum over the last dimension of x, each column weighted: `(x * w).sum(-1)` in one kernel, differentiable once.

    x (..., d) and w (d,) are float32, float16 or bfloat16, of any strides, on one CUDA device (or on the CPU with
    TRITON_INTERPRET=1 set before Triton is imported: slow, for tests and for learning). Sums are kept in float32. The
    result (...) has the dtype to which torch promotes the two: `weighted_sum(bfloat16, float32)` is float32. Empty x is
    fine: no rows give an empty result, d = 0 gives zeros. Deterministic.

    Example: x of shape (4, 128, 768) and w of shape (768,) give a result of shape (4, 128).

    Raises ValueError when shapes, dtypes or devices do not fit, and where there is no Triton.
    """
    _check_arguments(x, w)
    return WeightedSum.apply(x, w)


def _check_arguments(x: Tensor, w: Tensor) -> None:
    if x.ndim == 0 or w.ndim != 1 or x.shape[-1] != w.shape[0]:
        raise ValueError(
            f"x must have shape (..., d) and w shape (d,), d being the same, got {tuple(x.shape)} and {tuple(w.shape)}"
        )
    if x.dtype not in SUPPORTED_DTYPES or w.dtype not in SUPPORTED_DTYPES:
        raise ValueError(f"x and w must be float32, float16 or bfloat16, got x {x.dtype} and w {w.dtype}")
    if x.device != w.device:
        raise ValueError(f"x and w must be on the same device, got x on {x.device} and w on {w.device}")
    if not TRITON_IS_INSTALLED:
        raise ValueError("weighted_sum needs Triton, which is not installed (it exists for Linux only)")
    if x.device.type != "cuda" and not (x.device.type == "cpu" and KERNELS_ARE_INTERPRETED):
        raise ValueError(
            f"x must be on a CUDA device, got x on {x.device}; a CPU runs the kernels in Triton's interpreter only: "
            "set TRITON_INTERPRET=1 before Python starts"
        )
