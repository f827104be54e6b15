"""Rows, files and provenance: nothing that was measured is ever lost, and a file says where its rows are from."""

import csv
import errno
import fcntl
import json
import os
import re
import signal
from dataclasses import asdict, dataclass, replace
from typing import Literal

import pytest

from cs336_systems import provenance
from cs336_systems.provenance import collect_provenance
from cs336_systems.records import DetailRows, ResultsFile, Statistics, format_value, read_results, to_markdown
from tests.example_rows import RUN


@dataclass(frozen=True)
class _Row:
    name: str
    size: int
    time_ms: float | None


@dataclass(frozen=True)
class _Checked(_Row):
    status: str = "ok"
    unit: Literal["m", "s"] = "m"
    error: float | None = None


def test_statistics():
    assert Statistics.of([1.0, 2.0, 6.0]) == Statistics(mean=3.0, std=pytest.approx(7**0.5), median=2.0, min=1.0)
    assert Statistics.of([4.0]) == Statistics(mean=4.0, std=None, median=4.0, min=4.0)  # one value has no spread
    with pytest.raises(ValueError, match="at least one"):
        Statistics.of([])


def test_rows_survive_the_file_and_know_their_run(tmp_path):
    ResultsFile(tmp_path, "bench", _Row, RUN).append(_Row("a", 1, 1.5))
    later = replace(RUN, date="2026-02-01 08:00")
    second = ResultsFile(tmp_path, "bench", _Row, later, resume=True)
    second.append(_Row("b", 2, None))
    runs, rows, run_of_row = read_results(tmp_path / "bench.json", _Row)
    assert rows == [_Row("a", 1, 1.5), _Row("b", 2, None)]
    assert [runs[index].date for index in run_of_row] == ["2026-01-31 12:00", "2026-02-01 08:00"]


def test_a_new_run_keeps_the_old_runs_files_together(tmp_path):
    others = ("benches.json", "bench-2.png")
    for name in others:
        (tmp_path / name).write_text("{}")
    for run in ("first", "second", "third"):  # within a second, perhaps
        results = ResultsFile(tmp_path, "bench", _Row, RUN)
        results.append(_Row(run, 1, 1.0))
        results.write_tables()
        (tmp_path / "bench.png").write_text(run)
        (tmp_path / "bench_times.png").write_text(run)
    files = {f"bench.{kind}" for kind in ("json", "csv", "md", "tex", "png")} | {"bench_times.png"}
    folders = {(path / "bench.png").read_text(): path for path in tmp_path.iterdir() if path.is_dir()}
    assert set(folders) == {"first", "second"}
    for run, folder in {**folders, "third": tmp_path}.items():
        assert [row.name for row in read_results(folder / "bench.json", _Row)[1]] == [run]
        assert (folder / "bench_times.png").read_text() == run
        assert {path.name for path in folder.iterdir() if path.is_file()} - {*others} == files
    assert all((tmp_path / name).exists() for name in others)  # no file of this name's


def test_details_of_a_cell_that_is_measured_again_take_the_place_of_the_old(tmp_path):
    @dataclass(frozen=True)
    class Cell:
        name: str

    results = ResultsFile(tmp_path, "bench", _Row, RUN)
    for resume in (False, True):  # a run ended between the details and the row beside them, and is resumed
        details = DetailRows(results, "parts", _Row, "parts", resume)
        for name in ("a", "b"):
            parts = [{"size": size, "time_ms": float(resume)} for size in (1, 2)]
            assert details.complete(Cell(name), {"parts": parts, "time_ms": 3.0}) == {"time_ms": 3.0}
    expected = [_Row(name, size, 1.0) for name in "ab" for size in (1, 2)]
    assert read_results(tmp_path / "parts.json", _Row)[1] == expected
    assert details.complete(Cell("c"), {}) == {}
    assert details.file.rows == expected


