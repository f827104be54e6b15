"""What becomes of a sweep's files whatever ends it: an error of a measurement, a full disk, a reader that has gone."""

import errno
import os
import signal
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace

import pytest

from cs336_systems.benchmarking import into_files
from cs336_systems.benchmarking.grouped_sweep import run_grouped_sweep
from cs336_systems.benchmarking.into_files import check_any_measured, finish_files, resolve_device, sweep_into_files
from cs336_systems.benchmarking.isolation import Outcome
from cs336_systems.benchmarking.rank_sweep import run_rank_sweep
from cs336_systems.benchmarking.sweep import run_sweep, unmeasured
from cs336_systems.cli import show, tell
from cs336_systems.files import NotWritten
from cs336_systems.records import ResultsFile, read_results
from tests.example_rows import RUN


@dataclass(frozen=True)
class _Cell:
    number: int


@dataclass(frozen=True)
class _Row(_Cell):
    status: str = "ok"


@dataclass(frozen=True)
class _CellRow(_Cell):
    status: str = "ok"
    reason: str = ""


def _no_space(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _write(results):
    (results.directory / "rows.md").write_text(str(len(results.rows)))
    return f"{len(results.rows)} rows"


@pytest.fixture
def results(tmp_path):
    return ResultsFile(tmp_path, "rows", _Row, RUN)


def test_an_os_error_of_a_measurement_is_not_taken_for_a_full_disk(results, capsys):
    def sweep():
        results.append(_Row(1))
        raise OSError(errno.EAGAIN, "no more processes")

    with pytest.raises(OSError, match="no more processes"):
        sweep_into_files(results, sweep, _write)
    shown = capsys.readouterr()
    assert shown.out == "1 rows\n"
    assert "cannot write" not in shown.err
    assert (results.directory / "rows.md").read_text() == "1"


def test_a_full_disk_is_explained_and_counts_the_rows_that_are_there(results, capsys, monkeypatch):
    def sweep():
        results.append(_Row(1))
        monkeypatch.setattr(os, "fsync", _no_space)
        results.append(_Row(2))

    with pytest.raises(SystemExit) as stopped:
        sweep_into_files(results, sweep, _write)
    assert stopped.value.code == 1
    assert "No space left on device; the 1 row before remains in rows.json. Make room" in capsys.readouterr().err
    assert read_results(results.path, _Row)[1] == results.rows == [_Row(1)]


def test_a_row_and_then_tables_that_do_not_fit_are_one_line(results, capsys):
    def sweep():
        results.append(_Row(1))
        raise NotWritten(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(SystemExit) as stopped:
        sweep_into_files(results, sweep, _no_space)
    assert stopped.value.code == 1
    assert capsys.readouterr().err.strip().splitlines() == [
        f"error: cannot write under {results.directory}: No space left on device; the 1 row before remains in "
        "rows.json. Make room. To go on: python scripts/x.py --resume"
    ]


@pytest.mark.parametrize(
    ("number", "error", "word"),
    [
        (signal.SIGINT, KeyboardInterrupt(), "Interrupted"),
        (signal.SIGTERM, SystemExit(143), "Ended by SIGTERM"),
        (signal.SIGHUP, SystemExit(129), "Ended by SIGHUP"),
    ],
)
def test_a_second_signal_does_not_spoil_the_files(results, capsys, number, error, word):
    def sweep():
        results.append(_Row(1))
        raise error

    def write(results):
        signal.raise_signal(number)
        return _write(results)

    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as stopped:
        sweep_into_files(results, sweep, write)
    assert signal.getsignal(number) == before
    assert stopped.value.code == 128 + number
    assert (results.directory / "rows.md").exists()
    shown = capsys.readouterr()
    assert shown.out == "1 rows\n"
    assert shown.err.startswith(f"\n{word}. To go on: python scripts/x.py --resume\n")


@pytest.mark.parametrize(
    ("n_measured", "left"), [(0, "1; 2; 3; 4; 5; and 3 more"), (1, "2; 3; 4; 5; 6; and 2 more"), (6, "7; 8")]
)
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("a mistake")])
def test_a_sweep_that_is_stopped_ends_with_what_is_left_of_it(results, capsys, error, n_measured, left):
    def sweep():
        for cell in unmeasured([_Cell(number) for number in range(1, 9)], results, lambda cell: str(cell.number)):
            if cell.number > n_measured:
                raise error
            results.append(_Row(cell.number))

    with pytest.raises(type(error) if isinstance(error, RuntimeError) else SystemExit):
        sweep_into_files(results, sweep, _write)
    told = capsys.readouterr().err
    how = " To go on: python scripts/x.py --resume"
    more = how if isinstance(error, RuntimeError) else ""  # it has been said above
    assert told.splitlines()[-1] == f"{n_measured} of 8 cells have their rows. Left: {left}.{more}"
    assert told.count(how) == 1


