"""Ranks that torchrun or srun started: they meet, return to rank 0, and end together when one fails."""

from __future__ import annotations

import atexit
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cs336_systems.distributed.launcher import (
    Placement,
    RanksMissingError,
    check_environment,
    launched_placement,
    launcher,
)
from cs336_systems.distributed.lifeline import own_address
from cs336_systems.distributed.meeting import from_rank_0
from cs336_systems.distributed.process_group import GroupOptions, RankContext, _gpu_index, run_ranks
from cs336_systems.distributed.spawn import start_context
from cs336_systems.training.checkpoints import list_checkpoints
from tests.distributed_helpers import OPTIONS, ROOT, batch, loss_of, make_model
from tests.script_helpers import ScriptProcess, refused_without_torch, wait_until
from tests.train_under_torchrun import N_STEPS
from tests.training_helpers import QUICK, write_text

END_S = 30.0


@pytest.mark.slow  # four processes that import torch by themselves
def test_two_nodes_under_torchrun_train_the_same_weights(tmp_path: Path) -> None:
    """Two torchruns on this machine, each a node of one rank, meet over the loopback address."""
    files = [tmp_path / "node-0.pt", tmp_path / "node-1.pt"]
    with socket.socket() as probe:  # torchrun asks for a port by number; this one was free a moment ago
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    nodes = [
        start_context().Process(
            target=_torchrun,
            args=(
                tmp_path / f"output-{node}",
                ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=two-nodes"],
                [f"--node-rank={node}", f"--rdzv-endpoint={endpoint}"],
                ["-m", "tests.train_under_torchrun", str(files[node])],
            ),
        )
        for node in range(2)
    ]
    outputs = [tmp_path / f"output-{node}" for node in range(2)]
    assert _run_to_end(nodes) == [0, 0], [output.read_text() for output in outputs]
    written = [file for file in files if file.exists()]
    assert len(written) == 1  # by rank 0 alone
    alone = make_model(0)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(N_STEPS):
        optimizer.zero_grad()
        loss_of(alone, *batch(step)).backward()
        optimizer.step()
    for weights in torch.load(written[0]):
        for name, expected in alone.state_dict().items():
            torch.testing.assert_close(weights[name], expected, rtol=1e-9, atol=1e-12)


def _torchrun(output: Path, *arguments: list[str]) -> None:
    """What `torchrun` on the command line calls, in a process that has torch already."""
    from torch.distributed.run import main

    _write_to(output)
    os.environ.update(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    main([argument for some in arguments for argument in some])


def _write_to(output: Path) -> None:
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")


def _run_to_end(processes: list[Any]) -> list[int]:
    """Starts processes and returns their exit codes."""
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
        if process.is_alive():
            process.kill()
            process.join()
    return [process.exitcode for process in processes]


# Ranks with a launcher's environment, forked from the tests' fork server: quicker than the launchers themselves


def _torchrun_environment(rank: int, world_size: int, port: int, _: Path) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the agent, here the test, holds the store
    }


def _srun_environment(rank: int, world_size: int, _: int, directory: Path) -> dict[str, str]:
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(world_size),
        "SLURM_STEP_TASKS_PER_NODE": str(world_size),
        "CS336_RENDEZVOUS_DIR": str(directory),
    }


ENVIRONMENTS: dict[str, Callable[[int, int, int, Path], dict[str, str]]] = {
    "torchrun": _torchrun_environment,
    "slurm": _srun_environment,
}


def _rank_process(environment: dict[str, str], output: Path, function: Callable, args: tuple, world_size: int) -> None:
    os.environ.update(environment)
    _write_to(output)
    for _ in range(2):  # one group after another
        print(launcher(), run_ranks(function, *args, world_size=world_size, options=OPTIONS), flush=True)


