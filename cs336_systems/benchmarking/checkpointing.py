"""Activation checkpointing measured: peak memory and step time over the blocks in a segment, beside the formulas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cs336_systems.accounting.flops import train_step_flops
from cs336_systems.accounting.memory import saved_activation_bytes
from cs336_systems.accounting.training_memory import training_memory
from cs336_systems.benchmarking.into_files import measure_into_files
from cs336_systems.benchmarking.model_benchmark import BenchmarkRow, cell_label, measure_cell
from cs336_systems.benchmarking.sweep import run_sweep
from cs336_systems.configs import BenchmarkCell
from cs336_systems.defaults import SIZES, fill_in
from cs336_systems.figures import COLOURS, new_figure, save_figure
from cs336_systems.records import ResultsFile
from cs336_systems.sweep_cells import named_cells

GIB = 2**30


@dataclass(frozen=True)
class CheckpointRow(BenchmarkRow):
    """A benchmark row, and by formula: what is kept between forward and backward, the step's peak, and the FLOPs of the
    matrix products over those without checkpoints (how much longer the step takes if they are all that counts).
    `step_over_none` is the measured median over that of the same cell without checkpoints, None if that did not fit or
    came later. The formulas are for a train step in eager mode; a cell that can be has them whether it fits or
    not."""

    kept_predicted_gib: float | None = None
    peak_predicted_gib: float | None = None
    flops_over_none: float | None = None
    step_over_none: float | None = None


def complete(rows: Sequence[CheckpointRow], cell: BenchmarkCell, measured: dict[str, Any]) -> dict[str, Any]:
    """A row's results: what was measured, the formulas, and the step beside that without checkpoints, if it is among
    the `rows` before. On a CPU there is no peak: the benchmark's is the whole process's, Python's included."""
    results = measured | _predictions(cell)
    if not cell.device.startswith("cuda"):
        results["peak_memory_gib"] = None
    base = next((row for row in rows if _group(row) == _group(cell) and not row.checkpoint_every), None)
    if base is not None and base.step_median_ms and "step_median_ms" in measured:
        results["step_over_none"] = measured["step_median_ms"] / base.step_median_ms
    return results


def _predictions(cell: BenchmarkCell) -> dict[str, Any]:
    every = cell.checkpoint_every or None
    shape = (cell.model_config(), cell.batch_size, cell.ctx)
    step = (*shape, cell.precision, cell.attention, every)
    is_flash = cell.attention != "naive"
    plain = train_step_flops(*shape, flash_backward=is_flash)
    with_them = train_step_flops(*shape, flash_backward=is_flash, recomputed_blocks=cell.num_layers if every else 0)
    return {
        "kept_predicted_gib": saved_activation_bytes(*step) / GIB,
        "peak_predicted_gib": training_memory(*step).peak / GIB,
        "flops_over_none": with_them / plain,
    }


def _group(row: BenchmarkCell) -> tuple:
    return row.size, row.ctx, row.precision, row.attention, row.compile


COLUMNS = {
    "size": "size",
    "ctx": "ctx",
    "precision": "precision",
    "attention": "attention",
    "checkpoint_every": "blocks in a segment",
    "status": "status",
    "peak_memory_gib": "peak GiB",
    "peak_predicted_gib": "predicted peak GiB",
    "kept_predicted_gib": "predicted kept GiB",
    "step_median_ms": "median step ms",
    "step_over_none": "of that without",
    "flops_over_none": "FLOPs of those without",
}


def best_note(rows: Sequence[CheckpointRow]) -> str:
    """In words: for each precision and attention the segment with the least memory, measured and by formula."""
    lines = []
    for group in dict.fromkeys(map(_group, rows)):
        chosen = [row for row in rows if _group(row) == group and row.checkpoint_every and row.status != "unsupported"]
        measured = [row for row in chosen if row.peak_memory_gib is not None]
        if not measured:
            continue
        best = min(measured, key=lambda row: (row.peak_memory_gib or 0.0, -row.checkpoint_every))
        predicted = min(chosen, key=lambda row: (row.peak_predicted_gib or 0.0, -row.checkpoint_every))
        size, ctx, precision, attention, _ = group
        lines.append(
            f"{size}, context {ctx}, {precision}, {attention}: least memory with {best.checkpoint_every} in a segment "
            f"({best.peak_memory_gib:.1f} GiB); by formula with {predicted.checkpoint_every} "
            f"({predicted.peak_predicted_gib:.1f} GiB)."
        )
    return "\n".join(lines)


