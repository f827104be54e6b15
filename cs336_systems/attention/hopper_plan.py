"""Where Hopper's own kernels take a step's place in a launch plan.

The forward pass takes head_dim 33 to 128 (in tiles of 64 or 128), backward 65 to 128, in float16 and bfloat16 without
dropout, and problems whose tiles of queries are enough for all multiprocessors. Measured on an H200, bfloat16, causal,
length 16,384, ms:

| 8 heads x 128 | forward | dK, dV | dQ |
|---|---|---|---|
| flash_forward_kernel, flash_backward_kernel (Triton) | 1.02 | 1.70 | 1.33 |
| hopper_forward_kernel, hopper_dq_kernel (Gluon) | 0.79 | 1.71 | 1.05 |

Backward in one pass takes the place of two where its tiles of 128 keys are enough for all multiprocessors too. It works
at few heads at once, so that the tiles that their programs share are in the L2 cache (docs/attention.md has the bytes);
with fewer than four, or more than a third as many programs at one head as each has steps, they wait for their turns.
Whole backward pass, bfloat16, on an H200, in alternation, TFLOP/s by heads at once, (that which is chosen);
548 is from another run, in which 2 and 8 heads had 544 and 545:

| heads x length, head_dim 128 | two passes | 1 | 2 | 4 | 8 | 16 | 32 | all |
|---|---|---|---|---|---|---|---|---|
| 32 x 32,768, causal | 478 | 569 | 563 | (561) | 550 | 539 | | 518 |
| 32 x 32,768 | 475 | | 559 | (548) | 536 | | | 327 |
| 8 x 65,536, causal | 483 | 565 | 566 | (561) | | | | 555 |
| 8 x 16,384, causal | 465 | 520 | 523 | (536) | | | | 530 |
| 8 x 16,384 | 470 | 524 | 529 | (533) | | | | 530 |
| 4 sequences of 8 x 4,096, causal | 394 | | 426 | 463 | (459) | 456 | | 448 |
| 4 sequences of 32 x 4,096, causal | 421 | | | 482 | (474) | 473 | 457 | 321 |
| 4 sequences of 20 x 1,024, causal | 273 | | | | 282 | 292 | (291) | 270 |

Without turns, dQ added in any order, it is 3 to 6% faster (all heads at once, 8 x 16,384, causal: 547 and 566,
without a mask 540 and 570; 32 x 32,768: 520 and 534).

Shorter problems, for which Triton's is one pass too, take turns more often, and gain all the same. Steps of a program
for each that takes turns with it, and TFLOP/s, not causal and causal:

| heads x length, head_dim 128 | steps a turn | Triton's | Hopper's |
|---|---|---|---|
| 4 x 8,192 | 3.9 | 449, 377 | 505, 471 |
| 8 x 4,096 | 3.8 | 421, 337 | 490, 419 |
| 2 sequences of 8 x 2,048 | 3.6 | 384, 292 | 444, 346 |
| 16 x 2,048 | 3.6 | 382, 292 | 445, 345 |
| 32 x 1,024 | 3.2 | 328, 234 | 369, 254 |

At head_dim 64 the exponentials take as long as the products, and what counts are warps to choose from and few other
instructions: three consumers of 64 queries instead of two, and tiles of 128 keys all the same (hopper_forward.py says
how they find room). Forward, bfloat16, on an H200, in alternation, TFLOP/s, not causal and causal:

| heads x length, head_dim 64 | Triton's | two consumers | three |
|---|---|---|---|
| 16 x 16,384 | 446, 445 | 431, 446 | 521, 495 |
| 16 x 65,536 | 440, 443 | 430, - | 507, 536 |
| 4 sequences of 16 x 4,096 | 429, 372 | 399, 370 | 484, 395 |
| 16 x 4,096 | 419, 309 | - | 436, 310 |
| 16 x 2,048 | 346, 198 | - | 278, 189 |
| 8 sequences of 12 x 1,024 | 320, 205 | - | 298, 173 |

Short ones have too few tiles of keys to make up for filling the pipeline, and 192 queries a program leave more to
spare. In backward Hopper's kernels gain nothing there: dQ takes 1.36 ms (16 heads, 16,384, causal; Triton's 1.33) and
with three consumers 1.37 against 1.42, but 2.77 against 2.47 without a mask; one pass reaches 371 TFLOP/s where two
reach 402. There Triton's stay.
"""

from collections.abc import Sequence

import torch

