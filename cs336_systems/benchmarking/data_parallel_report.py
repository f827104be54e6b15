"""What a data-parallel run's rows say together: steps over the one without communication, the model's too, pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cs336_systems.accounting.communication import LinearCost, best_bucket_bytes, ddp_overhead_s
from cs336_systems.benchmarking.data_parallel import DataParallelCell, DataParallelRow, cell_label, variant_label

BUCKETED_HERE = ("bucketed", "bucketed-zeroed", "bucketed-in-place")
Costs = Mapping[tuple[int, int | None], LinearCost]  # the line through the all-reduce times, by ranks and cap on CTAs

COLUMNS = {
    "precision": "precision",
    "world_size": "ranks",
    "implementation": "implementation",
    "bucket_size_mb": "MB",
    "comm_dtype": "sent in",
    "max_ctas": "CTAs at most",
    "high_priority": "high priority",
    "status": "status",
    "step_median_ms": "median step ms",
    "step_std_ms": "± ms",
    "exposed_ms": "step over none, ms",
    "exposed_share": "of the step",
    "predicted_overhead_ms": "predicted over none, ms",
    "communication_ms": "communication alone ms",
    "collective_ms": "collectives ms",
    "covered_share": "covered by backward",
    "n_collectives": "collectives",
    "peak_memory_gib": "peak GiB",
}


def derived(
    cell: DataParallelCell,
    measured: Mapping[str, Any],
    rows: Sequence[DataParallelRow],
    costs: Costs,
) -> dict[str, Any]:
    """The fields that need other rows: by how much the step is longer than the one without communication, and what was
    predicted of that.

    Args:
        measured: the cell's own results.
        rows: those before it, among them the one without communication.
    """
    baseline = next((row.step_median_ms for row in rows if _is_baseline_of(row, cell)), None)
    results: dict[str, Any] = {}
    if baseline is not None and cell.implementation != "none":
        results["exposed_ms"] = measured["step_median_ms"] - baseline
        results["exposed_share"] = results["exposed_ms"] / measured["step_median_ms"]
    cost = costs.get((cell.world_size, cell.max_ctas))
    if cell.implementation in BUCKETED_HERE and cost is not None:
        n_bytes = measured["gradient_mb"] * 1e6 * _comm_share(cell)
        overhead_s = ddp_overhead_s(n_bytes, measured["n_collectives"], cost)
        results["predicted_overhead_ms"] = overhead_s * 1e3
    return results


def _is_baseline_of(row: DataParallelRow, cell: DataParallelCell) -> bool:
    return (row.implementation, row.status) == ("none", "ok") and all(
        getattr(row, name) == getattr(cell, name) for name in ("precision", "world_size")
    )


def _comm_share(cell: DataParallelCell) -> float:
    return 1.0 if cell.comm_dtype is None else 0.5  # two bytes for float32's four


def best_sizes(rows: Sequence[DataParallelRow], costs: Costs) -> str:
    """A line for each precision, number of ranks and bucketed implementation: the best bucket size by the model and as
    measured."""
    lines = []
    groups: dict[tuple[str, int, str], list[DataParallelRow]] = {}
    for row in rows:
        if row.implementation in BUCKETED_HERE and row.status == "ok":
            groups.setdefault((row.precision, row.world_size, variant_label(row)), []).append(row)
    for (precision, world_size, variant), group in groups.items():
        fastest = min(group, key=lambda row: row.step_median_ms or 0.0)
        line = f"{precision}, {world_size} ranks, {variant}: fastest with {fastest.bucket_size_mb:g} MB buckets"
        cost = costs.get((world_size, fastest.max_ctas))
        if cost is not None:
            n_bytes = (group[0].gradient_mb or 0.0) * 1e6 * _comm_share(group[0])
            least = min(group, key=lambda row: row.predicted_overhead_ms or 0.0)
            line += (
                f"; the model's best of these is {least.bucket_size_mb:g} MB, and of all "
                f"{best_bucket_bytes(n_bytes, cost) / 1e6:.3g} MB (o = {cost.call_cost_s * 1e6:.3g} µs, "
                f"w = {cost.bandwidth_bytes_per_s / 1e9:.3g} GB/s, s = {n_bytes / 1e6:.4g} MB)"
            )
        lines.append(line + ".")
    return "\n".join(lines)


def plot_bucket_sizes(rows: Sequence[DataParallelRow], path: Path) -> None:
    """The step over none, measured and predicted, over the bucket size; lines for implementations without buckets."""
    from cs336_systems.figures import COLOURS, new_figure, save_figure

    measured = [row for row in rows if row.exposed_ms is not None]
    panels = list(dict.fromkeys((row.precision, row.world_size) for row in measured))
    if not panels:
        return
    figure, axes = new_figure(columns=len(panels))
    for axis, panel in zip(axes[0], panels, strict=True):
        mine = [row for row in measured if (row.precision, row.world_size) == panel]
        for index, name in enumerate(dict.fromkeys(variant_label(row) for row in mine)):
            group = sorted((row for row in mine if variant_label(row) == name), key=lambda row: row.bucket_size_mb or 0)
            colour = COLOURS[index % len(COLOURS)]
            if group[0].bucket_size_mb is None:
                axis.axhline(group[0].exposed_ms, color=colour, linestyle=":", label=name)
                continue
            sizes = [row.bucket_size_mb for row in group]
            axis.plot(sizes, [row.exposed_ms for row in group], "o-", color=colour, label=name)
            if name == "bucketed" and group[0].predicted_overhead_ms is not None:
                axis.plot(sizes, [row.predicted_overhead_ms for row in group], "--", color="black", label="model")
        axis.set_xscale("log")
        axis.set_xlabel("bucket, MB")
        axis.set_ylabel("median step over that\nwithout communication, ms")
        axis.set_title(f"{panel[0]}, {panel[1]} ranks")
        axis.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    save_figure(figure, path)


def timelines_to_show(rows: Sequence[DataParallelRow], timelines: Mapping[str, Any]) -> dict[str, Any]:
    """One timeline an implementation, of its fastest bucket size, at the run's first precision and number of ranks:
    more would not fit into one picture. `timelines` is by `cell_label`."""
    chosen: dict[str, DataParallelRow] = {}
    for row in rows:
        same_run = (row.precision, row.world_size) == (rows[0].precision, rows[0].world_size)
        if row.status != "ok" or not same_run or cell_label(row) not in timelines:
            continue
        best = chosen.setdefault(row.implementation, row)
        if (row.step_median_ms or 0.0) < (best.step_median_ms or 0.0):
            chosen[row.implementation] = row
    return {cell_label(row): timelines[cell_label(row)] for row in chosen.values()}


def plot_timeline(timelines: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """A row of computation and a row of communication for each implementation, over one step's time.

    `timelines` has, by label, a profiled step's `computation`, `backward` and `communication` intervals in ms.
    """
    from cs336_systems.figures import PHASE_COLOURS, new_figure, save_figure

    figure, axes = new_figure(width=10, height=0.8 + 0.9 * len(timelines))
    axis = axes[0][0]
    ticks: dict[float, str] = {}
    for index, (label, steps) in enumerate(timelines.items()):
        y = -2.4 * index
        for name, offset, colour in (
            ("computation", 0.0, "#999999"),
            ("backward", 0.0, PHASE_COLOURS["backward"]),
            ("communication", -1.0, PHASE_COLOURS["forward"]),
        ):
            bars = [(start, end - start) for start, end in steps[name]]
            what = {"computation": "other computation", "backward": "backward"}.get(name, name)
            axis.broken_barh(bars, (y + offset - 0.4, 0.8), color=colour, label=what if index == 0 else None)
        ticks |= {y: f"{label}: computes", y - 1.0: "communicates"}
    axis.set_yticks(list(ticks), list(ticks.values()), fontsize=8)
    axis.set_xlabel("ms after the step's start (rank 0)")
    axis.grid(axis="y", visible=False)
    axis.legend(frameon=False, fontsize=7, ncols=3, loc="lower right", bbox_to_anchor=(1.0, 1.0))
    save_figure(figure, path)
