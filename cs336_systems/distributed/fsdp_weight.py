"""One sharded weight: this rank's rows of it, which are the parameter, and the whole, which has memory only while it is
needed. And the collectives of FSDP, each of one or several weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from jaxtyping import Float, Inexact
from torch import Tensor, nn
from torch.distributed.distributed_c10d import ReduceScatterOptions

from cs336_systems.distributed.collectives import averages_itself


class ShardedWeight:
    """A weight of `n_rows` rows, of which each rank holds ceil(n_rows / world_size); the last ranks hold what is left,
    possibly nothing. For example 5 rows over 3 ranks: 2, 2, 1; over 4 ranks: 2, 2, 1, 0.

    Attributes:
        shard: the module's own parameter, cut down to this rank's rows, in its own dtype (the master weights).
        full: a leaf of autograd with the whole weight's shape, in the dtype of computation. Between uses its storage
            has no bytes, so that what autograd saved of it (views, which share the storage) takes no memory either;
            when the storage is filled again, before backward needs it, the saved views are valid again.
        n_users: how many forward and backward computations need `full` at this moment.
        gathered: all ranks' rows, with padding behind the last, in `full`'s memory; `mine` are this rank's.
        master: the shard as the collectives see it, without autograd.
        sent: what this rank sends: `master` where `sends_shard`, else `mine` with its padding.
        work: the collective that fills `full`, until it was waited for.
    """

    def __init__(
        self, name: str, parameter: nn.Parameter, compute_dtype: torch.dtype | None, group: dist.ProcessGroup
    ) -> None:
        """Cut `parameter`, which must be the same on all ranks, down to this rank's rows."""
        self.name = name
        self.shard = parameter
        self.shape = parameter.shape
        self.n_users = 0
        self._group = group
        self._rank, world_size = dist.get_rank(group), group.size()
        self.rows_per_rank = -(-self.shape[0] // world_size)
        whole = parameter.detach()
        self._start = min(self._rank * self.rows_per_rank, self.shape[0])
        parameter.grad = None
        parameter.data = self.rows_of(whole).clone(memory_format=torch.contiguous_format)
        self._built_as = parameter.dtype, parameter.device
        dtype = compute_dtype or parameter.dtype
        # Collectives write it. `full` shares its memory but not its version counter, by which autograd would notice the
        # writing and refuse its saved views.
        self.gathered = torch.empty(self._padded_shape(), dtype=dtype, device=parameter.device)
        self.n_bytes = self.gathered.untyped_storage().nbytes()
        view = self.gathered.new_empty(0).set_(self.gathered.untyped_storage(), 0, self.shape, self.gathered.stride())
        self.full = nn.Parameter(view)  # each use makes it require a gradient, or not, as the shard does
        # Whether the shard can be sent as it is: no cast, and no padding behind its rows.
        self.sends_shard = dtype == parameter.dtype and parameter.shape[0] == self.rows_per_rank
        # Views that every gather would have to make anew; none can be made while there is no memory.
        padded = self.gathered.narrow(0, self._rank * self.rows_per_rank, self.rows_per_rank)
        self.master = self.shard.detach()
        self.mine = padded[: self.master.shape[0]]
        self.sent = self.master if self.sends_shard else padded
        self.work: dist.Work | None = None
        self.is_resident = True
        self.free()

    def _padded_shape(self) -> tuple[int, ...]:
        return (self.rows_per_rank * self._group.size(), *self.shape[1:])

    def rows_of(self, whole: Tensor) -> Tensor:
        """This rank's rows of a tensor with the weight's shape."""
        return whole[self._start : self._start + self.rows_per_rank]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of computation, in which weight and gradient travel."""
        return self.gathered.dtype

    def check_unchanged(self, parameter: Tensor | None) -> None:
        """Raises RuntimeError if `parameter`, the layer's of this moment, is not the one that was sharded, or was moved
        or cast since."""
        now = None if parameter is None else (parameter.dtype, parameter.device)
        if parameter is not self.shard or now != self._built_as:
            raise RuntimeError(
                f"module: its weight {self.name!r} was {_describe(self._built_as)} when it was sharded, and is "
                f"{_describe(now)} now. Move, cast or replace before wrapping; compute_dtype chooses the dtype of "
                "computation"
            )

    # ---- Weights -----------------------------------------------------------------------------------------------------

    def make_room(self) -> None:
        """Give `full` its memory, to be filled by a gather from where the shard is now."""
        if self.shard.data_ptr() != self.master.data_ptr():  # it was given other memory
            self.master = self.shard.detach()
            if self.sends_shard:
                self.sent = self.master
        self.gathered.untyped_storage().resize_(self.n_bytes)
        self.is_resident = True

    def wait(self) -> None:
        """Let what follows (on a GPU: on the current stream) see the gathered weight."""
        if self.work is not None:
            self.work.wait()
            self.work = None

    def free(self) -> None:
        """Give the whole weight's memory back; the views that autograd saved stay, without memory."""
        if self.is_resident:
            self.wait()
            self.gathered.untyped_storage().resize_(0)
            self.is_resident = False

    @torch.no_grad()
    def gather_master(self) -> Float[Tensor, "rows *columns"]:
        """The whole weight in the parameter's own dtype; a collective call that leaves `full` alone."""
        mine = self.shard.new_zeros((self.rows_per_rank, *self.shape[1:]))
        mine[: self.shard.shape[0]].copy_(self.shard)
        return gather_rows(mine, self._group)[: self.shape[0]]

    # ---- Gradients ---------------------------------------------------------------------------------------------------

    def take_gradient(self) -> Inexact[Tensor, "padded_rows *columns"] | None:
        """The whole weight's gradient, contiguous and padded to as many rows on each rank; `full` has none then. None
        for a weight that was frozen since its forward."""
        gradient, self.full.grad = self.full.grad, None
        if gradient is None:
            return None
        if gradient.requires_grad:  # of a backward with create_graph
            gradient = gradient.detach()
        if self.shape[0] == self.gathered.shape[0]:
            return gradient.contiguous()
        padded = gradient.new_empty(self.gathered.shape)
        padded[: self.shape[0]].copy_(gradient)
        padded[self.shape[0] :].zero_()
        return padded

    def add_gradient(self, rows: Inexact[Tensor, "rows *columns"]) -> None:
        """Add this rank's rows of an averaged gradient, perhaps padded, to the shard's, in the shard's dtype."""
        shard = self.shard
        if rows.shape != shard.shape:
            rows = rows[: shard.shape[0]]
        rows = rows.to(shard.dtype)
        if shard.grad is None:
            shard.grad = rows
        else:
            shard.grad += rows


def _describe(built_as: tuple[torch.dtype, torch.device] | None) -> str:
    return "gone" if built_as is None else f"a parameter of {built_as[0]} on {built_as[1]}"


class WeightCollectives:
    """The collectives of a step, each of one or several weights of one dtype, asynchronous.

    They call the group's own methods: what torch.distributed's functions add takes the host as long again.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._averages_itself = averages_itself(group)
        # gloo's coalesced gathers damage the heap when another collective is on its way (pytorch/pytorch#65231, and
        # still in torch 2.11).
        self._gathers_together = dist.get_backend(group) == "nccl"
        self._reduction = ReduceScatterOptions()
        self._reduction.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG if self._averages_itself else dist.ReduceOp.SUM)

    def start_gather(self, weights: Sequence[ShardedWeight]) -> None:
        """Begin to fill the `full` of weights that are not resident, from all ranks' shards."""
        for weight in weights:
            weight.make_room()
        copied = [weight for weight in weights if not weight.sends_shard]
        if len(copied) == 1:
            copied[0].mine.copy_(copied[0].master)
        elif copied:
            torch._foreach_copy_([weight.mine for weight in copied], [weight.master for weight in copied])
        if len(weights) == 1 or not self._gathers_together:
            for weight in weights:
                weight.work = self._group._allgather_base(weight.gathered, weight.sent)
            return
        work = self._group.allgather_into_tensor_coalesced(
            [weight.gathered for weight in weights], [weight.sent for weight in weights]
        )
        for weight in weights:
            weight.work = work

    def start_reduce_scatter(self, weights: Sequence[ShardedWeight], gradients: list[Tensor]) -> PendingGradients:
        """Begin to average gradients, from `take_gradient`, over the ranks; each rank gets its rows of them.

        The division by world_size comes before the sum: float16 may hold the mean of gradients, but not their sum.
        """
        if not self._averages_itself:
            for gradient in gradients:
                gradient.div_(self._group.size())
        rows = [
            gradient.new_empty((weight.rows_per_rank, *weight.shape[1:]))
            for weight, gradient in zip(weights, gradients, strict=True)
        ]
        if len(rows) == 1:
            work = self._group._reduce_scatter_base(rows[0], gradients[0], self._reduction)
        else:
            work = self._group.reduce_scatter_tensor_coalesced(rows, gradients, self._reduction)
        return PendingGradients(weights, gradients, rows, work)


@dataclass
class PendingGradients:
    """A reduce-scatter on its way, whose results nobody may look at before `finish`."""

    weights: Sequence[ShardedWeight]
    gradients: list[Tensor]  # whose memory is read until the wait is over
    rows: list[Tensor]
    work: dist.Work

    def discard(self) -> None:
        """Wait, since the memory is in use until then, and forget the results."""
        self.work.wait()
        self.gradients.clear()

    def finish(self) -> None:
        """Wait, and add the rows to the shards' gradients."""
        self.discard()
        for weight, rows in zip(self.weights, self.rows, strict=True):
            weight.add_gradient(rows)


def gather_rows(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All ranks' rows, one below the other; `mine` has the same shape on all ranks."""
    everything = mine.new_empty((mine.shape[0] * group.size(), *mine.shape[1:]))
    dist.all_gather_into_tensor(everything, mine, group=group)
    return everything
