"""From the sharding benchmarks' arguments to their files: check, measure, and write rows, tables and a timeline."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from cs336_systems.benchmarking.data_parallel_report import plot_timeline
from cs336_systems.benchmarking.gather_picture import plot_gathers
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
from cs336_systems.benchmarking.sharding import measure_sharding
from cs336_systems.benchmarking.sharding_cells import (
    ShardingCell,
    ShardingMemoryRow,
    ShardingRow,
    cell_label,
    scheme_label,
)
from cs336_systems.cli import refusing_bad_input
from cs336_systems.records import write_atomically

COLUMNS = {
    "precision": "precision",
    "world_size": "ranks",
    "implementation": "implementation",
    "max_ctas": "CTAs at most",
    "high_priority": "high priority",
    "status": "status",
    "step_median_ms": "step ms",
    "step_std_ms": "± ms",
    "optimizer_ms": "optimizer ms",
    "peak_memory_gib": "peak GiB",
    "predicted_peak_gib": "predicted GiB",
    "collective_ms": "collectives ms",
    "exposed_collective_ms": "exposed ms",
    "n_gathers": "gathers",
    "n_late": "late",
    "late_ms": "late ms",
}
MEMORY_COLUMNS = {
    "precision": "precision",
    "world_size": "ranks",
    "implementation": "implementation",
    "rank": "rank",
    "moment": "moment",
    "parameters_gib": "parameters GiB",
    "predicted_parameters_gib": "predicted",
    "gradients_gib": "gradients GiB",
    "predicted_gradients_gib": "predicted ",
    "optimizer_state_gib": "optimizer state GiB",
    "predicted_optimizer_state_gib": "predicted  ",
    "rest_gib": "rest GiB",
    "total_gib": "total GiB",
    "peak_since_gib": "peak since GiB",
}


def run_sharding_benchmark(
    command: str,
    profile_step: Callable[..., dict[str, Any]] | None,
    *,
    name: str,
    size: str,
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
    **parameters: Any,
) -> list[ShardingRow]:
    """Measures every implementation and leaves the files `name`* under `out` (scripts/sharded_optimizer_benchmark.py,
    scripts/fsdp_benchmark.py, scripts/scaling_benchmark.py).

    "none", which does not communicate, is measured on the fewest ranks only.

    `profile_step(step, device)` profiles one step. Bad input ends the program with status 2 before anything runs.
    """
    with refusing_bad_input():
        common = model_on_ranks(size, device, attention, precision=precision, implementation=implementation)
        device = common["device"]
        nccl = nccl_settings(device, max_ctas, high_priority)
        ranks = world_sizes(processes, device, default_processes)
        sequences = batch_sizes(ranks, batch_size, total_batch_size)
        base = ShardingCell(implementation="none", **common, **parameters)
        cells = [
            replace(base, precision=kind, world_size=n, batch_size=sequences[n], implementation=scheme, **setting)
            for kind, n, scheme, setting in product(precision, ranks, implementation, nccl)
            if scheme != "none" or (n == min(ranks) and setting == nccl[0])
        ]
        results = open_results(out, name, ShardingRow, command, device)
        memory = open_results(out, f"{name}_memory", ShardingMemoryRow, command, device)
    timelines: dict[str, Any] = {}
    gathers_of: dict[str, list[dict[str, Any]]] = {}

    def complete(cell: ShardingCell, measured: dict[str, Any]) -> dict[str, Any]:
        for held in measured.pop("memory"):
            if memory is not None:
                memory.append(ShardingMemoryRow(**asdict(cell), **held))
        intervals, gathers = measured.pop("intervals"), measured.pop("gathers", [])
        if intervals is not None:
            timelines[cell_label(cell)] = intervals
        if gathers:
            gathers_of[cell_label(cell)] = gathers
        return measured

    run_rank_sweep(cells, partial(measure_sharding, profile_step=profile_step), results, cell_label, complete)
    if results is None or memory is None:  # a launched rank other than 0
        return []
    print(results.write_tables(present(COLUMNS, results.rows)))
    print(write_scaling(results.rows, out / f"{name}_by_ranks", scheme_label))
    print(memory.write_tables(present(MEMORY_COLUMNS, memory.rows)))
    if timelines:
        write_atomically(out / f"{name}_timelines.json", json.dumps(timelines))
        plot_timeline(timelines, out / f"{name}_timeline.png")
    if gathers_of:
        write_atomically(out / f"{name}_gathers.json", json.dumps(gathers_of))
        plot_gathers(gathers_of, out / f"{name}_gathers.png")
    print(f"Rows, tables and picture: {out}/{name}*", file=sys.stderr)
    return results.rows