@pytest.mark.parametrize(("statuses", "ends"), [(("oom", "ok"), False), (("killed", "oom"), True), (("ok",), False)])
def test_only_a_run_that_measured_nothing_at_all_ends_with_status_1(results, statuses, ends):
    for number, status in enumerate(statuses):
        results.append(_Row(number, status))
    with pytest.raises(SystemExit, match="1") if ends else nullcontext():
        check_any_measured(results)


def test_tables_that_do_not_fit_are_explained_too(results, capsys):
    with pytest.raises(SystemExit) as stopped:
        sweep_into_files(results, lambda: results.append(_Row(1)), _no_space)
    assert stopped.value.code == 1
    assert "cannot write under" in capsys.readouterr().err


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_that_nobody_reads_on_stops_nothing(monkeypatch, stream):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as gone:
        monkeypatch.setattr(sys, stream, gone)
        for _ in range(2):
            (show if stream == "stdout" else tell)("text")
        if stream == "stderr":
            os.dup2(os.open(os.devnull, os.O_WRONLY), writer)  # closing it writes once more


@pytest.mark.parametrize(("device", "is_timed"), [("cpu", True), ("cpu", False), ("auto", True)])
def test_a_cpu_is_looked_at_where_it_is_timed(monkeypatch, device, is_timed):
    looked = []
    monkeypatch.setattr(into_files, "run_isolated", lambda *_: Outcome("ok", (found, RUN, ["cpu", "cuda"], 3)))
    monkeypatch.setattr(into_files, "with_cpu_load", lambda run, **rest: (looked.append(rest), run)[1])
    found = "cuda" if device == "auto" else device
    for n_threads in (None, 2):
        *resolved, look = resolve_device(device, "command", is_timed=is_timed, n_threads=n_threads)
        assert resolved == [found, RUN]
        if look is not None:
            look(RUN, is_end=True)
    advice = " OMP_NUM_THREADS=1 suffers least."
    looks = [{"n_threads": 3, "advice": advice, "is_end": True}, {"n_threads": 2, "advice": "", "is_end": True}]
    assert looked == (looks if found == "cpu" and is_timed else [])


@pytest.mark.parametrize("is_timed", [True, False])
@pytest.mark.parametrize("ending", [None, KeyboardInterrupt(), RuntimeError("a mistake")])
def test_the_machine_is_looked_at_before_and_after_what_is_timed(tmp_path, ending, is_timed):
    done = []

    def look(run, is_end):
        done.append("after" if is_end else "before")
        return replace(run, busy_cores=1.5 if is_end else run.busy_cores)

    def sweep():
        if is_timed:
            for _ in range(2):
                results.timing_begins()
        results.append(_Row(1))
        done.append("measured")
        if ending is not None:
            raise ending

    results = ResultsFile(tmp_path, "rows", _Row, RUN, look=look)
    with nullcontext() if ending is None else pytest.raises((SystemExit, RuntimeError)):
        sweep_into_files(results, sweep, _write)
    assert done == (["before", "measured", "after"] if is_timed else ["measured"])
    runs, rows, run_of_row = read_results(results.path, _Row)
    assert (runs, rows, run_of_row) == ([replace(RUN, busy_cores=1.5 if is_timed else None)], [_Row(1)], [0])


