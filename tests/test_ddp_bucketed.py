"""The 2025 edition's test of bucketed data parallelism, in this project's words."""

from functools import partial

import pytest

from cs336_systems.distributed.process_group import RankContext
from tests.adapters import (
    ddp_bucketed_on_after_backward,
    ddp_bucketed_on_train_batch_start,
    get_ddp_bucketed,
)
from tests.ddp_cases import train_through_adapters
from tests.distributed_helpers import run_gloo


def _train(context: RankContext, tied: bool, bucket_size_mb: float) -> None:
    train_through_adapters(
        context,
        tied,
        partial(get_ddp_bucketed, bucket_size_mb=bucket_size_mb),
        ddp_bucketed_on_after_backward,
        ddp_bucketed_on_train_batch_start,
    )


@pytest.mark.parametrize("bucket_size_mb", [0.0016, 0.0001, 0.01])
@pytest.mark.parametrize("tied", [False, True])
def test_five_steps_on_two_ranks_equal_one_process(tied: bool, bucket_size_mb: float) -> None:
    run_gloo(_train, tied, bucket_size_mb, world_size=2)
