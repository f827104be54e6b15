"""scripts/profile_kernels.py as a person runs it: the way to the same tables without nsys."""

from __future__ import annotations

import csv
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from cs336_systems.files import NotWritten
from cs336_systems.profiling.run_kernels import run_kernels
from tests.profile_helpers import CELL, analyze
from tests.script_helpers import ScriptProcess


def test_the_same_tables_without_nsys(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A CPU's operators, from a step to files, and again from the trace that was kept."""
    what: dict[str, Any] = CELL | {"device": "cpu", "mode": "train-step", "precision": "fp32", "checkpoint_every": 0}
    made = run_kernels(
        "python scripts/profile_kernels.py", size="tiny", ctx=16, benchmark=None, top=5, out=tmp_path / "out", **what
    )
    assert made.verdict is None
    first = capsys.readouterr().out
    name = "tiny-ctx16-train-step-fp32"
    written = {path.name for path in (tmp_path / "out").iterdir()}
    tables = {"answers.md", "kernels.csv", *(f"steps.{ending}" for ending in ("json", "csv", "md", "tex"))}
    assert written == tables | {f"{name}{ending}" for ending in (".md", ".png", ".json.gz")}
    text = (tmp_path / "out" / f"{name}.md").read_text()
    assert "| operator" in text
    assert "Bound by" not in text  # nothing is launched on a CPU
    analyze(tmp_path / "out" / f"{name}.json.gz", out=tmp_path / "again", top=5)
    assert (tmp_path / "again" / f"{name}.md").read_text() == text
    with (tmp_path / "out" / "kernels.csv").open(newline="") as file:
        in_forward = [row for row in csv.DictReader(file) if row["range"] == "forward"]
    assert "aten::mm" in {row["kernel"] for row in in_forward}
    leader = max(in_forward, key=lambda row: float(row["total_ms"]))["kernel"]
    assert made.row.forward_leader == leader  # which it is, a busy machine decides
    tables = [[line for line in out.splitlines() if line.startswith("|")] for out in (first, capsys.readouterr().out)]
    assert tables[0] == tables[1]
    assert any(f"| {leader} " in line for line in tables[0])


def test_kernels_of_a_cell_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    what: dict[str, Any] = CELL | {"mode": "train-step", "precision": "fp32", "checkpoint_every": 0}
    for changed, message in (
        ({"ctx": 0}, "--ctx 0"),
        ({"device": "cuda:77"}, "--device cuda:77: is not on this machine"),
    ):
        arguments = {"size": "tiny", "ctx": 16, "benchmark": None, "top": 5, "out": tmp_path, **what, **changed}
        with pytest.raises(SystemExit) as stopped:
            run_kernels("python scripts/profile_kernels.py", **arguments)
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("n_written", [0, 1])
def test_a_full_disk_keeps_the_trace_or_says_that_nothing_is_kept(tmp_path, monkeypatch, capsys, n_written):
    """The first file is the trace, which the others are made of; what is kept of it is whole."""
    made: list[str] = []

    def replace(temporary: Any, path: Any) -> None:
        if len(made) >= n_written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        made.append(Path(path).name)
        moved(temporary, path)

    moved = os.replace
    monkeypatch.setattr("cs336_systems.files.os.replace", replace)
    what: dict[str, Any] = CELL | {"device": "cpu", "mode": "forward", "precision": "fp32", "checkpoint_every": 0}
    out = tmp_path / "out"
    with pytest.raises((SystemExit, NotWritten)) as stopped:
        run_kernels("python", size="tiny", ctx=16, benchmark=None, top=5, out=out, **what)
    trace = out / "tiny-ctx16-forward-fp32.json.gz"
    told = capsys.readouterr().err
    if n_written == 0:
        assert str(trace) in str(getattr(stopped.value, "in_a_line", ""))
        assert "whole" not in told
        assert [path.name for path in out.iterdir()] == []
    else:
        assert stopped.value.args == (1,)
        assert f"{os.strerror(errno.ENOSPC)}; the trace is whole, and scripts/analyze_nsys.py reads it: {trace}" in told
        monkeypatch.undo()
        analyze(trace, out=tmp_path / "again", top=5)


def test_a_cpu_is_not_asked_for_its_gpus_aloud(tmp_path):
    """The profiler's library would write an error where there is no driver."""
    quick = ["--device", "cpu", "--size", "tiny", "--ctx", 16, "--warmup", 0, "--steps", 1]
    run = ScriptProcess(tmp_path, "profile_kernels", *quick, "--out", tmp_path / "out")
    assert run.wait() == 0, run.errors
    *bar, last = filter(None, run.errors.splitlines())
    assert all("| 0/1 [" in line or "| 1/1 [" in line for line in bar)
    assert "| 1/1 [" in bar[-1]
    assert last == f"Answers, rows, kernels, trace, tables and picture: {tmp_path}/out/"
