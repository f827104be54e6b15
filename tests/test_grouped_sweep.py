"""A grouped sweep: a process a group, a row a cell whatever happens to the cell, resume."""

import os
import signal
from dataclasses import dataclass

import pytest
import torch

from cs336_systems.benchmarking.grouped_sweep import Skipped, run_grouped_sweep
from cs336_systems.records import ResultsFile, Unsupported, read_results
from tests.example_rows import RUN


@dataclass(frozen=True)
class _Cell:
    group: str
    name: str


@dataclass(frozen=True)
class _Row(_Cell):
    status: str = "ok"
    reason: str = ""
    process: int | None = None
    length: int | None = None


class _Measure:
    def __init__(self):
        self.process = os.getpid()

    def __call__(self, cell):
        if cell.name == "large":
            raise torch.OutOfMemoryError("CUDA out of memory")
        if cell.name.startswith("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if cell.name == "unsupported":
            raise Unsupported("not on this machine")
        if cell.name == "slow":
            raise Skipped("takes too long")
        if cell.name == "mistake":
            raise ZeroDivisionError("a mistake")
        return {"process": self.process}


def _sweep(tmp_path, names, resume=False, **changes):
    results = ResultsFile(tmp_path, "bench", _Row, RUN, resume=resume)
    for name, value in changes.items():
        setattr(results, name, value)
    cells = [_Cell(*name.split()) for name in names]
    run_grouped_sweep(cells, lambda cell: cell.group, _Measure, results, known=lambda cell: {"length": len(cell.name)})
    return results.rows


def test_a_group_shares_a_process_and_goes_on_after_each_kind_of_failure(tmp_path):
    names = ["x a", "y a", "x large", "x b", "x killed", "x killed2", "x unsupported", "x slow", "x c", "x b"]
    rows = _sweep(tmp_path, names)  # b, which is there twice, is one
    assert [(row.group, row.name, row.status) for row in rows] == [
        ("x", "a", "ok"), ("x", "large", "oom"), ("x", "b", "ok"), ("x", "killed", "killed"),
        ("x", "killed2", "killed"), ("x", "unsupported", "unsupported"), ("x", "slow", "skipped"), ("x", "c", "ok"),
        ("y", "a", "ok"),
    ]  # fmt: skip
    a, b, c, y = (row.process for row in rows if row.status == "ok")
    assert a == b
    assert len({a, c, y, os.getpid()}) == 4
    assert [row.length for row in rows] == [len(row.name) for row in rows]
    assert rows[5].reason == "not on this machine"
    assert read_results(tmp_path / "bench.json", _Row)[1] == rows

    resumed = _sweep(tmp_path, [*names, "x d"], resume=True)  # those that were killed are tried again
    kept = [row for row in rows if row.status != "killed"]
    assert resumed[: len(kept)] == kept
    assert [(row.name, row.status) for row in resumed[len(kept) :]] == [
        ("killed", "killed"), ("killed2", "killed"), ("d", "ok"),
    ]  # fmt: skip


def test_a_resumed_sweep_says_that_nothing_is_left(tmp_path, capsys):
    _sweep(tmp_path, ["x a"])
    assert "Nothing is left" not in capsys.readouterr().err
    _sweep(tmp_path, ["x a"], resume=True)
    assert f"Nothing is left to measure: every cell has its row in {tmp_path}/bench.json." in capsys.readouterr().err


def test_a_mistake_ends_the_sweep_after_the_rows_before_it_are_on_disk(tmp_path):
    results, cells = ResultsFile(tmp_path, "bench", _Row, RUN), [_Cell("x", name) for name in ("a", "mistake", "b")]
    with pytest.raises(RuntimeError, match="ZeroDivisionError: a mistake"):
        run_grouped_sweep(cells, lambda cell: cell.group, _Measure, results, lambda cell: cell.name)
    assert results.left() == ["mistake", "b"]
    assert [row.name for row in read_results(tmp_path / "bench.json", _Row)[1]] == ["a"]


def test_a_row_that_cannot_be_written_ends_the_sweep(tmp_path):
    def full_disk(row):
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space left"):
        _sweep(tmp_path, ["x a", "x b"], append=full_disk)
