"""From tensors to kernel launches: what the FlashAttention-2 kernels are told about a call, and in which order they run.

This is the only host code between `flash_triton.py` and the kernels. Below a length of about 4,096 it takes longer
than they do, so it is kept lean: no PyTorch operator but allocations, and `_launch` skips Triton's own dispatch.
"""

import functools
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from cs336_systems.attention.triton_backward import flash_backward_kernel, flash_preprocess_kernel
from cs336_systems.attention.triton_forward import flash_combine_kernel, flash_forward_kernel
from cs336_systems.attention.triton_tuning import (
    INTERPRETER,
    Gpu,
    KernelConfig,
    Plan,
    Problem,
    choose,
    choose_backward,
    chunk_size,
    wants_tma,
)

# Rows of the backward pass's per-row buffer are padded to a multiple of this, the largest tile of queries.
ROW_PADDING = 128
_LOG2_E = 1.4426950408889634
_SMALLEST_SCALE = 1e-30

# The kernels around the main ones are bound by memory; small tiles spread short sequences over the card.
_ROWS_OF_MEMORY_BOUND_TILES = 16
_MEMORY_BOUND = KernelConfig(block_own=16, block_step=16, num_warps=4, num_stages=1)

_compiled: dict[tuple, Any] = {}
_MAX_COMPILED = 4096  # keys hold strides, so every new length adds one: it must not grow for ever


@functools.cache
def _gpu_of(device: torch.device) -> Gpu:
    properties = torch.cuda.get_device_properties(device)
    return Gpu(
        name=properties.name,
        arch=10 * properties.major + properties.minor,
        n_sm=properties.multi_processor_count,
        shared_memory_bytes=properties.shared_memory_per_block_optin,
    )


@functools.cache
def _block_d_of(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


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
    q: Tensor,
    k: Tensor,
    is_causal: bool,
    scale: float,
    dropout_p: float = 0.0,
    seed: int = 0,
    offset: int = 0,
    gpu: Gpu | None = None,
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
        block_d=_block_d_of(head_dim),
        dtype=q.dtype,
        is_causal=is_causal,
        scale=max(scale, _SMALLEST_SCALE),  # -inf·0, of a masked score, would be NaN
        dropout_p=dropout_p,
        dropout_scale=1.0 / (1.0 - dropout_p) if dropout_p < 1.0 else 0.0,
        seed=seed,
        offset=offset,
        precision=_dot_precision(q.dtype, head_dim, gpu.arch),
        gpu=gpu,
    )


def _launch(
    kernel: Any,
    n_programs: int,
    config: KernelConfig,
    tensors: tuple[Any, ...],  # tensors, or tensor descriptors
    strides: tuple[tuple[int, ...], ...],
    numbers: tuple[float, ...],  # what the kernel declares do_not_specialize, and floats
    constants: tuple[Any, ...],  # the kernel's tl.constexpr parameters
) -> None:
    """kernel[(n_programs,)](*tensors, *strides, *numbers, *constants), compiled as config says.

    Triton's own dispatch examines every argument at every launch. All that it specialises on here is dtypes, constants,
    strides, whether pointers are 16-byte aligned, and the device: so the compiled kernel is kept by those, for aligned
    pointers, and launched directly. Other pointers, launch hooks (a profiler's) and the interpreter take Triton's way.
    """
    device = tensors[0].get_device()
    key = (kernel, device, config, strides, constants, tuple([x.dtype for x in tensors if isinstance(x, Tensor)]))
    compiled = _compiled.get(key)
    arguments = [x.data_ptr() if isinstance(x, Tensor) else x for x in tensors]
    is_aligned = not any([pointer & 15 for pointer in arguments if isinstance(pointer, int)])
    hooks = triton.knobs.runtime
    if compiled is None or not is_aligned or hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
        compiled = kernel[(n_programs,)](
            *tensors, *strides, *numbers, *constants, num_warps=config.num_warps, num_stages=config.num_stages
        )
        if compiled is not None and is_aligned:
            if len(_compiled) >= _MAX_COMPILED:
                _compiled.clear()
            _compiled[key] = compiled
        return
    stream = torch._C._cuda_getCurrentRawStream(device)
    compiled.run(
        n_programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None,
        *arguments, *strides, *numbers, *constants,
    )  # fmt: skip


def _tma_ready(x: Tensor) -> bool:
    """Whether a tensor descriptor can describe x: unit last stride, everything else 16-byte aligned."""
    unit = 16 // x.element_size()
    *outer, last = x.stride()
    return last == 1 and x.data_ptr() % 16 == 0 and all(stride % unit == 0 and stride > 0 for stride in outer)


def _descriptors(rows: int, block_d: int, *tensors: Tensor) -> tuple[TensorDescriptor, ...]:
    return tuple(TensorDescriptor(x, x.shape, x.stride(), [1, 1, rows, block_d]) for x in tensors)


