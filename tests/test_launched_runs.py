"""Benchmarks and training as ranks that a launcher started: rank 0 writes, all resume, and what stops them is told."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cs336_systems.distributed.spawn import start_context
from cs336_systems.training.checkpoints import list_checkpoints
from tests.distributed_helpers import ROOT, batch, loss_of, make_model
from tests.launched_ranks import run_to_end, torchrun_environment, write_to
from tests.script_helpers import ScriptProcess, wait_until
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


def test_launched_training_that_is_stopped_says_how_to_go_on(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    out, data = tmp_path / "out", write_text(tmp_path)
    options = {**QUICK, "parallel": "ddp", "steps": 1_000_000, "checkpoint_every": 2, "data": data, "out": out}
    arguments = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    ranks = []
    for rank in range(2):
        folder = tmp_path / f"rank-{rank}"
        folder.mkdir()
        environment = torchrun_environment(rank, 2, store.port, tmp_path)
        ranks.append(ScriptProcess(folder, "train", *arguments, environment=environment))
    wait_until(lambda: len(list_checkpoints(out)) > 1, "a checkpoint before the newest, which may be half there")
    for rank in ranks:
        with suppress(ProcessLookupError):
            rank.send_signal(signal.SIGTERM)
    # Who is in a collective first hears that the other has ended.
    assert {rank.wait() for rank in ranks} <= {128 + signal.SIGTERM, 1}
    how = r"^To go on from checkpoint-\d+\.pt: .*torchrun --nproc-per-node 2 scripts/train\.py .* --resume$"
    assert [len(re.findall(how, rank.errors, re.MULTILINE)) for rank in ranks] == [1, 0]