def plot_checkpointing(rows: Sequence[CheckpointRow], path: Path, capacity_gib: float) -> None:
    """Peak memory (dots) and its formula (lines) over the blocks in a segment, and the step's time; no checkpoints at
    the right.

    `capacity_gib`: the card's memory, a grey line; 0 for none.
    """
    figure, axes = new_figure(columns=2, width=5.2)
    memory_axis, time_axis = axes[0]
    lengths = sorted({row.checkpoint_every for row in rows}, key=_place)
    ticks = {every: index for index, every in enumerate(lengths)}
    for colour, group in zip(COLOURS, dict.fromkeys(map(_group, rows)), strict=False):
        chosen = sorted((row for row in rows if _group(row) == group), key=lambda row: _place(row.checkpoint_every))
        label = " ".join(map(str, group[2:4]))
        x = [ticks[row.checkpoint_every] for row in chosen]
        memory_axis.plot(x, [row.peak_predicted_gib for row in chosen], "-", color=colour, linewidth=1)
        ran = [row for row in chosen if row.status == "ok"]
        x = [ticks[row.checkpoint_every] for row in ran]
        if any(row.peak_memory_gib is not None for row in ran):
            memory_axis.plot(x, [row.peak_memory_gib for row in ran], "o", color=colour, markersize=4)
        time_axis.plot(x, [row.step_median_ms for row in ran], "o-", color=colour, markersize=4, label=label)
    if capacity_gib:
        memory_axis.axhline(capacity_gib, color="#999999", linewidth=0.8)
    memory_axis.set_ylim(bottom=0)
    is_measured = any(row.peak_memory_gib is not None for row in rows)
    memory_axis.set_ylabel("peak GiB; lines: formula" if is_measured else "peak GiB, by formula")
    time_axis.set_ylabel("ms a step")
    time_axis.set_ylim(bottom=0)
    for axis in (memory_axis, time_axis):
        axis.set_xticks(range(len(lengths)), [str(every) if every else "none" for every in lengths])
        axis.set_xlabel("blocks in a checkpointed segment")
    time_axis.legend(frameon=False, fontsize=8)
    save_figure(figure, path)


def _place(every: int) -> float:
    return every or float("inf")


def write_files(results: ResultsFile) -> str:
    """Writes the table and the picture, and returns what a person reads."""
    rows: Sequence[CheckpointRow] = results.rows
    capacity = results.used_runs()[-1].gpu_memory_gib
    plot_checkpointing(rows, results.path.with_suffix(".png"), capacity)
    columns = {
        name: heading
        for name, heading in COLUMNS.items()
        if name in ("size", "status", "checkpoint_every") or {getattr(row, name) for row in rows} != {None}
    }
    return results.write_tables(columns, best_note(rows))


def run_checkpointing(
    command: str, *, size: tuple[str, ...] | None, device: str, out: Path, resume: bool, **parameters: Any
) -> list[CheckpointRow]:
    """Measures the product of sizes and parameters and leaves the files under `out`; see scripts/checkpointing.py. The
    size that is None is small on a GPU, and tiny elsewhere."""

    def sweep(cells: list[BenchmarkCell], results: ResultsFile) -> None:
        run_sweep(
            cells, measure_cell, results, cell_label, lambda cell, measured: complete(results.rows, cell, measured)
        )

    return measure_into_files(
        command,
        "checkpointing",
        CheckpointRow,
        lambda device: named_cells(fill_in({"size": size}, SIZES, device)["size"], device=device, **parameters),
        sweep,
        write_files,
        device=device,
        out=out,
        resume=resume,
    )
