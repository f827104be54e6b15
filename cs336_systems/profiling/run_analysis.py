"""From report files to answers: finds the reports, reads each, and sets them beside the benchmark's own rows."""

from __future__ import annotations

import gzip
import json
import platform
import re
import sys
import zlib
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cs336_systems.cli import refusing_bad_input, show
from cs336_systems.configs import BenchmarkCell, check
from cs336_systems.files import check_writable
from cs336_systems.profiling import agreement
from cs336_systems.profiling.analysis import Analysis, analyze, write_analyses
from cs336_systems.profiling.nsys import NsysFailed, export_sqlite, exported, find_nsys
from cs336_systems.profiling.nsys_report import read_report
from cs336_systems.profiling.nsys_trim import trim_report
from cs336_systems.profiling.step_answers import StepRow
from cs336_systems.profiling.trace import Trace
from cs336_systems.provenance import Provenance
from cs336_systems.records import ResultsFile

UNPROFILED = "unprofiled"  # the folder of rows measured without a profiler
_CELL = ("size", "ctx", "batch_size", "mode", "precision", "compile", "attention", "optimizer", "checkpoint_every")


def run_analysis(
    command: str,
    *,
    reports: Sequence[Path],
    benchmark: Path | None,
    out: Path,
    top: int,
    nsys: str,
    trim: Path | None = None,
    steps: int = 1,
    compare: bool = False,
) -> list[Analysis]:
    """Reads reports and folders of scripts/profile_nsys.py, and writes what `write_analyses` does under `out`.

    With `trim`, writes the one report's first steps there, and nothing else; with `compare`, only how far two reports
    of the same step agree, as agreement.json and its tables. Bad input, and reports of which none can be read, end the
    program with status 2; one among others is named and left out, and the status is 1.
    """
    with refusing_bad_input():
        check(len(reports) > 0, "reports", (), "needs at least one report or folder")
        check(top >= 1, "top", top, "must be at least 1")
        check(steps >= 1, "steps", steps, "must be at least 1")
        files, folders = find_reports(reports)
        if trim is not None:
            check(len(files) == 1, "trim", str(trim), f"cuts one report, and there are {len(files)}")
            size = trim_report(_as_sqlite(files[0], nsys), trim, steps)
            print(f"{trim}: {size / 1e3:.0f} kB", file=sys.stderr)
            return []
        check_writable(out)
        if compare:
            _compare(command, files, out, nsys)
            return []
        baseline = _rows_of(benchmark) if benchmark else []
        for folder in folders:
            baseline += rows_beside(folder / UNPROFILED)
        analyses, unreadable = {}, []
        for file in files:
            try:
                trace = read_trace_file(file, nsys)
            except ValueError as error:
                unreadable.append(str(error))
                continue
            name = report_name(file)
            analyses[name] = analyze(replace(trace, source=name), row_of(baseline, trace.cell))
        if unreadable and not analyses:
            raise ValueError("; ".join(unreadable))
        cells = [own for folder in folders for own in sorted(folder.iterdir()) if own.name != UNPROFILED]
        failed = [row for own in cells for row in failed_rows(own)]
        if not analyses and not failed:
            raise ValueError(f"{reports[0]}: holds no report")
        gpu = next((analysis.trace.gpu for analysis in analyses.values() if analysis.trace.gpu), None)
        results = ResultsFile(out, "steps", StepRow, _provenance(command, files, gpu))
    show(write_analyses(analyses, failed, results, top))
    print(f"Answers, rows, kernels, and a report and picture each: {out}/", file=sys.stderr)
    if unreadable:
        print("\n".join(f"error: left out: {reason}" for reason in unreadable), file=sys.stderr)
        raise SystemExit(1)
    return list(analyses.values())


def _compare(command: str, files: Sequence[Path], out: Path, nsys: str) -> None:
    check(len(files) == 2, "compare", True, f"takes two reports, and there are {len(files)}")
    first, second = (replace(read_trace_file(file, nsys), source=str(file)) for file in files)
    rows = agreement.compare(first, second)
    results = ResultsFile(out, "agreement", agreement.AgreementRow, _provenance(command, files, first.gpu))
    for row in rows:
        results.append(row)
    show(results.write_tables(agreement.COLUMNS, agreement.agreement_note(rows)))


