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
    scheme_label,
)
from cs336_systems.benchmarking.rank_sweep import (
    batch_sizes,
    model_on_ranks,
    nccl_settings,
    open_results,
    present,
    run_rank_sweep,
    world_sizes,
)
from cs336_systems.benchmarking.scaling import write_scaling
from cs336_systems.cli import refusing_bad_input
from cs336_systems.records import write_atomically

ALL_REDUCE_SIZES_MB = {"cuda": (1.0, 10.0, 100.0, 1000.0), "cpu": (0.1, 1.0, 10.0)}
_IN_TIMELINE = ("naive", "overlapped", "bucketed", "bucketed-in-place")


def run_data_parallel_benchmark(
    command: str,
    profile_step: Callable[..., Any] | None,
    *,
    size: str,
    attention: str,
    processes: tuple[int, ...],
    precision: tuple[str, ...],
    implementation: tuple[str, ...],
    bucket_size_mb: tuple[float, ...],
    device: str,
    out: Path,
    batch_size: int,
    total_batch_size: int | None,
    max_ctas: tuple[int, ...],
    high_priority: tuple[str, ...],
    **parameters: Any,
) -> list[DataParallelRow]:
    """Measures every implementation and leaves the files under `out` (scripts/ddp_benchmark.py).

    `profile_step(step, device)` profiles one step. Bad input ends the program with status 2 before anything runs.
    """
    with refusing_bad_input():
        common = model_on_ranks(size, device, attention, precision=precision, implementation=implementation)
        device = common["device"]
        nccl = nccl_settings(device, max_ctas, high_priority)
        base = DataParallelCell(implementation="none", **common, **parameters)
        ranks = world_sizes(processes, device, default=(2,))
        cells = data_parallel_cells(
            base,
            precision=precision,
            batch_sizes=batch_sizes(ranks, batch_size, total_batch_size),
            implementation=implementation,
            bucket_size_mb=bucket_size_mb,
            nccl=nccl,
        )
        results = open_results(out, "ddp", DataParallelRow, command, device)
        all_reduces = open_results(out, "all_reduce", AllReduceRow, command, device)
    sizes_mb = ALL_REDUCE_SIZES_MB[device]
    alone = [
        cell
        for cap in dict.fromkeys(setting["max_ctas"] for setting in nccl)
        for cell in all_reduce_cells(device, ranks, sizes_mb, max_ctas=cap)
    ]
    run_rank_sweep(alone, measure_all_reduce, all_reduces, all_reduce_label)
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
    print(results.write_tables(present(report.COLUMNS, results.rows), report.best_sizes(results.rows, costs)))
    print(write_scaling(results.rows, out / "ddp_by_ranks", scheme_label))
    report.plot_bucket_sizes(results.rows, out / "ddp_bucket_sizes.png")
    if timelines:
        write_atomically(out / "ddp_timelines.json", json.dumps(timelines))
        report.plot_timeline(report.timelines_to_show(results.rows, timelines), out / "ddp_timeline.png")
    print(f"Rows, tables and plots: {out}/ddp*", file=sys.stderr)
    return results.rows


def _costs(rows: list[AllReduceRow]) -> dict[tuple[int, int | None], LinearCost]:
    return {(fit.world_size, fit.max_ctas): fit.cost() for fit in fit_rows(rows)}
