"""Started by torchrun, on one node or several: trains a BucketedDDP and saves rank 0's weights.

torchrun … -m tests.train_under_torchrun weights.pt
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from cs336_systems.distributed.ddp_bucketed import BucketedDDP
from cs336_systems.distributed.launcher import launched_world_size
from cs336_systems.distributed.process_group import RankContext, run_ranks
from tests.distributed_helpers import batch, loss_of, make_model, part

N_STEPS = 3


def train(context: RankContext) -> dict[str, Any]:
    """Three SGD steps on this rank's part of each batch; returns the weights."""
    model = BucketedDDP(make_model(context.rank), bucket_size_mb=0.0006)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # AdamW would import torch._dynamo
    for step in range(N_STEPS):
        optimizer.zero_grad()
        loss_of(model, *(part(tensor, context.rank, context.world_size) for tensor in batch(step))).backward()
        model.finish_gradient_synchronization()
        optimizer.step()
    return model.state_dict()


if __name__ == "__main__":
    weights = run_ranks(train, world_size=launched_world_size() or 1)
    if weights is not None:
        torch.save(weights, sys.argv[1])