@pytest.mark.parametrize("content", ["[" * 100_000, '{"runs": [], "rows": [{"run": 7, "name": "a", "size": 1}]}', None])
def test_what_is_no_results_file_is_named(tmp_path, content):
    path = tmp_path / "bench.json"
    path.mkdir() if content is None else path.write_text(content)
    with pytest.raises(ValueError, match=r"bench\.json: not a results file of _Row rows"):
        read_results(path, _Row)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"time_ms": [1.0]}, r"time_ms=\[1.0\]: must be a number or null"),
        ({"time_ms": "abc"}, "time_ms='abc': must be a number or null"),
        ({"time_ms": True}, "time_ms=True: must be a number or null"),
        ({"time_ms": float("inf")}, "time_ms=inf: must be a finite number"),
        ({"size": 1.5}, "size=1.5: must be a whole number"),
        ({"name": 3}, "name=3: must be a text"),
        ({"size": None}, "size=None: must be a whole number"),
        ({"status": 7}, "status=7: must be one of ok, oom, killed"),
        ({"unit": "km"}, "unit='km': must be one of m, s"),
    ],
)
def test_a_value_that_is_none_of_its_columns_is_named_with_its_row(tmp_path, changed, said):
    path = tmp_path / "bench.json"
    good = {"run": 0, "name": "a", "size": 1, "time_ms": 2}
    path.write_text(json.dumps({"runs": [asdict(RUN)], "rows": [good, {**good, **changed}]}))
    with pytest.raises(ValueError, match=rf"bench\.json: not a results file of _Checked rows \(row 2, {said}"):
        ResultsFile(tmp_path, "bench", _Checked, RUN, resume=True)


def test_what_was_not_measured_has_no_values(tmp_path):
    path = tmp_path / "bench.json"
    lost = {"run": 0, "name": "a", "size": None, "time_ms": None, "status": "oom", "error": None}
    measured = {
        **lost,
        "size": 1,
        "status": "ok",
        "error": float("nan"),
    }  # not every number that is one of none is damage
    path.write_text(json.dumps({"runs": [asdict(RUN)], "rows": [lost, measured]}))
    assert [row.status for row in read_results(path, _Checked)[1]] == ["oom", "ok"]


def test_what_a_killed_run_left_half_written_goes(tmp_path):
    for name in (".bench.json-123", ".bench.csv-9", ".other.json-5"):
        (tmp_path / name).write_text("{")
    ResultsFile(tmp_path, "bench", _Row, RUN)
    assert [path.name for path in tmp_path.iterdir()] == [".other.json-5"]


def test_resuming_on_another_card_is_refused(tmp_path):
    ResultsFile(tmp_path, "bench", _Row, RUN).append(_Row("a", 1, 1.0))
    with pytest.raises(ValueError, match=r"resume=.*measured with gpu NVIDIA H100.*NVIDIA A100"):
        ResultsFile(tmp_path, "bench", _Row, replace(RUN, gpu="NVIDIA A100"), resume=True)


def test_resuming_a_file_that_is_no_results_file_names_it(tmp_path):
    (tmp_path / "bench.json").write_text('{"rows": [')
    with pytest.raises(ValueError, match=r"bench\.json: not a results file of _Row rows"):
        ResultsFile(tmp_path, "bench", _Row, RUN, resume=True)


def test_a_file_from_before_a_parameter_was_there_takes_its_default(tmp_path):
    @dataclass(frozen=True)
    class _LaterRow(_Row):
        every: int = 0

    @dataclass(frozen=True)
    class _StricterRow(_Row):
        every: int

    path = ResultsFile(tmp_path, "bench", _Row, RUN)
    path.append(_Row("a", 1, 1.0))
    assert read_results(tmp_path / "bench.json", _LaterRow)[1] == [_LaterRow("a", 1, 1.0, 0)]
    with pytest.raises(ValueError, match=r"columns differ by \['every'\]"):
        read_results(tmp_path / "bench.json", _StricterRow)
    ResultsFile(tmp_path, "later", _LaterRow, RUN).append(_LaterRow("a", 1, 1.0, 2))
    with pytest.raises(ValueError, match=r"columns differ by \['every'\]"):
        read_results(tmp_path / "later.json", _Row)


