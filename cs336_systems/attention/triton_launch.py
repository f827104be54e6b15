"""From tensors to kernel launches: the host code between `flash_triton.py` and the kernels.

Triton examines every argument at every launch, and costs more by that than a short sequence's kernels take. Whatever it
specialises on is the same for calls of equal shapes, strides, dtype and flags, on the same device, with aligned memory.
So the plan of such calls is made once (`triton_plan.py`), and what was compiled for it is launched directly from then
on (`triton_direct.py`); what is checked only once is checked where the plan is made.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from cs336_systems.attention.triton_autotune import is_enabled, tuned_passes
from cs336_systems.attention.triton_direct import Launch, direct_launch
from cs336_systems.attention.triton_plan import LaunchPlan, Step, Tile, plan_backward, plan_forward
from cs336_systems.attention.triton_tuning import INTERPRETER, Gpu, Passes, Problem
from cs336_systems.configs import MAX_HEAD_DIM

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_SMALLEST_SCALE = 1e-30
_SHORT_SCORES = 512 * 512  # queries times keys of a head
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


def _dot_precision(dtype: torch.dtype, arch: int, is_short: bool = False) -> str:
    """How products of float32 are made. They honour torch's setting: "tf32" where that allows it, else three products
    of float16 parts on tensor cores, as accurate as SDPA's (`triton_split.py`). Short calls, whose time is that of
    launches, are spared the two that make the parts: three products of TF32 parts ("tf32x3") need none. Before sm_80
    Triton has no tensor-core products, and they are float32's own ("ieee")."""
    if dtype != torch.float32 or arch < 80:
        return "ieee"
    if torch.backends.cuda.matmul.fp32_precision == "tf32":
        return "tf32"
    return "tf32x3" if is_short else "fp16x3"


def _check_supported(q: Tensor) -> None:
    if not q.is_cuda and not (q.is_cpu and triton.knobs.runtime.interpret):
        raise RuntimeError(
            f"the Triton kernels need a CUDA device, and q is on {q.device}; on a CPU they run in Triton's "
            "interpreter: set TRITON_INTERPRET=1 before Triton is imported"
        )
    if q.dtype not in _DTYPES or q.shape[-1] > MAX_HEAD_DIM:
        raise ValueError(
            f"the Triton kernels take float32, float16 or bfloat16 and head_dim 1 to {MAX_HEAD_DIM}; q is {q.dtype} "
            f"of shape {tuple(q.shape)}"
        )


def make_problem(
    q: Tensor, k: Tensor, is_causal: bool, scale: float, dropout_p: float = 0.0, gpu: Gpu | None = None
) -> Problem:
    """What the kernels need to know of q (batch, [heads,] n_queries, head_dim), k (batch, [kv_heads,] n_keys, head_dim)
    and the call. scale must not be negative; gpu is by default the one that q is on."""
    heads, kv_heads = (1, 1) if q.ndim == 3 else (q.shape[1], k.shape[1])
    head_dim = q.shape[-1]
    n_scores = q.shape[-2] * k.shape[-2]
    is_short = n_scores <= _SHORT_SCORES and q.shape[0] * heads * n_scores <= 16 * _SHORT_SCORES
    gpu = gpu or (_gpu_of(q.device) if q.is_cuda else INTERPRETER)
    return Problem(
        batch=q.shape[0],
        heads=heads,
        group=heads // kv_heads,
        n_queries=q.shape[-2],
        n_keys=k.shape[-2],
        head_dim=head_dim,
        block_d=max(16, triton.next_power_of_2(head_dim)),
        dtype=q.dtype,
        is_causal=is_causal,
        scale=max(scale, _SMALLEST_SCALE),  # -inf·0, of a masked score, would be NaN
        dropout_p=dropout_p,
        dropout_scale=1.0 / (1.0 - dropout_p) if dropout_p < 1.0 else 0.0,
        precision=_dot_precision(q.dtype, gpu.arch, is_short),
        gpu=gpu,
    )


def run(
    plan: LaunchPlan, tensors: tuple[Tensor, ...], seed: int = 0, offset: int = 0, pointers: Sequence[int] | None = None
) -> None:
    """Launch a plan's steps on the tensors that it was made for, on their device's current stream. `pointers` are the
    tensors' addresses, if the caller has them."""
    device = tensors[0].get_device()
    if device >= 0 and device != torch._C._cuda_getDevice():  # Triton launches on the current one
        with torch.cuda.device(device):
            run(plan, tensors, seed, offset, pointers)
        return
    if pointers is None:
        pointers = [x.data_ptr() for x in tensors]
    buffer = None
    if plan.scratch_bytes:  # one allocation serves all
        buffer = torch.empty(plan.scratch_bytes, dtype=torch.uint8, device=tensors[0].device)
        address = buffer.data_ptr()
        pointers = [*pointers, *[address + scratch.offset for scratch in plan.scratch]]
    hooks = triton.knobs.runtime  # a profiler's
    if plan.launches and not hooks.launch_enter_hook.calls and not hooks.launch_exit_hook.calls:
        stream = torch._C._cuda_getCurrentRawStream(device)
        for launch in plan.launches:
            launch(pointers, stream, seed, offset)
        return
    if buffer is not None:
        tensors = (*tensors, *[scratch.of(buffer) for scratch in plan.scratch])
    launches = [_run_by_triton(step, tensors, seed, offset) for step in plan.steps]
    known = [launch for launch in launches if launch is not None]
    if plan.is_aligned and len(known) == len(launches):
        plan.launches[:] = known  # in one step: other threads may be at the same plan


