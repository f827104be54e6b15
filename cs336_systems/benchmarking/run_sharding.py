"""From the sharding benchmarks' arguments to their files: check, measure, and write rows, tables and a timeline."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from cs336_systems.benchmarking.data_parallel_report import plot_timeline
from cs336_systems.benchmarking.rank_sweep import model_on_ranks, open_results, run_rank_sweep, world_sizes
from cs336_systems.benchmarking.sharding import measure_sharding
from cs336_systems.benchmarking.sharding_cells import ShardingCell, ShardingMemoryRow, ShardingRow, cell_label
from cs336_systems.cli import refusing_bad_input
from cs336_systems.records import write_atomically

COLUMNS = {
    "precision": "precision",
    "world_size": "ranks",
    "implementation": "implementation",
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
    processes: tuple[int, ...],
    precision: tuple[str, ...],
    implementation: tuple[str, ...],
    device: str,
    out: Path,
    max_ctas: int | None,
    high_priority: bool,
    **parameters: Any,
) -> list[ShardingRow]:
    """Measures every implementation and leaves the files `name`* under `out` (scripts/sharded_optimizer_benchmark.py,
    scripts/fsdp_benchmark.py).

    `profile_step(step, device)` profiles one step. Bad input ends the program with status 2 before anything runs.
    """
    with refusing_bad_input():
        common = model_on_ranks(
            size, device, max_ctas, high_priority, precision=precision, implementation=implementation
        )
        device = common["device"]
        cells = [
            ShardingCell(precision=p, world_size=n, implementation=i, **common, **parameters)  # ty: ignore[invalid-argument-type]
            for p, n, i in product(precision, world_sizes(processes, device, default=(2,)), implementation)
        ]
        results = open_results(out, name, ShardingRow, command, device)
        memory = open_results(out, f"{name}_memory", ShardingMemoryRow, command, device)
    timelines: dict[str, Any] = {}

    def complete(cell: ShardingCell, measured: dict[str, Any]) -> dict[str, Any]:
        for held in measured.pop("memory"):
            if memory is not None:
                memory.append(ShardingMemoryRow(**asdict(cell), **held))
        intervals = measured.pop("intervals")
        if intervals is not None:
            timelines[cell_label(cell)] = intervals
        return measured

    run_rank_sweep(cells, partial(measure_sharding, profile_step=profile_step), results, cell_label, complete)
    if results is None or memory is None:  # a launched rank other than 0
        return []
    print(results.write_tables(_present(COLUMNS, results.rows)))
    print(memory.write_tables(_present(MEMORY_COLUMNS, memory.rows)))
    if timelines:
        write_atomically(out / f"{name}_timelines.json", json.dumps(timelines))
        plot_timeline(timelines, out / f"{name}_timeline.png")
    print(f"Rows, tables and picture: {out}/{name}*", file=sys.stderr)
    return results.rows


def _present(columns: dict[str, str], rows: Sequence[Any]) -> dict[str, str]:
    return {field: heading for field, heading in columns.items() if {getattr(row, field) for row in rows} != {None}}
