"""Ranks that are stopped, or started as Ctrl-C comes."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from cs336_systems.distributed import process_group, spawn
from cs336_systems.distributed.process_group import GroupOptions, RankContext, spawn_ranks
from cs336_systems.distributed.spawn import RankFailedError, spawn_processes, start_context
from tests.script_helpers import ScriptProcess, forked_processes, rows_in, wait_until


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_ends_ranks_without_a_word(tmp_path: Path) -> None:
    """A terminal sends it to the ranks too."""
    sizes = [f"{0.001 * n:.3f}" for n in range(1, 200)]
    arguments = ["--device", "cpu", "--processes", "2", "--sizes-mb", *sizes, "--repeats", "1"]
    arguments += ["--out", tmp_path / "out"]
    run = ScriptProcess(tmp_path, "all_reduce_benchmark", *arguments)
    wait_until(lambda: len(rows_in(tmp_path / "out", "all_reduce")) >= 2, "the second row")
    for pid in {*forked_processes(), run.pid}:
        os.kill(pid, signal.SIGINT)
    assert run.wait() == 130
    wait_until(lambda: not forked_processes(), "the end of the ranks")
    lines = [line for line in run.errors.splitlines() if "cell" not in line and line.strip()]
    settings, _, _ = lines[0].removeprefix("Interrupted. To go on: ").partition("python ")  # what the tests set
    typed = settings + shlex.join(["python", "scripts/all_reduce_benchmark.py", *map(str, arguments)])
    assert lines == [
        f"Interrupted. To go on: {typed} --resume",
        f"Rows, tables and plots: {tmp_path}/out/all_reduce*",
    ]
    rows = rows_in(tmp_path / "out", "all_reduce")
    assert run.output.count("| ok ") == len(rows)


def _has_interrupts_blocked(index: int, connection: Any) -> None:
    connection.send({signal.SIGINT, signal.SIGHUP} <= signal.pthread_sigmask(signal.SIG_BLOCK, []))


def _survives_an_interrupt(index: int) -> str:
    for number in (signal.SIGINT, signal.SIGHUP):
        os.kill(os.getpid(), number)
    return "lives"


def test_ranks_leave_ctrl_c_to_their_parent_from_the_first() -> None:
    receiver, sender = start_context().Pipe(duplex=False)
    process = start_context().Process(target=_has_interrupts_blocked, args=(0, sender))
    process.start()
    assert receiver.recv()  # as yet nothing of ours has run there
    process.join()
    assert spawn_processes(_survives_an_interrupt, (), 1) == ["lives"]


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes under /proc")
def test_ctrl_c_between_two_forks_leaves_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = spawn._start, []

    def interrupted(*arguments: Any) -> Any:
        started.append(start(*arguments))
        signal.raise_signal(signal.SIGINT)
        return started[-1]

    others = set(forked_processes())
    monkeypatch.setattr(spawn, "_start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        spawn_processes(_wait_for_ever, (), 2)
    assert len(started) == 1
    assert not set(forked_processes()) - others


def _wait_for_ever(index: int) -> None:
    signal.pause()


def _be_stopped(context: RankContext) -> None:
    import torch
    import torch.distributed as dist

    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1))  # from now on: a machine may be slow to start the ranks
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(1))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals as on POSIX")
def test_a_stopped_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "spawn_processes", lambda *call, waits_s: spawn_processes(*call, waits_s=1.0))
    with pytest.raises(RankFailedError) as failure:
        spawn_ranks(_be_stopped, world_size=3, options=GroupOptions("cpu", timeout_s=100.0))
    first = str(failure.value).splitlines()[0]
    assert first.startswith("rank 1 is alive and did not report within timeout_s=1, stopped or too slow, for which")
    assert "Timed out waiting 1000ms" in first


@pytest.mark.parametrize("value", [0.0, -1.0, 2e6, float("inf"), float("nan")])
def test_limits_that_no_group_has_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"^timeout_s=.*must be more than 0 and at most 1000000"):
        GroupOptions("cpu", timeout_s=value)
