"""The elementwise part of SwiGLU, silu(a) · b, in one kernel forward and one backward.

With σ the logistic function: y = a·σ(a)·b (Shazeer 2020, eq. 6, between its matrix products), and for the gradient dy

    da = dy · b · σ(a) · (1 + a·(1 − σ(a)))        db = dy · a·σ(a)

For backward only a and b are kept: σ(a) is computed again, where eager PyTorch keeps it and silu(a) beside them.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from cs336_systems.kernels.support import as_rows, check_tensors, launch, operator, tl, triton

_MAX_BLOCK = 1024  # 8 elements a thread


@triton.jit
def _tile(d, BLOCK: tl.constexpr):
    """The program's row (int64), its columns, and which of them exist."""
    tiles_a_row = tl.cdiv(d, BLOCK)
    program = tl.program_id(0)
    columns = program % tiles_a_row * BLOCK + tl.arange(0, BLOCK)
    return (program // tiles_a_row).to(tl.int64), columns, columns < d


@triton.jit
def _silu_multiply_forward_kernel(
    a_ptr,  # (n_rows, d)
    b_ptr,  # (n_rows, d)
    y_ptr,  # (n_rows, d), contiguous
    a_row_stride,
    b_row_stride,
    d,
    BLOCK: tl.constexpr,
):
    """One program: BLOCK elements of a row."""
    row, columns, mask = _tile(d, BLOCK)
    a = tl.load(a_ptr + row * a_row_stride + columns, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + row * b_row_stride + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * d + columns, (a * tl.sigmoid(a) * b).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _silu_multiply_backward_kernel(
    dy_ptr,  # (n_rows, d)
    a_ptr,  # (n_rows, d)
    b_ptr,  # (n_rows, d)
    da_ptr,  # (n_rows, d), contiguous
    db_ptr,  # (n_rows, d), contiguous
    dy_row_stride,
    a_row_stride,
    b_row_stride,
    d,
    BLOCK: tl.constexpr,
):
    """One program: BLOCK elements of a row."""
    row, columns, mask = _tile(d, BLOCK)
    dy = tl.load(dy_ptr + row * dy_row_stride + columns, mask=mask, other=0.0).to(tl.float32)
    a = tl.load(a_ptr + row * a_row_stride + columns, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + row * b_row_stride + columns, mask=mask, other=0.0).to(tl.float32)
    sigma = tl.sigmoid(a)
    da = dy * b * sigma * (1.0 + a * (1.0 - sigma))
    tl.store(da_ptr + row * d + columns, da.to(da_ptr.dtype.element_ty), mask=mask)
    tl.store(db_ptr + row * d + columns, (dy * a * sigma).to(db_ptr.dtype.element_ty), mask=mask)


def _block_options(d: int) -> dict[str, int]:
    block = min(triton.next_power_of_2(max(d, 1)), _MAX_BLOCK)
    return {"BLOCK": block, "num_warps": max(block // 256, 1)}


def _silu_multiply_forward(a: Tensor, b: Tensor) -> Tensor:
    n_rows, d = a.shape
    y = a.new_empty((n_rows, d))
    options = _block_options(d)
    n_programs = n_rows * triton.cdiv(d, options["BLOCK"])
    launch(_silu_multiply_forward_kernel, n_programs, a, b, y, a.stride(0), b.stride(0), d, **options)
    return y


def _silu_multiply_forward_fake(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape)


def _silu_multiply_backward(dy: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    n_rows, d = a.shape
    da, db = a.new_empty((n_rows, d)), b.new_empty((n_rows, d))
    options = _block_options(d)
    n_programs = n_rows * triton.cdiv(d, options["BLOCK"])
    strides = dy.stride(0), a.stride(0), b.stride(0)
    launch(_silu_multiply_backward_kernel, n_programs, dy, a, b, da, db, *strides, d, **options)
    return da, db


def _silu_multiply_backward_fake(dy: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a.new_empty(a.shape), b.new_empty(b.shape)


_forward = operator(_silu_multiply_forward, _silu_multiply_forward_fake)
_backward = operator(_silu_multiply_backward, _silu_multiply_backward_fake)


class SiluMultiply(torch.autograd.Function):
    """`SiluMultiply.apply(a, b)`: a, b (..., d) -> silu(a) · b (..., d). Arguments are checked in `silu_multiply`."""

    @staticmethod
    def forward(ctx, a, b):
        a_rows, b_rows = as_rows(a), as_rows(b)
        ctx.save_for_backward(a_rows, b_rows)
        return _forward(a_rows, b_rows).view(a.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        da, db = _backward(as_rows(dy), *ctx.saved_tensors)
        return da.view(dy.shape), db.view(dy.shape)


def silu_multiply(a: Float[Tensor, "*batch d"], b: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    """silu(a) · b, differentiable once: what is between SwiGLU's matrix products (Shazeer 2020, eq. 6).

    a and b (..., d) have one dtype, float32, float16 or bfloat16, and one CUDA device (or a CPU in Triton's
    interpreter), and any strides: the two halves of one matrix product are read where they are. Computed in float32 and
    rounded once to that dtype. For backward a and b are kept.

    Raises:
        ValueError: shapes, dtypes or devices that don't fit together, or no Triton here.
    """
    if a.ndim < 1 or a.shape != b.shape or a.dtype != b.dtype:
        raise ValueError(
            "silu_multiply: a and b must have one shape (..., d) and one dtype, got "
            f"{tuple(a.shape)} {a.dtype} and {tuple(b.shape)} {b.dtype}"
        )
    check_tensors("silu_multiply", a=a, b=b)
    y: Tensor = SiluMultiply.apply(a, b)
    return y
