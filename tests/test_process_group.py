"""Ranks start, meet, agree and end together, whether spawned, or started by torchrun or srun."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from cs336_systems.distributed import slurm
from cs336_systems.distributed.process_group import GroupOptions, RankContext, check_gpus, run_ranks, spawn_ranks
from cs336_systems.distributed.spawn import RankFailedError
from tests.distributed_helpers import run_gloo, start_python
from tests.script_helpers import is_running, wait_until

END_S = 30.0  # a failed run must have ended by then


def _sum_of_ranks(context: RankContext, offset: int) -> tuple[int, int, float, str]:
    total = torch.tensor(float(context.rank + offset))
    dist.all_reduce(total)
    return context.rank, dist.get_world_size(), total.item(), str(context.device)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_spawned_ranks_meet_and_return_in_rank_order(world_size: int) -> None:
    results = run_gloo(_sum_of_ranks, 10, world_size=world_size)
    total = sum(rank + 10 for rank in range(world_size))
    assert results == [(rank, world_size, total, "cpu") for rank in range(world_size)]
    assert not dist.is_initialized()


def _large_result(context: RankContext) -> torch.Tensor:
    return torch.full((1_000_000,), float(context.rank))


def test_results_larger_than_a_pipe_come_back() -> None:
    results = run_gloo(_large_result)
    assert [result[-1].item() for result in results] == [0.0, 1.0]


def _environment_value(_: RankContext, name: str) -> str | None:
    return os.environ.get(name)


def test_ranks_see_the_callers_environment_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    run_gloo(_environment_value, "X")  # the fork server is running, with an environment of its own
    monkeypatch.setenv("CS336_TEST_VALUE", "now")
    assert run_gloo(_environment_value, "CS336_TEST_VALUE") == ["now", "now"]


_FIRST_MODULES = """
import sys
from cs336_systems.distributed.spawn import spawn_processes

def has_torch(rank):
    return "torch.distributed" in sys.modules

if __name__ == "__main__":
    print(spawn_processes(has_torch, (), 2), has_torch(None))
"""


def test_a_spawned_rank_imports_no_torch_of_its_own(tmp_path: Path) -> None:
    """Which takes seconds: it is forked with the server's. The script names no torch, so that no rank could have it
    from elsewhere."""
    script = tmp_path / "ranks.py"
    script.write_text(_FIRST_MODULES)
    output, _ = start_python(str(script)).communicate()
    assert output == "[True, True] False\n"


_A_PROCESS = """
import multiprocessing, sys, tempfile
from multiprocessing import util
from cs336_systems.signals import starting_processes

if __name__ == "__main__":
    process = multiprocessing.get_context("forkserver").Process(target=sys.exit, args=(7,))
    with starting_processes():
        process.start()
    process.join()
    print(process.exitcode, util.get_temp_dir(), tempfile.gettempdir())
"""


@pytest.mark.parametrize("n_characters", [70, 71, 72, 76, 200])
def test_a_long_tmpdir_leaves_room_for_sockets(n_characters: int, tmp_path: Path) -> None:
    script, folder = tmp_path / "process.py", Path(tempfile.mkdtemp(dir="/tmp"))
    script.write_text(_A_PROCESS)
    long = folder / ("x" * (n_characters - len(f"{folder}/")))
    long.mkdir()
    output, _ = start_python(str(script), TMPDIR=str(long)).communicate()
    code, of_sockets, of_files = output.split()
    assert (code, of_files) == ("7", str(long))
    assert str(Path(of_sockets).parent) == (str(long) if n_characters <= 71 else "/tmp")
    assert not Path(of_sockets).exists()
    long.rmdir()  # in which nothing is left
    folder.rmdir()


def _fail(context: RankContext, how: str) -> None:
    if context.rank == 1:
        if how == "raises":
            raise ArithmeticError("no such gradient")
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "leaves":
            os._exit(0)
    while True:  # the others wait for a rank that never comes
        dist.all_reduce(torch.zeros(1))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raises", "rank 1 of 3 raised ArithmeticError: no such gradient"),
        ("killed", "rank 1 of 3 was killed by SIGKILL"),
        ("leaves", "rank 1 of 3 ended with exit status 0 and no result"),
    ],
)
def test_a_failing_rank_ends_the_run_and_is_named(how: str, message: str) -> None:
    start_s = time.monotonic()
    with pytest.raises(RankFailedError) as failure:
        run_gloo(_fail, how, world_size=3)
    assert time.monotonic() - start_s < END_S
    assert failure.value.rank == 1
    assert str(failure.value).startswith(message)
    if how == "raises":
        assert "in _fail" in failure.value.cause_traceback
        assert failure.value.cause_traceback.strip() in str(failure.value)
        assert isinstance(failure.value.__cause__, ArithmeticError)


def _hang_alone(context: RankContext) -> None:
    if context.rank == 1:
        raise KeyError("gone")
    time.sleep(3600)  # no collective through which it could notice


def test_ranks_that_notice_nothing_are_ended_too() -> None:
    start_s = time.monotonic()
    with pytest.raises(RankFailedError, match="rank 1 of 2 raised KeyError"):
        run_gloo(_hang_alone)
    assert time.monotonic() - start_s < END_S


_PARENT = """
import os, time
from cs336_systems.distributed import spawn

