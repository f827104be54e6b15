"""What FSDP keeps in memory and when it communicates: order, number and timing of its collectives."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from cs336_systems.distributed import fsdp_schedule
from cs336_systems.distributed.fsdp import FSDP
from cs336_systems.distributed.fsdp_schedule import N_AHEAD, REDUCED_TOGETHER, UseOrder, WeightManager
from cs336_systems.distributed.fsdp_weight import PendingGradients, ShardedWeight, WeightCollectives
from cs336_systems.distributed.process_group import RankContext
from tests.distributed_helpers import CountedCollectives, run_gloo
from tests.fsdp_helpers import Checkpointed, Mixed, build, loss_on, resident, transformer

N_LAYERS = 3
N_LINEAR = 7 * N_LAYERS + 1


class Log:
    """What a model's weights go through, in order: ("gather" | "use" | "free" | "reduce" | "reduced", name)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, str]] = []
        self.most_resident = self.most_pending = 0
        self._resident: set[str] = set()
        self._n_pending = 0
        for owner, method, record in (
            (WeightCollectives, "start_gather", lambda _, weights: self._gather(weights)),
            (ShardedWeight, "free", lambda weight: self._free(weight)),
            (WeightManager, "acquire", lambda manager, weight: self.events.append(("use", weight.name))),
            (WeightCollectives, "start_reduce_scatter", lambda _, weights, gradients: self._reduce(weights, 1)),
            (PendingGradients, "finish", lambda pending: self._reduce(pending.weights, -1)),
        ):
            monkeypatch.setattr(owner, method, self._before(getattr(owner, method), record))

    def _before(self, function: Callable, record: Callable) -> Callable:
        def recorded(*args: Any) -> Any:
            record(*args)
            return function(*args)

        return recorded

    def _gather(self, weights: Sequence[ShardedWeight]) -> None:
        for weight in weights:
            assert not weight.is_resident, f"{weight.name} is gathered twice"
            self.events.append(("gather", weight.name))
            self._resident.add(weight.name)
        self.most_resident = max(self.most_resident, len(self._resident))

    def _free(self, weight: ShardedWeight) -> None:
        self.events.append(("free", weight.name))
        self._resident.discard(weight.name)

    def _reduce(self, weights: Sequence[ShardedWeight], change: int) -> None:
        for weight in weights:
            self.events.append(("reduce" if change > 0 else "reduced", weight.name))
            self._n_pending += change
        self.most_pending = max(self.most_pending, self._n_pending)

    def names(self, kind: str) -> list[str]:
        return [name for event, name in self.events if event == kind]

    def clear(self) -> None:
        self.events, self.most_resident, self.most_pending = [], 0, 0


def step(model: FSDP, context: RankContext, i_step: int = 0) -> None:
    model.zero_grad()
    loss = loss_on(model, i_step, context.rank, context.world_size)
    loss.backward()
    model.finish_gradient_synchronization()


