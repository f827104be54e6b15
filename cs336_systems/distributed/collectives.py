"""The collectives that data parallelism is made of: average gradients, broadcast a module, compare modules.

All work on gloo and NCCL, in any floating dtype, and on every rank in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Inexact, Shaped
from torch import Tensor, nn
from torch.distributed.distributed_c10d import AllreduceCoalescedOptions


def averages_itself(group: dist.ProcessGroup) -> bool:
    """Whether the group's backend has ReduceOp.AVG: NCCL has, gloo has not."""
    return dist.get_backend(group) == "nccl"


@torch.no_grad()
def average_(tensor: Inexact[Tensor, "..."], group: dist.ProcessGroup, async_op: bool = False) -> dist.Work | None:
    """Replace `tensor` by its mean over the ranks, in place. One all-reduce.

    The division comes before the sum: float16 holds nothing above 65,504, which a sum of gradients can exceed where
    their mean does not. NCCL's AVG multiplies by 1 / world_size as it reads, in the same order.

    Args:
        tensor: same shape and dtype on all ranks; contiguous.
        async_op: return at once with a handle to wait for; the division has been queued by then.
    """
    if averages_itself(group):
        return dist.all_reduce(tensor, dist.ReduceOp.AVG, group=group, async_op=async_op)
    tensor.div_(group.size())
    return dist.all_reduce(tensor, dist.ReduceOp.SUM, group=group, async_op=async_op)


@torch.no_grad()
def average_coalesced_(tensors: Sequence[Inexact[Tensor, "..."]], group: dist.ProcessGroup) -> dist.Work:
    """`average_` of several tensors of one dtype, where they lie, as one collective. Always asynchronous.

    NCCL runs them as one group call, so that they need not be copied into one buffer; gloo copies them itself.
    """
    # dist.all_reduce_coalesced makes the same call, after a warning that its interface may change.
    options = AllreduceCoalescedOptions()
    if averages_itself(group):
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)
    else:
        torch._foreach_div_(list(tensors), group.size())
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
    real = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
    return group.allreduce_coalesced(real, options)


@torch.no_grad()
def broadcast_tensor(tensor: Shaped[Tensor, "..."], group: dist.ProcessGroup, source: int = 0) -> None:
    """Copy the source rank's `tensor` (any dtype, shape and strides) into the other ranks' tensors."""
    dense = tensor.resolve_conj().resolve_neg().contiguous()
    # As bytes: gloo knows few dtypes, and what is copied need not be understood.
    dist.broadcast(dense.reshape(-1).view(torch.uint8), group=group, group_src=source)
    if dense.data_ptr() != tensor.data_ptr():
        tensor.copy_(dense)


def broadcast_module(module: nn.Module, group: dist.ProcessGroup, source: int = 0) -> None:
    """Copy the source rank's parameters (frozen ones too) and buffers into the other ranks' module, in place."""
    for tensor in (*module.parameters(), *module.buffers()):
        broadcast_tensor(tensor.detach(), group, source)


def describe_module(module: nn.Module) -> list[tuple[Any, ...]]:
    """What the ranks must agree on: kind, name, shape, dtype and requires_grad of each parameter and buffer, in order.

    Tied parameters are listed once, so that ranks of which only some tie them differ.
    """
    return [
        (kind, name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        for kind, tensors in (("parameter", module.named_parameters()), ("buffer", module.named_buffers()))
        for name, tensor in tensors
    ]


def check_same_module(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Compare the ranks' modules by names, shapes and dtypes; a collective call.

    Raises:
        ValueError: on every rank, if any two differ; it names the rank and its first parameter or buffer that differs
            from rank 0's. Without this check the ranks would wait for each other forever, or average unlike tensors.
    """
    descriptions: list[Any] = [None] * group.size()
    dist.all_gather_object(descriptions, describe_module(module), group=group)
    for rank, description in enumerate(descriptions):
        if description != descriptions[0]:
            raise ValueError(
                f"module: the ranks built different ones. {_first_difference(rank, description, descriptions[0])}"
            )


def _first_difference(rank: int, theirs: list[tuple], rank_0s: list[tuple]) -> str:
    for index in range(max(len(theirs), len(rank_0s))):
        here = theirs[index] if index < len(theirs) else None
        there = rank_0s[index] if index < len(rank_0s) else None
        if here != there:
            return f"Rank {rank} has {_describe(here)} where rank 0 has {_describe(there)}"
    raise AssertionError("the descriptions are equal")


def _describe(entry: tuple | None) -> str:
    if entry is None:
        return "nothing more"
    kind, name, shape, dtype, requires_grad = entry
    frozen = " (frozen)" if kind == "parameter" and not requires_grad else ""
    return f"{kind} {name!r} {str(dtype).removeprefix('torch.')} {shape}{frozen}"
