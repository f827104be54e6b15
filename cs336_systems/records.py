"""Rows and the files that hold them: what every benchmark and profile writes.

A row is a frozen dataclass of scalars. A `ResultsFile` keeps rows as JSON, replaced atomically after each row, so that
whatever stops the run (Ctrl-C, a full disk, a crash) leaves every finished row readable.
"""

from __future__ import annotations

import json
import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any, Generic, TypeVar

from cs336_systems.files import check_writable, lock_folder, write_atomically
from cs336_systems.provenance import Provenance
from cs336_systems.reasons import list_in_latex, list_in_markdown, measured_first, number_reasons
from cs336_systems.resuming import run_begins
from cs336_systems.row_values import check_values
from cs336_systems.signals import signals_waiting


class Unsupported(Exception):
    """What was asked for cannot run on this machine; the message is the row's reason, its status "unsupported"."""


@dataclass(frozen=True)
class Statistics:
    """Mean, sample standard deviation (None for one value), median and minimum, in the values' own unit."""

    mean: float
    std: float | None
    median: float
    min: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Statistics:
        """Raises ValueError for no values."""
        if not values:
            raise ValueError("values=[]: statistics need at least one value")
        return cls(
            mean=float(statistics.fmean(values)),
            std=float(statistics.stdev(values)) if len(values) > 1 else None,
            median=float(statistics.median(values)),
            min=float(min(values)),
        )


Row = TypeVar("Row")  # a frozen dataclass of scalars


