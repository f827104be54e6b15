"""From the data-parallel benchmark's arguments to its files: check, measure, compare, and write rows and pictures."""

from __future__ import annotations

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
from cs336_systems.benchmarking.before_work import does_not_fit
from cs336_systems.benchmarking.data_parallel import (
    BUCKETED,
    OWN_BUCKETED,
    DataParallelCell,
    DataParallelRow,
    cell_label,
    data_parallel_cells,
    measure_data_parallel,
    scheme_label,
)
from cs336_systems.benchmarking.into_files import check_none_killed
from cs336_systems.benchmarking.rank_files import (
    VARIED,
    ByLabel,
    check_same_workload,
    check_timeout,
    ranks_into_files,
)
from cs336_systems.benchmarking.rank_sweep import (
    batch_sizes,
    check_attention,
    model_on_ranks,
    nccl_settings,
    open_results,
    present,
    run_rank_sweep,
    world_sizes,
)
from cs336_systems.benchmarking.run_all_reduce import open_all_reduce, write_all_reduce_files
from cs336_systems.benchmarking.scaling import write_scaling
from cs336_systems.cli import refusing_bad_input, tell
from cs336_systems.configs import check
from cs336_systems.distributed.process_group import DEFAULT_TIMEOUT_S
from cs336_systems.feasibility import check_memory, tell_if_crowded
from cs336_systems.records import ResultsFile
from cs336_systems.sweep_cells import possible

ALL_REDUCE_SIZES_MB = {"cuda": (1.0, 10.0, 100.0, 1000.0), "cpu": (0.1, 1.0, 10.0)}
BUCKET_SIZES_MB = {"cuda": (1.0, 10.0, 100.0, 1000.0), "cpu": (0.1, 1.0)}
_IN_TIMELINE = ("naive", "overlapped", "bucketed", "bucketed-in-place")


def run_data_parallel_benchmark(
    command: str,
    profile_step: Callable[..., Any] | None,
    *,
    size: str | None,
    ctx: int | None,
    attention: str,
    processes: tuple[int, ...],
    precision: tuple[str, ...],
    implementation: tuple[str, ...],
    bucket_size_mb: tuple[float, ...] | None,
    device: str,
    out: Path,
    batch_size: int,
    total_batch_size: int | None,
    max_ctas: tuple[int, ...],
    high_priority: tuple[str, ...],
    timeout_s: float = DEFAULT_TIMEOUT_S,
    resume: bool = False,
    **parameters: Any,
) -> list[DataParallelRow]:
    """Measures every implementation and leaves the files under `out` (scripts/ddp_benchmark.py).

    `profile_step(step, device)` profiles one step. Bad input ends the program with status 2 before anything runs;
    whatever else ends it, the tables of the rows so far are written.
    """
    with refusing_bad_input():
        check_timeout(timeout_s)
        for flag, value, readers in (
            ("bucket_size_mb", bucket_size_mb, BUCKETED),
            ("comm_dtype", parameters.get("comm_dtype"), OWN_BUCKETED),
        ):
            is_read = value is None or not {*implementation}.isdisjoint(readers)
            one = " ".join(map(str, value)) if isinstance(value, tuple) else value
            check(is_read, flag, one, f"goes with --implementation {' or '.join(readers)}")
        common = model_on_ranks(size, ctx, device, attention, precision=precision, implementation=implementation)
        device = common["device"]
        nccl = nccl_settings(device, max_ctas, high_priority)
        base = DataParallelCell(implementation="none", **common, **parameters)
        ranks = world_sizes(processes, device, default=(2,))
        cells = data_parallel_cells(
            base,
            precision=precision,
            batch_sizes=batch_sizes(ranks, batch_size, total_batch_size),
            implementation=implementation,
            bucket_size_mb=BUCKET_SIZES_MB[device] if bucket_size_mb is None else bucket_size_mb,
            nccl=nccl,
        )
        check_attention(attention, device, precision)
        check_memory(possible(cells))
        results = open_results(out, "ddp", DataParallelRow, command, device, resume)
        check_same_workload(results, possible(cells), (*VARIED, "bucket_size_mb", "comm_dtype"))
        all_reduces, fits = open_all_reduce(out, command, device, resume, results)
        timelines = ByLabel(out / "ddp_timelines.json", resume)
    sizes_mb = ALL_REDUCE_SIZES_MB[device]
    if results is not None:
        tell_if_crowded(device, ranks)
        tell("First all-reduces alone: their cost per call and per byte predicts what is exposed of each bucket size.")
    alone = [
        cell
        for cap in dict.fromkeys(setting["max_ctas"] for setting in nccl)
        for cell in all_reduce_cells(device, ranks, sizes_mb, max_ctas=cap)
    ]
    ranks_into_files(
        all_reduces,
        lambda: run_rank_sweep(alone, measure_all_reduce, all_reduces, all_reduce_label, timeout_s=timeout_s),
        lambda all_reduces: write_all_reduce_files(all_reduces, fits),
        must_measure=False,
    )
    costs = _costs(all_reduces.rows) if all_reduces is not None else {}

    def complete(cell: DataParallelCell, measured: dict[str, Any]) -> dict[str, Any]:
        intervals = measured.pop("intervals")
        if intervals is not None and cell.implementation in _IN_TIMELINE:
            timelines.add(cell_label(cell), intervals)
        return measured | report.derived(cell, measured, results.rows if results is not None else [], costs)

    measure = partial(measure_data_parallel, profile_step=profile_step)
    ranks_into_files(
        results,
        lambda: run_rank_sweep(cells, measure, results, cell_label, complete, timeout_s, known=does_not_fit),
        lambda results: _write_files(results, costs, timelines),
    )
    if all_reduces is not None:
        check_none_killed(all_reduces)
    return results.rows if results is not None else []


def _write_files(results: ResultsFile[DataParallelRow], costs: report.Costs, timelines: ByLabel) -> str:
    rows, out = results.rows, results.directory
    tables = [results.write_tables(present(report.COLUMNS, rows), report.best_sizes(rows, costs))]
    tables.append(write_scaling(rows, out / "ddp_by_ranks", scheme_label))
    report.plot_bucket_sizes(rows, out / "ddp_bucket_sizes.png")
    if shown := report.timelines_to_show(rows, timelines.entries):
        report.plot_timeline(shown, out / "ddp_timeline.png")
    return "\n".join(tables)


def _costs(rows: list[AllReduceRow]) -> dict[tuple[int, int | None], LinearCost]:
    return {(fit.world_size, fit.max_ctas): fit.cost() for fit in fit_rows(rows)}
