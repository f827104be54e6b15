"""A sweep: a row a cell whatever happens to the cell, resume, cold caches."""

import os
import signal
from dataclasses import dataclass, replace

import pytest
import torch

from cs336_systems.benchmarking.isolation import Outcome
from cs336_systems.benchmarking.sweep import run_sweep, told_apart
from cs336_systems.records import ResultsFile, Unsupported, read_results
from tests.example_rows import RUN


@dataclass(frozen=True)
class _Cell:
    name: str
    size: int = 1
    cold_caches: bool = False


@dataclass(frozen=True)
class _Row(_Cell):
    status: str = "ok"
    reason: str = ""
    value: int | None = None
    caches: str | None = None


def _measure(cell):
    if cell.name == "large":
        raise torch.OutOfMemoryError("CUDA out of memory")
    if cell.name == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if cell.name == "unsupported":
        raise Unsupported("not on this machine")
    if cell.name == "mistake":
        raise ZeroDivisionError("a mistake")
    return {"value": 10 * cell.size, "caches": os.environ.get("TORCHINDUCTOR_CACHE_DIR")}


def _sweep(tmp_path, cells, resume=False):
    results = ResultsFile(tmp_path, "bench", _Row, RUN, resume=resume)
    run_sweep(cells, _measure, results)
    return results.rows


def test_every_cell_gets_a_row_and_the_cells_after_a_failure_run(tmp_path):
    rows = _sweep(tmp_path, [_Cell("large"), _Cell("killed"), _Cell("unsupported"), _Cell("small", 2)])
    assert [(row.name, row.status, row.value) for row in rows] == [
        ("large", "oom", None),
        ("killed", "killed", None),
        ("unsupported", "unsupported", None),
        ("small", "ok", 20),
    ]
    assert rows[2].reason == "not on this machine"


def test_a_killed_cell_is_measured_again_on_resume_and_others_are_not(tmp_path, monkeypatch):
    rows = _sweep(tmp_path, [_Cell("large"), _Cell("killed"), _Cell("small", 2)])
    asked = []

    def measured(measure, cell, **options):
        asked.append(cell.name)
        return Outcome("ok", value={"value": 7})

    monkeypatch.setattr("cs336_systems.benchmarking.sweep.run_isolated", measured)
    resumed = _sweep(tmp_path, [_Cell("large"), _Cell("killed"), _Cell("small", 2)], resume=True)
    assert asked == ["killed"]
    assert [(row.name, row.status, row.value) for row in resumed] == [
        ("large", "oom", None), ("small", "ok", 20), ("killed", "ok", 7),
    ]  # fmt: skip
    assert resumed[:2] == [rows[0], rows[2]]
    assert read_results(tmp_path / "bench.json", _Row)[1] == resumed


def test_cells_of_one_label_are_told_apart_by_what_differs():
    cells = [_Cell("a"), _Cell("b", 1), _Cell("b", 2, cold_caches=True)]
    assert told_apart(cells, lambda cell: cell.name) == dict(
        zip(cells, ("a", "b, size 1, cold caches False", "b, size 2, cold caches True"), strict=True)
    )


def test_what_ran_out_of_a_cpus_memory_is_measured_again(tmp_path, monkeypatch):
    """What is free of it depends on what else is at work."""
    run = replace(RUN, gpu="none")
    for status in ("oom", "ok"):
        results = ResultsFile(tmp_path, "bench", _Row, run, resume=status == "ok")
        monkeypatch.setattr(
            "cs336_systems.benchmarking.sweep.run_isolated", lambda *_, status=status, **__: Outcome(status)
        )
        run_sweep([_Cell("large"), _Cell("small")], _measure, results)
        assert [(row.name, row.status) for row in results.rows] == [("large", status), ("small", status)]


def test_a_mistake_ends_the_sweep_after_the_rows_before_it_are_on_disk(tmp_path):
    results = ResultsFile(tmp_path, "bench", _Row, RUN)
    with pytest.raises(RuntimeError, match="ZeroDivisionError: a mistake"):
        run_sweep([_Cell("a"), _Cell("mistake"), _Cell("b")], _measure, results, lambda cell: cell.name)
    assert results.left() == ["mistake", "b"]
    assert [row.name for row in read_results(tmp_path / "bench.json", _Row)[1]] == ["a"]


def test_resume_measures_only_what_is_missing(tmp_path, capsys):
    _sweep(tmp_path, [_Cell("a"), _Cell("large"), _Cell("a")])  # one that is there twice is one
    assert "Nothing is left" not in capsys.readouterr().err
    _sweep(tmp_path, [_Cell("large"), _Cell("a")], resume=True)
    assert f"Nothing is left to measure: every cell has its row in {tmp_path}/bench.json." in capsys.readouterr().err
    rows = _sweep(tmp_path, [_Cell("a"), _Cell("large"), _Cell("a", 2), _Cell("mistake", 3)][:3], resume=True)
    assert [(row.name, row.size, row.status) for row in rows] == [("a", 1, "ok"), ("large", 1, "oom"), ("a", 2, "ok")]


def test_a_cell_with_cold_caches_gets_empty_ones_of_its_own(tmp_path):
    rows = _sweep(tmp_path, [_Cell("a", cold_caches=True), _Cell("b", cold_caches=True), _Cell("c")])
    assert rows[0].caches != rows[1].caches
    assert not os.path.exists(os.path.dirname(rows[0].caches))
    assert "cold-caches" not in (rows[2].caches or "")