class ResultsFile(Generic[Row]):
    """Rows of one kind in `<directory>/<name>.json`, with CSV, Markdown and LaTeX beside it on request.

    Each row belongs to a run, and each run has its provenance, so that a resumed file still says where every row is
    from. The files of an earlier run that is not resumed (rows, tables and pictures: `<name>.*` and `<name>_*`) are
    moved to a folder of their own, never overwritten.

    Attributes:
        look: what others use of the machine is looked at by it, as timing begins and ends: None, or called with the
            run's provenance, and with `is_end`, for the provenance with that.
        lock: held while rows are added; a thread that writes tables of the last rows holds it.
        asked: the cells that this run is to leave rows of, and what a person calls each.

    Raises:
        ValueError: the directory cannot be written, or the file to resume has columns that do not fit, or rows of
            another card.
    """

    def __init__(
        self,
        directory: str | Path,
        name: str,
        row_type: type[Row],
        provenance: Provenance,
        resume: bool = False,
        look: Callable[..., Provenance] | None = None,
    ) -> None:
        self.look = look
        self._is_timed = False
        self.directory = Path(directory)
        self.path = self.directory / f"{name}.json"
        self.row_type = row_type
        self.runs: list[Provenance] = []
        self.rows: list[Row] = []
        self._run_of_row: list[int] = []
        self.asked: dict[Any, str] = {}
        self.lock = threading.RLock()
        check_writable(self.directory)
        lock_folder(self.directory)
        for unfinished in self.directory.glob(f".{name}.*-*"):  # of a run that was killed as it wrote
            unfinished.unlink()
        if self.path.exists():
            if resume:
                self._read()
                self._check_same_machine(provenance)
            else:
                self._set_aside()
        self.runs.append(provenance)
        run_begins()

    def append(self, row: Row) -> None:
        """Adds a row and puts the whole file on disk. Raises NotWritten if it can't; all then is as it was before."""
        self.replace([row], lambda _: False)

    def replace(self, rows: Sequence[Row], is_replaced: Callable[[Row], bool]) -> None:
        """Adds rows in the place of those of which `is_replaced(row)` is true, in one write; errors as `append`."""
        kept = [index for index, row in enumerate(self.rows) if not is_replaced(row)]
        after = [self.rows[index] for index in kept] + [*rows]
        run_of_row = [self._run_of_row[index] for index in kept] + [len(self.runs) - 1] * len(rows)
        with signals_waiting(), self.lock:  # cut in two, they would leave tables that lack a row of the file
            self._write(after, run_of_row)
            self.rows, self._run_of_row = after, run_of_row

    def timing_begins(self) -> None:
        """Looks at the machine when it is sure that something will be timed, and nothing of the run's own is at work
        yet. To be called before each of what may be first; other threads' calls wait for the one that looks."""
        with self.lock:
            if self.look is not None and not self._is_timed:
                self._is_timed = True
                self.runs[-1] = self.look(self.runs[-1], is_end=False)

    def timing_ends(self) -> None:
        """Looks again, if anything was timed, when nothing of the run's own is at work any more. Raises NotWritten if
        that can't be kept."""
        if self.look is not None and self._is_timed:
            run = self.look(self.runs[-1], is_end=True)
            if run != self.runs[-1]:
                self.runs[-1] = run
                self.replace([], lambda _: False)

    def left(self) -> list[str]:
        """What a person calls the cells `asked` for that have no row yet."""
        return [self.asked[cell] for cell in self.cells_left()]

    def cells_left(self) -> list[Any]:
        """Those cells themselves."""
        return [cell for cell in self.asked if not any(is_row_of(row, cell) for row in self.rows)]

    def used_runs(self) -> list[Provenance]:
        """The runs that have rows, in order."""
        return [run for index, run in enumerate(self.runs) if index in set(self._run_of_row)]

    def measured(self) -> list[str]:
        """A line for each of them that says where its rows are from, e.g. under a table."""
        return [f"Measured: {run.summary()}" for run in self.used_runs()]

    def write_tables(
        self, columns: Mapping[str, str] | None = None, note: str = "", summary: Sequence[Any] | None = None
    ) -> str:
        """Writes CSV (every row and column), Markdown and LaTeX (`columns`: field to heading) and returns the Markdown.

        In the last two, rows that were not measured come last, and the reasons why stand below the table, numbered in
        the column `status`. They are of `summary`, rows made of the file's own, where there is one.
        """
        if not self.rows:
            return ""
        rows = measured_first(self.rows if summary is None else summary)
        table, reasons = to_frame(rows, columns), []
        if columns is not None and "status" in columns:
            table[columns["status"]], reasons = number_reasons(rows)
        provenance = self.measured()
        parts = [_frame_to_markdown(table), list_in_markdown(reasons), note, *provenance]
        markdown = "\n\n".join(filter(None, parts)) + "\n"
        latex = "\n".join(f"% {line}" for line in provenance) + "\n"
        latex += table.to_latex(index=False, escape=True, na_rep="--")
        latex += list_in_latex(reasons)
        write_atomically(self.path.with_suffix(".csv"), to_frame(self.rows).to_csv(index=False))
        write_atomically(self.path.with_suffix(".md"), markdown)
        write_atomically(self.path.with_suffix(".tex"), latex)
        return markdown

    def _write(self, rows: Sequence[Row], run_of_row: Sequence[int]) -> None:
        document = {
            "runs": [asdict(run) for run in self.runs],
            "rows": [{"run": run, **_as_dict(row)} for run, row in zip(run_of_row, rows, strict=True)],
        }
        write_atomically(self.path, json.dumps(document, indent=1) + "\n")

    def _set_aside(self) -> None:
        """Moves the earlier run's files into a folder that is named after its end, e.g. benchmark-20260131-120000."""
        name = self.path.stem
        stamp = datetime.fromtimestamp(self.path.stat().st_mtime, UTC).strftime("%Y%m%d-%H%M%S")
        earlier = [path for path in self.directory.iterdir() if path.name.startswith((f"{name}.", f"{name}_"))]
        folder = self.directory / f"{name}-{stamp}"
        for number in count(2):
            if not folder.exists():
                break
            folder = self.directory / f"{name}-{stamp}-{number}"
        folder.mkdir()
        for path in earlier:
            path.rename(folder / path.name)

    def _read(self) -> None:
        self.runs, self.rows, self._run_of_row = read_results(self.path, self.row_type)

    def _check_same_machine(self, now: Provenance) -> None:
        for before in self.runs:
            for name in ("gpu", "torch", "triton"):
                if getattr(before, name) != getattr(now, name):
                    raise ValueError(
                        f"resume={str(self.path)!r}: its rows were measured with {name} {getattr(before, name)}, and "
                        f"this machine has {getattr(now, name)}; name another --out"
                    )