def test_a_full_disk_leaves_the_rows_before(tmp_path, monkeypatch):
    results = ResultsFile(tmp_path, "bench", _Row, RUN)
    results.append(_Row("kept", 1, 1.0))

    def no_space(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        results.append(_Row("lost", 2, 1.0))
    assert [row.name for row in read_results(tmp_path / "bench.json", _Row)[1]] == ["kept"]
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]  # no half-written file is left behind


@pytest.mark.parametrize("written_first", [False, True])
def test_ctrl_c_as_a_row_is_written_leaves_the_row_in_file_and_tables(tmp_path, monkeypatch, written_first):
    results = ResultsFile(tmp_path, "bench", _Row, RUN)
    os_replace = os.replace

    def interrupted(*paths):
        if written_first:
            os_replace(*paths)
        signal.raise_signal(signal.SIGINT)
        if not written_first:
            os_replace(*paths)

    monkeypatch.setattr("cs336_systems.files.os.replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        results.append(_Row("a", 1, 1.5))
    assert results.rows == read_results(results.path, _Row)[1] == [_Row("a", 1, 1.5)]


def test_a_folder_is_one_processs_at_a_time(tmp_path):
    """A lock of its own stands in for another process's: the kernel tells them apart in the same way."""
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(ValueError, match=r"out=.*another run is writing there"):
        ResultsFile(tmp_path, "bench", _Row, RUN)
    os.close(descriptor)
    ResultsFile(tmp_path, "bench", _Row, RUN).append(_Row("kept", 1, 1.0))
    assert ResultsFile(tmp_path, "bench", _Row, RUN, resume=True).rows == [_Row("kept", 1, 1.0)]
    with pytest.raises(BlockingIOError):
        fcntl.flock(os.open(tmp_path, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_an_unwritable_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for below, which in (("file", "it is a file"), ("file/sub", f"{tmp_path}/file is a file")):
        said = f"out='{tmp_path}/{below}': must be a folder that can be written to ({which})"
        with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
            ResultsFile(tmp_path / below, "bench", _Row, RUN)


def test_tables(tmp_path):
    results = ResultsFile(tmp_path, "bench", _Row, RUN)
    results.append(_Row("a_1", 16, 12.3456))
    results.append(_Row("b", 2, None))
    markdown = results.write_tables({"name": "name", "time_ms": "time ms"}, note="A note.")
    assert "| a_1    |     12.35 |" in markdown
    assert "A note." in markdown
    assert "`python scripts/x.py`" in markdown
    assert (tmp_path / "bench.md").read_text() == markdown
    with open(tmp_path / "bench.csv") as file:
        assert list(csv.reader(file)) == [["name", "size", "time_ms"], ["a_1", "16", "12.3456"], ["b", "2", ""]]
    latex = (tmp_path / "bench.tex").read_text()
    assert r"a\_1" in latex
    assert r"\begin{tabular}" in latex


@dataclass(frozen=True)
class _StatusRow:
    name: str
    status: str = "ok"
    reason: str = ""
    time_ms: float | None = None


def test_rows_without_a_measurement_come_last_and_are_told_why_below(tmp_path):
    room = "CUDA out of memory. Tried to allocate 2.00 GiB."
    state = " GPU 0 has a total capacity of 139.80 GiB of which 1.43 GiB is free. See PYTORCH_CUDA_ALLOC_CONF"
    results = ResultsFile(tmp_path, "bench", _StatusRow, RUN)
    for row in (
        _StatusRow("a", "unsupported", "compile='on': needs a\nC_compiler & 5%"),
        _StatusRow("b", "oom", room + state),
        _StatusRow("c", time_ms=2.0),
        _StatusRow("d", "oom", room),
        _StatusRow("e", time_ms=1.0, reason="snapshot not kept"),
        _StatusRow("f", "killed"),
    ):
        results.append(row)
    markdown = results.write_tables({"name": "name", "status": "how", "time_ms": "ms"}, note="A note.")
    reasons = ["- [1] snapshot not kept", "- [2] compile='on': needs a C_compiler & 5%", f"- [3] {room}"]
    rows = ["|c|ok|2|", "|e|ok[1]|1|", "|a|unsupported[2]|–|", "|b|oom[3]|–|", "|d|oom[3]|–|", "|f|killed|–|"]
    lines = markdown.splitlines()
    assert [line.replace(" ", "") for line in lines[2:8]] == rows
    assert lines[8:14] == ["", *reasons, "", "A note."]
    latex = (tmp_path / "bench.tex").read_text()
    assert [line[0] for line in latex.splitlines() if line.count(" & ") == 2] == ["n", *"ceabdf"]
    assert r"a & unsupported [2] & -- \\" in latex
    assert "\\end{tabular}\n\n[1] snapshot not kept\n\n[2] compile='on': needs a C\\_compiler \\& 5\\%\n" in latex
    with open(tmp_path / "bench.csv") as file:  # rows as they were measured, with all that is known
        kept = list(csv.DictReader(file))
    assert "".join(row["name"] for row in kept) == "abcdef"
    assert (kept[1]["status"], kept[1]["reason"]) == ("oom", room + state)


def test_markdown_aligns_numbers_right():
    assert to_markdown([_Row("a", 1, 0.25), _Row("b", 20, None)]).splitlines()[1] == "|:-------|-------:|----------:|"


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (float("nan"), "–"), (12.3456, "12.35"), (12345.6, "12346"), (0.0123456, "0.01235"), (7, "7")],
)
def test_values_are_shown_to_four_digits(value, text):
    assert format_value(value) == text


def test_provenance_of_this_machine(monkeypatch):
    run = collect_provenance("python scripts/x.py", "cpu")
    assert run.gpu == "none"
    assert run.torch.startswith("2.")
    assert run.cpu_count >= 1
    assert "python scripts/x.py" in run.summary()


def test_a_cpus_rows_name_no_cuda(monkeypatch):
    """Torch's build has one, which nothing ran on; rows from before that was left out are told without it, too."""
    monkeypatch.setattr("torch.version.cuda", "13.0")
    run = collect_provenance("x", "cpu")
    assert (run.gpu, run.driver, run.cuda) == ("none", "none", "none")
    assert "CUDA" not in run.summary()
    assert "CUDA" not in replace(run, cuda="13.0").summary()
    assert "; CUDA 13.0, torch 2." in replace(run, gpu="NVIDIA H200", cuda="13.0").summary()


@pytest.mark.parametrize(("given", "shown"), [("f00d", "f00d"), ("0123456789" * 4, "012345678901")])
def test_the_commit_comes_from_the_environment_where_there_is_no_checkout(monkeypatch, tmp_path, given, shown):
    """A whole hash as short as git's own would be."""
    monkeypatch.setattr("cs336_systems.provenance._SOURCE_ROOT", tmp_path)
    monkeypatch.setenv("GIT_COMMIT", given)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert collect_provenance("x", "cpu").git_commit == shown


@pytest.mark.parametrize(
    ("busy", "said"),
    [
        ({}, "(4 cores); "),
        ({"busy_cores": 1.5}, "(4 cores, of which others used 1.5 as it began or ended); "),
        ({"busy_load": 6.1}, "(4 cores, busy as it began: load 6.1); "),
    ],
)
def test_a_busy_cpu_is_said_under_its_tables(tmp_path, monkeypatch, busy, said):
    """And what was measured before that was recorded is read as it was."""
    monkeypatch.setattr(provenance, "usable_cores", lambda: 4)
    run = replace(collect_provenance("x", "cpu"), **busy)
    results = ResultsFile(tmp_path, "rows", _Row, run)
    results.append(_Row("a", 1, 1.0))
    assert said in results.write_tables()
    assert read_results(results.path, _Row)[0] == [run]
    document = json.loads(results.path.read_text())
    for name in ("busy_cores", "busy_load"):
        del document["runs"][0][name]
    results.path.write_text(json.dumps(document))
    assert read_results(results.path, _Row)[0] == [replace(run, busy_cores=None, busy_load=None)]
