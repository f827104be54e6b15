"""From tensors to kernel launches: the host code between `flash_triton.py` and the kernels.

Triton examines every argument at every launch, and costs more by that than a short sequence's kernels take. Whatever it
specialises on is the same for calls of equal shapes, strides, dtype and flags, on the same device, with aligned memory.
So the plan of such calls is made once (`triton_plan.py`), keeps its compiled kernels, and launches them directly.
"""

import functools
from collections.abc import Callable

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from cs336_systems.attention.triton_autotune import is_enabled, tuned_passes
from cs336_systems.attention.triton_plan import LaunchPlan, Tile, plan_backward, plan_forward
from cs336_systems.attention.triton_tuning import INTERPRETER, Gpu, Passes, Problem

_SMALLEST_SCALE = 1e-30
_MAX_PLANS = 4096  # every new length makes one: they must not pile up for ever

_plans: dict[tuple, LaunchPlan] = {}


@functools.cache
def _gpu_of(device: torch.device) -> Gpu:
    properties = torch.cuda.get_device_properties(device)
    return Gpu(
        name=properties.name,
        arch=10 * properties.major + properties.minor,
        n_sm=properties.multi_processor_count,
        shared_memory_bytes=properties.shared_memory_per_block_optin,
    )


def _dot_precision(dtype: torch.dtype, head_dim: int, arch: int) -> str:
    """tl.dot's input_precision. Float32 honours torch's setting: "tf32" where that allows it, else products on tensor
    cores that are as accurate as float32 arithmetic: "bf16x6" (six products of bfloat16 parts), or "tf32x3" (three of
    TF32 parts) where the former needs more registers than there are. Measured on an H200, errors against float64 are
    a half and two thirds of SDPA's, and bf16x6 is a sixth faster. Before sm_80 products are float32's own."""
    if dtype != torch.float32 or arch < 80:
        return "ieee"
    if torch.backends.cuda.matmul.fp32_precision == "tf32":
        return "tf32"
    return "bf16x6" if arch == 90 and head_dim <= 64 else "tf32x3"


def make_problem(
    q: Tensor, k: Tensor, is_causal: bool, scale: float, dropout_p: float = 0.0, gpu: Gpu | None = None
) -> Problem:
    """What the kernels need to know of q (batch, heads, n_queries, head_dim), k (batch, kv_heads, n_keys, head_dim)
    and the call. scale must not be negative; gpu is by default the one that q is on."""
    batch, heads, n_queries, head_dim = q.shape
    gpu = gpu or (_gpu_of(q.device) if q.is_cuda else INTERPRETER)
    return Problem(
        batch=batch,
        heads=heads,
        group=heads // k.shape[1],
        n_queries=n_queries,
        n_keys=k.shape[2],
        head_dim=head_dim,
        block_d=max(16, triton.next_power_of_2(head_dim)),
        dtype=q.dtype,
        is_causal=is_causal,
        scale=max(scale, _SMALLEST_SCALE),  # -inf·0, of a masked score, would be NaN
        dropout_p=dropout_p,
        dropout_scale=1.0 / (1.0 - dropout_p) if dropout_p < 1.0 else 0.0,
        precision=_dot_precision(q.dtype, head_dim, gpu.arch),
        gpu=gpu,
    )


def run(plan: LaunchPlan, tensors: tuple[Tensor, ...], seed: int = 0, offset: int = 0) -> None:
    """Launch a plan's steps on the tensors that it was made for, on the current stream."""
    for shape in plan.scratch:
        tensors = (*tensors, torch.empty(shape, dtype=torch.float32, device=tensors[0].device))
    pointers = [x.data_ptr() for x in tensors]
    is_aligned = _are_aligned(pointers)
    device = tensors[0].get_device()
    hooks = triton.knobs.runtime  # a profiler's
    is_direct = is_aligned and not hooks.launch_enter_hook.calls and not hooks.launch_exit_hook.calls
    for i, step in enumerate(plan.steps):
        seeds = (seed, offset) if step.takes_seed else ()
        compiled = plan.compiled[i] if is_direct else None
        if compiled is None:
            operands = [tensors[x] if isinstance(x, int) else _descriptor(tensors, x) for x in step.operands]
            compiled = step.kernel[(step.n_programs,)](
                *operands, *step.strides, *step.numbers, *seeds, *step.constants,
                num_warps=step.config.num_warps, num_stages=step.config.num_stages,
            )  # fmt: skip
            if is_aligned:  # stays None in the interpreter
                plan.compiled[i] = compiled
        else:
            stream = torch._C._cuda_getCurrentRawStream(device)
            operands = [pointers[x] if isinstance(x, int) else _descriptor(tensors, x) for x in step.operands]
            compiled.run(
                step.n_programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None,
                *operands, *step.strides, *step.numbers, *seeds, *step.constants,
            )  # fmt: skip


