"""AdamW's kernel, which finds each tensor of a model by itself: in a table of their addresses.

A row of the table, in int64: the addresses of p, g, m, v and of the weight that is p rounded (0 if there is none), the
elements, the tensor's first tile, then what the update needs of the tensor's group and step, six float32 in pairs.
"""

from __future__ import annotations

import functools
import math
import struct
from typing import Any

import torch
from torch import Tensor

from cs336_systems.kernels.support import launch, tl, triton

TILE = 2048  # elements that a program updates, 8 a thread: more would leave registers for one program a multiprocessor
_N_WARPS = 8
ALIGNMENT_BYTES = 16  # of the widest loads and stores
_MAX_TILE_MAPS = 16

_ROW = 10
_FLOATS = struct.Struct("6f")
_PAIRS = struct.Struct("3q")


@triton.jit
def _pointer(address_ptr, DTYPE: tl.constexpr, ALIGNMENT: tl.constexpr, WIDEST: tl.constexpr):
    """The address as a pointer, said to be aligned no better than lets a thread access as many elements at once as of
    the widest dtype: with more, threads would own other elements of a narrow tensor than of a wide one, and exchange
    them through shared memory."""
    bits: tl.constexpr = DTYPE.primitive_bitwidth  # ty: ignore[missing-union-attribute]
    aligned: tl.constexpr = ALIGNMENT * bits // WIDEST if ALIGNMENT > 1 else 1
    return tl.multiple_of(tl.load(address_ptr).to(tl.pointer_type(DTYPE)), aligned)  # ty: ignore[invalid-argument-type]


