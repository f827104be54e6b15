"""Ranks that torchrun or srun started: they meet, return to rank 0, and end together when one fails."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from cs336_systems.distributed.process_group import RankContext
from tests.launched_ranks import ENVIRONMENTS, launch, sum_of_ranks

END_S = 30.0


@pytest.mark.parametrize("kind", ENVIRONMENTS)
def test_launched_ranks_meet_and_rank_0_gets_the_results(kind: str, tmp_path: Path) -> None:
    codes, outputs = launch(kind, tmp_path, sum_of_ranks, 10)
    assert codes == [0, 0, 0], outputs
    results = [(rank, 33.0) for rank in range(3)]
    assert outputs[0] == f"{kind} {results}\n" * 2
    assert outputs[1] == outputs[2] == f"{kind} None\n" * 2
    assert not list(tmp_path.glob(".rendezvous*"))


def _fail(context: RankContext, failing: int, how: str, started: Path) -> None:
    dist.barrier()
    if context.rank == failing:
        started.write_text(str(time.time()))
        if how == "raises":
            raise ArithmeticError("no such gradient")
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(4 * END_S)  # in no collective through which it could notice


@pytest.mark.parametrize("kind", ENVIRONMENTS)
@pytest.mark.parametrize(("failing", "how"), [(0, "raises"), (1, "raises"), (0, "killed"), (1, "killed")])
def test_all_launched_ranks_end_when_one_fails(kind: str, failing: int, how: str, tmp_path: Path) -> None:
    started = tmp_path / "started"
    codes, outputs = launch(kind, tmp_path, _fail, failing, how, started)
    assert time.time() - float(started.read_text()) < END_S
    assert codes[failing] == (1 if how == "raises" else -signal.SIGKILL)
    if how == "raises":
        assert outputs[failing].startswith(f"rank {failing} of 3 on ")
        assert "in _fail" in outputs[failing]
        assert outputs[failing].rstrip().endswith("ArithmeticError: no such gradient")
    for rank in {0, 1, 2} - {failing}:
        assert codes[rank] == 1
        assert outputs[rank] == f"rank {rank} ends because rank {failing} has ended\n"


def _fail_unread(context: RankContext, failing: int, how: str, started: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    for number in (1, 2):
        os.dup2(writing, number)
    os.environ["TORCHELASTIC_ERROR_FILE"] = f"{started}-error-{context.rank}"
    _fail(context, failing, how, started)


@pytest.mark.parametrize(("failing", "how"), [(0, "killed"), (1, "killed"), (1, "raises")])
def test_launched_ranks_end_though_nobody_reads_what_they_print(failing: int, how: str, tmp_path: Path) -> None:
    """As under `torchrun ... 2>&1 | head`."""
    started = tmp_path / "started"
    codes, _ = launch("torchrun", tmp_path, _fail_unread, failing, how, started, world_size=2)
    assert time.time() - float(started.read_text()) < END_S
    assert codes[1 - failing] == 1
    assert codes[failing] == (1 if how == "raises" else -signal.SIGKILL)
    error = Path(f"{started}-error-{failing}")
    assert [error] * (how == "raises") == list(tmp_path.glob("started-error-*"))
    if how == "raises":
        assert "no such gradient" in error.read_text()  # what torchrun shows at its end
