"""AdamW over all parameters of a model in one launch: each value is read and written once, and nothing is allocated.

A plain loop starts a dozen kernels a parameter, and large's 330 parameters then take longer to launch than to update.
One kernel can go through all of them if it finds each by itself: a table on the device has a row for each tensor, with
the addresses of parameter, gradient and state, and what the update needs of its group and step.
"""

from __future__ import annotations

import functools
import math
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cs336_basics.optimizer import AdamW, Loss
from cs336_systems.kernels.support import SUPPORTED_DTYPES, check_device, launch, tl, triton

TILE = 2048  # elements that a program updates, 8 a thread: more would leave registers for one program a multiprocessor
_N_WARPS = 8
_ALIGNMENT_BYTES = 16  # of the widest loads and stores
_MAX_TILE_MAPS = 16

# A row of the table, in int64: four addresses, elements, the tensor's first tile, then six float32 in pairs.
_ROW = 9
_FLOATS = struct.Struct("6f")
_PAIRS = struct.Struct("3q")


@triton.jit
def _pointer(address_ptr, DTYPE: tl.constexpr, ALIGNMENT: tl.constexpr):
    return tl.multiple_of(tl.load(address_ptr).to(tl.pointer_type(DTYPE)), ALIGNMENT)  # ty: ignore[invalid-argument-type]