def find_reports(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """The report files that paths stand for, and those of the paths that are folders of scripts/profile_nsys.py. There
    a report is its SQLite if it is `exported`, else the .nsys-rep, to be exported.

    Raises ValueError for a path that is not there.
    """
    files, folders = [], []
    for path in paths:
        if not path.exists():
            raise ValueError(f"{path}: there is no such file or folder")
        if not path.is_dir():
            files.append(path)
            continue
        folders.append(path)
        for folder in sorted(path.iterdir(), key=lambda one: one.stat().st_mtime):
            report = folder / "report.nsys-rep"
            found = exported(report) or report
            files += [found] if found.exists() else []
    return files, folders


def read_trace_file(path: Path, nsys: str = "nsys") -> Trace:
    """The trace of a .nsys-rep (exported with `nsys`), of its SQLite, or of torch.profiler's .json or .json.gz.

    Raises ValueError for anything else, saying what is missing.
    """
    if path.name.endswith((".json", ".json.gz")):
        from cs336_systems.profiling.torch_trace import read_torch_trace

        try:
            with (
                gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file
            ):
                return read_torch_trace(json.load(file), report_name(path))
        except (OSError, EOFError, zlib.error, ValueError) as error:  # not UTF-8, and not JSON, are ValueErrors
            raise ValueError(f"{path}: is no trace of torch.profiler ({error})") from error
    return read_report(_as_sqlite(path, nsys))


def _as_sqlite(path: Path, nsys: str) -> Path:
    if path.suffix != ".nsys-rep":
        return path
    try:
        return exported(path) or export_sqlite(path, find_nsys(nsys))
    except NsysFailed as error:
        raise ValueError(f"{path}: {error}") from error


def report_name(path: Path) -> str:
    """What a report is called: its file's name, or its folder's where scripts/profile_nsys.py made it."""
    stem = re.sub(r"\.(nsys-rep|sqlite|json|json\.gz)$", "", path.name)
    return path.resolve().parent.name if stem == "report" else stem


def cell_name(cell: BenchmarkCell) -> str:
    """A name for a cell's files, e.g. "small-ctx128-train-step-fp32"."""
    parts = [cell.size, f"ctx{cell.ctx}", cell.mode, cell.precision]
    parts += [cell.attention] if cell.attention != "naive" else []
    parts += {"off": [], "on": ["compiled"], "blocks": ["compiled-blocks"]}[cell.compile]
    parts += [cell.optimizer] if cell.optimizer != "adamw" else []
    parts += [f"checkpoint{cell.checkpoint_every}"] if cell.checkpoint_every else []
    return "-".join(parts)


def benchmark_row(path: Path | None, cell: BenchmarkCell) -> dict[str, Any] | None:
    """The row of a cell in a file of scripts/benchmark.py; None where it has none, ValueError if it is no such file."""
    return row_of(_rows_of(path), asdict(cell)) if path else None


def _rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a file that somebody named."""
    check(path.is_file(), "benchmark", str(path), "must be a file that scripts/benchmark.py wrote")
    return _read_benchmark(path)[1]


def rows_beside(folder: Path) -> list[dict[str, Any]]:
    """The rows that scripts/benchmark.py left in a folder; none where it left no file."""
    path = folder / "benchmark.json"
    return _read_benchmark(path)[1] if path.exists() else []


def _read_benchmark(path: Path) -> tuple[list[Provenance], list[dict[str, Any]]]:
    """The runs, at least one, and the rows, with whatever columns they have: unlike `read_results`, it takes files from
    before or after a column was there."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        runs, rows = [Provenance(**run) for run in document["runs"]], document["rows"]
        if not runs:
            raise ValueError("it has no runs")
        if not isinstance(rows, list) or not all(isinstance(row, dict) and "status" in row for row in rows):
            raise ValueError("its rows must be a list of objects with a status")
    except KeyError as error:
        raise ValueError(f"{path}: is no file of scripts/benchmark.py (it has no {error})") from error
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: is no file of scripts/benchmark.py ({error})") from error
    return runs, rows


def row_of(rows: Sequence[dict[str, Any]], cell: dict[str, Any] | None) -> dict[str, Any] | None:
    """The first row that is set beside a cell's report: of the same step, however often that was run."""
    if cell is None:
        return None
    usual = {"checkpoint_every": 0}
    key = [cell.get(name, usual.get(name)) for name in _CELL]
    return next((row for row in rows if [row.get(name, usual.get(name)) for name in _CELL] == key), None)


def failed_rows(folder: Path) -> list[StepRow]:
    """Of a cell's folder: its row, if the cell could not run (out of memory, or unsupported)."""
    failed = [row for row in rows_beside(folder) if row["status"] != "ok"]
    shared = [name for name in _CELL if name in StepRow.__dataclass_fields__]
    try:
        return [
            StepRow(folder.name, row["status"], row["reason"], **{name: row[name] for name in shared}) for row in failed
        ]
    except KeyError as error:
        path = folder / "benchmark.json"
        raise ValueError(f"{path}: is no file of scripts/benchmark.py (a row has no {error})") from error


def _provenance(command: str, files: Sequence[Path], gpu: str | None) -> Provenance:
    """The run's that the benchmark left beside a report; else what the report itself says."""
    for file in files:
        beside = file.parent / "benchmark.json"
        if beside.exists():
            return replace(_read_benchmark(beside)[0][-1], command=command)
    unknown: dict[str, Any] = dict.fromkeys(("driver", "cuda", "torch", "triton", "cpu", "git_commit"), "unknown")
    return Provenance(
        command=command,
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        gpu=gpu or "unknown GPU",
        gpu_count=1,
        gpu_memory_gib=0.0,
        python=platform.python_version(),
        cpu_count=0,
        **unknown,
    )
