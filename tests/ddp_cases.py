"""The wrappers that every data-parallel test runs over, and their collectives a step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from cs336_systems.distributed.ddp_bucketed import BucketedDDP
from cs336_systems.distributed.ddp_flat import FlatDDP
from cs336_systems.distributed.ddp_naive import NaiveDDP
from cs336_systems.distributed.ddp_overlapped import OverlappedDDP
from cs336_systems.distributed.process_group import RankContext
from tests.distributed_helpers import N_TRAINABLE

SMALL_MB = 0.0006  # TiedModel in float64: four buckets
WRAPPERS: dict[str, Callable[..., Any]] = {
    "naive": NaiveDDP,
    "flat": FlatDDP,
    "overlapped": OverlappedDDP,
    "bucketed": partial(BucketedDDP, bucket_size_mb=SMALL_MB),
    "bucketed-no-views": partial(BucketedDDP, bucket_size_mb=SMALL_MB, gradient_as_bucket_view=False),
}
N_COLLECTIVES = {
    "naive": {"allreduce_": N_TRAINABLE},
    "flat": {"allreduce_": 1},
    "overlapped": {"allreduce_": N_TRAINABLE},
    "bucketed": {"allreduce_": 4},
    "bucketed-no-views": {"allreduce_coalesced_": 4},
}
each_wrapper = pytest.mark.parametrize("name", WRAPPERS)


# The course's tests of both editions look at the same training, through tests/adapters.py.


class _Layers(nn.Module):
    """(batch, 10) to (batch, 5): no biases, a frozen parameter, and optionally two layers of one weight."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.first = nn.Linear(10, 10, bias=False)
        self.middle = nn.Linear(10, 10, bias=False)
        if tied:
            self.middle.weight = self.first.weight
        self.last = nn.Linear(10, 5, bias=False)
        self.fixed = nn.Parameter(torch.tensor([2.0, 3.0]), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.middle(torch.relu(self.first(x)))))


def train_through_adapters(
    context: RankContext,
    tied: bool,
    wrap: Callable[[nn.Module], nn.Module],
    on_after_backward: Callable[[nn.Module, torch.optim.Optimizer], None],
    on_batch_start: Callable[[nn.Module, torch.optim.Optimizer], None] = lambda model, optimizer: None,
) -> None:
    """Five SGD steps on this rank's half of each batch, beside one process on the whole batch.

    Each rank starts from weights of its own, and after wrapping has rank 0's. Parameters are compared in the order in
    which the two models list them, after wrapping and after each step.
    """
    torch.manual_seed(context.rank)
    module = _Layers(tied)
    own = [parameter.detach().clone() for parameter in module.parameters()]
    wrapped = wrap(module)
    assert wrapped.module is module
    torch.manual_seed(0)
    alone = _Layers(tied)
    for parameter, before, expected in zip(wrapped.parameters(), own, alone.parameters(), strict=True):
        assert torch.equal(parameter, expected)
        # The weights differed between the ranks; the frozen parameter is a constant.
        assert torch.equal(before, expected) == (context.rank == 0 or not parameter.requires_grad)
    first = [parameter.detach().clone() for parameter in alone.parameters()]
    optimizers = torch.optim.SGD(wrapped.parameters(), lr=0.1), torch.optim.SGD(alone.parameters(), lr=0.1)
    x, y = torch.randn(20, 10), torch.randn(20, 5)
    for _ in range(5):
        on_batch_start(wrapped, optimizers[0])
        for model, optimizer, rows in (
            (wrapped, optimizers[0], slice(context.rank, None, 2)),
            (alone, optimizers[1], slice(None)),
        ):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
            if model is wrapped:
                on_after_backward(wrapped, optimizer)
            optimizer.step()
        for parameter, expected in zip(wrapped.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(parameter, expected)
        x, y = x.roll(3, 0), y.roll(3, 0)
    moved = [
        not torch.equal(parameter, expected) for parameter, expected in zip(wrapped.parameters(), first, strict=True)
    ]
    assert moved == [parameter.requires_grad for parameter in wrapped.parameters()]