def _run_by_triton(step: Step, tensors: tuple[Tensor, ...], seed: int, offset: int) -> Launch | None:
    """Launch a step as Triton does, compiling its kernel if need be; what launches it without Triton next time."""
    operands = [tensors[x] if isinstance(x, int) else _descriptor(tensors, x) for x in step.operands]
    seeds = (seed, offset) if step.takes_seed else ()
    options = {"num_warps": step.config.num_warps, "num_stages": step.config.num_stages}
    if step.config.max_registers is not None:
        options["maxnreg"] = step.config.max_registers
    compiled = step.kernel[(step.n_programs,)](*operands, *step.numbers, *seeds, *step.constants, **options)
    return direct_launch(step, compiled)


def _descriptor(tensors: tuple[Tensor, ...], x: Tile) -> Any:
    if not x.for_gluon:
        return TensorDescriptor(tensors[x.tensor], x.shape, x.strides, x.tile)
    from triton.experimental.gluon.language import NVMMASharedLayout, float16, float32
    from triton.experimental.gluon.nvidia import hopper

    dtypes = {2: float16, 4: float32}  # only the size counts
    layout = NVMMASharedLayout.get_default_for(x.tile, dtypes[tensors[x.tensor].dtype.itemsize])
    return hopper.TensorDescriptor(tensors[x.tensor], x.shape, x.strides, x.tile, layout)


def _are_aligned(pointers: list[int]) -> bool:
    bits = 0
    for pointer in pointers:
        bits |= pointer
    return bits & 15 == 0


def _add_plan(key: tuple, make: Callable[[], LaunchPlan]) -> LaunchPlan:
    if len(_plans) >= _MAX_PLANS:
        _plans.clear()
    plan = _plans[key] = make()
    return plan


def launch_flash_forward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, is_causal: bool, scale: float,
    dropout_p: float = 0.0, seed: int = 0, offset: int = 0, is_hopper: bool = False,
) -> None:  # fmt: skip
    """Fill o and lse. q (batch, [heads,] n_queries, head_dim), k, v (batch, [kv_heads,] n_keys, head_dim), of one
    dtype; o like q; lse (batch, [heads,] n_queries) float32, contiguous; scale not negative; nothing empty. With
    is_hopper by Hopper's own kernels where they can run. Raises RuntimeError where the kernels cannot run, ValueError
    for another dtype or head_dim."""
    tensors = (q, k, v, o, lse)
    pointers = [q.data_ptr(), k.data_ptr(), v.data_ptr(), o.data_ptr(), lse.data_ptr()]
    is_aligned = _are_aligned(pointers)
    dtype = q.dtype
    precision = dtype is torch.float32 and torch.backends.cuda.matmul.fp32_precision
    key = (
        q.shape, k.shape, q.stride(), k.stride(), v.stride(), o.stride(), dtype, q.device, is_aligned, is_causal, scale,
        dropout_p, precision, is_hopper,
    )  # fmt: skip

    def make() -> LaunchPlan:
        _check_supported(q)
        strides = q.stride(), k.stride(), v.stride(), o.stride()
        problem = make_problem(q, k, is_causal, scale, dropout_p)
        plan = plan_forward(problem, strides, is_aligned)
        if is_enabled(problem):

            def replan(passes: Passes) -> LaunchPlan:
                return plan_forward(problem, strides, is_aligned, passes[0][1])

            plan = replan(tuned_passes(problem, plan.passes, lambda passes: run(replan(passes), tensors, seed, offset)))
        if is_hopper:
            from cs336_systems.attention.hopper_plan import with_hopper_forward

            plan = with_hopper_forward(plan, problem, strides)
        return plan

    run(_plans.get(key) or _add_plan(key, make), tensors, seed, offset, pointers)


def launch_flash_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    is_causal: bool, scale: float, dropout_p: float = 0.0, seed: int = 0, offset: int = 0,
    needs_dq: bool = True, needs_dkdv: bool = True, is_hopper: bool = False,
) -> None:  # fmt: skip
    """Fill dq if it is needed, dk and dv if either is. Shapes, dtypes and errors as in the forward pass: do, dq like q;
    dk like k; dv like v."""
    tensors = (do, q, k, v, o, lse, dq, dk, dv)
    pointers = [x.data_ptr() for x in tensors]
    is_aligned = _are_aligned(pointers)
    strides = tuple([x.stride() for x in (do, q, k, v, o, dq, dk, dv)])
    dtype = q.dtype
    precision = dtype is torch.float32 and torch.backends.cuda.matmul.fp32_precision
    key = (
        q.shape, k.shape, strides, dtype, q.device, is_aligned, is_causal, scale, dropout_p, precision, needs_dq,
        needs_dkdv, is_hopper,
    )  # fmt: skip

    def make() -> LaunchPlan:
        _check_supported(q)
        problem = make_problem(q, k, is_causal, scale, dropout_p)
        plan = plan_backward(problem, strides, is_aligned, needs_dq, needs_dkdv)
        if is_enabled(problem):
            measured = (do.contiguous() if plan.copies_do else do, *tensors[1:])
            laid_out = [x.stride() for x in measured if x is not lse]

            def replan(passes: Passes) -> LaunchPlan:
                return plan_backward(problem, laid_out, is_aligned, needs_dq, needs_dkdv, passes)

            passes = tuned_passes(problem, plan.passes, lambda passes: run(replan(passes), measured, seed, offset))
            plan = replan(passes)._replace(copies_do=plan.copies_do)
        if is_hopper:
            from cs336_systems.attention.hopper_plan import with_hopper_backward

            plan = with_hopper_backward(plan, problem, strides, needs_dq, needs_dkdv)
        return plan

    plan = _plans.get(key) or _add_plan(key, make)
    if plan.copies_do:
        tensors = (do.contiguous(), *tensors[1:])
        pointers[0] = tensors[0].data_ptr()
    run(plan, tensors, seed, offset, pointers)