from cs336_systems.attention.hopper_backward import N_CONSUMERS, hopper_backward_kernel
from cs336_systems.attention.hopper_dq import hopper_dq_kernel
from cs336_systems.attention.hopper_forward import ROWS, hopper_forward_kernel
from cs336_systems.attention.hopper_scale_dq import hopper_scale_dq_kernel
from cs336_systems.attention.triton_plan import (
    LOG2_E,
    MEMORY_BOUND,
    LaunchPlan,
    Step,
    Strides,
    Tile,
    contiguous_strides,
    is_tma_ready,
    launch_plan,
    with_heads,
)
from cs336_systems.attention.triton_tuning import KernelConfig, Problem

_RING_DEPTH = 2


def _config(n_consumers: int, block_step: int) -> KernelConfig:
    """A program's own tiles are `n_consumers` times 64 rows. The warp groups of two consumers and the producer's (of
    three consumers: four groups) have all registers of a multiprocessor, 168 a thread (128); a kernel divides them
    anew."""
    max_registers = {2: 168, 3: 128}[n_consumers]
    return KernelConfig(
        ROWS.value * n_consumers, block_step, num_warps=4, num_stages=_RING_DEPTH, use_tma=True,
        max_registers=max_registers,
    )  # fmt: skip


# By the head_dim of their tiles.
_FORWARD = {64: _config(3, 128), 128: _config(2, 128)}
_DQ = {128: _config(N_CONSUMERS.value, 64)}
_ONE_PASS = {128: _config(N_CONSUMERS.value, 64)}
_MIN_KEYS = {64: 4096, 128: 1}  # of the forward pass
_LEAST_HEADS_AT_ONCE = 4
_STEPS_FOR_A_TURN = 3  # of a program, for each that takes turns with it


def _is_supported(problem: Problem, replaced: KernelConfig, config: KernelConfig, strides: Sequence[Strides]) -> bool:
    """`replaced` is what Triton's kernel would run in: with descriptors, if the problem is large and its tensors
    fit. `config` is the one in its place."""
    p = problem
    return (
        replaced.use_tma
        and p.gpu.arch == 90
        and p.dtype.itemsize == 2
        and p.dropout_p == 0
        and _n_programs(p, config) >= p.gpu.n_sm
        and all(is_tma_ready(with_heads(x), 2) for x in strides)
    )


