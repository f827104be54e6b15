"""scripts/analyze_nsys.py as a person runs it: reports into answers, and what is no report into a line."""

from __future__ import annotations

import errno
import gzip
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from cs336_systems.configs import named_cell
from cs336_systems.profiling.run_analysis import failed_rows, find_reports, report_name
from cs336_systems.profiling.step_answers import StepRow
from cs336_systems.records import read_results
from tests.nsys_reports import MadeReport
from tests.profile_helpers import (
    CELL,
    MS,
    analyze,
    made_report,
    make_provenance,
    nsys_command,
    stand_in_nsys,
    write_benchmark_rows,
)

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def nsys(tmp_path: Path) -> Path:
    return stand_in_nsys(tmp_path)


def test_a_report_of_another_program_is_answered_too(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    report = MadeReport()
    report.kernel("void my_kernel<float>(float*)", 10 * MS, 20 * MS, launch=1)
    report.kernel("ampere_sgemm_128x64_tn", 20 * MS, 50 * MS, launch=2)
    analyze(report.write(tmp_path / "theirs.v2.sqlite"), out=tmp_path / "out")
    assert "theirs.v2" in capsys.readouterr().out
    text = (tmp_path / "out" / "theirs.v2.md").read_text()
    assert "no NVTX ranges" in text
    assert "## The whole report" in text
    assert "my_kernel<float>" in text
    assert "**Bound by matrix products.**" in text


def test_reports_are_found_exported_and_named(nsys: Path, tmp_path: Path) -> None:
    exported = tmp_path / "cells" / "small-ctx128" / "report.nsys-rep"
    exported.parent.mkdir(parents=True)
    exported.touch()
    (tmp_path / "cells" / "unprofiled").mkdir()
    assert find_reports([tmp_path / "cells"]) == ([exported], [tmp_path / "cells"])
    assert (report_name(exported), report_name(tmp_path / "2.7b.json.gz")) == ("small-ctx128", "2.7b")
    analyze(tmp_path / "cells", out=tmp_path / "out", nsys=nsys_command(nsys))
    assert (tmp_path / "out" / "small-ctx128.md").exists()
    assert exported.with_suffix(".sqlite").exists()


def test_the_sqlite_of_an_earlier_report_is_not_taken_for_the_one_beside_it(nsys: Path, tmp_path: Path) -> None:
    report = tmp_path / "cells" / "small-ctx128" / "report.nsys-rep"
    report.parent.mkdir(parents=True)
    report.touch()
    (sqlite := report.with_suffix(".sqlite")).touch()
    for age_s, found in ((-10, report), (10, sqlite)):
        os.utime(sqlite, (report.stat().st_atime, report.stat().st_mtime + age_s))
        assert find_reports([tmp_path / "cells"])[0] == [found]
    report.unlink()
    assert find_reports([tmp_path / "cells"])[0] == [sqlite]


def test_a_report_that_cannot_be_read_among_others_is_named_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    for name in ("small-ctx128", "small-ctx256"):
        report = tmp_path / "cells" / name / "report.sqlite"
        report.parent.mkdir(parents=True)
        made_report(named_cell("small", 128, **CELL)).write(report)
    report.write_bytes(report.read_bytes()[:5000])
    with pytest.raises(SystemExit) as stopped:
        analyze(tmp_path / "cells", out=tmp_path / "out")
    assert stopped.value.code == 1
    assert f"error: left out: {report}" in capsys.readouterr().err
    assert len(read_results(tmp_path / "out" / "steps.json", StepRow)[1]) == 1


def test_a_full_disk_leaves_the_reports_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    report = made_report(named_cell("small", 128, **CELL)).write(tmp_path / "full.sqlite")
    before = report.read_bytes()
    monkeypatch.setattr("cs336_systems.profiling.analysis.write_atomically", full)
    with pytest.raises(SystemExit) as stopped:
        analyze(report, out=tmp_path / "out")
    assert stopped.value.code == 1
    assert "out: No space left on device; the reports are whole" in capsys.readouterr().err
    assert report.read_bytes() == before


def test_trimming_by_the_script(tmp_path: Path) -> None:
    report = made_report(named_cell("small", 128, **CELL)).write(tmp_path / "full.sqlite")
    script = [sys.executable, str(ROOT / "scripts" / "analyze_nsys.py"), str(report)]
    run = subprocess.run(
        [*script, "--trim", str(tmp_path / "small.sqlite")], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr.startswith(f"{tmp_path / 'small.sqlite'}: ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (b"text", "notes.txt", "notes.txt: must be a .nsys-rep file, or SQLite"),
        (b"{}", "trace.json", "trace.json: is no trace of torch.profiler (trace: must be "),
        (b"[1,2]", "list.json", "list.json: is no trace of torch.profiler (trace: must be "),
        (b"3", "three.json", "three.json: is no trace of torch.profiler (trace: must be "),
        (b'{"runs": [], "rows": []}', "steps.json", "steps.json: is no trace of torch.profiler (trace: must be "),
        (b'{"traceEvents": null}', "null.json", "null.json: is no trace of torch.profiler (trace: must be "),
        (b'{"traceEvents": [1]}', "one.json", "one.json: is no trace of torch.profiler (trace: must be "),
        (b"{", "cut.json", "cut.json: is no trace of torch.profiler (Expecting"),
        (b'{"\xff', "bytes.json", "bytes.json: is no trace of torch.profiler ('utf-8' codec"),
        (
            gzip.compress(b'{"traceEvents": []}', mtime=0)[:-12],  # the time would be in the test's name
            "cut.json.gz",
            "cut.json.gz: is no trace of torch.profiler (Compr",
        ),
        (
            gzip.compress(b"{}", mtime=0)[:10] + b"\xff" * 9,
            "bad.json.gz",
            "bad.json.gz: is no trace of torch.profiler (Error -3",
        ),
        (b"text", "text.json.gz", "text.json.gz: is no trace of torch.profiler (Not a gzipped file"),
        (None, "missing.sqlite", "missing.sqlite: there is no such file or folder"),
    ],
)
def test_what_is_no_report_ends_with_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture, content: bytes | None, name: str, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(SystemExit) as stopped:
        analyze(tmp_path / name, out=tmp_path / "out")
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "Expecting property name"),
        ("[]", "list indices must be"),
        ('{"rows": 5}', "it has no 'runs'"),
        ('{"runs": [], "rows": []}', "it has no runs"),
        ('{"runs": [{"command": "x"}], "rows": []}', "missing 12 required positional arguments"),
        (json.dumps({"runs": [asdict(make_provenance())], "rows": 5}), "its rows must be a list of objects"),
        (json.dumps({"runs": [asdict(make_provenance())], "rows": [{}]}), "its rows must be a list of objects"),
    ],
)
@pytest.mark.parametrize("is_compared", [False, True])
def test_a_bad_benchmark_beside_a_report_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture, content: str, told: str, is_compared: bool
) -> None:
    report = made_report(named_cell("small", 128, **CELL)).write(tmp_path / "report.sqlite")
    beside = tmp_path / "benchmark.json"
    beside.write_text(content)
    with pytest.raises(SystemExit) as stopped:
        analyze(*[report] * (1 + is_compared), out=tmp_path / "out", compare=is_compared)
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {beside}: is no file of scripts/benchmark.py (")
    assert told in line


def test_a_benchmark_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    report = made_report(named_cell("small", 128, **CELL)).write(tmp_path / "report.sqlite")
    with pytest.raises(SystemExit) as stopped:
        analyze(report, out=tmp_path / "out", benchmark=tmp_path / "none.json")
    assert stopped.value.code == 2
    assert f"error: --benchmark {tmp_path / 'none.json'}: must be a file" in capsys.readouterr().err


def test_a_failed_row_without_its_cell_is_named(tmp_path: Path) -> None:
    write_benchmark_rows(tmp_path, {"status": "oom", "reason": "CUDA out of memory"})
    with pytest.raises(ValueError, match=r"benchmark\.json: is no file of scripts/benchmark\.py \(a row has no 'size'"):
        failed_rows(tmp_path)
