"""Nsight Systems from the command line: run the benchmark under it, and turn its report into SQLite.

Only the tool is called here; what its report says is read by `nsys_report`.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from cs336_systems.configs import BenchmarkCell, check

_BENCHMARK = Path(__file__).resolve().parents[2] / "scripts" / "benchmark.py"
PARAMETERS = ("size", "ctx", "mode", "precision", "compile", "attention", "optimizer", "checkpoint_every")
PARAMETERS += ("warmup", "steps", "batch_size", "device", "seed")

CAPTURE_HINT = (
    "capture one with `nsys profile --trace=cuda,nvtx -o report python scripts/benchmark.py --nvtx`, or with "
    "scripts/profile_nsys.py, which runs that for you"
)


class NsysFailed(Exception):
    """nsys could not be run, or left no report; the message says what to do."""


def find_nsys(nsys: str) -> list[str]:
    """The words of the command `nsys`: a program's name or path, or a wrapper with arguments (split as a shell does).

    Raises ValueError where there is no such program.
    """
    words = shlex.split(nsys)
    check(
        bool(words) and shutil.which(words[0]) is not None,
        "nsys",
        nsys,
        "is no program here. Nsight Systems comes with the CUDA toolkit or from developer.nvidia.com/nsight-systems; "
        "give its path with --nsys, or take scripts/profile_kernels.py, which needs none",
    )
    return words


def benchmark_command(cells: Sequence[BenchmarkCell], out: Path, nvtx: bool, resume: bool = False) -> list[str]:
    """scripts/benchmark.py on a product of cells of named sizes, its rows under `out`, added to those there if
    `resume`; marked for nsys if `nvtx`."""
    command = [sys.executable, str(_BENCHMARK)]
    for name in PARAMETERS:
        values = dict.fromkeys(str(getattr(cell, name)) for cell in cells)
        command += [f"--{name.replace('_', '-')}", *values]
    return [*command, *(["--nvtx"] if nvtx else []), *(["--resume"] if resume else []), "--out", str(out)]


def profile_command(nsys: Sequence[str], report: Path, command: Sequence[str]) -> list[str]:
    """nsys around `command`, so that it records what lies between cudaProfilerStart and Stop, in every process.

    Kernels and ranges only: sampling the CPU needs rights that containers lack, and slows the step. A CUDA graph's
    kernels are recorded one by one.
    """
    return [
        *nsys,
        "profile",
        "--trace=cuda,nvtx",
        "--sample=none",
        "--cpuctxsw=none",
        "--cuda-graph-trace=node",
        "--capture-range=cudaProfilerApi",
        "--capture-range-end=stop",
        "--force-overwrite=true",
        f"--output={report}",
        *command,
    ]


def export_command(nsys: Sequence[str], report: Path, sqlite: Path) -> list[str]:
    """nsys's own conversion of a .nsys-rep file to SQLite."""
    return [*nsys, "export", "--type=sqlite", "--force-overwrite=true", f"--output={sqlite}", str(report)]


def capture(nsys: Sequence[str], report: Path, command: Sequence[str]) -> None:
    """Runs `command` under nsys and waits; the report is `report` (ending in .nsys-rep) when this returns.

    An earlier report there is removed first, and the SQLite of it.

    Raises:
        NsysFailed: `command` failed, or nsys left no report.
    """
    for earlier in (report, report.with_suffix(".sqlite")):
        earlier.unlink(missing_ok=True)
    try:
        status = run(profile_command(nsys, report, command))
    except KeyboardInterrupt:  # nsys, which was interrupted too, may leave a report of less than was asked for
        report.unlink(missing_ok=True)
        raise
    if status != 0:
        report.unlink(missing_ok=True)
        raise NsysFailed(f"nsys or the program under it ended with status {status}; its own words are above")
    if not report.exists():
        left = sorted(path.name for path in report.parent.glob(f"{report.stem}*.qdstrm"))
        raise NsysFailed(
            f"nsys recorded, and could not make a report of it ({left[0]} is what it left). Its importer lacks "
            "libraries, often libdw1 and libelf1: install them, or import the file on a machine that has them"
            if left
            else "nsys left no report: nothing called cudaProfilerStart under it. On a CPU there is nothing to record"
        )


def is_captured(report: Path) -> bool:
    """Whether there is a whole report: its SQLite was made, which comes after it, and `capture` removes both first. The
    report itself may be gone, or, as copies of files may be, younger than what was made of it."""
    return report.with_suffix(".sqlite").exists()


def exported(report: Path) -> Path | None:
    """The SQLite of a report that `is_captured`, if it is not older than the report: what is older is made anew."""
    sqlite = report.with_suffix(".sqlite")
    if not is_captured(report) or (report.exists() and sqlite.stat().st_mtime < report.stat().st_mtime):
        return None
    return sqlite


def export_sqlite(report: Path, nsys: Sequence[str]) -> Path:
    """The report as SQLite, beside it: what was `exported`, or made now, under another name until it is whole.

    Raises NsysFailed if nsys could not read it.
    """
    if kept := exported(report):
        return kept
    sqlite, unfinished = report.with_suffix(".sqlite"), report.with_name(f".{report.stem}-unfinished.sqlite")
    try:
        status = run(export_command(nsys, report, unfinished))
        if status != 0 or not unfinished.exists():
            raise NsysFailed(f"nsys export of {report} ended with status {status}; its own words are above")
        return unfinished.replace(sqlite)
    finally:
        for left in (unfinished, unfinished.with_name(f"{unfinished.name}-journal")):
            left.unlink(missing_ok=True)


def run(command: Sequence[str]) -> int:
    """Prints the command as a person would type it, runs it, and returns its status; NsysFailed if it can't run."""
    print(f"$ {shlex.join(command)}", file=sys.stderr, flush=True)
    try:
        return subprocess.run(command, check=False).returncode
    except OSError as error:
        raise NsysFailed(f"{command[0]} cannot be run: {error.strerror}") from error