@triton.jit
def _update_tile(
    p_ptr, g_ptr, m_ptr, v_ptr, w_ptr, row_ptr, offsets, n_elements, HAS_WEIGHT: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    scalars_ptr = (row_ptr + 7).to(tl.pointer_type(tl.float32))
    decay = tl.load(scalars_ptr)  # 1 - lr·λ
    one_minus_beta1 = tl.load(scalars_ptr + 1)
    beta2 = tl.load(scalars_ptr + 2)
    one_minus_beta2 = tl.load(scalars_ptr + 3)
    step_size = tl.load(scalars_ptr + 4)  # lr·√(1 - β₂ᵗ) / (1 - β₁ᵗ)
    eps = tl.load(scalars_ptr + 5)  # ε·√(1 - β₂ᵗ)
    mask = offsets < n_elements if MASKED else None
    p = tl.load(p_ptr + offsets, mask=mask).to(tl.float32)
    g = tl.load(g_ptr + offsets, mask=mask).to(tl.float32)
    m = tl.load(m_ptr + offsets, mask=mask).to(tl.float32)
    v = tl.load(v_ptr + offsets, mask=mask).to(tl.float32)
    # Each sum with a product is said to be one operation: left to the compiler, which of them are could depend on the
    # dtypes, and so would the last bit.
    m = tl.fma(one_minus_beta1, g - m, m)
    v = tl.fma(beta2, v, one_minus_beta2 * g * g)
    p = tl.fma(-step_size, m / (tl.sqrt(v) + eps), decay * p)
    tl.store(p_ptr + offsets, p.to(p_ptr.dtype.element_ty), mask=mask)
    tl.store(m_ptr + offsets, m.to(m_ptr.dtype.element_ty), mask=mask)
    tl.store(v_ptr + offsets, v.to(v_ptr.dtype.element_ty), mask=mask)
    if HAS_WEIGHT:
        tl.store(w_ptr + offsets, p.to(w_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _adamw_kernel(
    table_ptr,  # (n_tensors, ROW) int64
    tensor_of_tile_ptr,  # (n_tiles,) int32
    P_DTYPE: tl.constexpr,
    G_DTYPE: tl.constexpr,
    M_DTYPE: tl.constexpr,
    V_DTYPE: tl.constexpr,
    W_DTYPE: tl.constexpr,  # of the weight that is p rounded; None if p is the weight
    WIDEST: tl.constexpr,  # bits of the widest of these
    ALIGNMENT: tl.constexpr,  # bytes; of all addresses
    ROW: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program: TILE elements of one parameter and its state."""
    tile = tl.program_id(0)
    row_ptr = table_ptr + tl.load(tensor_of_tile_ptr + tile).to(tl.int64) * ROW
    p_ptr = _pointer(row_ptr, P_DTYPE, ALIGNMENT, WIDEST)
    g_ptr = _pointer(row_ptr + 1, G_DTYPE, ALIGNMENT, WIDEST)
    m_ptr = _pointer(row_ptr + 2, M_DTYPE, ALIGNMENT, WIDEST)
    v_ptr = _pointer(row_ptr + 3, V_DTYPE, ALIGNMENT, WIDEST)
    HAS_WEIGHT: tl.constexpr = W_DTYPE is not None
    w_ptr = _pointer(row_ptr + 4, W_DTYPE, ALIGNMENT, WIDEST) if HAS_WEIGHT else p_ptr
    n_elements = tl.load(row_ptr + 5)
    start = (tile - tl.load(row_ptr + 6)) * TILE  # int64, as the table is
    offsets = start + tl.arange(0, TILE)
    # A mask whose end is not known to be a multiple of anything would make every access one element wide.
    if start + TILE <= n_elements:
        _update_tile(p_ptr, g_ptr, m_ptr, v_ptr, w_ptr, row_ptr, offsets, n_elements, HAS_WEIGHT, False)
    else:
        _update_tile(p_ptr, g_ptr, m_ptr, v_ptr, w_ptr, row_ptr, offsets, n_elements, HAS_WEIGHT, True)


@functools.lru_cache(maxsize=_MAX_TILE_MAPS)
def _tensor_of_tile(n_tiles: tuple[int, ...], device: torch.device) -> Tensor:
    """(total tiles,) int32: which tensor each tile is of. It is the same in every step: made once."""
    tensors = torch.arange(len(n_tiles), dtype=torch.int32)
    return tensors.repeat_interleave(torch.tensor(n_tiles)).to(device)


_TRITON_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


class Launch:
    """The tensors that one launch updates: rows of its table, one after another, and each row's tiles."""

    def __init__(self) -> None:
        self.table: list[int] = []
        self.n_tiles: list[int] = []
        self.first_tile = 0

    def add(self, addresses: tuple[int, int, int, int, int], n_elements: int, scalars: tuple[int, ...]) -> None:
        """Addresses of p, g, m, v, and the weight that is p rounded (0 if there is none); `packed_scalars`."""
        self.table += (*addresses, n_elements, self.first_tile, *scalars)
        tiles = -(-n_elements // TILE)
        self.n_tiles.append(tiles)
        self.first_tile += tiles


def launch_adamw(
    update: Launch, dtypes: tuple[torch.dtype | None, ...], is_aligned: bool, device: torch.device
) -> None:
    """Updates the tensors of one combination of dtypes (p, g, m, v, and the weight's or None)."""
    table = torch.tensor(update.table, dtype=torch.int64)
    if device.type == "cuda":
        # From pinned memory the copy is queued like a kernel; the allocator keeps that memory until it is done.
        table = table.pin_memory().to(device, non_blocking=True)
    p, g, m, v, w = (None if dtype is None else getattr(tl, _TRITON_DTYPES[dtype]) for dtype in dtypes)
    widest = 8 * max(dtype.itemsize for dtype in dtypes if dtype is not None)
    launch(
        _adamw_kernel, update.first_tile, table, _tensor_of_tile(tuple(update.n_tiles), device), P_DTYPE=p, G_DTYPE=g,
        M_DTYPE=m, V_DTYPE=v, W_DTYPE=w, WIDEST=widest, ALIGNMENT=ALIGNMENT_BYTES if is_aligned else 1, ROW=_ROW,
        TILE=TILE, num_warps=_N_WARPS,
    )  # fmt: skip


def packed_scalars(group: dict[str, Any], t: int) -> tuple[int, ...]:
    """What the kernel needs to know of a group's settings at step t, as the table holds it."""
    lr, (beta1, beta2) = group["lr"], group["betas"]
    root = math.sqrt(1 - beta2**t)
    numbers = (
        1 - lr * group["weight_decay"],
        1 - beta1,
        beta2,
        1 - beta2,
        lr * root / (1 - beta1**t),
        group["eps"] * root,
    )
    return _PAIRS.unpack(_FLOATS.pack(*numbers))