def _launch(kind: str, directory: Path, function: Any, *args: Any, world_size: int = 3) -> tuple[list[int], list[str]]:
    """Exit codes and outputs of the ranks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    outputs = [directory / f"output-{rank}" for rank in range(world_size)]
    processes = [
        start_context().Process(
            target=_rank_process,
            args=(
                ENVIRONMENTS[kind](rank, world_size, store.port, directory),
                outputs[rank],
                function,
                args,
                world_size,
            ),
        )
        for rank in range(world_size)
    ]
    return _run_to_end(processes), [output.read_text() for output in outputs]


def _sum(context: RankContext, offset: int) -> tuple[int, float]:
    total = torch.tensor(float(context.rank + offset))
    dist.all_reduce(total)
    return context.local_rank, total.item()


@pytest.mark.parametrize("kind", ENVIRONMENTS)
def test_launched_ranks_meet_and_rank_0_gets_the_results(kind: str, tmp_path: Path) -> None:
    codes, outputs = _launch(kind, tmp_path, _sum, 10)
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
    codes, outputs = _launch(kind, tmp_path, _fail, failing, how, started)
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
    codes, _ = _launch("torchrun", tmp_path, _fail_unread, failing, how, started, world_size=2)
    assert time.time() - float(started.read_text()) < END_S
    assert codes[1 - failing] == 1
    assert codes[failing] == (1 if how == "raises" else -signal.SIGKILL)
    error = Path(f"{started}-error-{failing}")
    assert [error] * (how == "raises") == list(tmp_path.glob("started-error-*"))
    if how == "raises":
        assert "no such gradient" in error.read_text()  # what torchrun shows at its end


def _all_reduce_benchmark(environment: dict[str, str], output: Path, out: Path) -> None:
    os.environ.update(environment)
    _write_to(output)
    from cs336_systems.benchmarking.run_all_reduce import run_all_reduce_benchmark

    options: dict[str, Any] = {"warmup": 1, "repeats": 2, "max_ctas": None, "high_priority": False}
    command = "torchrun scripts/all_reduce_benchmark.py"
    for resume, sizes_mb in enumerate(((0.01, 0.1), (0.01, 0.2, 0.1))):
        rows = run_all_reduce_benchmark(
            command, processes=(), sizes_mb=sizes_mb, device="cpu", out=out, resume=bool(resume), **options
        )
    print([row.size_mb for row in rows], flush=True)


def test_a_benchmark_under_a_launcher_writes_on_rank_0_and_resumes_on_all(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    outputs = [tmp_path / f"output-{rank}" for rank in range(2)]
    folders = [tmp_path / f"rank-{rank}" for rank in range(2)]
    processes = [
        start_context().Process(
            target=_all_reduce_benchmark,
            args=(_torchrun_environment(rank, 2, store.port, tmp_path), outputs[rank], folders[rank]),
        )
        for rank in range(2)
    ]
    assert _run_to_end(processes) == [0, 0], [output.read_text() for output in outputs]
    assert "[0.01, 0.1, 0.2]" in outputs[0].read_text().splitlines()
    assert outputs[1].read_text() == "[]\n"
    assert (folders[0] / "all_reduce.json").exists()
    assert not (folders[1] / "all_reduce.json").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_launched_benchmark_that_is_stopped_leaves_tables(number: int, tmp_path: Path) -> None:
    """As in a terminal, all ranks hear it, and once more when the launcher passes it on; between two cells, when no
    rank is in a group, as well as inside one."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    sizes = [f"{0.001 * n:.3f}" for n in range(1, 400)]
    arguments = ["--device", "cpu", "--sizes-mb", *sizes, "--repeats", "1", "--out", tmp_path / "out"]
    folders = [tmp_path / f"rank-{rank}" for rank in range(2)]
    ranks = []
    for rank, folder in enumerate(folders):
        folder.mkdir()
        environment = _torchrun_environment(rank, 2, store.port, tmp_path)
        ranks.append(ScriptProcess(folder, "all_reduce_benchmark", *arguments, environment=environment))
    rows_file = tmp_path / "out" / "all_reduce.json"
    wait_until(lambda: rows_file.exists() and len(json.loads(rows_file.read_text())["rows"]) >= 2, "the second row")
    for _ in range(2):
        for rank in ranks:
            with suppress(ProcessLookupError):
                rank.send_signal(number)
    # Who is in a collective first hears that the other has ended.
    assert ranks[0].wait() in (128 + number, 1)
    assert ranks[1].wait() in (-number, 1)
    assert "Traceback" not in ranks[0].errors + ranks[1].errors
    n_rows = len(json.loads(rows_file.read_text())["rows"])
    command = "torchrun --nproc-per-node 2 scripts/all_reduce_benchmark.py --device cpu"
    assert f"To go on: OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']} " in ranks[0].errors
    assert f" {command} " in ranks[0].errors
    assert f" {command} " in json.loads(rows_file.read_text())["runs"][0]["command"]
    assert f"{n_rows} of 399 cells have their rows. Left: " in ranks[0].errors
    tables = [(tmp_path / "out" / f"all_reduce.{kind}").read_text() for kind in ("md", "csv", "tex")]
    assert [tables[0].count("| ok "), len(tables[1].splitlines())] == [n_rows, n_rows + 1]
    assert (tmp_path / "out" / "all_reduce.png").exists()


