"""From the data-parallel benchmark's arguments to its files: check, measure, compare, and write rows and pictures."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from cs336_systems.accounting.communication import LinearCost
from cs336_systems.benchmarking import data_parallel_report as report
from cs336_systems.benchmarking.all_reduce import (
    AllReduceRow,
    all_reduce_cells,
    all_reduce_label,
    fit_rows,
    measure_all_reduce,
)
from cs336_systems.benchmarking.data_parallel import (
    DataParallelCell,
    DataParallelRow,
    cell_label,
    data_parallel_cells,
    measure_data_parallel,
)
from cs336_systems.benchmarking.rank_sweep import model_on_ranks, open_results, run_rank_sweep, world_sizes
from cs336_systems.cli import refusing_bad_input
from cs336_systems.records import write_atomically

ALL_REDUCE_SIZES_MB = {"cuda": (1.0, 10.0, 100.0, 1000.0), "cpu": (0.1, 1.0, 10.0)}
_IN_TIMELINE = ("naive", "overlapped", "bucketed", "bucketed-in-place")


def run_data_parallel_benchmark(
    command: str,
    profile_step: Callable[..., Any] | None,
    *,
    size: str,
    processes: tuple[int, ...],
    precision: tuple[str, ...],
    implementation: tuple[str, ...],
    bucket_size_mb: tuple[float, ...],
    device: str,
    out: Path,
    max_ctas: int | None,
    high_priority: bool,
    **parameters: Any,
) -> list[DataParallelRow]:
    """Measures every implementation and leaves the files under `out` (scripts/ddp_benchmark.py).

    `profile_step(step, device)` profiles one step. Bad input ends the program with status 2 before anything runs.
    """
    with refusing_bad_input():
        common = model_on_ranks(
            size, device, max_ctas, high_priority, precision=precision, implementation=implementation
        )
        device = common["device"]
        base = DataParallelCell(implementation="none", **common, **parameters)
        ranks = world_sizes(processes, device, default=(2,))
        cells = data_parallel_cells(
            base, precision=precision, world_size=ranks, implementation=implementation, bucket_size_mb=bucket_size_mb
        )
        results = open_results(out, "ddp", DataParallelRow, command, device)
        all_reduces = open_results(out, "all_reduce", AllReduceRow, command, device)
    run_rank_sweep(
        all_reduce_cells(device, ranks, ALL_REDUCE_SIZES_MB[device], max_ctas=max_ctas, high_priority=high_priority),
        measure_all_reduce,
        all_reduces,
        all_reduce_label,
    )
    costs = _costs(all_reduces.rows) if all_reduces is not None else {}
    timelines: dict[str, Any] = {}

    def complete(cell: DataParallelCell, measured: dict[str, Any]) -> dict[str, Any]:
        intervals = measured.pop("intervals")
        if intervals is not None and cell.implementation in _IN_TIMELINE:
            timelines[cell_label(cell)] = intervals
        return measured | report.derived(cell, measured, results.rows if results is not None else [], costs)

    run_rank_sweep(cells, partial(measure_data_parallel, profile_step=profile_step), results, cell_label, complete)
    if results is None:  # a launched rank other than 0
        return []
    shown = {n: h for n, h in report.COLUMNS.items() if {getattr(row, n) for row in results.rows} != {None}}
    print(results.write_tables(shown, report.best_sizes(results.rows, costs)))
    report.plot_bucket_sizes(results.rows, out / "ddp_bucket_sizes.png")
    if timelines:
        write_atomically(out / "ddp_timelines.json", json.dumps(timelines))
        report.plot_timeline(report.timelines_to_show(results.rows, timelines), out / "ddp_timeline.png")
    print(f"Rows, tables and plots: {out}/ddp*", file=sys.stderr)
    return results.rows


def _costs(rows: list[AllReduceRow]) -> dict[int, LinearCost]:
    return {fit.world_size: fit.cost() for fit in fit_rows(rows)}
