"""From a trace to what a person reads: tables for each range, the handout's answers, the verdict, and a picture."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from cs336_systems.files import write_atomically
from cs336_systems.profiling.kernel_tables import class_table, kernel_table, range_table
from cs336_systems.profiling.step_answers import COLUMNS, WHAT_RAN, StepRow, answer
from cs336_systems.profiling.step_time import step_time
from cs336_systems.profiling.timeline import plot_timeline
from cs336_systems.profiling.trace import Trace
from cs336_systems.profiling.verdict import Verdict, judge
from cs336_systems.provenance import Provenance
from cs336_systems.reasons import short_reason
from cs336_systems.records import ResultsFile, to_frame, to_markdown

_RANGE_HEADINGS = {
    "range": "range",
    "count": "times",
    "host_ms": "host ms",
    "kernel_ms": "{units} ms",
    "kernels": "{units}",
    "matmul_share": "matmul share",
    "leading_kernel": "most time in",
    "leading_share": "its share",
}
_KERNEL_HEADINGS = {
    "kernel": "{unit}",
    "kind": "class",
    "total_ms": "ms",
    "count": "times",
    "mean_us": "mean µs",
    "share": "share",
}
_LONGEST_NAME = 80  # characters of a kernel's name in Markdown; CSV has all of them


@dataclass(frozen=True)
class Analysis:
    """A trace, its answers as a row, and its verdict (None on a CPU, where nothing is launched)."""

    trace: Trace
    row: StepRow
    verdict: Verdict | None


def analyze(trace: Trace, benchmark: Mapping[str, Any] | None = None) -> Analysis:
    """`benchmark`: the row of the same cell from scripts/benchmark.py, measured without a profiler.

    Raises ValueError for a trace with no kernels in its steps.
    """
    unprofiled_ms = (benchmark or {}).get("step_mean_ms")
    time = step_time(trace, unprofiled_ms) if trace.unit == "kernel" else None
    verdict = judge(trace, time) if time else None
    return Analysis(trace, answer(trace, time, verdict.binding if verdict else None, benchmark), verdict)


def report_markdown(analysis: Analysis, top: int) -> str:
    """Everything about one trace: verdict, ranges, and for each range its classes and its `top` kernels."""
    trace = analysis.trace
    parts = [f"# {_title(analysis)}", *trace.notes]
    if analysis.verdict is not None:
        parts.append(analysis.verdict.to_markdown())
    if trace.kinds():
        parts += ["## Ranges (of one step)", _table(range_table(trace), _RANGE_HEADINGS, trace.unit)]
    for kind in [None, *trace.kinds()]:
        if kind == "step":
            continue  # the same as all of it
        rows = kernel_table(trace, kind)
        heading = f"## {kind}" if kind else "## The whole step" if trace.steps else "## The whole report"
        parts += [heading, _table(class_table(trace, kind), {"kernel": "class", **_without_names()}, trace.unit)]
        parts.append(_table(rows[:top], _KERNEL_HEADINGS, trace.unit))
        if len(rows) > top:
            rest = sum(row.total_ms for row in rows[top:])
            parts.append(f"{len(rows) - top} more take {rest:.3g} ms together.")
    return "\n\n".join(parts) + "\n"


def write_analyses(
    analyses: Mapping[str, Analysis],
    failed: Sequence[StepRow],
    results: ResultsFile[StepRow],
    top: int,
    kept: str = "the reports are whole",
) -> str:
    """Writes into the folder of `results`: its rows as JSON, CSV, Markdown and LaTeX, answers.md, kernels.csv, and a
    Markdown file and a timeline each. Returns answers.md. `failed` are rows of cells that left no report.

    A file that cannot be written, as on a full disk, ends the program with a line, which says what is `kept`, and
    status 1.
    """
    try:
        return _write(analyses, failed, results, top)
    except OSError as error:
        print(f"error: cannot write under {results.directory}: {error.strerror}; {kept}", file=sys.stderr)
        raise SystemExit(1) from None


def _write(analyses: Mapping[str, Analysis], failed: Sequence[StepRow], results: ResultsFile[StepRow], top: int) -> str:
    out = results.directory
    for row in [*(analysis.row for analysis in analyses.values()), *failed]:
        results.append(row)
    kernels = []
    for name, analysis in analyses.items():
        write_atomically(out / f"{name}.md", report_markdown(analysis, top))
        plot_timeline(analysis.trace, out / f"{name}.png", _title(analysis))
        for kind in [None, *analysis.trace.kinds()]:
            rows = kernel_table(analysis.trace, kind)[:top] if kind != "step" else []
            kernels += [{"report": name, **to_frame([row]).iloc[0].to_dict()} for row in rows]
    if kernels:
        import pandas as pd

        write_atomically(out / "kernels.csv", pd.DataFrame(kernels).to_csv(index=False))
    shown = {name: heading for columns in COLUMNS.values() for name, heading in columns.items()}
    results.write_tables({**_what_ran(results.rows), **_there(results.rows, shown)})
    markdown = answers_markdown(results.rows, results.used_runs())
    write_atomically(out / "answers.md", markdown)
    return markdown


def answers_markdown(rows: Sequence[StepRow], runs: Sequence[Provenance]) -> str:
    """One table a question of the handout, a row a cell."""
    measured = [_abbreviated(row) for row in rows if row.status == "ok"]
    what = _there(measured, WHAT_RAN) or {"source": "report"}
    parts = []
    for heading, columns in COLUMNS.items():
        columns = _there(measured, columns)
        if columns:
            parts += [f"### {heading}", to_markdown(measured, {**what, **columns})]
    for row in rows:
        if row.status != "ok":
            parts.append(f"{row.source}: {row.status} ({short_reason(row)})")
    return "\n\n".join([*parts, *(f"Measured: {run.summary()}" for run in runs)]) + "\n"


def _what_ran(rows: Sequence[StepRow]) -> dict[str, str]:
    failed = {"status": "status"} if any(row.status != "ok" for row in rows) else {}
    return {"source": "report", **_there(rows, WHAT_RAN), **failed}


def _there(rows: Sequence[StepRow], columns: Mapping[str, str]) -> dict[str, str]:
    return {name: heading for name, heading in columns.items() if any(getattr(row, name) is not None for row in rows)}


def _title(analysis: Analysis) -> str:
    row = analysis.row
    if row.size is None:
        return row.source
    return f"{row.size}, context {row.ctx}, batch {row.batch_size}, {row.mode}, {row.precision} ({row.source})"


def _without_names() -> dict[str, str]:
    return {name: heading for name, heading in _KERNEL_HEADINGS.items() if name not in ("kernel", "kind")}


def _table(rows: Sequence[Any], headings: Mapping[str, str], unit: str) -> str:
    columns = {name: heading.format(unit=unit, units=f"{unit}s") for name, heading in headings.items()}
    return to_markdown([_abbreviated(row) for row in rows], columns)


def _abbreviated(row: Any) -> Any:
    """The row with long names cut in their middle: cuBLAS's kernels differ at both ends."""
    long = {
        field.name: f"{value[: _LONGEST_NAME - 31]}…{value[-30:]}"
        for field in fields(row)
        if isinstance(value := getattr(row, field.name), str) and len(value) > _LONGEST_NAME
    }
    return replace(row, **long)