def _tile(problem: Problem, tensor: int, strides: Strides, is_query: bool, rows: int) -> Tile:
    p = problem
    heads, length = (p.heads, p.n_queries) if is_query else (p.heads // p.group, p.n_keys)
    shape = [p.batch, heads, length, p.head_dim]
    return Tile(tensor, shape, list(with_heads(strides)), [1, 1, rows, p.block_d], for_gluon=True)


def _n_programs(problem: Problem, config: KernelConfig) -> int:
    return -(-problem.n_queries // config.block_own) * problem.batch * problem.heads


def with_hopper_forward(plan: LaunchPlan, problem: Problem, strides: Sequence[Strides]) -> LaunchPlan:
    """`plan_forward`'s plan for tensors (q, k, v, o, lse) with `strides` of the first four, and Hopper's kernel in it
    if that can run; else the plan as it is."""
    p = problem
    config = _FORWARD.get(p.block_d)
    if config is None or p.n_keys < _MIN_KEYS[p.block_d] or len(plan.steps) != 1:  # the keys are cut into chunks
        return plan
    if not _is_supported(p, plan.passes[0][1], config, strides):
        return plan
    q, k, v, o = strides
    step = Step(
        hopper_forward_kernel, _n_programs(p, config), config,
        (_tile(p, 0, q, True, ROWS.value), _tile(p, 1, k, False, config.block_step),
         _tile(p, 2, v, False, config.block_step), _tile(p, 3, o, True, ROWS.value), 4),
        (p.batch, p.heads, p.n_queries, p.n_keys, p.scale * LOG2_E), False,
        (p.group, p.is_causal, config.block_own // ROWS.value, _RING_DEPTH),
    )  # fmt: skip
    return plan._replace(steps=(step,), passes=(("forward", config),))


def with_hopper_backward(
    plan: LaunchPlan, problem: Problem, strides: Sequence[Strides], needs_dq: bool, needs_dkdv: bool
) -> LaunchPlan:
    """`plan_backward`'s plan for tensors (do, q, k, v, o, lse, dq, dk, dv) with `strides` of all but lse, and Hopper's
    kernels in it if they can run: one pass for all three gradients, or the one for dQ; else the plan as it is."""
    p = problem
    do, q, k, v, o, dq, dk, dv = strides
    if plan.copies_do:
        do = contiguous_strides((p.batch, p.heads, p.n_queries, p.head_dim))
    name, replaced = plan.passes[-1]
    if name not in ("dq", "fused") or not needs_dq:
        return plan
    config = _ONE_PASS.get(p.block_d) if needs_dkdv else None
    if config is not None and _is_supported(p, replaced, config, (do, q, k, v, dk, dv)):
        heads_at_once = _heads_at_once(p, config)
        if heads_at_once is not None:
            return _one_pass(plan, p, config, heads_at_once, do, q, k, v, o, dq, dk, dv)
    config = _DQ.get(p.block_d)
    if config is None or name != "dq" or not _is_supported(p, replaced, config, (do, q, k, v, dq)):
        return plan
    rows_scratch = 9
    n_rows = plan.scratch[0].shape[1]
    step = Step(
        hopper_dq_kernel, _n_programs(p, config), config,
        (_tile(p, 1, q, True, ROWS.value), _tile(p, 0, do, True, ROWS.value), _tile(p, 2, k, False, config.block_step),
         _tile(p, 3, v, False, config.block_step), _tile(p, 6, dq, True, ROWS.value), rows_scratch),
        (p.batch, p.heads, p.n_queries, p.n_keys, n_rows, p.scale, p.scale * LOG2_E), False,
        (p.group, p.is_causal, _RING_DEPTH),
    )  # fmt: skip
    return plan._replace(steps=(*plan.steps[:-1], step), passes=(*plan.passes[:-1], ("dq", config)))


def _heads_at_once(problem: Problem, config: KernelConfig) -> int | None:
    """How many key/value heads one backward pass works at before the next ones: the fewest of whose programs each
    waits little for its turns. None if it waits long with all heads at once, or if the programs are too few. Of those
    that run at once, all that work at one head add to each of its tiles of queries one after the other, and so the
    last is that many tiles behind."""
    p = problem
    key_tiles, heads = -(-p.n_keys // config.block_own), p.batch * p.heads // p.group
    steps = -(-p.n_queries // ROWS.value) * p.group
    if key_tiles * heads < p.gpu.n_sm:
        return None
    at_once = min(_LEAST_HEADS_AT_ONCE, heads)
    while steps < _STEPS_FOR_A_TURN * min(key_tiles, -(-p.gpu.n_sm // at_once)):
        if at_once == heads:
            return None
        at_once = min(2 * at_once, heads)
    return at_once


def _one_pass(
    plan: LaunchPlan, p: Problem, config: KernelConfig, heads_at_once: int, do: Strides, q: Strides, k: Strides,
    v: Strides, o: Strides, dq: Strides, dk: Strides, dv: Strides,
) -> LaunchPlan:  # fmt: skip
    rows, sums = 9, 10  # scratch
    batch_heads, n_rows = p.batch * p.heads, plan.scratch[0].shape[1]
    preprocess = plan.steps[0]
    preprocess = preprocess._replace(constants=(*preprocess.constants[:-1], True))
    rows_shape, sums_shape = (3 * batch_heads, n_rows), (p.batch, p.heads, p.n_queries, p.head_dim)
    sums_strides, half = contiguous_strides(sums_shape), p.block_d // N_CONSUMERS.value
    backward = Step(
        hopper_backward_kernel, -(-p.n_keys // config.block_own) * p.batch * (p.heads // p.group), config,
        (_tile(p, 1, q, True, ROWS.value), _tile(p, 0, do, True, ROWS.value), _tile(p, 2, k, False, ROWS.value),
         _tile(p, 3, v, False, ROWS.value),
         Tile(rows, list(rows_shape), [n_rows, 1], [1, ROWS.value], for_gluon=True),
         Tile(sums, list(sums_shape), list(sums_strides), [1, 1, ROWS.value, half], for_gluon=True),
         _tile(p, 7, dk, False, ROWS.value), _tile(p, 8, dv, False, ROWS.value), rows),
        (p.batch, p.heads, heads_at_once, p.n_queries, p.n_keys, n_rows, p.scale, p.scale * LOG2_E), False,
        (p.group, p.is_causal, _RING_DEPTH),
    )  # fmt: skip
    block_rows = MEMORY_BOUND.block_own
    scale_dq = Step(
        hopper_scale_dq_kernel, -(-p.n_queries // block_rows) * batch_heads, MEMORY_BOUND, (sums, 6),
        (sums_strides, with_heads(dq), p.heads, p.n_queries, p.scale), False, (p.head_dim, p.block_d, block_rows),
    )  # fmt: skip
    scratch = [(rows_shape, torch.float32), (sums_shape, torch.float32)]
    steps = (preprocess, backward, scale_dq)
    return launch_plan(scratch, steps, (("fused", config),), plan.is_aligned, plan.copies_do)
