"""What one attention call launches: kernels, numbers of programs and every argument but the tensors themselves.

A plan depends on shapes, strides, dtype and flags only. `triton_launch.py` makes it once for all calls that share
those: below a length of about 4,096 the host's work takes longer than the kernels.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from cs336_systems.attention.triton_backward import flash_backward_kernel, flash_preprocess_kernel
from cs336_systems.attention.triton_forward import flash_combine_kernel, flash_forward_kernel
from cs336_systems.attention.triton_tuning import (
    KernelConfig,
    Passes,
    Problem,
    choose,
    choose_backward,
    chunk_size,
    wants_tma,
)

# Rows of the backward pass's per-row buffer are padded to a multiple of this, the largest tile of queries.
ROW_PADDING = 128
_LOG2_E = 1.4426950408889634
# The kernels around the main ones are bound by memory; small tiles spread short sequences over the card.
_MEMORY_BOUND = KernelConfig(block_own=16, block_step=16, num_warps=4, num_stages=1)

Strides = tuple[int, ...]


class Tile(NamedTuple):
    """An operand to pass as a tensor descriptor: the tensor's position, and the shape of the tile to fetch."""

    tensor: int
    shape: list[int]


class Step(NamedTuple):
    """One launch, kernel[(n_programs,)](*operands, *strides, *numbers, [seed, offset,] *constants)."""

    kernel: Any
    n_programs: int
    config: KernelConfig
    operands: tuple[int | Tile, ...]  # positions in the call's tensors, which end with the plan's scratch
    strides: tuple[Strides, ...]
    numbers: tuple[float, ...]
    takes_seed: bool
    constants: tuple[Any, ...]


class LaunchPlan(NamedTuple):
    scratch: tuple[tuple[int, ...], ...]  # shapes of float32 buffers
    steps: tuple[Step, ...]
    compiled: list[Any]  # a step's compiled kernel, once it has run
    passes: Passes
    copies_do: bool = False  # the plan is for a contiguous copy of do


def _is_tma_ready(strides: Strides, itemsize: int) -> bool:
    """Whether a tensor descriptor can describe a tensor: unit last stride, the others multiples of 16 bytes."""
    *outer, last = strides
    return last == 1 and all(stride > 0 and stride * itemsize % 16 == 0 for stride in outer)


def _contiguous(shape: tuple[int, ...]) -> Strides:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))


def _constants(problem: Problem, config: KernelConfig) -> tuple[Any, ...]:
    return (
        problem.group, problem.is_causal, problem.dropout_p > 0, problem.head_dim, problem.block_d, problem.precision,
        config.block_own, config.block_step, config.use_tma,
    )  # fmt: skip


def plan_forward(
    problem: Problem,
    strides: Sequence[Strides],
    is_aligned: bool,
    config: KernelConfig | None = None,
    n_chunks: int | None = None,
) -> LaunchPlan:
    """For the tensors (q, k, v, o, lse), with `strides` of the first four; is_aligned says that all memory starts at a
    multiple of 16 bytes. `config` and `n_chunks` override the tuned choice."""
    q, k, v, o = strides
    if config is None:
        can_use_tma = is_aligned and all(_is_tma_ready(x, problem.dtype.itemsize) for x in (k, v))
        config = choose("forward", problem, can_use_tma and wants_tma(problem, is_backward=False))
    p, own = problem, config.block_own
    n_blocks = -(-p.n_queries // own) * p.batch * p.heads
    chunk_keys = chunk_size(p, config, n_blocks, n_chunks)
    n_chunks = -(-p.n_keys // chunk_keys)
    tile = [1, 1, config.block_step, p.block_d]
    o_chunks_shape = (n_chunks * p.batch, p.heads, p.n_queries, p.head_dim)
    o_chunks = o if n_chunks == 1 else _contiguous(o_chunks_shape)
    outputs = (3, 4) if n_chunks == 1 else (5, 6)
    forward = Step(
        flash_forward_kernel, n_blocks * n_chunks, config,
        (0, *((Tile(1, tile), Tile(2, tile)) if config.use_tma else (1, 2)), *outputs),
        (q, k, v, o_chunks),
        (p.batch, p.heads, p.n_queries, p.n_keys, chunk_keys, p.scale * _LOG2_E, p.dropout_p, p.dropout_scale), True,
        _constants(p, config),
    )  # fmt: skip
    if n_chunks == 1:
        return LaunchPlan((), (forward,), [None], (("forward", config),))
    rows = _MEMORY_BOUND.block_own
    combine = Step(
        flash_combine_kernel, -(-p.n_queries // rows) * p.batch * p.heads, _MEMORY_BOUND,
        (5, 6, 3, 4), (o_chunks, o), (p.batch, p.heads, p.n_queries, n_chunks), False, (p.head_dim, p.block_d, rows),
    )  # fmt: skip
    return LaunchPlan((o_chunks_shape, o_chunks_shape[:-1]), (forward, combine), [None, None], (("forward", config),))


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
    do, q, k, v, o, dq, dk, dv = strides
    copies_do = False
    if passes is None:
        itemsize = problem.dtype.itemsize
        use_tma = is_aligned and wants_tma(problem, is_backward=True)
        use_tma = use_tma and all(_is_tma_ready(x, itemsize) for x in (q, k, v))
        contiguous = _contiguous((problem.batch, problem.heads, problem.n_queries, problem.head_dim))
        if use_tma and not _is_tma_ready(do, itemsize) and _is_tma_ready(contiguous, itemsize):
            # o.sum().backward() hands over an expanded do: one copy of it buys descriptors for every tile.
            do, copies_do = contiguous, True
        passes = choose_backward(problem, use_tma and _is_tma_ready(do, itemsize))
    p, batch_heads = problem, problem.batch * problem.heads
    n_rows = -(-p.n_queries // ROW_PADDING) * ROW_PADDING
    block_rows = _MEMORY_BOUND.block_own
    preprocess = Step(
        flash_preprocess_kernel, n_rows // block_rows * batch_heads, _MEMORY_BOUND,
        (4, 0, 5, 9), (o, do), (p.heads, p.n_queries, n_rows), False, (p.head_dim, p.block_d, block_rows),
    )  # fmt: skip
    steps = [preprocess]
    for name, config in passes:
        run_dkdv, run_dq = needs_dkdv and name != "dq", needs_dq and name != "dkdv"
        key_programs = -(-p.n_keys // config.block_own) * p.batch * (p.heads // p.group)
        query_programs = -(-p.n_queries // config.block_own) * batch_heads
        if not run_dkdv and not run_dq:
            continue
        stepped: tuple[int | Tile, ...] = (1, 2, 3, 0, 9)
        if config.use_tma:
            tile = [1, 1, config.block_step, p.block_d]
            stepped = (*(Tile(i, tile) for i in (1, 2, 3, 0)), Tile(9, [1, config.block_step]))
        step = Step(
            flash_backward_kernel, run_dkdv * key_programs + run_dq * query_programs, config,
            (1, 2, 3, 0, *stepped, 9, 6, 7, 8), (q, k, v, do, dq, dk, dv),
            (p.batch, p.heads, p.n_queries, p.n_keys, n_rows, p.scale, p.scale * _LOG2_E, p.dropout_p,
             p.dropout_scale), True,
            (*_constants(p, config), run_dkdv, run_dq),
        )  # fmt: skip
        steps.append(step)
    return LaunchPlan(((2 * batch_heads, n_rows),), tuple(steps), [None] * len(steps), passes, copies_do)