def gathers_ahead(context: RankContext, alone_bytes: int) -> None:
    """From the second step on weights are gathered before their use, and at most three are whole. The gathers of large
    ones begin two uses early; those of small ones, which are gathered in pairs, one or two."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(fsdp_schedule, "ALONE_BYTES", alone_bytes)
        log = Log(monkeypatch)
        model = FSDP(build(transformer, 0))
        log.clear()
        step(model, context)
        assert log.most_resident == 1  # nothing is known of the order yet
        uses = log.names("use")
        assert len(uses) == 1 + 2 * N_LINEAR
        log.clear()
        step(model, context)
        assert log.names("use") == uses
        assert log.most_resident == 1 + N_AHEAD
        assert log.most_pending <= REDUCED_TOGETHER
        # lm_head, the last in forward and the first in backward, stays; so do its neighbours, gathered ahead.
        gathers = log.names("gather")
        assert gathers == [name for name, before in zip(uses, [None, *uses], strict=False) if name != before]
        # lm_head's weight is gathered once, though forward ends with it and backward begins with it.
        assert gathers.count("lm_head.weight") == 1
        # When a use begins, its weight is there or on its way, and the next use's if large (but at the step's first).
        n_there = 1 if alone_bytes else N_AHEAD
        there: set[str] = set()
        position = 0
        for event, name in log.events:
            if event == "gather":
                there.add(name)
            elif event == "free":
                there.discard(name)
            elif event == "use":
                assert position == 0 or set(uses[position : position + n_there]) <= there
                position += 1
        assert log.names("reduce") == log.names("reduced")
        assert len(log.names("reduce")) == N_LINEAR + 1
        # Gradients leave in pairs while backward goes on: before the last use all but the last and one that waits have.
        last_use = max(i for i, event in enumerate(log.events) if event[0] == "use")
        assert sum(event[0] == "reduce" for event in log.events[:last_use]) == N_LINEAR - 2


def counts_collectives(context: RankContext) -> None:
    """A step's collectives: its gathers, alone and in pairs, reduce-scatters in pairs, one all-reduce of all else."""
    by_alone_bytes = {
        0: (2 * N_LINEAR, 0),  # a gather a use but the embedding's in backward, and lm_head's is one
        # Attention's weights in pairs, two a block: (q, k) and (v, o), and backward (o, v) and (k, q).
        12 * 8 * 4: (2 * N_LINEAR - 8 * N_LAYERS, 4 * N_LAYERS),
        2**30: (2, N_LINEAR - 1),
    }
    odd = (N_LINEAR + 1) % 2
    averages = {"reduce_scatter_tensor_coalesced_": (N_LINEAR + 1) // 2, "_reduce_scatter_base_": odd, "allreduce_": 1}
    for alone_bytes, (n_alone, n_pairs) in by_alone_bytes.items():
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(fsdp_schedule, "ALONE_BYTES", alone_bytes)
            model = FSDP(build(transformer, 0))
            step(model, context)  # learns the order
            with CountedCollectives() as counts:  # which sees the calling thread: on the CPU backward runs in it
                step(model, context)
        gathers = {"_allgather_base_": n_alone, "allgather_into_tensor_coalesced_": n_pairs}
        if context.backend == "gloo":
            gathers = {"_allgather_base_": n_alone + 2 * n_pairs}
        assert counts.by_name == Counter(averages | gathers), (alone_bytes, counts.by_name)
    tied = FSDP(build(partial(Mixed, tied=True), 0))
    loss = loss_on(tied, 0, context.rank, context.world_size)
    with CountedCollectives() as counts:
        loss.backward()
        tied.finish_gradient_synchronization()
    # Tied and twice-used weights' gradients travel once: embedding, positions, first, twice, narrow, widen.
    assert counts.by_name["reduce_scatter_tensor_coalesced_"] == 3
    assert counts.by_name["_reduce_scatter_base_"] == 0


def frees_saved_tensors(context: RankContext) -> None:
    """Between forward and backward the graph keeps views of the whole weights, and they have no memory."""
    for compute_dtype in (None, torch.bfloat16):
        model = FSDP(build(transformer, 0), compute_dtype=compute_dtype)
        saved: list[torch.Tensor] = []
        whole = {weight.gathered.untyped_storage()._cdata for weight in model._weights}

        def pack(tensor: torch.Tensor, whole: set[int] = whole, saved: list[torch.Tensor] = saved) -> torch.Tensor:
            if tensor.untyped_storage()._cdata in whole:
                saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = loss_on(model, 0, context.rank, context.world_size)
        assert len(saved) == N_LINEAR
        assert resident(model) == []
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in saved)
        loss.backward()
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in saved)
        model.finish_gradient_synchronization()
        # What is left is a rank's share: shards and their gradients.
        del loss, saved
        gc.collect()
        for weight in model._weights:
            assert weight.full.grad is None
            rows = weight.shard.shape[0]
            assert rows == weight.rows_of(torch.empty(weight.shape)).shape[0] <= weight.rows_per_rank
            assert weight.shard.untyped_storage().nbytes() == rows * weight.shard[0:1].nbytes
            assert weight.shard.grad is not None
            assert weight.shard.grad.untyped_storage().nbytes() <= weight.rows_per_rank * 4 * weight.shape[1]


