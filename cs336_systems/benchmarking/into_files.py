"""From a sweep's arguments to its files: check, find the device, measure, and write rows, tables and plots."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from cs336_systems.benchmarking.before_work import check_models, without_missing
from cs336_systems.benchmarking.isolation import run_isolated
from cs336_systems.cli import refusing_bad_input, show, tell
from cs336_systems.configs import check
from cs336_systems.cpu_load import with_cpu_load
from cs336_systems.files import NotWritten
from cs336_systems.provenance import (
    Provenance,
    best_device,
    check_without_torch,
    collect_provenance,
    devices_here,
)
from cs336_systems.records import ResultsFile, is_row_of
from cs336_systems.resuming import to_go_on
from cs336_systems.signals import STOPPED, answer, leave_unwinding_untold, stopped_by
from cs336_systems.sweep_cells import possible

Look = Callable[..., Provenance]
_MOST_LISTED = 5


def measure_into_files(
    command: str,
    name: str,
    row_type: Any,
    make_cells: Callable[[str], list[Any]],
    sweep: Callable[[list[Any], ResultsFile], None],
    write_files: Callable[[ResultsFile], str],
    *,
    device: str,
    out: Path,
    resume: bool,
    check_cells: Callable[[list[Any]], None] = check_models,
    must_measure: bool = True,
    is_timed: bool = True,
) -> list[Any]:
    """From arguments to files under `out`: check, measure, print the tables; returns the rows.

    `make_cells(device)` raises ValueError for what can never be; there may be `Impossible` ones among its cells, which
    are rows. `check_cells(cells)` raises ValueError where none of the others can be on this machine. `sweep` measures,
    and `write_files` writes all but the JSON file and returns what a person reads. Bad input ends the program with
    status 2 before anything is built; Ctrl-C and errors leave the rows so far on disk. With `must_measure` it ends with
    status 1 if no cell at all was measured, or one was killed. Without `is_timed` no time is among the results, and
    nothing is said of a busy CPU.
    """
    with refusing_bad_input():
        check_without_torch(make_cells, device, out)
        device, provenance, look = resolve_device(device, command, is_timed=is_timed)
        cells = without_missing(make_cells(device))
        check_cells(possible(cells))
        results = ResultsFile(out, name, row_type, provenance, resume, look)
    sweep_into_files(results, lambda: sweep(cells, results), write_files)
    if must_measure:
        check_any_measured(results)
    return results.rows


def sweep_into_files(
    results: ResultsFile, sweep: Callable[[], None], write_files: Callable[[ResultsFile], str]
) -> None:
    """Calls `sweep()`, which adds rows to `results`; then, whatever ended it, writes the files and prints their text.
    What others use of a CPU is looked at once more if `sweep` has timed anything there.

    Raises:
        SystemExit: 130 after Ctrl-C, 143 after SIGTERM and 129 after SIGHUP (as endings.py answers them), 1 where a
            file could not be written, each after a line that says how to go on.
    """
    told: list[str] = []
    before = {number: signal.getsignal(number) for number in STOPPED}
    try:
        with _explaining(NotWritten, results, told):
            sweep()
    except (KeyboardInterrupt, SystemExit) as error:
        number = stopped_by(error)
        if number is None:
            raise
        _answer(dict.fromkeys(before, signal.SIG_IGN))
        told.append(f"\n{STOPPED[number]}. {to_go_on(results.runs[-1].command)}")
        tell(told[-1])
        leave_unwinding_untold()
        raise SystemExit(128 + number) from None
    finally:
        try:
            finish_files(results, write_files, told)
        finally:
            _answer(before)


def check_any_measured(results: ResultsFile) -> None:
    """Raises SystemExit with status 1 where all rows say that their cells could not be measured, or one that was asked
    for that its process was killed, which is tried again (`unmeasured`)."""
    if all(getattr(row, "status", "ok") != "ok" for row in results.rows):
        raise SystemExit(1)
    check_none_killed(results)


def check_none_killed(results: ResultsFile) -> None:
    """Raises SystemExit with status 1 where a cell's row says that its process, or a rank of it, was killed."""
    if _killed(results):
        raise SystemExit(1)


def _killed(results: ResultsFile) -> list[str]:
    killed = [row for row in results.rows if getattr(row, "status", "ok") == "killed"]
    return [text for cell, text in results.asked.items() if any(is_row_of(row, cell) for row in killed)]


