"""AdamW over all parameters of a model in one launch: each value is read and written once, and nothing is allocated.

A plain loop starts a dozen kernels a parameter, and large's 330 parameters then take longer to launch than to update.
One kernel can go through all of them if it finds each by itself: a table on the device has a row for each tensor, with
the addresses of parameter, gradient and state, and what the update needs of its group and step.

The same pass can keep low-precision weights beside float32 masters (Micikevicius et al. 2018, "Mixed Precision
Training", section 3.1). Autocast over float32 weights reads 4 and writes 2 bytes a weight in each step to round it, and
the product's gradient in 2 bytes is read and written as 4 for the optimizer to read: 42 bytes a weight with the
update's own. Here the update writes the rounded weight, and reads the gradient as the product made it: 30.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cs336_basics.optimizer import AdamW, Loss
from cs336_systems.kernels.adamw_launch import ALIGNMENT_BYTES, Launch, launch_adamw, packed_scalars
from cs336_systems.kernels.support import SUPPORTED_DTYPES, check_device


class _Known(NamedTuple):
    """What need not be looked at again while a parameter, its state and the layout of its gradients stay the same."""

    address: int
    m: Tensor
    v: Tensor
    master: Tensor | None
    version: int  # of the parameter, less that of its master: the two are changed together, or by someone else
    gradient_dtype: torch.dtype
    gradient_stride: tuple[int, ...]
    n_elements: int
    p_address: int  # of the master, if there is one
    m_address: int
    v_address: int
    w_address: int
    unaligned: int  # the bits of the addresses, one or another, that are not a multiple of the alignment
    dtypes: tuple[torch.dtype | None, ...]
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
        launches: dict[tuple, Launch] = defaultdict(Launch)
        updated: list[Tensor] = []
        written_elsewhere: list[tuple[Tensor, Tensor]] = []
        kept: list[Tensor] = []  # copies, until the launches that read them are on their way
        for group in self.param_groups:
            scalars: dict[int, tuple[int, ...]] = {}
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None or parameter.numel() == 0:
                    continue
                state = self.state[parameter]
                g, known = gradient, self._known.get(id(parameter))
                # Short, as hundreds of parameters go through it while the device may wait.
                if (
                    known is None
                    or known.address != parameter.data_ptr()
                    or known.m is not state.get("exp_avg")
                    or known.v is not state.get("exp_avg_sq")
                    or known.master is not state.get("master")
                    or (known.master is not None and known.version != parameter._version - known.master._version)
                    or known.gradient_dtype is not gradient.dtype
                    or known.gradient_stride != gradient.stride()
                ):
                    g, written, known = self._look_at(parameter, gradient, state)
                    kept.append(g)
                    if written is not parameter:
                        written_elsewhere.append((parameter, written))
                t = state["step"] = int(state["step"]) + 1  # torch.optim's own AdamW has it in a tensor
                if t not in scalars:
                    scalars[t] = packed_scalars(group, t)
                address = g.data_ptr()
                is_aligned = (known.unaligned | address) % ALIGNMENT_BYTES == 0
                launches[known.dtypes, is_aligned, known.device].add(
                    (known.p_address, address, known.m_address, known.v_address, known.w_address),
                    known.n_elements,
                    scalars[t],
                )
                updated.append(parameter)
                if known.master is not None:
                    updated.append(known.master)
        for key, update in launches.items():
            launch_adamw(update, *key)
        for parameter, written in written_elsewhere:
            parameter.copy_(written)
        # As any operator that changes a tensor does: autograd must notice if a graph still needs the old values.
        torch.autograd.graph.increment_version(updated)
        return loss

    def use_master_weights(self, weights: Iterable[Tensor], dtype: torch.dtype = torch.bfloat16) -> None:
        """Rounds float32 parameters to `dtype`, where they lie in their modules, and keeps their float32 values as
        "master" in the state: from now on a step updates the master and rounds it into the parameter.

        Their gradients have `dtype` then, as matrix products under autocast make them: the updates are those of
        autocast over float32 weights to the last bit, unless gradients of several backward passes are added up, which
        rounds each sum. The model's state dict has the rounded weights, the optimizer's has the masters, and takes a
        state without: then the parameters as they are, rounded or not, are what the masters begin from. A parameter
        that something else changed between two steps is its master's new value.

        Raises:
            ValueError: `dtype` is neither float16 nor bfloat16; a weight is not this optimizer's, or not float32.
        """
        weights = list(weights)
        if dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"dtype is {dtype}; it must be float16 or bfloat16")
        ours = {id(parameter) for group in self.param_groups for parameter in group["params"]}
        for index, weight in enumerate(weights):
            if id(weight) not in ours:
                raise ValueError(f"weights[{index}], {tuple(weight.shape)}, is no parameter of this optimizer")
            if weight.dtype != torch.float32:
                raise ValueError(f"weights[{index}] is {weight.dtype}; it must be float32, to be its own master first")
        for weight in weights:
            self.state[weight]["master"] = torch.empty_like(weight, requires_grad=False).copy_(weight.detach())
            gradient, weight.grad = weight.grad, None
            weight.data = weight.detach().to(dtype)
            weight.grad = None if gradient is None else gradient.to(dtype)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of `AdamW`, `torch.optim.AdamW` or one of this class, in `state_dtype`. Masters are loaded for
        parameters that have one."""
        masters = {p: state["master"] for p, state in self.state.items() if "master" in state}
        super().load_state_dict(state_dict)  # rounds state to the parameter's dtype
        for group, saved_group in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for parameter, index in zip(group["params"], saved_group["params"], strict=True):
                saved = state_dict["state"].get(index, {})
                if parameter in masters:
                    self.state[parameter]["master"] = masters[parameter].copy_(saved.get("master", parameter.detach()))
                elif "master" in saved:
                    del self.state[parameter]["master"]
                for name in ("exp_avg", "exp_avg_sq"):
                    if name in saved:
                        self.state[parameter][name] = self._zeros(parameter).copy_(saved[name])

    def _look_at(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any]) -> tuple[Tensor, Tensor, _Known]:
        """Checks a parameter, makes its state at its first step, and returns the gradient, or a copy laid out in memory
        as the state is; the parameter, or what is to be copied into it; and what the launch needs. What is updated
        where it lies is remembered."""
        _check(parameter, gradient)
        state.setdefault("step", 0)
        m, v, master = state.get("exp_avg"), state.get("exp_avg_sq"), state.get("master")
        if m is None or v is None:
            m, v = self._zeros(parameter), self._zeros(parameter)
        elif m.stride() != v.stride() or not (m.is_contiguous() or m.stride() == torch.empty_like(m).stride()):
            m, v = (self._zeros(parameter).copy_(x) for x in (m, v))
        state["exp_avg"], state["exp_avg_sq"] = m, v
        g, written = _laid_out_like(m, gradient), _laid_out_like(m, parameter)
        p = written
        if master is not None:
            # Where the parameter is not its master rounded, something else has changed it since.
            changed = torch.where(parameter == master.to(parameter.dtype), master, parameter)
            p = state["master"] = master = torch.empty_like(m, dtype=torch.float32).copy_(changed)
        addresses = p.data_ptr(), m.data_ptr(), v.data_ptr(), 0 if p is written else written.data_ptr()
        known = _Known(
            address=parameter.data_ptr(),
            m=m,
            v=v,
            master=master,
            version=0 if master is None else parameter._version - master._version,
            gradient_dtype=gradient.dtype,
            gradient_stride=gradient.stride(),
            n_elements=parameter.numel(),
            p_address=addresses[0],
            m_address=addresses[1],
            v_address=addresses[2],
            w_address=addresses[3],
            unaligned=functools.reduce(int.__or__, addresses) % ALIGNMENT_BYTES,
            dtypes=(*(x.dtype for x in (p, g, m, v)), None if p is written else written.dtype),
            device=parameter.device,
        )
        if written is parameter and g is gradient:
            self._known[id(parameter)] = known
        else:
            self._known.pop(id(parameter), None)
        return g, written, known

    def _zeros(self, parameter: Tensor) -> Tensor:
        """Dense, in the parameter's order of memory if that has one."""
        dtype = self.state_dtype or (torch.float32 if "master" in self.state[parameter] else parameter.dtype)
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)


def _check(parameter: Tensor, gradient: Tensor) -> None:
    for name, tensor in (("a parameter", parameter), ("a gradient", gradient)):
        if tensor.layout != torch.strided:
            raise ValueError(f"FusedAdamW: {name} is {tensor.layout}; it must be dense")
        if tensor.dtype not in SUPPORTED_DTYPES:
            raise ValueError(f"FusedAdamW: {name} is {tensor.dtype}; it must be float32, float16 or bfloat16")
    check_device("FusedAdamW", parameter=parameter, gradient=gradient)


def _laid_out_like(state: Tensor, tensor: Tensor) -> Tensor:
    """`tensor`, or a copy with the state's strides: then equal offsets from the first elements are equal places."""
    if tensor.stride() == state.stride():
        return tensor
    return torch.empty_like(state, dtype=tensor.dtype).copy_(tensor)
