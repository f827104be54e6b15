"""From the sharding benchmarks' arguments to their files: check, measure, and write rows, tables and a timeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from cs336_systems.benchmarking.before_work import does_not_fit
from cs336_systems.benchmarking.data_parallel_report import plot_timeline
from cs336_systems.benchmarking.gather_picture import plot_gathers
from cs336_systems.benchmarking.rank_files import (
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
from cs336_systems.benchmarking.scaling import write_scaling
from cs336_systems.benchmarking.sharding import measure_sharding
from cs336_systems.benchmarking.sharding_cells import (
    ShardingCell,
    ShardingMemoryRow,
    ShardingRow,
    cell_label,
    scheme_label,
)
from cs336_systems.benchmarking.sharding_memory import CONFIGURATION, write_memory
from cs336_systems.cli import refusing_bad_input
from cs336_systems.distributed.process_group import DEFAULT_TIMEOUT_S
from cs336_systems.feasibility import check_memory, tell_if_crowded
from cs336_systems.records import DetailRows, ResultsFile
from cs336_systems.sweep_cells import cells_of, possible

COLUMNS = CONFIGURATION | {
    "status": "status",
    "step_median_ms": "median step ms",
    "step_std_ms": "± ms",
    "optimizer_ms": "optimizer ms",
    "peak_memory_gib": "peak GiB",
    "predicted_peak_gib": "predicted peak GiB",
    "collective_ms": "collectives ms",
    "exposed_collective_ms": "exposed collectives ms",
    "n_gathers": "gathers",
    "n_late": "late",
    "late_ms": "late ms",
}


def run_sharding_benchmark(
    command: str,
    profile_step: Callable[..., dict[str, Any]] | None,
    *,
    name: str,
    size: str | None,
    ctx: int | None,
    attention: str,
    processes: tuple[int, ...],
    precision: tuple[str, ...],
    implementation: tuple[str, ...],
    device: str,
    out: Path,
    batch_size: int,
    total_batch_size: int | None,
    max_ctas: tuple[int, ...],
    high_priority: tuple[str, ...],
    default_processes: tuple[int, ...] = (2,),
    timeout_s: float = DEFAULT_TIMEOUT_S,
    resume: bool = False,
    **parameters: Any,
) -> list[ShardingRow]:
    """Measures every implementation and leaves the files `name`* under `out` (scripts/sharded_optimizer_benchmark.py,
    scripts/fsdp_benchmark.py, scripts/scaling_benchmark.py).

    "none", which does not communicate, is measured on the fewest ranks only.

    `profile_step(step, device)` profiles one step. Bad input ends the program with status 2 before anything runs;
    whatever else ends it, the tables of the rows so far are written.
    """
    with refusing_bad_input():
        check_timeout(timeout_s)
        common = model_on_ranks(size, ctx, device, attention, precision=precision, implementation=implementation)
        device = common["device"]
        nccl = nccl_settings(device, max_ctas, high_priority)
        ranks = world_sizes(processes, device, default_processes)
        sequences = batch_sizes(ranks, batch_size, total_batch_size)
        base = ShardingCell(implementation="none", **common, **parameters)
        varied = [
            dict(precision=kind, world_size=n, batch_size=sequences[n], implementation=scheme, **setting)
            for kind, n, scheme, setting in product(precision, ranks, implementation, nccl)
            if scheme != "none" or (n == min(ranks) and setting == nccl[0])
        ]
        cells = cells_of(ShardingCell, ({**asdict(base), **values} for values in varied))
        check_attention(attention, device, precision)
        check_memory(possible(cells))
        results = open_results(out, name, ShardingRow, command, device, resume)
        check_same_workload(results, possible(cells))
        memory = None
        if results is not None:
            memory = DetailRows(results, f"{name}_memory", ShardingMemoryRow, "memory", resume)
        timelines = ByLabel(out / f"{name}_timelines.json", resume)
        gathers_of = ByLabel(out / f"{name}_gathers.json", resume)
    if results is not None:
        tell_if_crowded(device, ranks)

    def complete(cell: ShardingCell, measured: dict[str, Any]) -> dict[str, Any]:
        intervals, gathers = measured.pop("intervals"), measured.pop("gathers", [])
        if intervals is not None:
            timelines.add(cell_label(cell), intervals)
        if gathers:
            gathers_of.add(cell_label(cell), gathers)
        return memory.complete(cell, measured) if memory is not None else measured

    def write_files(results: ResultsFile[ShardingRow]) -> str:
        tables = [results.write_tables(present(COLUMNS, results.rows))]
        tables.append(write_scaling(results.rows, out / f"{name}_by_ranks", scheme_label))
        if memory is not None:
            tables.append(write_memory(memory.file))
        if timelines.entries:
            plot_timeline(timelines.entries, out / f"{name}_timeline.png")
        if gathers_of.entries:
            plot_gathers(gathers_of.entries, out / f"{name}_gathers.png")
        return "\n".join(tables)

    measure = partial(measure_sharding, profile_step=profile_step)
    ranks_into_files(
        results,
        lambda: run_rank_sweep(cells, measure, results, cell_label, complete, timeout_s, known=does_not_fit),
        write_files,
    )
    return results.rows if results is not None else []