def finish_files(
    results: ResultsFile, write_files: Callable[[ResultsFile], str], told: list[str] | None = None
) -> None:
    """Writes the files of the rows so far, if there are any, and prints their text and what is left to measure; what
    `told` has is not said again.

    Raises:
        SystemExit: 1 where a file could not be written, after a line that says how to go on.
    """
    with results.lock:  # a launched rank may be finishing in another thread, which would write to the same files
        if results.rows:
            with _explaining(OSError, results, [] if told is None else told):  # all that happens here is writing
                results.timing_ends()
                text = write_files(results)
            show(text)
            tell(f"Rows, tables and plots: {results.directory}/{results.path.stem}*")
        _tell_what_is_left(results, told or [])


def _tell_what_is_left(results: ResultsFile, told: Sequence[str]) -> None:
    """How many of the cells that a run was asked for have rows, and which have none, if it was stopped before; which
    were killed; and how to go on, unless that is `told`."""
    n, left, killed = len(results.asked), results.left(), _killed(results)
    lines = [f"{n - len(left)} of {n} cells have their rows. Left: {_listed(left)}."] if left else []
    if killed:
        lines.append(f"{len(killed)} of {n} cells were killed, and are tried again by --resume: {_listed(killed)}.")
    how = to_go_on(results.runs[-1].command)
    how = "" if any(how in line for line in told) else f" {how}"
    if lines:
        tell(f"{' '.join(lines)}{how}")


def _listed(cells: Sequence[str]) -> str:
    more = [f"and {len(cells) - _MOST_LISTED} more"] if len(cells) > _MOST_LISTED else []
    return "; ".join([*cells[:_MOST_LISTED], *more])


def _answer(handlers: dict[signal.Signals, Any]) -> None:
    """A second Ctrl-C, be it from a launcher that passes the first one on, does not spoil the files of the seconds in
    which they are written; then it is answered as before."""
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():
            answer(number, handler)


@contextmanager
def _explaining(error_type: type[OSError], results: ResultsFile, told: list[str]) -> Generator[None]:
    """Ends the program with a line instead of a traceback where files cannot be written: status 1, and how to go on.
    Lines are in `told`, and what is there is not said again: the tables do not fit where a row did not."""
    try:
        yield
    except error_type as error:
        n = len(results.rows)
        remain = "no row was there yet" if n == 0 else f"the {n} row{'s' * (n > 1)} before remain{'s' * (n == 1)}"
        line = (
            f"\nerror: cannot write under {results.directory}: {error.strerror}; {remain} in {results.path.name}. "
            f"Make room. {to_go_on(results.runs[-1].command)}"
        )
        if line not in told:
            told.append(line)
            tell(line)
        raise SystemExit(1) from None


def resolve_device(
    device: str, command: str, *, is_timed: bool = True, n_threads: int | None = None
) -> tuple[str, Provenance, Look | None]:
    """What `device` stands for on this machine ("auto": a GPU if there is one), the run's provenance, and what a
    `ResultsFile` looks by at what others take of it, where a CPU is to be timed (`is_timed`), by `n_threads` threads at
    once (None: as many as torch takes by itself).

    Asked in a process of its own, so that this one never opens the card; and behind which the fork server has imported
    torch, so that nothing of the run's own is at work.

    Raises ValueError where there is no such device.
    """
    if sys.stderr.isatty():
        tell("Importing PyTorch and looking for a GPU …")  # seconds, once
    outcome = run_isolated(_probe, device, command)
    check(outcome.status == "ok", "device", device, f"cannot be looked at ({outcome.reason})")
    resolved, provenance, available, torch_threads = outcome.value
    check(resolved in available, "device", device, f"is not on this machine; it has {', '.join(available)}")
    if resolved != "cpu" or not is_timed:
        return resolved, provenance, None
    advice = " OMP_NUM_THREADS=1 suffers least." if n_threads is None and torch_threads > 1 else ""
    n_threads = torch_threads if n_threads is None else n_threads
    return resolved, provenance, partial(with_cpu_load, n_threads=n_threads, advice=advice)


def _probe(device: str, command: str) -> tuple[str, Provenance, list[str], int]:
    import torch

    available = devices_here()
    if device == "auto":
        device = best_device(available)
    provenance = collect_provenance(command, device if device in available else "cpu")
    return device, provenance, available, torch.get_num_threads()
