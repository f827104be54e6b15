"""Sweeps whose cells are so small that a process each would cost more than the measurement: one process a group.

Like `run_sweep`, each cell becomes a row as soon as it is measured. A cell that runs out of memory does not end its
group, and where the system kills a group's process, a fresh one goes on behind the cell that it died in.
"""

from __future__ import annotations

import gc
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from cs336_systems.benchmarking.isolation import Outcome, is_out_of_memory, run_isolated
from cs336_systems.benchmarking.sweep import make_row, unmeasured
from cs336_systems.progress import progress
from cs336_systems.records import ResultsFile, Unsupported

Measure = Callable[[Any], dict[str, Any]]


class Skipped(Exception):
    """A cell that is not worth its time; the message is the row's reason, and "skipped" its status."""


def run_grouped_sweep(
    cells: Sequence[Any],
    group_of: Callable[[Any], Hashable],
    make_measure: Callable[[], Measure],
    results: ResultsFile,
    label: Callable[[Any], str] = str,
    known: Callable[[Any], dict[str, Any]] = lambda cell: {},
) -> None:
    """Adds to `results` one row a cell, group by group, skipping cells whose row is there already.

    Args:
        cells: frozen dataclasses of parameters; the cells of a group are measured in their order.
        group_of: cells of which it returns the same are a group.
        make_measure: called once in a group's process, returns `measure(cell) -> dict` of the row's results, which may
            raise `Unsupported` and `Skipped`. It must pickle: a top-level function or class.
        results: its `row_type` has the cell's fields, `status`, `reason`, and the results (None where there is none).
        label: what the progress bar calls a cell.
        known: results that a cell's row has whatever becomes of the measurement.

    Raises:
        RuntimeError: a measurement failed otherwise than by memory; the rows so far are on disk.
        OSError: a row could not be written; the rows before it are on disk.
    """
    groups: dict[Hashable, list[Any]] = defaultdict(list)
    for cell in unmeasured(cells, results, label):
        groups[group_of(cell)].append(cell)
    if groups:
        results.timing_begins()
    with progress(len(cells), len(cells) - sum(map(len, groups.values()))) as bar:
        for group in groups.values():
            done = 0

            def add(outcome: Outcome, group: list[Any] = group) -> None:
                nonlocal done
                cell = group[done]
                results.append(make_row(results.row_type, cell, outcome, {**known(cell), **(outcome.value or {})}))
                done += 1
                bar.update()
                if done < len(group):
                    bar.set_description(label(group[done]))

            bar.set_description(label(group[0]))
            while done < len(group):
                outcome = _measure_in_a_process(make_measure, group[done:], add)
                if outcome.status != "ok":  # the process's own end, in the cell after those that it reported
                    add(outcome)


def _measure_in_a_process(
    make_measure: Callable[[], Measure], cells: Sequence[Any], add: Callable[[Outcome], None]
) -> Outcome:
    """Calls `add` with each cell's outcome as it comes; returns the process's own."""
    receiver, sender = Pipe(duplex=False)
    failures: list[BaseException] = []

    def collect() -> None:
        try:
            while True:
                add(receiver.recv())
        except EOFError:
            pass
        except BaseException as error:  # the main thread's to raise, e.g. a full disk
            failures.append(error)
            receiver.close()  # ends the process at its next row

    collector = threading.Thread(target=collect, daemon=True)
    collector.start()
    try:
        return run_isolated(_measure_in_turn, make_measure, cells, sender)
    finally:
        sender.close()  # the last writer: the collector reads what is left and ends
        collector.join()
        receiver.close()
        if failures:
            raise failures[0]


def _measure_in_turn(make_measure: Callable[[], Measure], cells: Sequence[Any], sender: Connection) -> None:
    measure = make_measure()
    gc.freeze()  # torch's own objects need not be looked through whenever a cell's garbage is collected
    for cell in cells:
        sender.send(_attempt(measure, cell))


def _attempt(measure: Measure, cell: Any) -> Outcome:
    try:
        return Outcome("ok", value=measure(cell))
    except Unsupported as error:
        return Outcome("unsupported", reason=str(error))
    except Skipped as error:
        return Outcome("skipped", reason=str(error))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).strip().splitlines()[0]
    # Only here, since the exception held the frames that held the tensors.
    _free_memory()
    return Outcome("oom", reason=reason)


def _free_memory() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
