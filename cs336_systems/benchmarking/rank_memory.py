"""What becomes of cells on ranks that do not fit into this machine's memory: rows beside the others', and no rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cs336_systems.benchmarking.before_work import does_not_fit
from cs336_systems.benchmarking.sweep import make_row, unmeasured
from cs336_systems.records import ResultsFile


def cells_that_fit(cells: Sequence[Any], results: ResultsFile | None) -> list[Any]:
    """The cells to measure; the others are added to `results` as rows with status `oom`, if they are not there yet.

    `results` is None on the ranks other than 0 of a launched job.
    """
    outcomes = {cell: outcome for cell in cells if (outcome := does_not_fit(cell)) is not None}
    if results is not None:
        for cell in unmeasured(list(outcomes), results):
            results.append(make_row(results.row_type, cell, outcomes[cell], {}))
    return [cell for cell in cells if cell not in outcomes]
