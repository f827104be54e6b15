"""From the all-reduce benchmark's arguments to its files: check, measure, fit, and write rows, tables and the plot."""

from __future__ import annotations

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
from cs336_systems.benchmarking.rank_files import (
    check_same_workload,
    check_timeout,
    ranks_into_files,
)
from cs336_systems.benchmarking.rank_sweep import (
    open_results,
    resolve_ranks_device,
    run_rank_sweep,
    world_sizes,
)
from cs336_systems.cli import refusing_bad_input
from cs336_systems.configs import check
from cs336_systems.distributed.process_group import DEFAULT_TIMEOUT_S, GroupOptions
from cs336_systems.feasibility import tell_if_crowded
from cs336_systems.records import ResultsFile


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
    timeout_s: float = DEFAULT_TIMEOUT_S,
    resume: bool = False,
) -> list[AllReduceRow]:
    """Measures all numbers of processes and sizes and leaves the files under `out` (scripts/all_reduce_benchmark.py).

    Bad input ends the program with status 2 before anything runs; whatever else ends it, the tables of the rows so far
    are written.
    """
    with refusing_bad_input():
        check_timeout(timeout_s)
        check(sizes_mb != (), "sizes_mb", "", "needs at least one value")
        device = resolve_ranks_device(device)
        GroupOptions(device, max_ctas=max_ctas, high_priority=high_priority)
        ranks = world_sizes(processes, device, HANDOUT_PROCESSES)
        cells = all_reduce_cells(
            device,
            ranks,
            sizes_mb,
            warmup=warmup,
            repeats=repeats,
            max_ctas=max_ctas,
            high_priority=high_priority,
        )
        results, fits = open_all_reduce(out, command, device, resume)
        check_same_workload(results, cells, varied=("world_size", "size_mb"))
    if results is not None:
        tell_if_crowded(device, ranks)
    ranks_into_files(
        results,
        lambda: run_rank_sweep(cells, measure_all_reduce, results, all_reduce_label, timeout_s=timeout_s),
        lambda results: write_all_reduce_files(results, fits),
    )
    return results.rows if results is not None else []


def open_all_reduce(
    out: Path, command: str, device: str, resume: bool, beside: ResultsFile | None = None
) -> tuple[ResultsFile[AllReduceRow] | None, ResultsFile[AllReduceFit] | None]:
    """The files for the rows and for the lines through them (`open_results`)."""
    rows = open_results(out, "all_reduce", AllReduceRow, command, device, resume, beside)
    fits = ResultsFile(out, "all_reduce_fit", AllReduceFit, rows.runs[-1], resume=resume) if rows is not None else None
    return rows, fits


def write_all_reduce_files(results: ResultsFile[AllReduceRow], fits: ResultsFile[AllReduceFit] | None) -> str:
    """Fits the rows anew, writes tables and the plot, and returns what a person reads."""
    note = "Bandwidths from the median, of the slowest rank in each repeat. MB is 10**6 bytes, GB 10**9."
    tables = [results.write_tables(ROW_COLUMNS, note)]
    found = fit_rows(results.rows)
    if fits is not None and found:
        fits.runs[-1] = results.runs[-1]  # which has by now what others used of the CPU
        fits.replace(found, lambda _: True)  # a resumed run's are of fewer rows
        tables.append(fits.write_tables(FIT_COLUMNS, "Fit of time = o + bytes / w to the medians, by relative errors."))
    plot_all_reduce(results.rows, found, results.directory / "all_reduce.png")
    return "\n".join(tables)
