"""Rotary position embedding of queries or keys in one kernel, forward and backward.

Su et al. 2021, section 3.4.2. Pair i of position p, the elements (2i, 2i + 1), is turned by the angle whose cosine and
sine are cos[p, i] and sin[p, i]; its first element goes to place i of the output and its second to head_dim/2 + i, as
the model's `RotaryEmbedding` has it:

    y₁ = x₁·cos − x₂·sin        y₂ = x₁·sin + x₂·cos

A rotation's inverse is its transpose: backward turns by the same angles the other way, and keeps nothing but them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from cs336_systems.configs import MAX_ROPE_HEAD_DIM
from cs336_systems.kernels.support import check_device, check_tensors, launch, operator, tl, triton

_TILE = 1024  # elements of a head that a program holds at a time
_HEADS_A_PROGRAM = 4  # share the cosines and sines that a program reads


@triton.jit
def _rope_kernel(
    x_ptr,  # (batch, heads, seq, head_dim), rows contiguous; backward: the gradient of the rotated
    cos_ptr,  # (positions, head_dim / 2) float32, contiguous
    sin_ptr,
    positions_ptr,  # (batch, seq) int64; None for 0 … seq - 1
    y_ptr,  # (batch, heads, seq, head_dim), rows contiguous; backward: the gradient of x
    x_batch_stride, x_head_stride, x_seq_stride,
    positions_batch_stride, positions_seq_stride,
    y_batch_stride, y_head_stride, y_seq_stride,
    heads,
    seq,
    n_positions,
    HAS_POSITIONS: tl.constexpr,
    BACKWARD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SEQ: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_SEQ positions of GROUP heads of a sequence."""
    n_groups = tl.cdiv(heads, GROUP)
    n_tiles = tl.cdiv(seq, BLOCK_SEQ)
    program = tl.program_id(0)
    tile = program % n_tiles
    first_head = program // n_tiles % n_groups * GROUP
    batch = (program // (n_tiles * n_groups)).to(tl.int64)

    HALF: tl.constexpr = HEAD_DIM // 2
    BLOCK_HALF: tl.constexpr = BLOCK_D // 2
    places = tile * BLOCK_SEQ + tl.arange(0, BLOCK_SEQ).to(tl.int64)
    exists = places < seq
    pairs = tl.arange(0, BLOCK_HALF)
    columns = tl.arange(0, BLOCK_D)
    half_mask = exists[:, None] & (pairs < HALF)[None, :]
    mask = exists[:, None] & (columns < HEAD_DIM)[None, :]

    angles = places
    angle_mask = half_mask
    if HAS_POSITIONS:
        positions = positions_ptr + batch * positions_batch_stride + places * positions_seq_stride
        angles = tl.load(positions, mask=exists, other=0)
        angle_mask = half_mask & ((angles >= 0) & (angles < n_positions))[:, None]
    angles = angles[:, None] * HALF + pairs[None, :]
    cos = tl.load(cos_ptr + angles, mask=angle_mask, other=float("nan"))
    sin = tl.load(sin_ptr + angles, mask=angle_mask, other=float("nan"))

    for index in range(first_head, tl.minimum(first_head + GROUP, heads)):
        head = tl.cast(index, tl.int64)
        x_row = x_ptr + batch * x_batch_stride + head * x_head_stride + places[:, None] * x_seq_stride
        y_row = y_ptr + batch * y_batch_stride + head * y_head_stride + places[:, None] * y_seq_stride
        if BACKWARD:
            first = tl.load(x_row + pairs[None, :], mask=half_mask, other=0.0).to(tl.float32)
            second = tl.load(x_row + HALF + pairs[None, :], mask=half_mask, other=0.0).to(tl.float32)
            # Neighbours again, so that both are written together.
            turned = tl.join(first * cos + second * sin, second * cos - first * sin)
            turned = tl.reshape(turned, (BLOCK_SEQ, BLOCK_D)).to(y_ptr.dtype.element_ty)
            tl.store(y_row + columns[None, :], turned, mask=mask)
        else:
            x = tl.load(x_row + columns[None, :], mask=mask, other=0.0).to(tl.float32)
            first, second = tl.split(tl.reshape(x, (BLOCK_SEQ, BLOCK_HALF, 2)))
            dtype = y_ptr.dtype.element_ty
            tl.store(y_row + pairs[None, :], (first * cos - second * sin).to(dtype), mask=half_mask)
            tl.store(y_row + HALF + pairs[None, :], (first * sin + second * cos).to(dtype), mask=half_mask)


def _rope(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, y_strides: Sequence[int]) -> Tensor:
    """x (batch, heads, seq, head_dim) turned; with y_strides turned back, into a tensor of these strides. cos, sin
    contiguous, positions (batch, seq)."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    is_backward = len(y_strides) > 0
    if positions is not None and not is_backward:
        _check_range(positions, cos.shape[0])
    y = x.new_empty_strided(x.shape, y_strides) if is_backward else torch.empty_like(x)
    batch, heads, seq, head_dim = x.shape
    block_d = triton.next_power_of_2(head_dim)
    block_seq = max(1, min(triton.next_power_of_2(seq), _TILE // block_d))
    group = min(heads, _HEADS_A_PROGRAM)
    launch(
        _rope_kernel, batch * triton.cdiv(heads, group) * triton.cdiv(seq, block_seq), x, cos, sin, positions, y,
        *x.stride()[:3], *((0, 0) if positions is None else positions.stride()), *y.stride()[:3], heads, seq,
        cos.shape[0],
        HAS_POSITIONS=positions is not None, BACKWARD=is_backward, HEAD_DIM=head_dim, BLOCK_SEQ=block_seq,
        BLOCK_D=block_d, GROUP=group,
    )  # fmt: skip
    return y


def _check_range(positions: Tensor, n_positions: int) -> None:
    """Not on a GPU: asking would make the host wait for it, and what the kernel cannot look up there is NaN."""
    if not positions.is_cpu or positions.numel() == 0:
        return
    least, largest = positions.min().item(), positions.max().item()
    if least < 0 or largest >= n_positions:
        outside = least if least < 0 else largest
        raise ValueError(f"rope: a position is {outside}; cos and sin have those from 0 to {n_positions - 1}")


def _rope_fake(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, y_strides: Sequence[int]) -> Tensor:
    if y_strides:
        return x.new_empty_strided(x.shape, y_strides)
    return torch.empty_like(x if x.stride(-1) == 1 else x.contiguous())


_turn = operator(_rope, _rope_fake)


class Rope(torch.autograd.Function):
    """`Rope.apply(x, cos, sin, positions)`: x (batch, heads, seq, head_dim) -> the same, rotated. Arguments are checked
    in `rope`."""

    @staticmethod
    def forward(ctx, x, cos, sin, positions):
        ctx.save_for_backward(cos, sin, positions)
        y = _turn(x, cos, sin, positions, ())
        # Attention may give its gradient head by head. Laid out like x, that of the projection needs no copy.
        ctx.strides = y.stride()
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return _turn(dy, *ctx.saved_tensors, ctx.strides), None, None, None


def rope(
    x: Float[Tensor, "batch heads seq head_dim"],
    cos: Float[Tensor, "positions half"],
    sin: Float[Tensor, "positions half"],
    positions: Int[Tensor, "... seq"] | None = None,
) -> Float[Tensor, "batch heads seq head_dim"]:
    """x with each pair turned by its position's angle (Su et al. 2021, section 3.4.2), differentiable once.

    Args:
        x: (batch, heads, seq, head_dim), float32, float16 or bfloat16, of any strides, head_dim even and at most 1,024.
        cos, sin: (positions, head_dim / 2) float32, such as `RotaryEmbedding` has.
        positions: (seq,) or (batch, seq) integers that index cos and sin; None for 0 … seq - 1. On a GPU what is turned
            by one that is out of range is NaN, and so is its gradient.

    Returns x's shape, dtype and, as far as they are dense, strides: pairs (2i, 2i + 1) have become (i, head_dim/2 + i).

    Raises:
        ValueError: shapes, dtypes or devices that don't fit together, more positions than cos has, one that is out of
            range (on a CPU), or no Triton here.
    """
    if x.ndim != 4 or not 2 <= x.shape[3] <= MAX_ROPE_HEAD_DIM or x.shape[3] % 2:
        raise ValueError(
            f"rope: x is {tuple(x.shape)}; it must be (batch, heads, seq, head_dim) with an even head_dim from 2 to "
            f"{MAX_ROPE_HEAD_DIM}"
        )
    batch, _, seq, head_dim = x.shape
    for name, table in (("cos", cos), ("sin", sin)):
        if (
            table.dtype != torch.float32
            or table.ndim != 2
            or table.shape != cos.shape
            or table.shape[1] * 2 != head_dim
        ):
            raise ValueError(
                f"rope: {name} is {tuple(table.shape)} {table.dtype}; it must be (positions, {head_dim // 2}) float32"
            )
    if positions is None and seq > cos.shape[0]:
        raise ValueError(f"rope: x has {seq} positions; cos and sin have {cos.shape[0]}")
    if positions is not None:
        if positions.shape not in ((seq,), (1, seq), (batch, seq)):
            raise ValueError(f"rope: positions is {tuple(positions.shape)}; it must be ({seq},) or ({batch}, {seq})")
        check_device("rope", x=x, positions=positions)
        positions = positions.long().expand(batch, seq)
    check_tensors("rope", x=x, cos=cos, sin=sin)
    y: Tensor = Rope.apply(x, cos.contiguous(), sin.contiguous(), positions)
    return y
