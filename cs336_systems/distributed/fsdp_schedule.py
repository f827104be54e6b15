"""When FSDP gathers and frees weights: up to two ahead of their use, in the order that the last step had.

A step's uses come in the same order each time: forward, backward, and between them what activation checkpointing
computes again. So the order is recorded, not derived from the model, and followed for as long as it fits.
"""

from __future__ import annotations

from collections import deque

import torch

from cs336_systems.distributed.fsdp_weight import PendingGradient, ShardedWeight

N_AHEAD = 2
# Reduce-scatters on their way; each keeps a whole weight's gradient alive.
MAX_PENDING_GRADIENTS = 2


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
        self._current.append(weight)
        if position < len(self._expected) and self._expected[position] is weight:
            return self._expected[position + 1 : position + 1 + N_AHEAD]
        self._expected = []
        return []


class WeightManager:
    """Keeps resident the weights that are in use and those expected next, and no others."""

    def __init__(self) -> None:
        self._order = UseOrder()
        self._ahead: list[ShardedWeight] = []
        self._resident: list[ShardedWeight] = []
        self._pending: deque[PendingGradient] = deque()
        self._backward_uses: dict[int, list[Use]] = {}  # by the backward pass that holds them

    def begin_forward(self) -> None:
        """A forward pass of the whole module begins; what was gathered before may be out of date."""
        if torch._C._current_graph_task_id() == -1:
            for backward_pass in list(self._backward_uses):  # one that raised
                self._end_backward(backward_pass)
        self._ahead = []
        self._free_unused()
        self._order.begin(torch.is_grad_enabled())

    def acquire(self, weight: ShardedWeight) -> None:
        """Make the weight available from now until `release`; begin to gather the next ones."""
        self._ahead = self._order.record(weight)
        weight.n_users += 1
        self._free_unused()
        for needed in (weight, *self._ahead):
            if not needed.is_resident:
                self._resident.append(needed)
                needed.start_gather()
        weight.wait()

    def release(self, weight: ShardedWeight) -> None:
        """The weight's use has ended; free it unless another lasts or one of the next needs it."""
        weight.n_users -= 1
        self._free_unused()

    def _free_unused(self) -> None:
        for weight in [w for w in self._resident if w.n_users == 0 and w not in self._ahead]:
            self._resident.remove(weight)
            weight.free()

    # ---- Backward ----------------------------------------------------------------------------------------------------

    def acquire_for_backward(self, use: Use) -> None:
        """As `acquire`, until `release_from_backward` or the end of the backward pass, whichever comes first."""
        backward_pass = torch._C._current_graph_task_id()
        if backward_pass not in self._backward_uses:
            self._backward_uses[backward_pass] = []
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end_backward(backward_pass))
        self._backward_uses[backward_pass].append(use)
        self.acquire(use.weight)

    def release_from_backward(self, use: Use) -> None:
        """The use's share of backward is done; does nothing for a use that holds nothing."""
        uses = self._backward_uses.get(torch._C._current_graph_task_id(), [])
        if use in uses:
            uses.remove(use)
            self.release(use.weight)

    def _end_backward(self, backward_pass: int) -> None:
        self._ahead = []
        for use in self._backward_uses.pop(backward_pass):  # e.g. of weights whose gradient was not asked for
            use.weight.n_users -= 1
        self._free_unused()

    def gradient_is_ready(self, weight: ShardedWeight) -> None:
        """Begin to average the weight's gradient, which is complete; finish the oldest, so that few are alive."""
        while len(self._pending) >= MAX_PENDING_GRADIENTS:
            self._pending.popleft().finish()
        self._pending.append(weight.start_reduce_scatter())

    def finish_gradients(self) -> None:
        """Every shard's gradient is there afterwards, and no whole weight, since the shards are about to change."""
        self._ahead = []
        self._free_unused()
        while self._pending:
            self._pending.popleft().finish()


class Use:
    """One use of a weight in one forward pass, and what autograd calls when backward reaches it.

    `begin_backward` is a hook on the layer's output: its gradient is there, and next the layer's own backward will look
    at the weight. `end_backward` is a hook on the view of the weight that this use computed with (its gradient is
    there, so whatever had saved the view has run), or, for a frozen weight, on the layer's input.
    """

    def __init__(self, manager: WeightManager, weight: ShardedWeight) -> None:
        self._manager = manager
        self.weight = weight

    def begin_backward(self, gradient: object) -> None:
        self._manager.acquire_for_backward(self)

    def end_backward(self, gradient: object) -> None:
        self._manager.release_from_backward(self)
