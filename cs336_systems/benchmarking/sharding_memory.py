"""What a sharding benchmark's ranks hold, as a table that can be read: a row a configuration, of the fullest rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cs336_systems.benchmarking.rank_sweep import present
from cs336_systems.benchmarking.sharding_cells import MOMENTS, ShardingMemoryRow
from cs336_systems.records import ResultsFile

AFTER_BUILD, BEFORE_STEP, AFTER_STEP = MOMENTS
_PARTS = [
    *("parameters_gib", "gradients_gib", "optimizer_state_gib"),
    *("predicted_parameters_gib", "predicted_gradients_gib", "predicted_optimizer_state_gib"),
]
# What tells configurations apart, and its headings.
CONFIGURATION = {
    "precision": "precision",
    "world_size": "ranks",
    "implementation": "implementation",
    "max_ctas": "CTAs at most",
    "high_priority": "high priority",
}


@dataclass(frozen=True)
class MemoryTableRow:
    """One configuration; each number is that of the rank with the most of it, in GiB.

    Parameters, gradients and optimizer state, and their formulas, are of the moment before the optimizer's step. The
    totals at the three moments, and the most that there was at any time, are None on a CPU.
    """

    precision: str
    world_size: int
    implementation: str
    max_ctas: int | None
    high_priority: bool
    parameters_gib: float | None
    predicted_parameters_gib: float | None
    gradients_gib: float | None
    predicted_gradients_gib: float | None
    optimizer_state_gib: float | None
    predicted_optimizer_state_gib: float | None
    after_build_gib: float | None
    before_step_gib: float | None
    after_step_gib: float | None
    peak_gib: float | None


COLUMNS = CONFIGURATION | {
    "parameters_gib": "parameters GiB",
    "predicted_parameters_gib": "predicted parameters GiB",
    "gradients_gib": "gradients GiB",
    "predicted_gradients_gib": "predicted gradients GiB",
    "optimizer_state_gib": "optimizer state GiB",
    "predicted_optimizer_state_gib": "predicted optimizer state GiB",
    "after_build_gib": "total after build GiB",
    "before_step_gib": "total before optimizer step GiB",
    "after_step_gib": "total after optimizer step GiB",
    "peak_gib": "peak with the build GiB",
}
NOTE = (
    "Each number is that of the rank with the most of it; parameters, gradients and optimizer state are those before "
    "the optimizer's step. Each rank at each moment is in the CSV."
)


def summarize_memory(rows: Sequence[ShardingMemoryRow]) -> list[MemoryTableRow]:
    """A row a configuration, in the order of the first of each."""
    groups: dict[tuple, list[ShardingMemoryRow]] = {}
    for row in rows:
        groups.setdefault(tuple(getattr(row, name) for name in CONFIGURATION), []).append(row)
    return [_summarize(key, mine) for key, mine in groups.items()]


def _summarize(key: tuple, rows: Sequence[ShardingMemoryRow]) -> MemoryTableRow:
    def most(name: str, *moments: str) -> float | None:
        values = [getattr(row, name) for row in rows if row.moment in moments]
        return max((value for value in values if value is not None), default=None)

    return MemoryTableRow(
        **dict(zip(CONFIGURATION, key, strict=True)),
        **{name: most(name, BEFORE_STEP) for name in _PARTS},
        after_build_gib=most("total_gib", AFTER_BUILD),
        before_step_gib=most("total_gib", BEFORE_STEP),
        after_step_gib=most("total_gib", AFTER_STEP),
        peak_gib=most("peak_since_gib", *MOMENTS),
    )


def write_memory(results: ResultsFile[ShardingMemoryRow]) -> str:
    """Writes the table, and the CSV of all rows; returns the Markdown."""
    table = summarize_memory(results.rows)
    return results.write_tables(present(COLUMNS, table), NOTE, table)
