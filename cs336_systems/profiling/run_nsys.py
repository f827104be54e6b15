"""From the arguments of scripts/profile_nsys.py to reports: each cell's benchmark under nsys, and once without it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from cs336_systems.cli import refusing_bad_input, show
from cs336_systems.configs import BenchmarkCell, check, named_cell
from cs336_systems.files import check_writable
from cs336_systems.profiling.nsys import (
    PARAMETERS,
    NsysFailed,
    benchmark_command,
    capture,
    export_command,
    export_sqlite,
    find_nsys,
    is_captured,
    profile_command,
    run,
)
from cs336_systems.profiling.run_analysis import (
    UNPROFILED,
    cell_name,
    failed_rows,
    row_of,
    rows_beside,
    run_analysis,
)
from cs336_systems.progress import Countdown
from cs336_systems.resuming import run_begins, to_go_on
from cs336_systems.sweep_cells import as_read, check_read


def run_nsys(
    command: str,
    *,
    nsys: str,
    out: Path,
    resume: bool,
    dry_run: bool,
    unprofiled: bool,
    size: tuple[str, ...],
    ctx: tuple[int, ...],
    mode: tuple[str, ...],
    precision: tuple[str, ...],
    top: int,
    **parameters: Any,
) -> None:
    """Captures every cell of the product, exports it to `<out>/<cell>/report.sqlite`, and reads all (`run_analysis`).

    A cell that cannot run (out of memory) leaves its benchmark's row and no report; any other failure ends the program
    with status 1. Bad input, and reports to `resume` that are of another workload, end the program with status 2
    before anything runs; Ctrl-C leaves the reports so far, and `resume` goes on from there.
    """
    with refusing_bad_input():
        for flag, values in {"size": size, "ctx": ctx, "mode": mode, "precision": precision}.items():
            check(values != (), flag, (), "needs at least one value")
        cells = [
            named_cell(name, length, mode=how, precision=number, **parameters)
            for name, length, how, number in product(size, ctx, mode, precision)
        ]
        check_read(cells)
        if resume:
            for cell in cells:
                _check_kept(out, as_read(cell))
        program = shlex.split(nsys) if dry_run else find_nsys(nsys)
        if not dry_run:
            check_writable(out)
    if dry_run:
        for words in commands(cells, program, out, unprofiled):
            show(shlex.join(words))
        return
    run_begins()
    try:
        if unprofiled:
            run(benchmark_command(cells, out / UNPROFILED, nvtx=False, resume=resume))
        countdown = Countdown(sum(not (resume and is_captured(_report(out, cell))) for cell in cells))
        for cell in cells:
            report = _report(out, cell)
            if not (resume and is_captured(report)):
                countdown.next(cell_name(cell))
                report.parent.mkdir(parents=True, exist_ok=True)
                try:
                    capture(program, report, benchmark_command([as_read(cell)], report.parent, nvtx=True))
                except NsysFailed:
                    if not failed_rows(report.parent):
                        raise
                    print(f"{cell_name(cell)} left no report: {failed_rows(report.parent)[0].reason}", file=sys.stderr)
                    continue
            export_sqlite(report, program)
    except KeyboardInterrupt:
        print(f"\nInterrupted. {to_go_on(command)}", file=sys.stderr)
        raise SystemExit(130) from None
    except NsysFailed as error:
        print(f"error: {error}. Reports so far are kept. {to_go_on(command)}", file=sys.stderr)
        raise SystemExit(1) from None
    run_analysis(command, reports=[out], benchmark=None, out=out, top=top, nsys=nsys)


def _report(out: Path, cell: BenchmarkCell) -> Path:
    return out / cell_name(cell) / "report.nsys-rep"


def _check_kept(out: Path, cell: BenchmarkCell) -> None:
    """Raises ValueError where what there is of a cell is of another workload: its folder's name says not all of it."""
    report = _report(out, cell)
    folder, kept = report.parent, []
    if is_captured(report):
        kept += [(folder, row) for row in rows_beside(folder)[-1:]]
    if timed := row_of(rows_beside(out / UNPROFILED), asdict(cell)):
        kept.append((out / UNPROFILED, timed))
    for where, row in kept:
        for name in PARAMETERS:
            before, now = row.get(name, getattr(cell, name)), getattr(cell, name)  # or a file from before the column
            if before != now:
                what = f"what is there of {folder.name} has {name} {before}, and this run {now}"
                raise ValueError(f"resume={str(where)!r}: {what}; name another --out")


def commands(cells: Sequence[BenchmarkCell], nsys: Sequence[str], out: Path, unprofiled: bool) -> list[list[str]]:
    """What `run_nsys` runs, in order, for a person to run by hand (it exports to another name, and renames)."""
    listed = [benchmark_command(cells, out / UNPROFILED, nvtx=False)] if unprofiled else []
    for cell in cells:
        report = _report(out, cell)
        benchmark = benchmark_command([as_read(cell)], report.parent, nvtx=True)
        listed.append(profile_command(nsys, report, benchmark))
        listed.append(export_command(nsys, report, report.with_suffix(".sqlite")))
    return listed
