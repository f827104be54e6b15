"""RMSNorm in one kernel, forward and backward, with the addition that comes before it in a pre-norm block if asked.

y = h / √(mean(h²) + ε) · w over the last dimension (Zhang & Sennrich 2019, eq. 4), with h = x or h = x + residual. A
row is read once, stays in registers while its mean is taken, and is written once: eager PyTorch makes six passes.

With r = 1 / √(mean(h²) + ε), ĥ = h·r and the gradient dy:

    dh = r · (w·dy − ĥ · mean(w·dy·ĥ))        dw = Σ_rows dy·ĥ

dw is a sum over all rows. Each program goes through many rows and keeps its own sum in registers; as many rows of
partial sums as there are programs are added up at the end, always in the same order.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from cs336_systems.configs import MAX_NORM_WIDTH
from cs336_systems.kernels.support import as_rows, check_tensors, launch, n_multiprocessors, operator, tl, triton

# A row is in registers whole, 16 of its elements a thread; wider ones would not fit.
_PROGRAMS_A_MULTIPROCESSOR = 4  # of the backward pass


@triton.jit
def _rms_norm_forward_kernel(
    x_ptr,  # (n_rows, d)
    residual_ptr,  # (n_rows, d); None without one
    w_ptr,  # (d,), contiguous
    y_ptr,  # (n_rows, d), contiguous
    h_ptr,  # (n_rows, d), contiguous; None without a residual
    inverse_rms_ptr,  # (n_rows,) float32
    x_row_stride,
    residual_row_stride,
    d,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < d
    h = tl.load(x_ptr + row * x_row_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * residual_row_stride + columns, mask=mask, other=0.0)
        rounded = (h + residual.to(tl.float32)).to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + row * d + columns, rounded, mask=mask)
        h = rounded.to(tl.float32)  # what backward reads, and what the unfused operators would norm
    w = tl.load(w_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(h * h, axis=0) / d + eps)
    tl.store(y_ptr + row * d + columns, (h * inverse_rms * w).to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(inverse_rms_ptr + row, inverse_rms)


@triton.jit
def _rms_norm_backward_kernel(
    dy_ptr,  # (n_rows, d)
    dh_ptr,  # (n_rows, d): what reaches h by another way than y; None without
    h_ptr,  # (n_rows, d)
    w_ptr,  # (d,), contiguous
    inverse_rms_ptr,  # (n_rows,) float32
    dx_ptr,  # (n_rows, d), contiguous
    partial_dw_ptr,  # (n_programs, d) float32, contiguous; None where it is not needed
    dy_row_stride,
    dh_row_stride,
    h_row_stride,
    n_rows,
    d,
    HAS_DH: tl.constexpr,
    NEEDS_DW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: every n_programs-th row, and the sum that these rows contribute to dw."""
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    mask = columns < d
    w = tl.load(w_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK,), tl.float32)
    for index in range(program, n_rows, tl.num_programs(0)):
        row = tl.cast(index, tl.int64)  # in the interpreter index is Python's own number, without .to
        dy = tl.load(dy_ptr + row * dy_row_stride + columns, mask=mask, other=0.0).to(tl.float32)
        h = tl.load(h_ptr + row * h_row_stride + columns, mask=mask, other=0.0).to(tl.float32)
        inverse_rms = tl.load(inverse_rms_ptr + row)
        normed = h * inverse_rms
        if NEEDS_DW:
            dw += dy * normed
        dy *= w
        dx = inverse_rms * (dy - normed * (tl.sum(dy * normed, axis=0) / d))
        if HAS_DH:
            dx += tl.load(dh_ptr + row * dh_row_stride + columns, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row * d + columns, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if NEEDS_DW:
        tl.store(partial_dw_ptr + program.to(tl.int64) * d + columns, dw, mask=mask)


def _block_options(d: int) -> dict[str, int]:
    block = triton.next_power_of_2(d)
    return {"BLOCK": block, "num_warps": max(block // 512, 1)}


def _rms_norm_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """y in `dtype`, h (empty without a residual: it is x) and 1/rms. x, residual (n, d), weight (d,)."""
    n_rows, d = x.shape
    y = x.new_empty((n_rows, d), dtype=dtype)
    has_residual = residual is not None
    h = x.new_empty((n_rows if has_residual else 0, d), dtype=_sum_dtype(x, residual))
    inverse_rms = x.new_empty(n_rows, dtype=torch.float32)
    launch(
        _rms_norm_forward_kernel, n_rows, x, residual, weight.contiguous(), y, h if has_residual else None, inverse_rms,
        x.stride(0), residual.stride(0) if has_residual else 0, d, eps, HAS_RESIDUAL=has_residual, **_block_options(d),
    )  # fmt: skip
    return y, h, inverse_rms


def _rms_norm_forward_fake(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    n_rows, d = x.shape
    h = x.new_empty((0 if residual is None else n_rows, d), dtype=_sum_dtype(x, residual))
    return x.new_empty((n_rows, d), dtype=dtype), h, x.new_empty(n_rows, dtype=torch.float32)


def _rms_norm_backward(
    dy: Tensor, dh: Tensor | None, h: Tensor, weight: Tensor, inverse_rms: Tensor, needs_dw: bool
) -> tuple[Tensor, Tensor]:
    """The gradient of h in its dtype, and that of weight (empty where it is not needed). dy, dh, h (n, d)."""
    n_rows, d = h.shape
    dx = h.new_empty((n_rows, d))
    n_programs = min(n_rows, _PROGRAMS_A_MULTIPROCESSOR * n_multiprocessors(h.device))
    partial_dw = h.new_empty((n_programs, d), dtype=torch.float32) if needs_dw else None
    launch(
        _rms_norm_backward_kernel, n_programs, dy, dh, h, weight.contiguous(), inverse_rms, dx, partial_dw,
        dy.stride(0), 0 if dh is None else dh.stride(0), h.stride(0), n_rows, d, HAS_DH=dh is not None,
        NEEDS_DW=needs_dw, **_block_options(d),
    )  # fmt: skip
    dw = weight.new_empty(0) if partial_dw is None else partial_dw.sum(0).to(weight.dtype)
    return dx, dw


def _rms_norm_backward_fake(
    dy: Tensor, dh: Tensor | None, h: Tensor, weight: Tensor, inverse_rms: Tensor, needs_dw: bool
) -> tuple[Tensor, Tensor]:
    return h.new_empty(h.shape), weight.new_empty(weight.shape if needs_dw else 0)


def _sum_dtype(x: Tensor, residual: Tensor | None) -> torch.dtype:
    return x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)


_forward = operator(_rms_norm_forward, _rms_norm_forward_fake)
_backward = operator(_rms_norm_backward, _rms_norm_backward_fake)


class RMSNormFunction(torch.autograd.Function):
    """`RMSNormFunction.apply(x, residual, weight, eps, dtype)`: x and residual (or None) (..., d), weight (d,) -> y,
    and h with a residual. Arguments are checked in `rms_norm` and `add_rms_norm`."""

    @staticmethod
    def forward(ctx, x, residual, weight, eps, dtype):
        rows = as_rows(x)
        y, h, inverse_rms = _forward(rows, None if residual is None else as_rows(residual), weight, eps, dtype)
        ctx.save_for_backward(rows if residual is None else h, weight, inverse_rms)
        ctx.set_materialize_grads(False)
        ctx.dtypes = x.dtype, None if residual is None else residual.dtype
        y = y.view(x.shape)
        return y if residual is None else (y, h.view(x.shape))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dh=None):
        h, weight, inverse_rms = ctx.saved_tensors
        x_dtype, residual_dtype = ctx.dtypes
        if dy is None:  # nothing came through y
            dx, dw = dh, None
        else:
            rows_of_dh = None if dh is None else as_rows(dh)
            needs_dw = ctx.needs_input_grad[2]
            dx, dw = _backward(as_rows(dy), rows_of_dh, h, weight, inverse_rms, needs_dw)
            dx, dw = dx.view(dy.shape), dw if needs_dw else None
        if dx is None:
            return None, None, None, None, None
        return dx.to(x_dtype), None if residual_dtype is None else dx.to(residual_dtype), dw, None, None


def rms_norm(
    x: Float[Tensor, "*batch d"], weight: Float[Tensor, " d"], eps: float = 1e-5, dtype: torch.dtype | None = None
) -> Float[Tensor, "*batch d"]:
    """x / √(mean(x²) + eps) · weight over the last dimension (Zhang & Sennrich 2019, eq. 4), differentiable once.

    x (..., d), of any strides, and weight (d,) are float32, float16 or bfloat16, not necessarily the same, on one CUDA
    device (or on a CPU in Triton's interpreter), d at most 8,192. Computed in float32; the result has `dtype`, by
    default x's. Deterministic. For backward it keeps x and a float32 number a row.

    Raises:
        ValueError: shapes, dtypes or devices that don't fit together, or no Triton here.
    """
    _check(x, None, weight, dtype)
    y: Tensor = RMSNormFunction.apply(x, None, weight, eps, dtype or x.dtype)
    return y


def add_rms_norm(
    x: Float[Tensor, "*batch d"],
    residual: Float[Tensor, "*batch d"],
    weight: Float[Tensor, " d"],
    eps: float = 1e-5,
    dtype: torch.dtype | None = None,
) -> tuple[Float[Tensor, "*batch d"], Float[Tensor, "*batch d"]]:
    """`rms_norm` of h = x + residual, and h itself, which goes on beside it: (y, h).

    h has the dtype to which torch promotes the two, and so has y unless `dtype` says otherwise; y is the norm of h as
    rounded to its dtype. The rest is as in `rms_norm`.
    """
    _check(x, residual, weight, dtype)
    y, h = RMSNormFunction.apply(x, residual, weight, eps, dtype or _sum_dtype(x, residual))
    return y, h


def _check(x: Tensor, residual: Tensor | None, weight: Tensor, dtype: torch.dtype | None) -> None:
    if x.ndim < 1 or weight.ndim != 1 or x.shape[-1] != weight.shape[0]:
        raise ValueError(
            f"rms_norm: x must be (..., d) and weight (d,), got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"rms_norm: residual is {tuple(residual.shape)}; it must have x's shape, {tuple(x.shape)}")
    if not 1 <= x.shape[-1] <= MAX_NORM_WIDTH:
        raise ValueError(f"rms_norm: x has a last dimension of {x.shape[-1]}; it must be from 1 to {MAX_NORM_WIDTH}")
    if dtype not in (None, torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"rms_norm: dtype is {dtype}; it must be float32, float16, bfloat16 or None")
    check_tensors("rms_norm", x=x, residual=residual, weight=weight)
