"""One sharded weight: this rank's rows of it, which are the parameter, and the whole, which has memory only while it is
needed. The collectives of FSDP, one weight at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn

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
        dtype = compute_dtype if compute_dtype is not None and parameter.is_floating_point() else parameter.dtype
        # All ranks' rows, with padding behind the last; written by collectives. `full` shares its memory but not its
        # version counter, by which autograd would notice the writing and refuse its saved views.
        self._gathered = torch.empty(self._padded_shape(), dtype=dtype, device=parameter.device)
        self._n_bytes = self._gathered.untyped_storage().nbytes()
        view = self._gathered.new_empty(0).set_(
            self._gathered.untyped_storage(), 0, self.shape, self._gathered.stride()
        )
        self.full = nn.Parameter(view)  # each use makes it require a gradient, or not, as the shard does
        self._mine = self._gathered.narrow(0, self._rank * self.rows_per_rank, self.rows_per_rank)
        # Whether the shard can be sent as it is: no cast, and no padding behind its rows.
        self._sends_shard = dtype == parameter.dtype and parameter.shape[0] == self.rows_per_rank
        self._work: dist.Work | None = None
        self.is_resident = True
        self.free()

    def _padded_shape(self) -> tuple[int, ...]:
        return (self.rows_per_rank * self._group.size(), *self.shape[1:])

    def rows_of(self, whole: Tensor) -> Tensor:
        """This rank's rows of a tensor with the weight's shape."""
        return whole[self._start : self._start + self.rows_per_rank]

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

    def start_gather(self) -> None:
        """Begin to fill `full` from all ranks' shards, unless it is there or on its way."""
        if self.is_resident:
            return
        self._gathered.untyped_storage().resize_(self._n_bytes)
        self.is_resident = True
        mine = self.shard.detach()
        if not self._sends_shard:
            self._mine[: mine.shape[0]].copy_(mine)
            mine = self._mine
        self._work = dist.all_gather_into_tensor(self._gathered, mine, group=self._group, async_op=True)

    def wait(self) -> None:
        """Let what follows (on a GPU: on the current stream) see the gathered weight."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def free(self) -> None:
        """Give the whole weight's memory back; the views that autograd saved stay, without memory."""
        if self.is_resident:
            self.wait()
            self._gathered.untyped_storage().resize_(0)
            self.is_resident = False

    @torch.no_grad()
    def gather_master(self) -> Float[Tensor, "rows *columns"]:
        """The whole weight in the parameter's own dtype; a collective call that leaves `full` alone."""
        mine = self.shard.new_zeros((self.rows_per_rank, *self.shape[1:]))
        mine[: self.shard.shape[0]].copy_(self.shard)
        return gather_rows(mine, self._group)[: self.shape[0]]

    # ---- Gradients ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def start_reduce_scatter(self) -> PendingGradient:
        """Take the whole weight's gradient from `full` and begin to average each rank's rows of it over the ranks.

        The division by world_size comes before the sum: float16 may hold the mean of gradients, but not their sum.
        """
        gradient, self.full.grad = self.full.grad, None
        assert gradient is not None
        padded_shape = self._padded_shape()
        if gradient.shape != padded_shape:
            padded = gradient.new_empty(padded_shape)
            padded[: self.shape[0]].copy_(gradient)
            padded[self.shape[0] :].zero_()
            gradient = padded
        mean = averages_itself(self._group)
        if not mean:
            gradient.div_(self._group.size())
        mine = gradient.new_empty((self.rows_per_rank, *self.shape[1:]))
        operation = dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM
        work = dist.reduce_scatter_tensor(mine, gradient.contiguous(), operation, group=self._group, async_op=True)
        return PendingGradient(self, mine, work)


def _describe(built_as: tuple[torch.dtype, torch.device] | None) -> str:
    return "gone" if built_as is None else f"a parameter of {built_as[0]} on {built_as[1]}"


@dataclass
class PendingGradient:
    """A reduce-scatter on its way, whose result nobody may look at before `finish`."""

    weight: ShardedWeight
    rows: Tensor
    work: dist.Work

    @torch.no_grad()
    def finish(self) -> None:
        """Wait, and add the rows to the shard's gradient, in the shard's dtype."""
        self.work.wait()
        shard = self.weight.shard
        gradient = self.rows
        if gradient.shape != shard.shape:
            gradient = gradient[: shard.shape[0]]
        gradient = gradient.to(shard.dtype)
        if shard.grad is None:
            shard.grad = gradient
        else:
            shard.grad += gradient


def gather_rows(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All ranks' rows, one below the other; `mine` has the same shape on all ranks."""
    everything = mine.new_empty((mine.shape[0] * group.size(), *mine.shape[1:]))
    dist.all_gather_into_tensor(everything, mine, group=group)
    return everything