def launch_flash_forward(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    config: KernelConfig | None = None,
    n_chunks: int | None = None,
) -> None:
    """Fill o and lse. q (batch, heads, n_queries, head_dim), k, v (batch, kv_heads, n_keys, head_dim), all of one
    dtype; o like q; lse (batch, heads, n_queries) float32, contiguous. `config` and `n_chunks` (into how many chunks
    keys are cut, at most) override the tuned choice."""
    if config is None:
        config = choose("forward", problem, wants_tma(problem, is_backward=False) and _tma_ready(k) and _tma_ready(v))
    own, step = config.block_own, config.block_step
    n_blocks = -(-problem.n_queries // own) * problem.batch * problem.heads
    chunk_keys = chunk_size(problem, config, n_blocks, n_chunks)
    n_chunks = -(-problem.n_keys // chunk_keys)
    o_chunks, lse_chunks = o, lse
    if n_chunks > 1:
        o_chunks = torch.empty((n_chunks * o.shape[0], *o.shape[1:]), dtype=torch.float32, device=o.device)
        lse_chunks = torch.empty((n_chunks, *lse.shape), dtype=torch.float32, device=o.device)
    k_step, v_step = _descriptors(step, problem.block_d, k, v) if config.use_tma else (k, v)
    _launch(
        flash_forward_kernel, n_blocks * n_chunks, config,
        (q, k_step, v_step, o_chunks, lse_chunks),
        (q.stride(), k.stride(), v.stride(), o_chunks.stride()),
        (problem.batch, problem.heads, problem.n_queries, problem.n_keys, chunk_keys, problem.scale * _LOG2_E,
         problem.dropout_p, problem.dropout_scale, problem.seed, problem.offset),
        (problem.group, problem.is_causal, problem.dropout_p > 0, problem.head_dim, problem.block_d, problem.precision,
         own, step, config.use_tma),
    )  # fmt: skip
    if n_chunks > 1:
        rows = _ROWS_OF_MEMORY_BOUND_TILES
        _launch(
            flash_combine_kernel, -(-problem.n_queries // rows) * problem.batch * problem.heads, _MEMORY_BOUND,
            (o_chunks, lse_chunks, o, lse), (o_chunks.stride(), o.stride()),
            (problem.batch, problem.heads, problem.n_queries, n_chunks),
            (problem.head_dim, problem.block_d, rows),
        )  # fmt: skip


def launch_flash_backward(
    problem: Problem,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    needs_dq: bool = True,
    needs_dkdv: bool = True,
    plan: Plan | None = None,
) -> None:
    """Fill dq if it is needed, dk and dv if either is. Shapes and dtypes as in the forward pass: do, dq like q; dk like
    k; dv like v. `plan` overrides the tuned choice of kernels and their configurations."""
    if plan is None:
        use_tma = wants_tma(problem, is_backward=True) and _tma_ready(q) and _tma_ready(k) and _tma_ready(v)
        if use_tma and not _tma_ready(do):
            do = do.contiguous()  # o.sum().backward() gives an expanded do: one copy buys descriptors for every tile
        plan = choose_backward(problem, use_tma and _tma_ready(do))
    batch_heads = problem.batch * problem.heads
    n_rows = -(-problem.n_queries // ROW_PADDING) * ROW_PADDING
    rows = torch.empty((2 * batch_heads, n_rows), dtype=torch.float32, device=q.device)
    _launch(
        flash_preprocess_kernel, n_rows // _ROWS_OF_MEMORY_BOUND_TILES * batch_heads, _MEMORY_BOUND,
        (o, do, lse, rows), (o.stride(), do.stride()), (problem.heads, problem.n_queries, n_rows),
        (problem.head_dim, problem.block_d, _ROWS_OF_MEMORY_BOUND_TILES),
    )  # fmt: skip
    for name, config in plan:
        own, step = config.block_own, config.block_step
        run_dkdv = needs_dkdv and name != "dq"
        run_dq = needs_dq and name != "dkdv"
        key_programs = -(-problem.n_keys // own) * problem.batch * (problem.heads // problem.group)
        query_programs = -(-problem.n_queries // own) * batch_heads
        n_programs = run_dkdv * key_programs + run_dq * query_programs
        if not n_programs:
            continue
        stepped = (q, k, v, do, rows)
        if config.use_tma:
            rows_step = TensorDescriptor(rows, rows.shape, rows.stride(), [1, step])
            stepped = (*_descriptors(step, problem.block_d, q, k, v, do), rows_step)
        _launch(
            flash_backward_kernel, n_programs, config,
            (q, k, v, do, *stepped, rows, dq, dk, dv),
            (q.stride(), k.stride(), v.stride(), do.stride(), dq.stride(), dk.stride(), dv.stride()),
            (problem.batch, problem.heads, problem.n_queries, problem.n_keys, n_rows, problem.scale,
             problem.scale * _LOG2_E, problem.dropout_p, problem.dropout_scale, problem.seed, problem.offset),
            (problem.group, problem.is_causal, problem.dropout_p > 0, problem.head_dim, problem.block_d,
             problem.precision, own, step, config.use_tma, run_dkdv, run_dq),
        )  # fmt: skip
