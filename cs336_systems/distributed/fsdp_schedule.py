"""When FSDP gathers and frees weights: up to two ahead of their use, in the order that the last step had.

A step's uses come in the same order each time: forward, backward, and between them what activation checkpointing
computes again. So the order is recorded, not derived from the model, and followed for as long as it fits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cs336_systems.distributed.fsdp_weight import PendingGradients, ShardedWeight, WeightCollectives

N_AHEAD = 2
# Of a smaller whole weight a collective's fixed cost is the larger part: it is gathered with its successor. A larger
# one travels long enough that it had better go early.
ALONE_BYTES = 8 * 2**20
# Gradients in a reduce-scatter. As many whole ones are on their way, and one less waits for company.
REDUCED_TOGETHER = 2
# Uses that are recorded of a step, which ends when the next begins: where none does, e.g. because layers are trained
# one by one or a graph is run backward again and again, the record must not grow for ever.
MAX_RECORDED = 2**16


class UseOrder:
    """The order of uses in the last step of each kind, and what comes next in it.

    For example, after a step that used a, b, c, b, a: `begin`, then record(a) returns [b, c], record(b) [c, b],
    record(c) [b, a], record(b) [a], record(a) []. Once a use is another than in the last step, nothing is predicted
    until the next step begins.
    """

    def __init__(self) -> None:
        self._last: dict[bool, list[ShardedWeight]] = {}
        self._current: list[ShardedWeight] = []
        self._kind = False
        self._expected: list[ShardedWeight] = []

    def begin(self, with_gradients: bool) -> None:
        """A forward pass begins. Those with and without gradients are remembered apart."""
        if self._current:
            self._last[self._kind] = self._current
        self._kind, self._current = with_gradients, []
        self._expected = self._last.get(with_gradients, [])

    def record(self, weight: ShardedWeight) -> list[ShardedWeight]:
        """Note that `weight` is used now; returns the next uses, at most N_AHEAD."""
        position = len(self._current)
        if position < MAX_RECORDED:
            self._current.append(weight)
        if position < len(self._expected) and self._expected[position] is weight:
            return self._expected[position + 1 : position + 1 + N_AHEAD]
        self._expected = []
        return []


class WeightManager:
    """Keeps resident the weights that are in use and those expected next, and no others."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._collectives = WeightCollectives(group)
        self._order = UseOrder()
        self._ahead: list[ShardedWeight] = []
        self._resident: list[ShardedWeight] = []
        self._in_forward = False  # of the whole module
        self._ready: list[tuple[ShardedWeight, Tensor]] = []  # gradients that wait for company
        self._pending: PendingGradients | None = None
        self._backward_uses: dict[int, dict[Use, None]] = {}  # by the backward pass that holds them, in order
        self._in_graph: set[ShardedWeight] = set()  # used since their gradient was last complete

    def begin_forward(self) -> None:
        """A forward pass of the whole module begins; what was gathered before may be out of date."""
        if torch._C._current_graph_task_id() == -1:
            self._forget_failed_passes()
        self.free_ahead()
        self._order.begin(torch.is_grad_enabled())
        self._in_forward = True

    def end_forward(self) -> None:
        """The forward pass has ended, or has failed."""
        self._in_forward = False

    def is_in_pass(self) -> bool:
        """Whether the module's forward, or any backward pass, runs now."""
        return self._in_forward or torch._C._current_graph_task_id() != -1

    def is_first_use(self, weight: ShardedWeight) -> bool:
        """Whether this is the first use, with gradients, since the weight's gradient was last complete."""
        is_first = weight not in self._in_graph
        self._in_graph.add(weight)
        return is_first

    def acquire(self, weight: ShardedWeight) -> None:
        """Make the weight available from now until `release`; begin to gather the next ones.

        A layer that is called by itself, outside the module's forward and backward, gathers its weight anew and has no
        place in the order: since the last pass the shards may have changed.
        """
        expected: list[ShardedWeight] = []
        if self.is_in_pass():
            expected, self._ahead = self._ahead, self._order.record(weight)
        else:
            self._forget_failed_passes()
            self.free_ahead()
        weight.n_users += 1
        if expected and expected[0] is not weight:
            self._free_unused()
        if not weight.is_resident:
            self.start_gather([weight])
        missing = [ahead for ahead in self._ahead if not ahead.is_resident]
        if missing:
            self._gather_ahead(missing)
        weight.wait()

    def _gather_ahead(self, missing: list[ShardedWeight]) -> None:
        """Begin to gather what of the next two uses is not there: small weights in pairs, others as soon as may be."""
        if len(missing) == 2 and _go_together(*missing):
            self.start_gather(missing)
            return
        for weight in missing:
            is_next = weight is self._ahead[0]
            if not weight.is_resident and (is_next or weight.n_bytes >= ALONE_BYTES):  # it can be both of the next
                self.start_gather([weight])

    def start_gather(self, weights: list[ShardedWeight]) -> None:
        """Begin to gather weights that are not resident, in one collective."""
        self._resident += weights
        self._collectives.start_gather(weights)

    def release(self, weight: ShardedWeight) -> None:
        """The weight's use has ended; free it unless another lasts or one of the next needs it."""
        weight.n_users -= 1
        if weight.n_users == 0 and weight not in self._ahead:
            self._resident.remove(weight)
            weight.free()

    def free_ahead(self) -> None:
        """Free what was gathered for uses to come."""
        self._ahead = []
        self._free_unused()

    def _free_unused(self) -> None:
        for weight in [w for w in self._resident if w.n_users == 0 and w not in self._ahead]:
            self._resident.remove(weight)
            weight.free()

    # ---- Backward ----------------------------------------------------------------------------------------------------

    def acquire_for_backward(self, use: Use) -> None:
        """As `acquire`, until `release_from_backward` or the end of the backward pass, whichever comes first."""
        self._uses_of_this_pass()[use] = None
        self.acquire(use.weight)

    def _uses_of_this_pass(self) -> dict[Use, None]:
        """Those that the backward pass that runs now holds. When it ends, so do they."""
        backward_pass = torch._C._current_graph_task_id()
        uses = self._backward_uses.get(backward_pass)
        if uses is None:
            uses = self._backward_uses[backward_pass] = {}
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end_backward(backward_pass))
        return uses

    def release_from_backward(self, use: Use) -> None:
        """The use's share of backward is done; does nothing for a use that holds nothing."""
        uses = self._backward_uses.get(torch._C._current_graph_task_id())
        if uses is not None and use in uses:
            del uses[use]
            self.release(use.weight)

    def _end_backward(self, backward_pass: int) -> None:
        """Every shard's gradient is there afterwards, as it is without sharding, for zero_grad to find."""
        self._end_uses(backward_pass)
        if self._ready:
            self._reduce_ready()
        self._finish_pending()

    def _end_uses(self, backward_pass: int) -> None:
        for use in self._backward_uses.pop(backward_pass):  # e.g. of weights whose gradient was not asked for
            use.weight.n_users -= 1
        self.free_ahead()

    def _forget_failed_passes(self) -> None:
        """Of backward passes that raised: nobody waits for their gradients, and they must not be added to others."""
        for backward_pass in list(self._backward_uses):
            self._end_uses(backward_pass)
            self._ready = []
            if self._pending is not None:
                self._pending.discard()
                self._pending = None

    def gradient_is_ready(self, weight: ShardedWeight) -> None:
        """The weight's gradient is complete, so backward has done with the weight. Begin to average it, two gradients
        in a collective; finish the last two, so that few are alive."""
        uses = self._uses_of_this_pass()
        for use in [use for use in uses if use.weight is weight]:
            del uses[use]
            self.release(weight)
        self._in_graph.discard(weight)
        gradient = weight.take_gradient()
        if gradient is None:
            return
        if self._ready and self._ready[0][1].dtype != gradient.dtype:
            self._reduce_ready()
        self._ready.append((weight, gradient))
        if len(self._ready) == REDUCED_TOGETHER:
            self._reduce_ready()

    def _reduce_ready(self) -> None:
        self._finish_pending()
        weights, gradients = zip(*self._ready, strict=True)
        self._ready = []
        self._pending = self._collectives.start_reduce_scatter(weights, list(gradients))

    def _finish_pending(self) -> None:
        if self._pending is not None:
            self._pending.finish()
            self._pending = None

    def finish_gradients(self) -> None:
        """There is no whole weight afterwards, since the shards are about to change."""
        self._forget_failed_passes()
        self.free_ahead()


