"""What one attention call launches: kernels, numbers of programs and every argument but the tensors themselves.

A plan depends on shapes, strides, dtype and flags only. `triton_launch.py` makes it once for all calls that share
those: below a length of about 4,096 the host's work takes longer than the kernels.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cs336_systems.attention.triton_backward import flash_backward_kernel, flash_preprocess_kernel
from cs336_systems.attention.triton_forward import flash_combine_kernel, flash_forward_kernel
from cs336_systems.attention.triton_split import MAX_BLOCKS, measure_kernel, split_kernel
from cs336_systems.attention.triton_tuning import (
    KernelConfig,
    Passes,
    Problem,
    choose,
    choose_backward,
    chunk_size,
    wants_inline_d,
    wants_tma,
)

# Rows of the backward pass's per-row buffer are padded to a multiple of this, the largest tile of queries.
ROW_PADDING = 128
LOG2_E = 1.4426950408889634
# The kernels around the main ones are bound by memory; small tiles spread short sequences over the card.
MEMORY_BOUND = KernelConfig(block_own=16, block_step=16, num_warps=4, num_stages=1)

Shape = tuple[int, ...]
Strides = tuple[int, ...]


class Tile(NamedTuple):
    """An operand to pass as a tensor descriptor: position, shape and strides, and the shape of the tile to fetch."""

    tensor: int
    shape: list[int]
    strides: list[int]
    tile: list[int]
    for_gluon: bool = False  # whose descriptors name the layout in shared memory as well


class Step(NamedTuple):
    """One launch, kernel[(n_programs,)](*operands, *strides, *numbers, [seed, offset,] *constants)."""

    kernel: Any
    n_programs: int
    config: KernelConfig
    operands: tuple[int | Tile, ...]  # positions in the call's tensors, which end with the plan's scratch
    numbers: tuple[Any, ...]  # strides come first
    takes_seed: bool
    constants: tuple[Any, ...]


class Scratch(NamedTuple):
    """A tensor that the steps of a plan share, contiguous, somewhere in a buffer of bytes."""

    shape: Shape
    dtype: torch.dtype
    offset: int

    def of(self, buffer: Tensor) -> Tensor:
        size = math.prod(self.shape) * self.dtype.itemsize
        return buffer[self.offset : self.offset + size].view(self.dtype).view(self.shape)


class LaunchPlan(NamedTuple):
    scratch: tuple[Scratch, ...]
    scratch_bytes: int
    steps: tuple[Step, ...]
    passes: Passes
    is_aligned: bool  # all memory starts at a multiple of 16 bytes
    launches: list[Callable]  # one for each step, once they have run: see triton_direct.py
    copies_do: bool = False  # the plan is for a contiguous copy of do


def launch_plan(
    scratch: Sequence[tuple[Shape, torch.dtype]],
    steps: Sequence[Step],
    passes: Passes,
    is_aligned: bool,
    copies_do: bool = False,
) -> LaunchPlan:
    """A plan whose scratch tensors, of these shapes and dtypes, are placed one after the other."""
    placed, end = [], 0
    for shape, dtype in scratch:
        placed.append(Scratch(shape, dtype, end))
        end += -(-math.prod(shape) * dtype.itemsize // 512) * 512  # as torch's allocator aligns
    return LaunchPlan(tuple(placed), end, tuple(steps), passes, is_aligned, [], copies_do)


def with_heads(strides: Strides) -> Strides:
    """Four strides; those of (batch, length, head_dim) get one for a heads dimension of one."""
    return strides if len(strides) == 4 else (strides[0], *strides)


def is_tma_ready(strides: Strides, itemsize: int) -> bool:
    """Whether a tensor descriptor can describe a tensor: unit last stride, the others multiples of 16 bytes."""
    *outer, last = strides
    return last == 1 and all(stride > 0 and stride * itemsize % 16 == 0 for stride in outer)


def contiguous_strides(shape: Shape) -> Strides:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))


def _constants(problem: Problem, config: KernelConfig) -> tuple[Any, ...]:
    return (
        problem.group, problem.is_causal, problem.dropout_p > 0, problem.head_dim, problem.block_d, problem.precision,
        problem.parts, config.block_own, config.block_step, config.use_tma,
    )  # fmt: skip


class _Split(NamedTuple):
    """Float32 operands as pairs of float16: what to launch for that, and what then stands in for q, k, v and do."""

    scratch: tuple[tuple[Shape, torch.dtype], ...]
    steps: tuple[Step, ...]
    operands: tuple[int, ...]  # positions of q, k, v (and do), split
    strides: tuple[Strides, ...]
    scales: int


def _plan_split(problem: Problem, tensors: tuple[int, ...], strides: tuple[Strides, ...], first: int) -> _Split:
    """Split q, k, v (and do), at these positions and with these strides; scratch begins at position `first`."""
    p = problem
    row = -(-p.head_dim // 8) * 8  # 16 bytes, for descriptors
    q_shape = (2 * p.batch, p.heads, p.n_queries, row)
    k_shape = (2 * p.batch, p.heads // p.group, p.n_keys, row)
    shapes = (q_shape, k_shape, k_shape, q_shape)[: len(tensors)]
    n_scales = p.batch * p.heads // p.group
    measures, scales = first + len(tensors), first + len(tensors) + 1
    scratch = (
        *((shape, torch.float16) for shape in shapes),
        ((2, 4, p.batch * p.heads, MAX_BLOCKS), torch.float32),
        ((3, 4, n_scales), torch.float32),
    )
    split_strides = tuple(contiguous_strides(shape) for shape in shapes)
    block_rows = max(16, 4096 // p.block_d)
    n_tiles = -(-max(p.n_queries, p.n_keys) // block_rows)
    tiles_per_block = -(-n_tiles // MAX_BLOCKS)
    n_blocks = -(-n_tiles // tiles_per_block)
    config = KernelConfig(block_rows, block_rows, num_warps=4, num_stages=1)
    all_four = (*tensors, *tensors[:1])[:4]
    split = range(first, first + len(tensors))
    sizes = (p.batch, p.heads, p.n_queries, p.n_keys)
    constants = (p.group, p.head_dim, p.block_d, block_rows, MAX_BLOCKS)
    each = p.batch * p.heads
    input_strides = (*strides, *strides[:1])[:4]
    steps = (
        Step(
            measure_kernel, len(tensors) * each * n_blocks, config, (*all_four, measures),
            (*input_strides, *sizes, tiles_per_block * block_rows, each * n_blocks), False, constants,
        ),
        Step(
            split_kernel, len(tensors) * each * n_tiles, config,
            (*all_four, *(*split, *split[:1])[:4], measures, scales),
            (*input_strides, *split_strides[:2], *sizes, n_blocks, each * n_tiles), False, constants,
        ),
    )  # fmt: skip
    return _Split(scratch, steps, tuple(split), split_strides, scales)


def _stepped(problem: Problem, config: KernelConfig, tensor: int, strides: Strides, is_query: bool) -> int | Tile:
    """An operand whose tiles a program steps through: a descriptor, if the configuration says so."""
    p = problem
    if not config.use_tma:
        return tensor
    heads, length = (p.heads, p.n_queries) if is_query else (p.heads // p.group, p.n_keys)
    shape = [p.parts * p.batch, heads, length, p.head_dim]
    return Tile(tensor, shape, list(strides), [1, 1, config.block_step, p.block_d])


def plan_forward(
    problem: Problem,
    strides: Sequence[Strides],
    is_aligned: bool,
    config: KernelConfig | None = None,
    n_chunks: int | None = None,
) -> LaunchPlan:
    """For the tensors (q, k, v, o, lse), with `strides` of the first four; is_aligned says that all memory starts at a
    multiple of 16 bytes. `config` and `n_chunks` override the tuned choice."""
    q, k, v, o = (with_heads(x) for x in strides)
    p, operands, scales, scratch, steps = problem, (0, 1, 2), 4, (), ()
    if p.parts == 2:
        split = _plan_split(p, (0, 1, 2), (q, k, v), first=5)
        scratch, steps, operands, scales = split.scratch, split.steps, split.operands, split.scales
        q, k, v = split.strides
    if config is None:
        can_use_tma = p.parts == 2 or (is_aligned and all(is_tma_ready(x, p.dtype.itemsize) for x in (k, v)))
        config = choose("forward", p, can_use_tma and wants_tma(p, is_backward=False))
    n_blocks = -(-p.n_queries // config.block_own) * p.batch * p.heads
    chunk_keys = chunk_size(p, config, n_blocks, n_chunks)
    n_chunks = -(-p.n_keys // chunk_keys)
    o_chunks_shape = (n_chunks * p.batch, p.heads, p.n_queries, p.head_dim)
    o_chunks, outputs = o, (3, 4)
    if n_chunks > 1:
        o_chunks, outputs = contiguous_strides(o_chunks_shape), (5 + len(scratch), 6 + len(scratch))
        scratch = (*scratch, (o_chunks_shape, torch.float32), (o_chunks_shape[:-1], torch.float32))
    stepped = (_stepped(p, config, operands[1], k, False), _stepped(p, config, operands[2], v, False))
    forward = Step(
        flash_forward_kernel, n_blocks * n_chunks, config, (operands[0], *stepped, *outputs, scales),
        (q, k, v, o_chunks, p.batch, p.heads, p.n_queries, p.n_keys, chunk_keys, p.scale * LOG2_E, p.dropout_p,
         p.dropout_scale), True, _constants(p, config),
    )  # fmt: skip
    steps = (*steps, forward)
    if n_chunks > 1:
        rows = MEMORY_BOUND.block_own
        combine = Step(
            flash_combine_kernel, -(-p.n_queries // rows) * p.batch * p.heads, MEMORY_BOUND, (*outputs, 3, 4),
            (o_chunks, o, p.batch, p.heads, p.n_queries, n_chunks), False, (p.head_dim, p.block_d, rows),
        )  # fmt: skip
        steps = (*steps, combine)
    return launch_plan(scratch, steps, (("forward", config),), is_aligned)


def plan_backward(
    problem: Problem,
    strides: Sequence[Strides],
    is_aligned: bool,
    needs_dq: bool = True,
    needs_dkdv: bool = True,
    passes: Passes | None = None,
) -> LaunchPlan:
    """For the tensors (do, q, k, v, o, lse, dq, dk, dv), with `strides` of all but lse; the rest as in `plan_forward`.
    `passes` overrides the tuned choice of kernels and their configurations."""
    do, q, k, v, o, dq, dk, dv = (with_heads(x) for x in strides)
    p, batch_heads, copies_do = problem, problem.batch * problem.heads, False
    n_rows = -(-p.n_queries // ROW_PADDING) * ROW_PADDING
    rows_shape = (2 * batch_heads, n_rows)
    scratch: tuple[tuple[Shape, torch.dtype], ...] = ((rows_shape, torch.float32),)
    steps, operands, scales, do_of_preprocess = [], (1, 2, 3, 0), 5, do
    use_tma = wants_tma(p, is_backward=True)
    if p.parts == 2:
        split = _plan_split(p, (1, 2, 3, 0), (q, k, v, do), first=10)
        scratch, steps, operands, scales = (*scratch, *split.scratch), list(split.steps), split.operands, split.scales
        q, k, v, do = split.strides
    elif passes is None:
        itemsize = p.dtype.itemsize
        use_tma = use_tma and is_aligned and all(is_tma_ready(x, itemsize) for x in (q, k, v))
        contiguous = contiguous_strides((p.batch, p.heads, p.n_queries, p.head_dim))
        if use_tma and not is_tma_ready(do, itemsize) and is_tma_ready(contiguous, itemsize):
            # o.sum().backward() hands over an expanded do: one copy of it buys descriptors for every tile.
            do = do_of_preprocess = contiguous
            copies_do = True
        use_tma = use_tma and is_tma_ready(do, itemsize)
    if passes is None:
        passes = choose_backward(p, use_tma)
    inline_d = wants_inline_d(p, passes)
    all_rows = 9
    if inline_d:
        scratch, all_rows = (), 5
    else:
        block_rows = MEMORY_BOUND.block_own
        preprocess = Step(
            flash_preprocess_kernel, n_rows // block_rows * batch_heads, MEMORY_BOUND, (4, 0, 5, 9, scales),
            (o, do_of_preprocess, p.heads, p.n_queries, n_rows), False,
            (p.parts, p.group, p.head_dim, p.block_d, block_rows, False),
        )  # fmt: skip
        steps.append(preprocess)
    for name, config in passes:
        run_dk, run_dv = (needs_dkdv and name in (which, "dkdv", "fused") for which in ("dk", "dv"))
        run_dq = needs_dq and name in ("dq", "fused")
        key_programs = -(-p.n_keys // config.block_own) * p.batch * (p.heads // p.group)
        query_programs = -(-p.n_queries // config.block_own) * batch_heads
        if not (run_dk or run_dv or run_dq):
            continue
        stepped = [
            _stepped(p, config, operand, x, is_query)
            for operand, x, is_query in zip(operands, (q, k, v, do), (True, False, False, True), strict=True)
        ]
        rows: int | Tile = all_rows
        if config.use_tma:
            rows = Tile(all_rows, list(rows_shape), [n_rows, 1], [1, config.block_step])
        step = Step(
            flash_backward_kernel, (run_dk or run_dv) * key_programs + run_dq * query_programs, config,
            (*operands, 4, *stepped, rows, all_rows, 6, 7, 8, scales),
            (q, k, v, do, o, dq, dk, dv, p.batch, p.heads, p.n_queries, p.n_keys, n_rows, p.scale, p.scale * LOG2_E,
             p.dropout_p, p.dropout_scale), True,
            (*_constants(p, config), run_dk, run_dv, run_dq, inline_d),
        )  # fmt: skip
        steps.append(step)
    return launch_plan(scratch, steps, passes, is_aligned, copies_do)
