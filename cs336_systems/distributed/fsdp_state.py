"""What concerns all of an FSDP model's parameters at once: full and sharded states, and the global gradient norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from cs336_systems.distributed.fsdp_weight import ShardedWeight, gather_rows

if TYPE_CHECKING:
    from cs336_systems.distributed.fsdp import FullyShardedDataParallel


def _weight_of(model: FullyShardedDataParallel) -> dict[Tensor, ShardedWeight]:
    return {weight.shard: weight for weight in model._weights}


def _named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The bare module's state dict, with the parameters themselves in it; tied ones under each of their names."""
    return {name: value for name, value in module.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}


def gather_full_params(model: FullyShardedDataParallel) -> dict[str, Tensor]:
    """See FullyShardedDataParallel.gather_full_params."""
    weights = _weight_of(model)
    return {
        name: weights[parameter].gather_master() if parameter in weights else parameter.detach().clone()
        for name, parameter in model.module.named_parameters()
    }


def full_state_dict(model: FullyShardedDataParallel, to_rank: int | None) -> dict[str, Tensor]:
    """See FullyShardedDataParallel.full_state_dict."""
    _check_rank(to_rank, model.process_group)
    keep = to_rank is None or to_rank == dist.get_rank(model.process_group)
    weights = _weight_of(model)
    gathered: dict[Tensor, Tensor] = {}
    state: dict[str, Tensor] = {}
    for name, tensor in _named_tensors(model.module).items():
        if tensor not in gathered:
            whole = weights[tensor].gather_master() if tensor in weights else tensor.detach()
            gathered[tensor] = whole.to("cpu", copy=True) if keep else whole.new_empty(0)
        if keep:
            state[name] = gathered[tensor]
    return state


def sharded_state_dict(model: FullyShardedDataParallel) -> dict[str, Tensor]:
    """See FullyShardedDataParallel.state_dict."""
    weights = _weight_of(model)
    if not weights:  # then there may be no parameter either, to tell the device
        return {name: tensor.detach() for name, tensor in _named_tensors(model.module).items()}
    mesh = _mesh(model)
    return {
        name: _as_dtensor(tensor.detach(), weights[tensor], mesh) if tensor in weights else tensor.detach()
        for name, tensor in _named_tensors(model.module).items()
    }


def load_state_dict(model: FullyShardedDataParallel, state_dict: Mapping[str, Any], strict: bool) -> None:
    """See FullyShardedDataParallel.load_state_dict."""
    ours = _named_tensors(model.module)
    missing, unknown = sorted(ours.keys() - state_dict.keys()), sorted(state_dict.keys() - ours.keys())
    if strict and (missing or unknown):
        raise ValueError(f"state_dict: it lacks {missing} and has {unknown}, which the module has not")
    weights = _weight_of(model)
    # All is checked before anything is written.
    sources = {
        name: _local_part(name, state_dict[name], tensor, weights.get(tensor))
        for name, tensor in ours.items()
        if name in state_dict
    }
    with torch.no_grad():
        for name, source in sources.items():
            ours[name].copy_(source)


def _local_part(name: str, value: Tensor, ours: Tensor, weight: ShardedWeight | None) -> Tensor:
    """This rank's part of a full or sharded tensor; raises ValueError if it is another model's."""
    shape = weight.shape if weight is not None else ours.shape
    if value.shape != shape:
        raise ValueError(f"state_dict: {name!r} has shape {tuple(value.shape)}, and the module's {tuple(shape)}")
    if isinstance(value, DTensor):
        local = value.to_local()
        if local.shape != ours.shape:
            raise ValueError(
                f"state_dict: {name!r} is sharded for another world size; load it with torch.distributed.checkpoint, "
                "into this model's state_dict()"
            )
        return local
    return weight.rows_of(value) if weight is not None else value


def _mesh(model: FullyShardedDataParallel) -> DeviceMesh:
    device = next(iter(model.module.parameters())).device
    return DeviceMesh.from_group(model.process_group, device.type)


def _as_dtensor(local: Tensor, weight: ShardedWeight, mesh: DeviceMesh) -> DTensor:
    # Shard(0) cuts as torch.chunk does, which is how the weight is cut.
    stride = torch.empty(weight.shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=weight.shape, stride=stride)


def _check_rank(to_rank: int | None, group: dist.ProcessGroup) -> None:
    if to_rank is not None and not 0 <= to_rank < group.size():
        raise ValueError(f"to_rank={to_rank}: must be a rank of {group.size()}, or None")


# ---- The optimizer's state -------------------------------------------------------------------------------------------


