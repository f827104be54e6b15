"""What a sweep over ranks leaves, whatever ends it: tables of the rows so far, and what a resumed run finds there
again.

The counterpart of into_files.py, for scripts that torchrun may start: of a launched job's ranks only 0 has files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from cs336_systems.benchmarking.into_files import check_any_measured, finish_files, sweep_into_files
from cs336_systems.cli import tell
from cs336_systems.configs import check
from cs336_systems.distributed.last_words import finishing
from cs336_systems.distributed.process_group import LONGEST_TIMEOUT_S
from cs336_systems.distributed.spawn import RankFailedError
from cs336_systems.files import write_atomically
from cs336_systems.records import ResultsFile
from cs336_systems.resuming import to_go_on
from cs336_systems.signals import ended_by_signals

# What tells the cells of one run apart; all else is the workload that its tables are of.
VARIED = ("precision", "world_size", "batch_size", "implementation", "max_ctas", "high_priority")


def ranks_into_files(
    results: ResultsFile | None,
    sweep: Callable[[], None],
    write_files: Callable[[ResultsFile], str],
    must_measure: bool = True,
) -> None:
    """`sweep_into_files` on the rank that has `results`; on the others (None) only the sweep.

    Args:
        must_measure: end the program with status 1 if no cell at all was measured, or one was killed.

    Raises:
        SystemExit: as `sweep_into_files`, or for `must_measure`.
        RankFailedError: a rank failed; the tables are written, and a note of the error says how to go on.
    """
    if results is None:
        with ended_by_signals():
            sweep()
        return
    try:
        with finishing(lambda: _finish_launched(results, write_files)):
            sweep_into_files(results, sweep, write_files)
    except RankFailedError as error:
        how = to_go_on(results.runs[-1].command)
        error.add_note(f"\nThe {len(results.rows)} rows before are in {results.path}. {how}")
        raise
    if must_measure:
        check_any_measured(results)


def _finish_launched(results: ResultsFile, write_files: Callable[[ResultsFile], str]) -> None:
    """What rank 0 of a launched job does before it ends by Ctrl-C, its own error or another rank's."""
    results.lock.acquire()  # until the process ends: the thread that measures adds no row that the tables lack
    how = to_go_on(results.runs[-1].command)
    finish_files(results, write_files, [how])
    n_rows = len(results.rows)
    tell(f"The {n_rows} rows so far are in {results.path}. {how}" if n_rows else f"No cell has its row yet. {how}")


def check_same_workload(results: ResultsFile | None, cells: Sequence[Any], varied: Collection[str] = VARIED) -> None:
    """Tables and comparisons are of one workload: the rows to go on from must be of that of `cells`, whose fields other
    than `varied` are the same in all. Batches may be the same on each rank or add up to the same, not both.

    Raises:
        ValueError: for the first row of another.
    """
    for row in results.rows if results is not None else ():
        for name in cells[0].__dataclass_fields__:
            before, now = getattr(row, name), getattr(cells[0], name)
            if name not in varied and before != now:
                _refuse(results, f"{name} {before}, and this run {now}")
        batches = {(one.world_size, one.batch_size) for one in (row, *cells) if hasattr(one, "batch_size")}
        if len({batch for _, batch in batches}) > 1 and len({n * batch for n, batch in batches}) > 1:
            _refuse(
                results, f"batch_size {row.batch_size} on {row.world_size} ranks, which does not go with this run's"
            )


def _refuse(results: ResultsFile | None, what: str) -> None:
    assert results is not None
    raise ValueError(f"resume={str(results.path)!r}: its rows have {what}; name another --out")


def check_timeout(timeout_s: float) -> None:
    """Raises ValueError for a limit of collectives, in seconds, that cannot be."""
    allowed = f"must be between 1 and {LONGEST_TIMEOUT_S:.0f}"
    check(1 <= timeout_s <= LONGEST_TIMEOUT_S, "timeout_s", timeout_s, allowed)


class ByLabel:
    """A JSON object beside the rows with an entry a cell, on disk as soon as it is known; a resumed run keeps them.

    Raises:
        ValueError: what is to be kept is no such file.
    """

    def __init__(self, path: Path, resume: bool) -> None:
        self.path = path
        self.entries: dict[str, Any] = {}
        if resume and path.exists():
            try:
                self.entries = dict(json.loads(path.read_text(encoding="utf-8")))
            except (TypeError, ValueError) as error:
                raise ValueError(f"resume={str(path)!r}: is not a JSON object ({error})") from error

    def add(self, label: str, entry: Any) -> None:
        """Raises NotWritten where it cannot be."""
        self.entries[label] = entry
        write_atomically(self.path, json.dumps(self.entries))
