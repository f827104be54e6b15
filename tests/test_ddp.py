"""The 2026 edition's test of data parallelism, in this project's words."""

import pytest

from cs336_systems.distributed.process_group import RankContext
from tests.adapters import ddp_on_after_backward, get_ddp
from tests.ddp_cases import train_through_adapters
from tests.distributed_helpers import run_gloo


def _train(context: RankContext, tied: bool) -> None:
    train_through_adapters(context, tied, get_ddp, ddp_on_after_backward)


@pytest.mark.parametrize("tied", [False, True])
def test_five_steps_on_two_ranks_equal_one_process(tied: bool) -> None:
    run_gloo(_train, tied, world_size=2)
