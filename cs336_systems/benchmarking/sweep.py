"""Measures the cells of a sweep one after another, each in a fresh process, and keeps a row of each on disk."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from cs336_systems.benchmarking.before_work import does_not_fit
from cs336_systems.benchmarking.isolation import Outcome, run_isolated
from cs336_systems.cli import as_flag, tell
from cs336_systems.configs import BenchmarkCell
from cs336_systems.progress import progress
from cs336_systems.records import ResultsFile, is_row_of
from cs336_systems.sweep_cells import Impossible, possible

_MOST_REASONS = 3


def run_sweep(
    cells: Sequence[Any],
    measure: Callable[[Any], Any],
    results: ResultsFile,
    label: Callable[[Any], str] = str,
    complete: Callable[[Any, dict[str, Any]], dict[str, Any]] = lambda cell, measured: measured,
    known: Callable[[Any], Outcome | None] = does_not_fit,
) -> None:
    """Adds to `results` one row a cell, in order, skipping cells whose row is there already.

    Args:
        cells: frozen dataclasses of parameters. A cell whose `cold_caches` is true gets empty compile caches.
        measure: a top-level function `measure(cell) -> dict` of the row's results, run in a process of its own. A
            "status" and a "reason" among them are the row's: a measurement may know what it ran out of memory for.
        results: its `row_type` has the cell's fields, `status`, `reason`, and the results (None where there is none).
            Out of memory is a result, so such a row is not measured again, but on a CPU, where it depends on what else
            the machine holds; nor is any other but one whose process was killed.
        label: what the progress bar calls a cell.
        complete: called as `complete(cell, measured)` in this process; returns the row's results.
        known: what becomes of a cell, where that can be said without measuring it.

    Raises:
        RuntimeError: a measurement failed otherwise than by memory; the rows so far are on disk.
        OSError: a row could not be written; the rows before it are on disk.
    """
    to_measure = unmeasured(cells, results, label)
    if any(known(cell) is None for cell in to_measure):
        results.timing_begins()
    with progress(len(cells), len(cells) - len(to_measure)) as bar:
        for cell in to_measure:
            bar.set_description(results.asked[cell])
            outcome = known(cell)
            if outcome is None:
                with _compile_caches(getattr(cell, "cold_caches", False)) as environment:
                    outcome = run_isolated(measure, cell, environment=environment)
            results.append(make_row(results.row_type, cell, outcome, complete(cell, outcome.value or {})))
            bar.update()


def unmeasured(cells: Sequence[Any], results: ResultsFile, label: Callable[[Any], str] = str) -> list[Any]:
    """The cells of which `results` has no row, or one whose cause may have passed: of a process that was killed, of
    what a CPU's memory was too full for, or of a model that could not run there (the environment, or what is installed,
    lets it now, or it would be `Impossible`). Such rows are taken out, here and in the file. Whatever else became of a
    cell, it stays as it is. A cell that is there twice is one. Those that are `Impossible` get their rows here.

    Tells where there are none, so that a resumed run does not end without a word of why; where there are, `results`
    knows what it is asked for, so that a run that is stopped ends with a word of what is left (into_files.py).
    """
    _add_impossible(cells, results)
    cells = possible(cells)
    on_cpu = results.runs[-1].gpu == "none"

    def is_tried_again(row: Any) -> bool:
        return any(row.status in _may_pass(cell, on_cpu) and is_row_of(row, cell) for cell in cells)

    if any(is_tried_again(row) for row in results.rows):
        results.replace([], is_tried_again)
    results.asked = told_apart(cells, label)
    left = results.cells_left()
    if not left:
        tell(f"Nothing is left to measure: every cell has its row in {results.path}.")
    return left


def told_apart(cells: Sequence[Any], label: Callable[[Any], str]) -> dict[Any, str]:
    """Each cell's label, e.g. "small ctx 256"; where several cells have one, what sets them apart behind it, by fields:
    "small ctx 256, warmup 0" and "small ctx 256, warmup 5"."""
    labels = {cell: label(cell) for cell in cells}
    for shared in [text for text, n in Counter(labels.values()).items() if n > 1]:
        same = [cell for cell, text in labels.items() if text == shared]
        apart = [name for name in asdict(same[0]) if len({getattr(cell, name) for cell in same}) > 1]
        for cell in same:
            labels[cell] += "".join(f", {name.replace('_', ' ')} {getattr(cell, name)}" for name in apart)
    return labels


def _may_pass(cell: Any, on_cpu: bool) -> tuple[str, ...]:
    """The statuses of a cell's row that another run may not give again."""
    return ("killed", *("oom",) * on_cpu, *("unsupported",) * isinstance(cell, BenchmarkCell))


def _add_impossible(cells: Sequence[Any], results: ResultsFile) -> None:
    """Adds a row, status "unsupported", for each combination that cannot be and has none yet, and tells of them."""

    def is_there(values: Mapping[str, Any]) -> bool:
        return any(all(getattr(row, name) == value for name, value in values.items()) for row in results.rows)

    missing = [cell for cell in cells if isinstance(cell, Impossible) and not is_there(dict(cell.values))]
    if not missing:
        return
    reasons = list(dict.fromkeys(as_flag(cell.reason) for cell in missing))
    more = [f"and for {len(reasons) - _MOST_REASONS} more reasons"] if len(reasons) > _MOST_REASONS else []
    n_cells = len(set(cells))
    tell(
        f"{len(missing)} of {n_cells} combinations cannot be measured, and become rows that say why: "
        f"{'; '.join([*reasons[:_MOST_REASONS], *more])}."
    )
    outcomes = [(cell, Outcome("unsupported", reason=cell.reason)) for cell in missing]
    results.replace([make_row(results.row_type, *each, {}) for each in outcomes], lambda _: False)


def make_row(row_type: Any, cell: Any, outcome: Outcome, values: Mapping[str, Any]) -> Any:
    """A row of the cell's parameters (or of an `Impossible`'s), the outcome's status and reason, and `values` (which
    may name their own); None where there is no value."""
    parameters = dict(cell.values) if isinstance(cell, Impossible) else asdict(cell)
    ending = {"status": outcome.status, "reason": outcome.reason}
    return row_type(**{**dict.fromkeys(row_type.__dataclass_fields__), **parameters, **ending, **values})


@contextmanager
def _compile_caches(cold: bool) -> Generator[Mapping[str, str]]:
    """Environment for a cell: nothing, or Inductor's and Triton's caches in folders of its own that start empty."""
    if not cold:
        yield {}
        return
    folder = tempfile.mkdtemp(prefix="cs336-cold-caches-")
    try:
        yield {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
