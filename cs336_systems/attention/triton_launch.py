"""From tensors to kernel launches: what the FlashAttention-2 kernels are told about a call, and in which order they run.

This is the only host code between `flash_triton.py` and the kernels; it is kept lean, as below a length of about 1,024
launches and host work take longer than the kernels.
"""

import functools
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from cs336_systems.attention.triton_backward import (
    _flash_backward_kernel,
    _flash_convert_dq_kernel,
    _flash_preprocess_kernel,
)
from cs336_systems.attention.triton_forward import _flash_forward_kernel
from cs336_systems.attention.triton_tuning import KernelConfig, Plan, choose_backward_plan, choose_config

# Rows of the backward pass's per-row buffers are padded to a multiple of this, the largest tile of queries.
ROW_PADDING = 128


class Problem(NamedTuple):
    """One call, as the kernels and the choice of their configuration see it."""

    batch: int
    heads: int
    group: int  # query heads to a key/value head
    n_queries: int
    n_keys: int
    head_dim: int
    block_d: int  # head_dim padded to a power of two, at least 16, for tl.dot
    dtype: torch.dtype
    is_causal: bool
    scale: float
    dropout_p: float
    seed: int
    offset: int
    precision: str  # tl.dot's input_precision
    arch: int  # compute capability, 90 for sm_90; 0 in the interpreter


_LOG2_E = 1.4426950408889634
_SMALLEST_SCALE = 1e-30


@functools.cache
def _arch_of(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@functools.cache
def _block_d_of(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


def _dot_precision(dtype: torch.dtype, arch: int) -> str:
    """tl.dot's input_precision. Float32 honours torch's setting: "tf32" if it allows that, else three TF32 products
    a product ("tf32x3"), which keep float32's accuracy on tensor cores. Before sm_80 there is no TF32."""
    if dtype != torch.float32 or arch < 80:
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"


def make_problem(
    q: Tensor, k: Tensor, is_causal: bool, scale: float, dropout_p: float = 0.0, seed: int = 0, offset: int = 0
) -> Problem:
    """What the kernels need to know of q (batch, heads, n_queries, head_dim), k (batch, kv_heads, n_keys, head_dim)
    and the call. scale must not be negative."""
    batch, heads, n_queries, head_dim = q.shape
    arch = _arch_of(q.device) if q.is_cuda else 0
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
        seed=seed,
        offset=offset,
        precision=_dot_precision(q.dtype, arch),
        arch=arch,
    )


def _step_operands(config: KernelConfig, block_d: int, *tensors: Tensor) -> tuple[bool, tuple]:
    """The tensors as tensor descriptors where the configuration wants them and every tensor's layout allows: unit
    last stride, everything else 16-byte aligned. Otherwise the tensors themselves, which the kernels take as pointers.
    """
    if not config.use_tma:
        return False, tensors
    for x in tensors:
        unit = 16 // x.element_size()
        *outer, last = x.stride()
        if last != 1 or x.data_ptr() % 16 or any(stride % unit or stride == 0 for stride in outer):
            return False, tensors
    block = [1, 1, config.block_step, block_d]
    return True, tuple(TensorDescriptor(x, x.shape, x.stride(), block) for x in tensors)


def _dropout_scale(problem: Problem) -> float:
    return 1.0 / (1.0 - problem.dropout_p) if problem.dropout_p < 1.0 else 0.0


def launch_flash_forward(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, config: KernelConfig | None = None
) -> None:
    """Fill o and lse. q (batch, heads, n_queries, head_dim), k, v (batch, kv_heads, n_keys, head_dim), all of one
    dtype; o like q; lse (batch, heads, n_queries) float32, contiguous. `config` overrides the tuned choice."""
    config = config or choose_config("forward", problem)
    use_tma, (k_step, v_step) = _step_operands(config, problem.block_d, k, v)
    grid = (-(-problem.n_queries // config.block_own) * problem.batch * problem.heads,)
    _flash_forward_kernel[grid](
        q, k_step, v_step, o, lse, q.stride(), k.stride(), v.stride(), o.stride(),
        problem.heads, problem.n_queries, problem.n_keys, problem.scale * _LOG2_E,
        problem.dropout_p, _dropout_scale(problem), problem.seed, problem.offset,
        problem.group, problem.is_causal, problem.dropout_p > 0, problem.head_dim, problem.block_d, problem.precision,
        config.block_own, config.block_step, use_tma, config.delay,
        num_warps=config.num_warps, num_stages=config.num_stages,
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
    plan = plan or choose_backward_plan(problem)
    one_pass = any(name == "one_pass" for name, _ in plan) and needs_dq
    batch_heads = problem.batch * problem.heads
    n_rows = -(-problem.n_queries // ROW_PADDING) * ROW_PADDING
    rows = torch.empty((2 * batch_heads, n_rows), dtype=torch.float32, device=q.device)
    dq_sum = rows  # never touched unless there is one pass
    if one_pass:
        dq_sum = torch.empty((batch_heads * n_rows, problem.block_d), dtype=torch.float32, device=q.device)
    # Both kernels around the main ones are bound by memory: whole rows, about 8 KiB a tile.
    block_rows = max(16, min(ROW_PADDING, 4096 // problem.block_d))
    _flash_preprocess_kernel[(n_rows // block_rows * batch_heads,)](
        o, do, lse, rows, dq_sum, o.stride(), do.stride(), problem.heads, problem.n_queries, n_rows,
        problem.head_dim, problem.block_d, block_rows, one_pass, num_warps=4,
    )  # fmt: skip
    for name, config in plan:
        run_dkdv = name != "dq" and (needs_dkdv or one_pass)
        run_dq = needs_dq and name in ("dq", "fused")
        key_programs = -(-problem.n_keys // config.block_own) * problem.batch * (problem.heads // problem.group)
        query_programs = -(-problem.n_queries // config.block_own) * batch_heads
        n_programs = run_dkdv * key_programs + run_dq * query_programs
        if not n_programs:
            continue
        use_tma, step = _step_operands(config, problem.block_d, q, k, v, do)
        rows_step = rows
        if use_tma:
            rows_step = TensorDescriptor(rows, rows.shape, rows.stride(), [1, config.block_step])
        dq_target = dq_sum
        if one_pass and config.reduce_by_tma:
            dq_target = TensorDescriptor(dq_sum, dq_sum.shape, dq_sum.stride(), [config.block_step, problem.block_d])
        _flash_backward_kernel[(n_programs,)](
            q, k, v, do, *step, rows_step, rows, dq, dk, dv, dq_target,
            q.stride(), k.stride(), v.stride(), do.stride(), dq.stride(), dk.stride(), dv.stride(),
            problem.batch, problem.heads, problem.n_queries, problem.n_keys, n_rows,
            problem.scale, problem.scale * _LOG2_E,
            problem.dropout_p, _dropout_scale(problem), problem.seed, problem.offset,
            problem.group, problem.is_causal, problem.dropout_p > 0,
            problem.head_dim, problem.block_d, problem.precision,
            config.block_own, config.block_step, use_tma, run_dkdv, run_dq, one_pass, config.reduce_by_tma, config.delay, config.num_stages,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    if one_pass:
        _flash_convert_dq_kernel[(-(-problem.n_queries // block_rows) * batch_heads,)](
            dq_sum, dq, dq.stride(), problem.heads, problem.n_queries, n_rows, problem.scale,
            problem.head_dim, problem.block_d, block_rows, num_warps=4,
        )  # fmt: skip
