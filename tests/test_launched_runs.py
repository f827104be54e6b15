"""Benchmarks and training as ranks that a launcher started: rank 0 writes, all resume, and what stops them is told."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cs336_systems.distributed.spawn import start_context
from cs336_systems.signals import IN_SUCCESSION_S
from cs336_systems.training.checkpoints import list_checkpoints
from cs336_systems.training.metrics import METRICS, PLOT
from tests.distributed_helpers import ROOT, batch, loss_of, make_model
from tests.launched_ranks import run_to_end, torchrun_environment, write_to
from tests.script_helpers import END_S, ScriptProcess, rows_in, wait_until
from tests.train_under_torchrun import N_STEPS
from tests.training_helpers import QUICK, write_text


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
    assert run_to_end(nodes) == [0, 0], [output.read_text() for output in outputs]
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

    write_to(output)
    os.environ.update(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    main([argument for some in arguments for argument in some])


def _all_reduce_benchmark(environment: dict[str, str], output: Path, out: Path) -> None:
    os.environ.update(environment)
    write_to(output)
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
            args=(torchrun_environment(rank, 2, store.port, tmp_path), outputs[rank], folders[rank]),
        )
        for rank in range(2)
    ]
    assert run_to_end(processes) == [0, 0], [output.read_text() for output in outputs]
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
        environment = torchrun_environment(rank, 2, store.port, tmp_path)
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


@contextmanager
def _launched_training(tmp_path: Path, **changes: Any) -> Generator[tuple[Path, list[ScriptProcess]]]:
    """The folder that rank 0 writes to, and two ranks of train.py, killed if the block leaves them running."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    out, data = tmp_path / "out", write_text(tmp_path)
    options = {**QUICK, "parallel": "ddp", "steps": 1_000_000, "data": data, "out": out, **changes}
    ranks: list[ScriptProcess] = []
    try:
        for rank in range(2):
            folder = tmp_path / f"rank-{rank}"
            folder.mkdir()
            environment = torchrun_environment(rank, 2, store.port, tmp_path)
            ranks.append(ScriptProcess(folder, "train", *_flags(options), environment=environment))
        yield out, ranks
    finally:
        for process in ranks:
            process.process.kill()


def _flags(options: dict[str, Any]) -> list[str]:
    return [str(word) for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]


def _steps(out: Path) -> list[int]:
    """The steps whose metrics are on disk."""
    text = (out / METRICS).read_text() if (out / METRICS).exists() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [line["step"] for line in lines if line["kind"] == "train"]


@pytest.mark.parametrize("who", ["all", "last"])
@pytest.mark.parametrize(
    ("number", "word"),
    [(signal.SIGINT, "Interrupted"), (signal.SIGTERM, "Ended by SIGTERM"), (signal.SIGHUP, "Ended by SIGHUP")],
)
def test_launched_training_that_is_stopped_saves_its_step(number: int, word: str, who: str, tmp_path: Path) -> None:
    """As in a terminal, all ranks hear it, and once more when the launcher passes it on; or one of them alone."""
    with _launched_training(tmp_path, checkpoint_every=1_000_000) as (out, ranks):
        wait_until(lambda: len(_steps(out)) > 2, "a step")
        for rank in [*ranks, *ranks] if who == "all" else ranks[1:]:
            with suppress(ProcessLookupError):
                rank.send_signal(number)
        assert [rank.wait() for rank in ranks] == [128 + number] * 2
        last = _steps(out)[-1]
        assert [path.name for path in list_checkpoints(out)] == [f"checkpoint-{last:08d}.pt"]
        command = r".*torchrun --nproc-per-node 2 scripts/train\.py .* --resume"
        how = rf"^{word} after step {last}, which is saved\. To go on from there: {command}$"
        assert [len(re.findall(how, rank.errors, re.MULTILINE)) for rank in ranks] == [1, 0]
        noted = [rank.errors.count(f"{word}: this step is finished and saved first.") for rank in ranks]
        assert noted == [int(who == "all"), 0]
        assert "Traceback" not in ranks[0].errors + ranks[1].errors
        assert (out / PLOT).exists()


def test_a_second_signal_ends_launched_training_at_once(tmp_path: Path) -> None:
    with _launched_training(tmp_path, checkpoint_every=1, validate_every=2, validation_batches=1_000_000) as (
        out,
        ranks,
    ):
        wait_until(lambda: len(_steps(out)) == 2, "the validation, which takes minutes")
        for wait_s in (IN_SUCCESSION_S + 0.1, 0):
            for rank in ranks:
                with suppress(ProcessLookupError):
                    rank.send_signal(signal.SIGINT)
            time.sleep(wait_s)
        # Who is in a collective first hears that the other has ended.
        assert {rank.wait() for rank in ranks} <= {128 + signal.SIGINT, 1}
        how = r"^To go on from checkpoint-00000001\.pt: .*torchrun --nproc-per-node 2 scripts/train\.py .* --resume$"
        assert [len(re.findall(how, rank.errors, re.MULTILINE)) for rank in ranks] == [1, 0]


@pytest.mark.slow  # three processes that import torch by themselves
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("script", ["train", "all_reduce_benchmark"])
def test_what_stops_torchrun_is_answered_before_it_kills_its_ranks(script: str, number: int, tmp_path: Path) -> None:
    """Ctrl-C goes to all processes of a terminal, the others to torchrun, which passes them on."""
    out = tmp_path / "out"
    options: dict[str, Any] = {"out": out}
    if script == "train":
        options |= {**QUICK, "parallel": "ddp", "steps": 1_000_000, "data": write_text(tmp_path)}
    options |= {"device": "cpu"}
    more = [] if script == "train" else ["--repeats", "1", "--sizes-mb", *(f"{0.001 * n:.3f}" for n in range(1, 4000))]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with (tmp_path / "shown").open("w") as shown:
        launcher = subprocess.Popen(
            [*torchrun, f"scripts/{script}.py", *_flags(options), *more],
            cwd=ROOT,
            stdout=shown,
            stderr=shown,
            start_new_session=True,
        )
    is_at_work = (lambda: len(_steps(out)) > 2) if script == "train" else (lambda: rows_in(out, "all_reduce"))
    try:
        wait_until(is_at_work, "the first row")
        if number == signal.SIGINT:
            os.killpg(launcher.pid, number)
        else:
            launcher.send_signal(number)
        launcher.wait(END_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
    text = (tmp_path / "shown").read_text()
    assert "forcefully exiting" not in text  # half a minute after the signal
    command = rf"torchrun --standalone --nproc-per-node 2 scripts/{script}\.py .* --resume$"
    assert re.search(rf"To go on.*: .*{command}", text, re.MULTILINE), text
    if script == "train":
        assert [path.name for path in list_checkpoints(out)][-1] == f"checkpoint-{_steps(out)[-1]:08d}.pt"