def _status(cell):
    return {"status": "ok"}


def _make_status():
    return _status


_SWEEPS = {
    "run_sweep": lambda cells, results, known: run_sweep(cells, _status, results, known=known),
    "run_rank_sweep": lambda cells, results, known: run_rank_sweep(cells, _status, results, known=known),
    "run_grouped_sweep": lambda cells, results, known: run_grouped_sweep(
        cells, lambda cell: cell.number, _make_status, results
    ),
}


@pytest.mark.parametrize("sweep", _SWEEPS)
def test_sweeps_look_at_the_machine_only_where_they_measure(monkeypatch, tmp_path, sweep):
    looked, measured = [], Outcome("ok", {"status": "ok"})
    monkeypatch.setattr("cs336_systems.benchmarking.sweep.run_isolated", lambda *_, **__: measured)
    monkeypatch.setattr("cs336_systems.benchmarking.rank_sweep._measure_on_ranks", lambda *_: measured)

    def look(run, is_end):
        looked.append(len(results.rows))
        return run

    first, second = _Cell(1), _Cell(2)
    results = ResultsFile(tmp_path, "rows", _CellRow, RUN, look=look)
    if sweep != "run_grouped_sweep":  # it measures whatever it is not told of
        _SWEEPS[sweep]([first], results, lambda cell: Outcome("oom"))
        assert [(row.status, looked) for row in results.rows] == [("oom", [])]
    _SWEEPS[sweep]([first, second], results, lambda cell: None)
    assert looked == [len(results.rows) - 1 if sweep != "run_grouped_sweep" else 0]
    results = ResultsFile(tmp_path, "rows", _CellRow, RUN, resume=True, look=look)
    _SWEEPS[sweep]([first, second], results, lambda cell: None)
    assert len(looked) == 1  # nothing was left to measure


@pytest.mark.parametrize("said", ["not a results file", "another run is writing there"])
def test_what_is_refused_does_not_look_at_the_cpus_load(monkeypatch, run_script, tmp_path, said):
    monkeypatch.setattr(into_files, "with_cpu_load", lambda run, **_: pytest.fail("was looked at"))
    if said == "not a results file":
        (tmp_path / "benchmark.json").write_text("{")
    else:
        monkeypatch.setattr("cs336_systems.records.lock_folder", _locked)
    small = ("--size", "tiny", "--ctx", 8, "--batch-size", 1, "--device", "cpu")
    status, _, errors = run_script("benchmark", *small, "--resume", "--out", tmp_path)
    assert status == 2
    assert said in errors


def _locked(directory):
    raise ValueError(f"out={str(directory)!r}: another run is writing there")


@pytest.mark.slow
@pytest.mark.parametrize("script", ["saved_tensors", "profile_memory"])
def test_what_times_nothing_does_not_look_at_the_cpus_load(monkeypatch, run_script, tmp_path, script):
    asked = []
    monkeypatch.setattr(into_files, "with_cpu_load", lambda run, **_: (asked.append(run), run)[1])
    small = ("--size", "tiny", "--ctx", 8, "--batch-size", 1, "--precision", "fp32", "--device", "cpu")
    assert run_script(script, *small, "--out", tmp_path)[0] == 0
    assert asked == []
    assert run_script("benchmark", *small, "--warmup", 0, "--steps", 1, "--out", tmp_path)[0] == 0
    assert len(asked) == 2


def test_two_threads_that_finish_do_not_write_at_once(results):
    results.append(_Row(1))
    inside, together = [0], []

    def write(results):
        inside[0] += 1
        time.sleep(0.05)
        together.append(inside[0])
        inside[0] -= 1
        return ""

    other = threading.Thread(target=finish_files, args=(results, write))
    other.start()
    finish_files(results, write)
    other.join()
    assert together == [1, 1]