def test_launched_training_that_is_stopped_says_how_to_go_on(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    out, data = tmp_path / "out", write_text(tmp_path)
    options = {**QUICK, "parallel": "ddp", "steps": 1_000_000, "checkpoint_every": 2, "data": data, "out": out}
    arguments = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    ranks = []
    for rank in range(2):
        folder = tmp_path / f"rank-{rank}"
        folder.mkdir()
        environment = _torchrun_environment(rank, 2, store.port, tmp_path)
        ranks.append(ScriptProcess(folder, "train", *arguments, environment=environment))
    wait_until(lambda: len(list_checkpoints(out)) > 1, "a checkpoint before the newest, which may be half there")
    for rank in ranks:
        with suppress(ProcessLookupError):
            rank.send_signal(signal.SIGTERM)
    # Who is in a collective first hears that the other has ended.
    assert {rank.wait() for rank in ranks} <= {128 + signal.SIGTERM, 1}
    how = r"^To go on from checkpoint-\d+\.pt: .*torchrun --nproc-per-node 2 scripts/train\.py .* --resume$"
    assert [len(re.findall(how, rank.errors, re.MULTILINE)) for rank in ranks] == [1, 0]


# Ranks whose others never come


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
    _write_to(output)
    if ends == "fails":
        run_ranks(_sum, 0, world_size=2, options=GroupOptions("cpu", timeout_s=1.0))
    from_rank_0("rows", timeout_s=20.0)
    atexit._run_exitfuncs()  # as at the end of a program, by SIGTERM or otherwise


@pytest.mark.parametrize("ends", ["fails", "is stopped"])
def test_a_slurm_job_whose_ranks_did_not_all_come_leaves_no_file(ends: str, tmp_path: Path) -> None:
    output = tmp_path / "output"
    arguments = (_srun_environment(0, 2, 0, tmp_path), output, ends)
    codes = _run_to_end([start_context().Process(target=_alone, args=arguments)])
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
        ({**_srun_environment(0, 2, 0, Path()), "MASTER_PORT": "1"}, f"MASTER_ADDR {_NO_PLACE}"),
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
    for name, value in _srun_environment(6, 8, 0, Path()).items():
        monkeypatch.setenv(name, value)
    for n_visible, index in ((4, 2), (1, 0)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda n_visible=n_visible: n_visible)
        assert _gpu_index(placement) == index


def test_a_node_is_reached_by_the_address_towards_the_rendezvous() -> None:
    assert own_address("127.0.0.1", 1) == "127.0.0.1"
    assert own_address("localhost", 1) == "localhost"
    assert own_address("no.such.host.invalid", 1) == "no.such.host.invalid"
