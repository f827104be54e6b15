"""The sharded optimizer with data parallelism, and clipping."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cs336_systems.distributed.ddp_bucketed import BucketedDDP
from cs336_systems.distributed.process_group import RankContext
from cs336_systems.distributed.sharded_optimizer import ShardedOptimizer
from tests.distributed_helpers import (
    assert_same_on_all_ranks,
    assert_same_weights,
    batch,
    finish,
    loss_of,
    make_model,
    part,
    run_gloo,
)


def train_data_parallel(context: RankContext) -> None:
    """Under a wrapper whose gradients are views into buckets, clipped by their global norm."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i_step: int, rank: int, world_size: int) -> None:
        tokens, targets = batch(i_step)
        optimizer.zero_grad(set_to_none=i_step % 2 == 0)
        loss_of(model, part(tokens, rank, world_size), part(targets, rank, world_size)).backward()
        finish(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    def sharded(parameters: Any) -> ShardedOptimizer:
        return ShardedOptimizer(parameters, torch.optim.AdamW, lr=0.02)

    for wrapped_first in (False, True):
        module = make_model(context.rank)
        early = None if wrapped_first else sharded(module.parameters())
        model = BucketedDDP(module, bucket_size_mb=0.0006)
        optimizer = early or sharded(model.parameters())
        plain = make_model(0)
        alone = torch.optim.AdamW(plain.parameters(), lr=0.02)
        for i_step in range(10):
            step(plain, alone, i_step, 0, 1)
            step(model, optimizer, i_step, context.rank, context.world_size)
        assert_same_on_all_ranks(module)
        assert_same_weights(module, plain)


def test_with_data_parallelism() -> None:
    run_gloo(train_data_parallel, world_size=2)