def bounded_with_checkpointing(context: RankContext) -> None:
    """A segment of two blocks computed again needs no more whole weights than any other step."""
    for use_reentrant in (False, True):
        with pytest.MonkeyPatch.context() as monkeypatch:
            log = Log(monkeypatch)
            model = FSDP(build(partial(Checkpointed, 2, use_reentrant), 0))
            for i_step in range(3):
                log.clear()
                step(model, context, i_step)
            # One that backward holds, one that is computed again, and those ahead of it.
            assert log.most_resident <= 2 + N_AHEAD
            assert resident(model) == []
            assert len(log.names("use")) == 1 + N_LINEAR + (N_LINEAR - 1) + N_LINEAR


def bounded_with_two_forward_passes(context: RankContext) -> None:
    """One backward pass through two forward passes frees each use's weight before the other pass's turn."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        log = Log(monkeypatch)
        model = FSDP(build(transformer, 0))
        for _ in range(3):
            log.clear()
            losses = [loss_on(model, i, context.rank, context.world_size) for i in range(2)]
            torch.stack(losses).sum().backward()
            model.finish_gradient_synchronization()
            assert log.most_resident <= 1 + N_AHEAD
            assert log.names("reduce").count("lm_head.weight") == 1


def another_order(context: RankContext) -> None:
    """A step that leaves the recorded order is right all the same, and frees what was gathered for nothing."""

    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))
            self.order = [0, 1, 2, 3, 4]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for i in self.order:
                x = torch.tanh(self.layers[i](x))
            return x

    model, plain = FSDP(build(Skips, 0)), build(Skips, 0)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    for order in ([0, 1, 2, 3, 4], [0, 4, 2], [4, 4, 1], [4, 4, 1], [3], [0, 1, 2, 3, 4]):
        for each in (model, plain):
            (each.module if isinstance(each, FSDP) else each).order = order
            each.zero_grad()
            each(x).square().mean().backward()
        model.finish_gradient_synchronization()
        assert resident(model) == []
        for weight, expected in zip(model._weights, (layer.weight for layer in plain.layers), strict=True):
            assert (weight.shard.grad is None) == (expected.grad is None)
            if expected.grad is not None:
                torch.testing.assert_close(weight.shard.grad, weight.rows_of(expected.grad), rtol=1e-6, atol=1e-7)


def all_cases(context: RankContext) -> None:
    torch.set_num_threads(1)
    gathers_ahead(context, alone_bytes=0)
    gathers_ahead(context, alone_bytes=2**30)
    counts_collectives(context)
    frees_saved_tensors(context)
    bounded_with_checkpointing(context)
    bounded_with_two_forward_passes(context)
    another_order(context)


def test_memory_and_communication() -> None:
    run_gloo(all_cases, world_size=2)


def test_use_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsdp_schedule, "MAX_RECORDED", 5)
    a, b, c = (object() for _ in range(3))
    order: Any = UseOrder()
    order.begin(True)
    assert [order.record(use) for use in (a, b, c, b, a)] == [[]] * 5
    order.begin(False)
    assert order.record(a) == []
    order.begin(True)
    assert [order.record(use) for use in (a, b, c, b, a)] == [[b, c], [c, b], [b, a], [a], []]
    order.begin(True)
    assert [order.record(use) for use in (a, c, b)] == [[b, c], [], []]  # another order: nothing is predicted
    order.begin(True)
    assert order.record(a) == [c, b]
    order.begin(True)
    for _ in range(2):  # a step that never ends is remembered in part
        assert [order.record(use) for use in (a, b, c, b, a, b)] == [[]] * 6
    assert len(order._current) == 5
    order.begin(True)
    assert [order.record(use) for use in (a, b, c, b, a, b)] == [[b, c], [c, b], [b, a], [a], [], []]