def sleep(rank):
    print(os.getpid(), flush=True)
    time.sleep(3600)

if __name__ == "__main__":
    spawn._preloaded_modules.clear()  # nothing here needs torch
    spawn.spawn_processes(sleep, (), 1)
"""


def test_ranks_end_with_their_parent(tmp_path: Path) -> None:
    """A parent that is killed leaves no ranks behind."""
    script = tmp_path / "parent.py"
    script.write_text(_PARENT)
    parent = start_python(str(script))
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    wait_until(lambda: not is_running(pid))
    parent.stdout.close()


_LAST_WORDS = """
import os, pathlib, sys, threading, time
from cs336_systems.distributed.last_words import end_at_once, finishing

def fail():
    raise ArithmeticError("told to nobody")

for stream in (sys.stdout, sys.stderr):
    if sys.argv[1] == "unread":
        reading, writing = os.pipe()
        os.close(reading)
    else:
        writing = os.open("/dev/full", os.O_WRONLY)
    os.dup2(writing, stream.fileno())
print("a line that waits in the buffer")
with finishing(lambda: pathlib.Path(sys.argv[2]).touch()), finishing(fail):
    threading.Thread(target=end_at_once, args=(3,), daemon=True).start()
    time.sleep(20)
os._exit(77)
"""


@pytest.mark.parametrize(
    "kind",
    [
        "unread",
        pytest.param("full", marks=pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")),
    ],
)
def test_a_rank_ends_where_its_last_words_cannot_be_written(kind: str, tmp_path: Path) -> None:
    finished = tmp_path / "finished"
    process = start_python("-c", _LAST_WORDS, kind, str(finished), PYTHONUNBUFFERED="")
    assert process.wait(END_S) == 3
    assert finished.exists()  # whose turn is after that of the function that failed
    process.communicate()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device_type": "tpu"}, "device_type='tpu': must"),
        ({"timeout_s": 0.0}, "timeout_s=0.0: must"),
        ({"max_ctas": 4}, "max_ctas=4: is an option of NCCL's"),
        ({"max_ctas": 65}, "max_ctas=65: must be between 1 and 64$"),
        ({"device_type": "cuda", "max_ctas": 0}, "max_ctas=0: must be between 1 and 64$"),
        ({"high_priority": True}, "high_priority=True: is an option of NCCL's"),
    ],
)
def test_bad_options_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GroupOptions(**arguments)


def test_bad_world_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="world_size=0: must"):
        spawn_ranks(_sum_of_ranks, 0, world_size=0)
    n_gpus = torch.cuda.device_count()
    with pytest.raises(ValueError, match=f"world_size={n_gpus + 1}: .* this node has {n_gpus} visible"):
        spawn_ranks(_sum_of_ranks, 0, world_size=n_gpus + 1, options=GroupOptions("cuda"))
    check_gpus("cpu", 10_000)


def test_a_world_size_other_than_the_launchers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="world_size=3: must be 2, as many ranks as the launcher started"):
        run_ranks(_sum_of_ranks, 0, world_size=3)


# Slurm: the variables that srun sets

STEP = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
}


def test_slurm_placement() -> None:
    assert slurm.is_task_of_several(STEP)
    assert slurm.placement(STEP) == (5, 7, 1, 3)
    assert slurm.placement({**STEP, "SLURM_STEP_TASKS_PER_NODE": "3(x2),1", "SLURM_NODEID": "2"}) == (5, 7, 1, 1)


def test_a_batch_script_and_a_lone_task_spawn_their_own_ranks() -> None:
    assert not slurm.is_task_of_several({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"})
    assert not slurm.is_task_of_several({**STEP, "SLURM_STEP_NUM_TASKS": "1"})
    assert not slurm.is_task_of_several({})