def _are_aligned(pointers: list[int]) -> bool:
    bits = 0
    for pointer in pointers:
        bits |= pointer
    return bits & 15 == 0


def _descriptor(tensors: tuple[Tensor, ...], tile: Tile) -> TensorDescriptor:
    x = tensors[tile.tensor]
    return TensorDescriptor(x, list(x.shape), list(x.stride()), tile.shape)


def _planned(key: tuple, make: Callable[[], LaunchPlan]) -> LaunchPlan:
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        plan = _plans[key] = make()
    return plan


def launch_flash_forward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, is_causal: bool, scale: float,
    dropout_p: float = 0.0, seed: int = 0, offset: int = 0,
) -> None:  # fmt: skip
    """Fill o and lse. q (batch, heads, n_queries, head_dim), k, v (batch, kv_heads, n_keys, head_dim), all of one
    dtype; o like q; lse (batch, heads, n_queries) float32, contiguous; scale not negative."""
    is_aligned = _are_aligned([x.data_ptr() for x in (q, k, v, o)])
    strides = q.stride(), k.stride(), v.stride(), o.stride()
    precision = q.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision
    key = (q.shape, k.shape, strides, q.dtype, q.device, is_aligned, is_causal, scale, dropout_p, precision)

    tensors = (q, k, v, o, lse)

    def make() -> LaunchPlan:
        problem = make_problem(q, k, is_causal, scale, dropout_p)
        plan = plan_forward(problem, strides, is_aligned)
        if is_enabled(problem):

            def replan(passes: Passes) -> LaunchPlan:
                return plan_forward(problem, strides, is_aligned, passes[0][1])

            plan = replan(tuned_passes(problem, plan.passes, lambda passes: run(replan(passes), tensors, seed, offset)))
        return plan

    run(_planned(key, make), tensors, seed, offset)


def launch_flash_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    is_causal: bool, scale: float, dropout_p: float = 0.0, seed: int = 0, offset: int = 0,
    needs_dq: bool = True, needs_dkdv: bool = True,
) -> None:  # fmt: skip
    """Fill dq if it is needed, dk and dv if either is. Shapes and dtypes as in the forward pass: do, dq like q; dk like
    k; dv like v."""
    tensors = (do, q, k, v, o, lse, dq, dk, dv)
    is_aligned = _are_aligned([x.data_ptr() for x in tensors])
    strides = tuple([x.stride() for x in (do, q, k, v, o, dq, dk, dv)])
    precision = q.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision
    key = (
        q.shape,
        k.shape,
        strides,
        q.dtype,
        q.device,
        is_aligned,
        is_causal,
        scale,
        dropout_p,
        precision,
        needs_dq,
        needs_dkdv,
    )

    def make() -> LaunchPlan:
        problem = make_problem(q, k, is_causal, scale, dropout_p)
        plan = plan_backward(problem, strides, is_aligned, needs_dq, needs_dkdv)
        if is_enabled(problem):
            measured = (do.contiguous() if plan.copies_do else do, *tensors[1:])
            laid_out = [x.stride() for x in measured if x is not lse]

            def replan(passes: Passes) -> LaunchPlan:
                return plan_backward(problem, laid_out, is_aligned, needs_dq, needs_dkdv, passes)

            passes = tuned_passes(problem, plan.passes, lambda passes: run(replan(passes), measured, seed, offset))
            plan = replan(passes)._replace(copies_do=plan.copies_do)
        return plan

    plan = _planned(key, make)
    if plan.copies_do:
        tensors = (do.contiguous(), *tensors[1:])
    run(plan, tensors, seed, offset)