class DetailRows(Generic[Row]):
    """A second file, of rows that come several at a time with each of a sweep's own.

    `results` are the sweep's own rows; this file lies beside them, `<name>.json`. A measurement has its details under
    `key`: a list of dicts of `row_type`'s fields, but for the cell's.
    """

    def __init__(self, results: ResultsFile, name: str, row_type: type[Row], key: str, resume: bool = False) -> None:
        self.file = ResultsFile(results.directory, name, row_type, results.runs[-1], resume=resume)
        self._key = key

    def complete(self, cell: Any, measured: dict[str, Any]) -> dict[str, Any]:
        """Takes the details out of a measurement and keeps them; what is left is the sweep's own row."""
        details = [self.file.row_type(**_as_dict(cell), **one) for one in measured.pop(self._key, [])]
        # A run that ended between these and the sweep's own row has left them there.
        if details:
            self.file.replace(details, lambda row: is_row_of(row, cell))
        return measured


def is_row_of(row: Any, cell: Any) -> bool:
    """Whether a row has all of a cell's parameters."""
    return all(getattr(row, name) == getattr(cell, name) for name in cell.__dataclass_fields__)


def read_results(path: str | Path, row_type: type[Row]) -> tuple[list[Provenance], list[Row], list[int]]:
    """Reads what a ResultsFile wrote: the runs, the rows, and each row's run.

    A column that the file lacks takes its default: the file is from before that parameter was there. Raises ValueError,
    naming the file, where it is not such a file, lacks a column that has no default, or has one that `row_type` lacks,
    or a value in it that is none of the column's.
    """
    path = Path(path)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        runs = [Provenance(**run) for run in document["runs"]]
        run_of_row = [int(row.pop("run")) for row in document["rows"]]
        columns = fields(row_type)  # ty: ignore[invalid-argument-type]
        names = {column.name for column in columns}
        needed = {column.name for column in columns if column.default is MISSING}
        rows = []
        for number, row in enumerate(document["rows"], start=1):
            if wrong := set(row) - names | needed - set(row):
                raise ValueError(f"columns differ by {sorted(wrong)}")
            check_values(row_type, row, f"row {number}, ")
            rows.append(row_type(**row))
        if wrong := set(run_of_row) - set(range(len(runs))):
            raise ValueError(f"it has {len(runs)} runs, and rows of run {min(wrong)}")
    except (AttributeError, KeyError, OSError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a results file of {row_type.__name__} rows ({error})") from error
    return runs, rows, run_of_row


def to_frame(rows: Sequence[Row], columns: Mapping[str, str] | None = None) -> Any:
    """Rows as a pandas DataFrame: all fields, or `columns` (field name to heading) in their order."""
    import pandas as pd

    frame = pd.DataFrame([_as_dict(row) for row in rows])
    return frame if columns is None else frame[list(columns)].rename(columns=dict(columns))


def to_markdown(rows: Sequence[Row], columns: Mapping[str, str] | None = None) -> str:
    """Rows as a Markdown table. Floats are shown to four significant digits, missing values as a dash."""
    return _frame_to_markdown(to_frame(rows, columns))


def _frame_to_markdown(frame: Any) -> str:
    frame = frame.astype(object).map(format_value)
    numeric = [all(_is_number(value) for value in frame[column]) for column in frame.columns]
    return frame.to_markdown(
        index=False, disable_numparse=True, colalign=["right" if right else "left" for right in numeric]
    )


def _as_dict(row: Any) -> dict[str, Any]:
    return asdict(row)


def format_value(value: Any) -> str:
    """One cell of a table, e.g. 12.3456 -> "12.35", 1234.5 -> "1234", None -> "–"."""
    if value is None or value != value:  # NaN
        return "–"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def _is_number(text: str) -> bool:
    return text == "–" or text.replace(".", "", 1).replace("e-", "", 1).lstrip("-").isdigit()