def full_optimizer_state_dict(
    model: FullyShardedDataParallel, optimizer: torch.optim.Optimizer, to_rank: int | None = None
) -> dict[str, Any]:
    """The state dict that an optimizer of the bare module would have, on the CPU: on every rank, or whole only on
    `to_rank`. A collective call.

    Args:
        optimizer: made of `model.parameters()`, with state tensors shaped like the parameters (moments) or without
            dimensions (step counts).
    """
    _check_rank(to_rank, model.process_group)
    keep = to_rank is None or to_rank == dist.get_rank(model.process_group)
    state_dict = optimizer.state_dict()
    state: dict[int, dict[str, Any]] = {}
    for number, name, value, weight in _states(model, optimizer):
        if weight is not None:
            rows = value.new_zeros((weight.rows_per_rank, *weight.shape[1:]))
            rows[: value.shape[0]].copy_(value)
            value = gather_rows(rows, model.process_group)[: weight.shape[0]]
        if keep:
            state.setdefault(number, {})[name] = value.to("cpu", copy=True) if isinstance(value, Tensor) else value
    return {**state_dict, "state": state}


def sharded_optimizer_state_dict(model: FullyShardedDataParallel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state dict with DTensors for what is sharded, which share the state's memory: for
    torch.distributed.checkpoint. To load one, the optimizer must have state: let it step once, with lr=0."""
    mesh = _mesh(model)
    state: dict[int, dict[str, Any]] = {}
    for number, name, value, weight in _states(model, optimizer):
        state.setdefault(number, {})[name] = value if weight is None else _as_dtensor(value, weight, mesh)
    return {**optimizer.state_dict(), "state": state}


def load_optimizer_state_dict(
    model: FullyShardedDataParallel, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
) -> None:
    """Load a full or sharded optimizer state dict; no collective, every rank loads the same.

    Raises:
        ValueError: another number of groups or parameters, or a tensor of another shape.
    """
    weights = _weight_of(model)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    if len(numbers) != len(parameters):
        raise ValueError(f"state_dict: it has {len(numbers)} parameters, and the optimizer {len(parameters)}")
    state: dict[int, dict[str, Any]] = {}
    for number, parameter in zip(numbers, parameters, strict=True):
        if number not in state_dict["state"]:
            continue
        state[number] = {
            name: _local_part(f"{name} of parameter {number}", value, parameter, weights.get(parameter))
            if isinstance(value, Tensor) and value.ndim
            else value
            for name, value in state_dict["state"][number].items()
        }
    optimizer.load_state_dict({**state_dict, "state": state})


def _states(
    model: FullyShardedDataParallel, optimizer: torch.optim.Optimizer
) -> list[tuple[int, str, Any, ShardedWeight | None]]:
    """(parameter's number, state's name, value, the weight whose rows it has) of all states, in the same order on all
    ranks."""
    weights = _weight_of(model)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = []
    for number, parameter in enumerate(parameters):
        for name, value in optimizer.state.get(parameter, {}).items():
            is_rows = isinstance(value, Tensor) and value.ndim > 0 and value.shape == parameter.shape
            states.append((number, name, value, weights.get(parameter) if is_rows else None))
    return states


# ---- The gradients' norm ---------------------------------------------------------------------------------------------


def clip_grad_norm_(model: FullyShardedDataParallel, max_norm: float) -> Tensor:
    """See FullyShardedDataParallel.clip_grad_norm_."""
    if not max_norm > 0:
        raise ValueError(f"max_norm={max_norm}: must be above 0")
    weights = _weight_of(model)
    parameters = list(model.module.parameters())
    device = parameters[0].device if parameters else torch.device("cpu")
    dtype = torch.float64 if any(parameter.dtype == torch.float64 for parameter in parameters) else torch.float32
    square = {
        is_sharded: _square_norm([p.grad for p in parameters if p.grad is not None and (p in weights) == is_sharded])
        for is_sharded in (True, False)
    }
    sharded = torch.as_tensor(square[True], dtype=dtype, device=device)
    dist.all_reduce(sharded, group=model.process_group)
    norm = (sharded + square[False]).sqrt()
    # Multiplying by 1 where nothing is to be clipped costs a pass; asking the device whether to would cost a wait.
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)
    return norm


def _square_norm(gradients: list[Tensor]) -> Tensor | float:
    if not gradients:
        return 0.0
    norms = [
        torch.linalg.vector_norm(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32))
        for gradient in gradients
    ]
    return torch.stack([norm.to(norms[0].dtype) for norm in norms]).square().sum()
