"""What a sharded optimizer must know of an optimizer class and its parameters before it divides them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336_basics.optimizer import AdamW
from cs336_systems.distributed.marks import is_shard

# They treat each element by itself, so that a parameter's rows may have different owners. Any other optimizer (such as
# Adafactor, whose state is sums over rows and columns) gets parameters whole.
ELEMENTWISE: frozenset[Any] = frozenset(
    {
        AdamW,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.Adamax,
        torch.optim.AdamW,
        torch.optim.ASGD,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)

# They treat a whole matrix at once (L-BFGS all parameters), and would be wrong with a rank's rows of each.
OF_WHOLE_MATRICES = (torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon)


def check_takes_rows(optimizer: Any) -> None:
    """Raises ValueError for an optimizer of whole matrices that has been given rows of FSDP's weights."""
    if isinstance(optimizer, OF_WHOLE_MATRICES):
        used = (parameter for group in optimizer.param_groups for parameter in group["params"])
        if any(is_shard(parameter) for parameter in used):
            raise ValueError(
                f"{type(optimizer).__name__}: it treats a whole matrix at once, and FSDP's parameters are this rank's "
                "rows of each; take an optimizer that treats each element by itself, such as AdamW, or "
                "ShardedOptimizer under data parallelism"
            )


def check_class(optimizer_cls: Any) -> None:
    """Raises ValueError for an optimizer whose step must evaluate the loss by itself, as L-BFGS's line search: it needs
    all parameters at once."""
    step = inspect.signature(optimizer_cls.step).parameters if hasattr(optimizer_cls, "step") else {}
    closure = step.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"optimizer_cls={getattr(optimizer_cls, '__name__', optimizer_cls)}: its step needs the closure, and with "
            "it all parameters at once; such an optimizer can't be sharded"
        )


def check_parameters(new: Sequence[Any], before: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Compare a group of parameters with those there are, and with the other ranks' group; a collective call.

    Raises:
        TypeError: a parameter is no tensor.
        ValueError: one is listed twice, FSDP has divided it, they lie on several devices, or (on all ranks) the ranks
            list different ones.
    """
    for parameter in new:
        if not isinstance(parameter, Tensor):
            raise TypeError(f"params: must be tensors, got {type(parameter).__name__}")
        if is_shard(parameter):
            raise ValueError(
                f"params: one of shape {tuple(parameter.shape)} is this rank's rows of a weight that FSDP divides, and "
                "its optimizer state is divided with it; give FSDP's parameters to the optimizer class itself"
            )
    seen = {id(parameter) for parameter in before}
    for i, parameter in enumerate(new):
        if id(parameter) in seen:
            raise ValueError(
                f"params: parameter {i} of the group, of shape {tuple(parameter.shape)}, is listed twice; each must be "
                "in one group, once"
            )
        seen.add(id(parameter))
    devices = {str(parameter.device) for parameter in (*before, *new)}
    if len(devices) > 1:
        raise ValueError(f"params: they lie on {sorted(devices)}; must be on one device")
    of_ranks: list[Any] = [None] * group.size()
    described = [(tuple(parameter.shape), parameter.dtype, parameter.requires_grad) for parameter in new]
    dist.all_gather_object(of_ranks, described, group=group)
    for rank, theirs in enumerate(of_ranks):
        if theirs != of_ranks[0]:
            raise ValueError(
                f"params: rank {rank} lists other parameters than rank 0 (shapes, dtypes or requires_grad); all ranks "
                "must list the same, in the same order"
            )


def description(parameter: Tensor) -> tuple[Any, ...]:
    """What must not change under an optimizer: shape, dtype and device."""
    return tuple(parameter.shape), parameter.dtype, parameter.device


def without_memory(parameter: Tensor) -> nn.Parameter:
    """A parameter of the same number of dimensions, dtype and device but no elements, for an optimizer to check."""
    shape = (0, *parameter.shape[1:]) if parameter.ndim else ()
    return nn.Parameter(parameter.detach().new_empty(shape), requires_grad=parameter.is_floating_point())