@triton.jit
def _update_tile(p_ptr, g_ptr, m_ptr, v_ptr, row_ptr, offsets, n_elements, MASKED: tl.constexpr):
    scalars_ptr = (row_ptr + 6).to(tl.pointer_type(tl.float32))
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
    m += one_minus_beta1 * (g - m)
    v = beta2 * v + one_minus_beta2 * g * g
    p = decay * p - step_size * (m / (tl.sqrt(v) + eps))
    tl.store(p_ptr + offsets, p.to(p_ptr.dtype.element_ty), mask=mask)
    tl.store(m_ptr + offsets, m.to(m_ptr.dtype.element_ty), mask=mask)
    tl.store(v_ptr + offsets, v.to(v_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _adamw_kernel(
    table_ptr,  # (n_tensors, ROW) int64
    tensor_of_tile_ptr,  # (n_tiles,) int32
    P_DTYPE: tl.constexpr,
    G_DTYPE: tl.constexpr,
    M_DTYPE: tl.constexpr,
    V_DTYPE: tl.constexpr,
    ALIGNMENT: tl.constexpr,  # bytes; of all addresses
    ROW: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program: TILE elements of one parameter and its state."""
    tile = tl.program_id(0)
    row_ptr = table_ptr + tl.load(tensor_of_tile_ptr + tile).to(tl.int64) * ROW
    p_ptr = _pointer(row_ptr, P_DTYPE, ALIGNMENT)
    g_ptr = _pointer(row_ptr + 1, G_DTYPE, ALIGNMENT)
    m_ptr = _pointer(row_ptr + 2, M_DTYPE, ALIGNMENT)
    v_ptr = _pointer(row_ptr + 3, V_DTYPE, ALIGNMENT)
    n_elements = tl.load(row_ptr + 4)
    start = (tile - tl.load(row_ptr + 5)) * TILE  # int64, as the table is
    offsets = start + tl.arange(0, TILE)
    # A mask whose end is not known to be a multiple of anything would make every access one element wide.
    if start + TILE <= n_elements:
        _update_tile(p_ptr, g_ptr, m_ptr, v_ptr, row_ptr, offsets, n_elements, False)
    else:
        _update_tile(p_ptr, g_ptr, m_ptr, v_ptr, row_ptr, offsets, n_elements, True)


@functools.lru_cache(maxsize=_MAX_TILE_MAPS)
def _tensor_of_tile(n_tiles: tuple[int, ...], device: torch.device) -> Tensor:
    """(total tiles,) int32: which tensor each tile is of. It is the same in every step: made once."""
    tensors = torch.arange(len(n_tiles), dtype=torch.int32)
    return tensors.repeat_interleave(torch.tensor(n_tiles)).to(device)


_TRITON_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


class _Launch:
    """The tensors that one launch updates: rows of its table, one after another, and each row's tiles."""

    def __init__(self) -> None:
        self.table: list[int] = []
        self.n_tiles: list[int] = []
        self.first_tile = 0

    def add(self, addresses: tuple[int, int, int, int], n_elements: int, scalars: tuple[int, ...]) -> None:
        """Addresses of p, g, m and v; `_scalars`."""
        self.table += (*addresses, n_elements, self.first_tile, *scalars)
        tiles = -(-n_elements // TILE)
        self.n_tiles.append(tiles)
        self.first_tile += tiles


def _launch_adamw(update: _Launch, dtypes: tuple[torch.dtype, ...], is_aligned: bool, device: torch.device) -> None:
    """Updates the tensors of one combination of dtypes (p, g, m, v)."""
    table = torch.tensor(update.table, dtype=torch.int64)
    if device.type == "cuda":
        # From pinned memory the copy is queued like a kernel; the allocator keeps that memory until it is done.
        table = table.pin_memory().to(device, non_blocking=True)
    p, g, m, v = (getattr(tl, _TRITON_DTYPES[dtype]) for dtype in dtypes)
    launch(
        _adamw_kernel, update.first_tile, table, _tensor_of_tile(tuple(update.n_tiles), device), P_DTYPE=p, G_DTYPE=g,
        M_DTYPE=m, V_DTYPE=v, ALIGNMENT=_ALIGNMENT_BYTES if is_aligned else 1, ROW=_ROW, TILE=TILE, num_warps=_N_WARPS,
    )  # fmt: skip


class _Known(NamedTuple):
    """What need not be looked at again while a parameter, its state and the layout of its gradients stay the same."""

    address: int
    m: Tensor
    v: Tensor
    gradient_dtype: torch.dtype
    gradient_stride: tuple[int, ...]
    n_elements: int
    m_address: int
    v_address: int
    unaligned: int  # the bits of the addresses, one or another, that are not a multiple of the alignment
    dtypes: tuple[torch.dtype, ...]
    device: torch.device


class FusedAdamW(AdamW):
    """`cs336_basics.optimizer.AdamW` (Loshchilov & Hutter 2019, algorithm 2) in one kernel for all parameters.

    Same arguments, state and updates, computed in float32 whatever the dtypes and rounded once: float32, float16 and
    bfloat16, in any mixture, with one launch for each combination of parameter's, gradient's and state's dtype (and one
    more for tensors that do not begin at a multiple of 16 bytes). Parameters may have any strides; those without
    gradients are left alone. A step does not make the host wait for the device.

    Args:
        params, lr, betas, eps, weight_decay: as `AdamW` takes them.
        state_dtype: of exp_avg and exp_avg_sq; None for each parameter's own. Loaded states are converted to it.

    Raises:
        ValueError: a hyperparameter outside its range, or `state_dtype` other than the three above; in `step`, a
            parameter or gradient of another dtype, a sparse gradient, or a device where Triton's kernels cannot run.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        if state_dtype is not None and state_dtype not in SUPPORTED_DTYPES:
            raise ValueError(f"state_dtype is {state_dtype}; it must be float32, float16, bfloat16 or None")
        self.state_dtype = state_dtype
        self._known: dict[int, _Known] = {}  # by the parameter's id
        super().__init__(params, lr, betas, eps, weight_decay)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "state_dtype": self.state_dtype}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._known = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Loss] | None = None) -> Loss | None:
        """Update every parameter that has a gradient; returns what `closure`, if given, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        launches: dict[tuple, _Launch] = defaultdict(_Launch)
        updated: list[Tensor] = []
        laid_out: list[tuple[Tensor, Tensor, Tensor]] = []
        for group in self.param_groups:
            scalars: dict[int, tuple[int, ...]] = {}
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None or parameter.numel() == 0:
                    continue
                state = self.state[parameter]
                p, g = parameter, gradient
                known = self._known.get(id(parameter))
                # Short, as hundreds of parameters go through it while the device may wait.
                if (
                    known is None
                    or known.address != parameter.data_ptr()
                    or known.m is not state.get("exp_avg")
                    or known.v is not state.get("exp_avg_sq")
                    or known.gradient_dtype is not gradient.dtype
                    or known.gradient_stride != gradient.stride()
                ):
                    p, g, known = self._look_at(parameter, gradient, state)
                    if p is not parameter or g is not gradient:
                        laid_out.append((parameter, p, g))
                t = state["step"] = int(state["step"]) + 1  # torch.optim's own AdamW has it in a tensor
                if t not in scalars:
                    scalars[t] = _scalars(group, t)
                address = g.data_ptr()
                is_aligned = (known.unaligned | address) % _ALIGNMENT_BYTES == 0
                launches[known.dtypes, is_aligned, known.device].add(
                    (known.address, address, known.m_address, known.v_address), known.n_elements, scalars[t]
                )
                updated.append(parameter)
        for key, update in launches.items():
            _launch_adamw(update, *key)
        for parameter, p, _ in laid_out:
            if p is not parameter:
                parameter.copy_(p)
        # As any operator that changes a tensor does: autograd must notice if a graph still needs the old values.
        torch.autograd.graph.increment_version(updated)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of `AdamW`, `torch.optim.AdamW` or one of this class, in `state_dtype`."""
        super().load_state_dict(state_dict)  # rounds state to the parameter's dtype
        for group, saved_group in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for parameter, index in zip(group["params"], saved_group["params"], strict=True):
                saved = state_dict["state"].get(index, {})
                for name in ("exp_avg", "exp_avg_sq"):
                    if name in saved:
                        self.state[parameter][name] = self._zeros(parameter).copy_(saved[name])

    def _look_at(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any]) -> tuple[Tensor, Tensor, _Known]:
        """Checks a parameter, makes its state at its first step, and returns parameter and gradient, or copies of them,
        laid out in memory as the state is. What is updated where it lies is remembered."""
        _check(parameter, gradient)
        state.setdefault("step", 0)
        m, v = state.get("exp_avg"), state.get("exp_avg_sq")
        if m is None or v is None:
            m, v = self._zeros(parameter), self._zeros(parameter)
        elif m.stride() != v.stride() or not (m.is_contiguous() or m.stride() == torch.empty_like(m).stride()):
            m, v = (self._zeros(parameter).copy_(x) for x in (m, v))
        state["exp_avg"], state["exp_avg_sq"] = m, v
        p, g = _laid_out_like(m, parameter), _laid_out_like(m, gradient)
        addresses = p.data_ptr(), m.data_ptr(), v.data_ptr()
        known = _Known(
            address=addresses[0],
            m=m,
            v=v,
            gradient_dtype=gradient.dtype,
            gradient_stride=gradient.stride(),
            n_elements=parameter.numel(),
            m_address=addresses[1],
            v_address=addresses[2],
            unaligned=(addresses[0] | addresses[1] | addresses[2]) % _ALIGNMENT_BYTES,
            dtypes=tuple(x.dtype for x in (p, g, m, v)),
            device=parameter.device,
        )
        if p is parameter and g is gradient:
            self._known[id(parameter)] = known
        else:
            self._known.pop(id(parameter), None)
        return p, g, known

    def _zeros(self, parameter: Tensor) -> Tensor:
        """Dense, in the parameter's order of memory if that has one."""
        return torch.zeros_like(parameter, dtype=self.state_dtype or parameter.dtype, requires_grad=False)


def _check(parameter: Tensor, gradient: Tensor) -> None:
    for name, tensor in (("a parameter", parameter), ("a gradient", gradient)):
        if tensor.layout != torch.strided:
            raise ValueError(f"FusedAdamW: {name} is {tensor.layout}; it must be dense")
        if tensor.dtype not in SUPPORTED_DTYPES:
            raise ValueError(f"FusedAdamW: {name} is {tensor.dtype}; it must be float32, float16 or bfloat16")
    check_device("FusedAdamW", parameter=parameter, gradient=gradient)


def _scalars(group: dict[str, Any], t: int) -> tuple[int, ...]:
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


def _laid_out_like(state: Tensor, tensor: Tensor) -> Tensor:
    """`tensor`, or a copy with the state's strides: then equal offsets from the first elements are equal places."""
    if tensor.stride() == state.stride():
        return tensor
    return torch.empty_like(state, dtype=tensor.dtype).copy_(tensor)
