"""What a launcher's environment says of a rank, and ranks whose others never come."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import sys
import time
from pathlib import Path
from threading import Timer

import pytest
import torch

from cs336_systems.distributed.launcher import Placement, RanksMissingError, check_environment, launched_placement
from cs336_systems.distributed.lifeline import own_address
from cs336_systems.distributed.meeting import from_rank_0
from cs336_systems.distributed.process_group import GroupOptions, _gpu_index, run_ranks
from cs336_systems.distributed.spawn import start_context
from tests.launched_ranks import ENVIRONMENTS, run_to_end, srun_environment, sum_of_ranks, write_to
from tests.script_helpers import refused_without_torch


def _stand_alone(monkeypatch: pytest.MonkeyPatch, kind: str, rank: int, directory: Path) -> None:
    port = 1 if rank else 0  # at which nobody listens, or which the system picks
    for name, value in ENVIRONMENTS[kind](rank, 2, port, directory).items():
        if name != "TORCHELASTIC_USE_AGENT_STORE":  # rank 0 holds the store
            monkeypatch.setenv(name, value)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_rank_that_waits_for_others_answers_signals(
    number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _stand_alone(monkeypatch, "torchrun", 0, tmp_path)
    handler = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    begin_s = time.monotonic()
    try:
        Timer(0.5, os.kill, (os.getpid(), number)).start()
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            from_rank_0("rows", timeout_s=1e5)  # longer than the tests take: its thread waits on
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert time.monotonic() - begin_s < 15


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "rank", "place"),
    [("torchrun", 0, " at 127.0.0.1:0"), ("torchrun", 1, " at 127.0.0.1:1"), ("slurm", 1, "")],
)
def test_ranks_that_do_not_come_are_an_error_in_a_line(
    kind: str, rank: int, place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _stand_alone(monkeypatch, kind, rank, tmp_path)
    with pytest.raises(RanksMissingError) as error:
        from_rank_0(None, timeout_s=1.0)
    line = f"rank {rank} of 2 waited 1 s for the others{place}, and not all of ranks 0 to 1 came"
    assert (str(error.value), error.value.in_a_line) == (line, line)


def test_a_place_that_cannot_be_is_an_error_in_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _stand_alone(monkeypatch, "torchrun", 0, tmp_path)
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(RanksMissingError, match=rf"rank 0 of 2 could not meet the others at 127.0.0.1:{port}: The"):
            from_rank_0(None, timeout_s=5.0)


def _alone(environment: dict[str, str], output: Path, ends: str) -> None:
    os.environ.update(environment)
    write_to(output)
    if ends == "fails":
        run_ranks(sum_of_ranks, 0, world_size=2, options=GroupOptions("cpu", timeout_s=1.0))
    from_rank_0("rows", timeout_s=20.0)
    atexit._run_exitfuncs()  # as at the end of a program, by SIGTERM or otherwise


@pytest.mark.parametrize("ends", ["fails", "is stopped"])
def test_a_slurm_job_whose_ranks_did_not_all_come_leaves_no_file(ends: str, tmp_path: Path) -> None:
    output = tmp_path / "output"
    arguments = (srun_environment(0, 2, 0, tmp_path), output, ends)
    codes = run_to_end([start_context().Process(target=_alone, args=arguments)])
    assert codes == [1 if ends == "fails" else 0]
    if ends == "fails":
        assert output.read_text() == "error: rank 0 of 2 waited 1 s for the others, and not all of ranks 0 to 1 came\n"
    assert list(tmp_path.iterdir()) == [output]


_RANK_0 = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
_NO_PLACE = (
    "must be set in the environment of a launched rank: the host of rank 0, and a free port there, "
    "e.g. MASTER_ADDR=127.0.0.1 MASTER_PORT=29500"
)
_MUST = "in the environment must be a whole number"


@pytest.mark.parametrize(
    ("environment", "line"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, f"MASTER_ADDR and MASTER_PORT {_NO_PLACE}"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, f"MASTER_ADDR {_NO_PLACE}"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, f"MASTER_PORT {_NO_PLACE}"),
        ({**_RANK_0, "MASTER_PORT": "abc"}, f"MASTER_PORT='abc' {_MUST} from 1 to 65535"),
        ({**_RANK_0, "MASTER_PORT": "99999"}, f"MASTER_PORT='99999' {_MUST} from 1 to 65535"),
        ({**_RANK_0, "WORLD_SIZE": "0"}, f"WORLD_SIZE='0' {_MUST} at least 1"),
        ({**_RANK_0, "RANK": "5"}, f"RANK='5' {_MUST} from 0 to 1, as WORLD_SIZE=2"),
        ({**_RANK_0, "RANK": "-1"}, f"RANK='-1' {_MUST} from 0 to 1, as WORLD_SIZE=2"),
        ({**_RANK_0, "RANK": "abc"}, f"RANK='abc' {_MUST} from 0 to 1, as WORLD_SIZE=2"),
        ({**_RANK_0, "LOCAL_RANK": "2"}, f"LOCAL_RANK='2' {_MUST} from 0 to 1"),
        ({**srun_environment(0, 2, 0, Path()), "MASTER_PORT": "1"}, f"MASTER_ADDR {_NO_PLACE}"),
    ],
)  # fmt: skip
def test_an_environment_that_no_rank_can_have_is_refused_at_once(
    environment: dict[str, str], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert refused_without_torch("train", "--parallel", "ddp", "--device", "cpu") == f"error: {line}\n"


@pytest.mark.parametrize("kind", ENVIRONMENTS)
def test_the_environment_that_a_launcher_sets_is_taken(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENTS[kind](1, 2, 29500, Path()).items():
        monkeypatch.setenv(name, value)
    check_environment(ranks_meet=True)
    assert launched_placement() == Placement(rank=1, world_size=2, local_rank=1, local_world_size=2)


def test_a_slurm_task_with_a_gpu_of_its_own_uses_that(monkeypatch: pytest.MonkeyPatch) -> None:
    placement = Placement(rank=6, world_size=8, local_rank=2, local_world_size=4)
    for name, value in srun_environment(6, 8, 0, Path()).items():
        monkeypatch.setenv(name, value)
    for n_visible, index in ((4, 2), (1, 0)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda n_visible=n_visible: n_visible)
        assert _gpu_index(placement) == index


def test_a_node_is_reached_by_the_address_towards_the_rendezvous() -> None:
    assert own_address("127.0.0.1", 1) == "127.0.0.1"
    assert own_address("localhost", 1) == "localhost"
    assert own_address("no.such.host.invalid", 1) == "no.such.host.invalid"