def _go_together(first: ShardedWeight, second: ShardedWeight) -> bool:
    is_small = first.n_bytes < ALONE_BYTES and second.n_bytes < ALONE_BYTES
    return is_small and first is not second and first.dtype == second.dtype


class Use:
    """One use of a weight in one forward pass, and what autograd calls when backward reaches it.

    `begin_backward` is a hook on the layer's output: its gradient is there, and next the layer's own backward will look
    at the weight. The use ends when the weight's gradient is complete. For the weight's second and later uses, whose
    backward comes before the first's, `end_backward` ends it earlier: a hook on the view of the weight that the use
    computed with (its gradient is there, so whatever had saved the view has run), or, for a frozen weight, on the
    layer's input.
    """

    __slots__ = ("_manager", "weight")

    def __init__(self, manager: WeightManager, weight: ShardedWeight) -> None:
        self._manager = manager
        self.weight = weight

    def weight_for_forward(self) -> Tensor:
        """The whole weight to compute with; unless it is frozen, what ends the use in backward is arranged."""
        full, requires_grad = self.weight.full, self.weight.shard.requires_grad
        if full.requires_grad != requires_grad:
            full.requires_grad_(requires_grad)
        if requires_grad and torch.is_grad_enabled() and not self._manager.is_first_use(self.weight):
            full = full.view_as(full)
            full.register_hook(self.end_backward)
        return full

    def input_for_forward(self, value: Any) -> Any:
        """An input to compute with, of a layer whose weight is frozen: its gradient ends the use in backward."""
        if not (isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()):
            return value
        if value.is_leaf:  # it outlives the step, and so would each step's hook
            value = value.view_as(value)
        value.register_hook(self.end_backward)
        return value

    def begin_backward(self, gradient: object) -> None:
        self._manager.acquire_for_backward(self)

    def end_backward(self, gradient: object) -> None:
        self._manager.release_from_backward(self)
