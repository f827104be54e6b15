"""Where Hopper's own kernels take a step's place in a launch plan.

They take head_dim 65 to 128 (in tiles of 128), float16 and bfloat16, no dropout, and problems whose tiles of 128
queries are enough for all multiprocessors. Measured on an H200, bfloat16, causal, length 16,384, ms:

| 8 heads x 128 | forward | dK, dV | dQ |
|---|---|---|---|
| flash_forward_kernel, flash_backward_kernel (Triton) | 1.02 | 1.70 | 1.33 |
| hopper_forward_kernel, hopper_dq_kernel (Gluon) | 0.79 | 1.71 | 1.05 |

At head_dim 64 the exponentials take as long as the products, and the same kernels gained nothing (forward 1.20 in
either, dQ 1.33 and 1.36): Triton's stay.
"""

from collections.abc import Sequence

from cs336_systems.attention.hopper_dq import hopper_dq_kernel
from cs336_systems.attention.hopper_forward import N_CONSUMERS, ROWS, hopper_forward_kernel
from cs336_systems.attention.triton_plan import (
    LOG2_E,
    LaunchPlan,
    Step,
    Strides,
    Tile,
    contiguous_strides,
    is_tma_ready,
    with_heads,
)
from cs336_systems.attention.triton_tuning import KernelConfig, Problem

_BLOCK_OWN = ROWS.value * N_CONSUMERS.value
_RING_DEPTH = 2
# Three warp groups of 168 registers a thread are all of a multiprocessor's; the kernels divide them anew.
_FORWARD = KernelConfig(_BLOCK_OWN, 128, num_warps=4, num_stages=_RING_DEPTH, use_tma=True, max_registers=168)
_DQ = KernelConfig(_BLOCK_OWN, 64, num_warps=4, num_stages=_RING_DEPTH, use_tma=True, max_registers=168)


def _is_supported(problem: Problem, config: KernelConfig, strides: Sequence[Strides]) -> bool:
    """`config` is what Triton's kernel would run in: with descriptors, if the problem is large and its tensors fit."""
    p = problem
    return (
        config.use_tma
        and p.gpu.arch == 90
        and p.dtype.itemsize == 2
        and p.block_d == 128
        and p.dropout_p == 0
        and _n_programs(p) >= p.gpu.n_sm
        and all(is_tma_ready(with_heads(x), 2) for x in strides)
    )


def _tile(problem: Problem, tensor: int, strides: Strides, is_query: bool, rows: int) -> Tile:
    p = problem
    heads, length = (p.heads, p.n_queries) if is_query else (p.heads // p.group, p.n_keys)
    shape = [p.batch, heads, length, p.head_dim]
    return Tile(tensor, shape, list(with_heads(strides)), [1, 1, rows, p.block_d], for_gluon=True)


def _n_programs(problem: Problem) -> int:
    return -(-problem.n_queries // _BLOCK_OWN) * problem.batch * problem.heads


def with_hopper_forward(plan: LaunchPlan, problem: Problem, strides: Sequence[Strides]) -> LaunchPlan:
    """`plan_forward`'s plan for tensors (q, k, v, o, lse) with `strides` of the first four, and Hopper's kernel in it
    if that can run; else the plan as it is."""
    p = problem
    if len(plan.steps) != 1 or not _is_supported(p, plan.passes[0][1], strides):  # the keys are not cut into chunks
        return plan
    q, k, v, o = strides
    step = Step(
        hopper_forward_kernel, _n_programs(p), _FORWARD,
        (_tile(p, 0, q, True, ROWS.value), _tile(p, 1, k, False, _FORWARD.block_step),
         _tile(p, 2, v, False, _FORWARD.block_step), _tile(p, 3, o, True, ROWS.value), 4),
        (p.batch, p.heads, p.n_queries, p.n_keys, p.scale * LOG2_E), False, (p.group, p.is_causal, _RING_DEPTH),
    )  # fmt: skip
    return plan._replace(steps=(step,), passes=(("forward", _FORWARD),))


def with_hopper_dq(plan: LaunchPlan, problem: Problem, strides: Sequence[Strides], needs_dq: bool) -> LaunchPlan:
    """`plan_backward`'s plan for tensors (do, q, k, v, o, lse, dq, dk, dv) with `strides` of all but lse, and Hopper's
    kernel for dQ in it if that can run; else the plan as it is."""
    p = problem
    do, q, k, v, _, dq, _, _ = strides
    if plan.copies_do:
        do = contiguous_strides((p.batch, p.heads, p.n_queries, p.head_dim))
    name, config = plan.passes[-1]
    if name != "dq" or not needs_dq or not _is_supported(p, config, (do, q, k, v, dq)):
        return plan
    rows_scratch = 9
    n_rows = plan.scratch[0].shape[1]
    step = Step(
        hopper_dq_kernel, _n_programs(p), _DQ,
        (_tile(p, 1, q, True, ROWS.value), _tile(p, 0, do, True, ROWS.value), _tile(p, 2, k, False, _DQ.block_step),
         _tile(p, 3, v, False, _DQ.block_step), _tile(p, 6, dq, True, ROWS.value), rows_scratch),
        (p.batch, p.heads, p.n_queries, p.n_keys, n_rows, p.scale, p.scale * LOG2_E), False,
        (p.group, p.is_causal, _RING_DEPTH),
    )  # fmt: skip
    return plan._replace(steps=(*plan.steps[:-1], step), passes=(*plan.passes[:-1], ("dq", _DQ)))
