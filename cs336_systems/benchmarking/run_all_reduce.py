"""From the all-reduce benchmark's arguments to its files: check, measure, fit, and write rows, tables and the plot."""

from __future__ import annotations

import sys
from pathlib import Path

from cs336_systems.benchmarking.all_reduce import (
    FIT_COLUMNS,
    HANDOUT_PROCESSES,
    ROW_COLUMNS,
    AllReduceFit,
    AllReduceRow,
    all_reduce_cells,
    all_reduce_label,
    fit_rows,
    measure_all_reduce,
    plot_all_reduce,
)
from cs336_systems.benchmarking.rank_sweep import (
    open_results,
    resolve_ranks_device,
    run_rank_sweep,
    world_sizes,
)
from cs336_systems.cli import refusing_bad_input
from cs336_systems.configs import check
from cs336_systems.distributed.process_group import GroupOptions


def run_all_reduce_benchmark(
    command: str,
    *,
    processes: tuple[int, ...],
    sizes_mb: tuple[float, ...],
    warmup: int,
    repeats: int,
    device: str,
    max_ctas: int | None,
    high_priority: bool,
    out: Path,
) -> list[AllReduceRow]:
    """Measures all numbers of processes and sizes and leaves the files under `out` (scripts/all_reduce_benchmark.py).

    Bad input ends the program with status 2 before anything runs.
    """
    with refusing_bad_input():
        check(sizes_mb != (), "sizes_mb", "", "needs at least one value")
        device = resolve_ranks_device(device)
        GroupOptions(device, max_ctas=max_ctas)
        cells = all_reduce_cells(
            device,
            world_sizes(processes, device, HANDOUT_PROCESSES),
            sizes_mb,
            warmup=warmup,
            repeats=repeats,
            max_ctas=max_ctas,
            high_priority=high_priority,
        )
        results = open_results(out, "all_reduce", AllReduceRow, command, device)
    run_rank_sweep(cells, measure_all_reduce, results, all_reduce_label)
    if results is None:  # a launched rank other than 0
        return []
    note = "Bandwidths from the median, of the slowest rank in each repeat. MB is 10**6 bytes, GB 10**9."
    print(results.write_tables(ROW_COLUMNS, note))
    fits = fit_rows(results.rows)
    if fits:
        fit_results = open_results(out, "all_reduce_fit", AllReduceFit, command, device)
        assert fit_results is not None
        for fit in fits:
            fit_results.append(fit)
        print(fit_results.write_tables(FIT_COLUMNS, "Fit of time = o + bytes / w to the medians, by relative errors."))
    plot_all_reduce(results.rows, fits, out / "all_reduce.png")
    print(f"Rows, tables and plot: {out}/all_reduce*.{{json,csv,md,tex,png}}", file=sys.stderr)
    return results.rows
