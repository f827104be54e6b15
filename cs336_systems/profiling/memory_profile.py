"""Where a step's memory goes: records one step of a cell, keeps its snapshot and picture, and says it in rows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cs336_systems.accounting.memory import autocast_weight_bytes, residual_stream_bytes, saved_activation_bytes
from cs336_systems.accounting.training_memory import training_memory
from cs336_systems.cli import refusing_bad_input, show
from cs336_systems.configs import BenchmarkCell
from cs336_systems.profiling.memory_picture import plot_peaks, plot_timeline
from cs336_systems.profiling.memory_recording import load_snapshot, record_step, save_snapshot
from cs336_systems.profiling.memory_timeline import CATEGORIES, MemoryTimeline, read_timeline
from cs336_systems.records import ResultsFile
from cs336_systems.workload import Workload

GIB, MIB = 2**30, 2**20
N_LARGEST = 8


@dataclass(frozen=True)
class MemoryRow(BenchmarkCell):
    """A cell and the memory of one step of it, after `warmup` others; None where there is no such phase.

    `peak_gib` is the most that the program held at once, in bytes as it asked for them; `peak_phase` when; the columns
    from `parameters_gib` to `other_gib` what it was then. `allocated_peak_gib` and `reserved_peak_gib` are the
    allocator's own, with its rounding, and with what it keeps in reserve. `kept_gib` is what forward and loss have left
    for backward: activations and, under autocast, copies of weights. `*_predicted_*` are the formulas of
    cs336_systems.accounting. Where memory ran out, all this is of the moment when it did, and `oom_gib` what was asked
    for then.
    """

    status: str = "ok"
    reason: str = ""
    forward_peak_gib: float | None = None
    loss_peak_gib: float | None = None
    backward_peak_gib: float | None = None
    optimizer_peak_gib: float | None = None
    peak_gib: float | None = None
    peak_phase: str | None = None
    peak_predicted_gib: float | None = None
    parameters_gib: float | None = None
    optimizer_state_gib: float | None = None
    gradients_gib: float | None = None
    weight_copies_gib: float | None = None
    activations_gib: float | None = None
    temporaries_gib: float | None = None
    other_gib: float | None = None
    kept_gib: float | None = None
    kept_predicted_gib: float | None = None
    residual_mib: float | None = None
    residual_predicted_mib: float | None = None
    allocated_peak_gib: float | None = None
    reserved_peak_gib: float | None = None
    oom_gib: float | None = None


@dataclass(frozen=True)
class AllocationRow(BenchmarkCell):
    """One of a cell's largest kinds of allocations, by the size of one: how many a step made, and what made them."""

    rank: int = 0
    mib: float = 0.0
    count: int = 0
    phase: str = ""
    category: str = ""
    line: str = ""


def measure_memory(cell: BenchmarkCell, out: Path) -> dict[str, Any]:
    """Records one step of the cell and returns the row's results, and under "largest" those of its allocation rows.

    Writes `out`/snapshots/….pickle and `out`/pictures/….png, also where memory ran out. Meant for a fresh process.
    """
    workload = Workload(cell)
    on_gpu = workload.device.type == "cuda"
    residual = _residual_bytes(workload)
    try:
        for _ in range(cell.warmup):
            workload.step(nullcontext)
    except (torch.OutOfMemoryError, MemoryError):
        workload.loss = None  # the recorded step will run into it too, and show where
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(workload.device)
    snapshot, error = record_step(workload)
    timeline = read_timeline(snapshot)
    results = _summary(cell, timeline)
    if error is not None:
        if timeline.oom_bytes is None and not isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            raise error
        results |= {"status": "oom", "reason": str(error).strip().splitlines()[0]}
    if residual:
        results["residual_mib"] = residual[0] / MIB
    if on_gpu:
        results["allocated_peak_gib"] = torch.cuda.max_memory_allocated(workload.device) / GIB
        results["reserved_peak_gib"] = torch.cuda.max_memory_reserved(workload.device) / GIB
    name = file_name(cell)
    for folder in ("snapshots", "pictures"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    plot_timeline(timeline, out / "pictures" / f"{name}.png", name.replace("_", " "))
    try:
        save_snapshot(snapshot, out / "snapshots" / f"{name}.pickle")
    except OSError as full:  # the numbers are worth more than the file
        results["reason"] = f"{results.get('reason', '')} snapshot not kept: {full.strerror}".strip()
    return results


def file_name(cell: BenchmarkCell) -> str:
    """What a cell's files are called, e.g. "2.7b_ctx512_train-step_bf16"."""
    parts = [cell.size, f"ctx{cell.ctx}", cell.mode, cell.precision]
    parts += [cell.attention] if cell.attention != "naive" else []
    parts += [f"compile-{cell.compile}"] if cell.compile != "off" else []
    parts += [f"every{cell.checkpoint_every}"] if cell.checkpoint_every else []
    return "_".join(parts)


def _residual_bytes(workload: Workload) -> list[int]:
    """Filled at the next step with the bytes of the first block's output, in eager mode."""
    found: list[int] = []
    if workload.cell.compile == "off":
        block = workload.model.layers[0]

        def note(module: Any, args: Any, output: torch.Tensor) -> None:
            found.append(output.untyped_storage().nbytes())
            hook.remove()

        hook = block.register_forward_hook(note)
    return found


def _summary(cell: BenchmarkCell, timeline: MemoryTimeline) -> dict[str, Any]:
    results: dict[str, Any] = {}
    total = timeline.total
    for phase in timeline.phases:
        if f"{phase.name}_peak_gib" in MemoryRow.__dataclass_fields__:
            results[f"{phase.name}_peak_gib"] = total[timeline.peak_event(phase)] / GIB
    peak = timeline.peak_event()
    results |= {"peak_gib": total[peak] / GIB, "peak_phase": timeline.phase_at(peak)}
    for category, size in timeline.held_at(peak).items():
        results[f"{category.replace(' ', '_')}_gib"] = size / GIB
    results["oom_gib"] = None if timeline.oom_bytes is None else timeline.oom_bytes / GIB
    shape = (cell.model_config(), cell.batch_size, cell.ctx)
    results["residual_predicted_mib"] = residual_stream_bytes(*shape) / MIB
    kept = timeline.kept_for_backward()
    if kept is not None:
        results["kept_gib"] = (kept["activations"] + kept["weight copies"]) / GIB
    if cell.mode != "forward" and cell.compile == "off":
        how = (cell.precision, cell.attention, cell.checkpoint_every or None)
        copies = autocast_weight_bytes(shape[0], cell.precision, cell.checkpoint_every or None)
        results["kept_predicted_gib"] = (saved_activation_bytes(*shape, *how) + copies) / GIB
        results["peak_predicted_gib"] = training_memory(*shape, *how).peak / GIB
    results["largest"] = [
        {
            "rank": rank,
            "mib": kind.size / MIB,
            "count": kind.count,
            "phase": kind.phase,
            "category": kind.category,
            "line": kind.line,
        }
        for rank, kind in enumerate(timeline.largest(N_LARGEST), start=1)
    ]
    return results


COLUMNS = {
    "size": "size",
    "ctx": "ctx",
    "mode": "mode",
    "precision": "precision",
    "attention": "attention",
    "compile": "compile",
    "checkpoint_every": "checkpoint every",
    "status": "status",
    "forward_peak_gib": "forward GiB",
    "loss_peak_gib": "loss GiB",
    "backward_peak_gib": "backward GiB",
    "optimizer_peak_gib": "optimizer GiB",
    "peak_gib": "peak GiB",
    "peak_predicted_gib": "predicted peak GiB",
    "peak_phase": "in",
    **{f"{category.replace(' ', '_')}_gib": f"{category} GiB" for category in CATEGORIES},
    "kept_gib": "kept for backward GiB",
    "kept_predicted_gib": "predicted kept GiB",
    "residual_mib": "residual MiB",
    "residual_predicted_mib": "predicted residual MiB",
    "allocated_peak_gib": "allocated GiB",
    "reserved_peak_gib": "reserved GiB",
    "oom_gib": "asked for at OOM GiB",
}
ALLOCATION_COLUMNS = {
    "size": "size",
    "ctx": "ctx",
    "mode": "mode",
    "precision": "precision",
    "rank": "",
    "mib": "MiB each",
    "count": "of them",
    "phase": "made in",
    "category": "as",
    "line": "by",
}
NOTE = (
    "Peaks by phase, and in the columns from parameters to other what was held at the highest of them. Sizes are as "
    "asked for"
)


def write_files(results: ResultsFile, allocations: ResultsFile) -> str:
    """Writes tables and the summary's picture, and returns what a person reads."""
    rows: Sequence[MemoryRow] = results.rows
    plot_peaks(rows, results.directory / "memory.png")
    always = ("size", "ctx", "mode", "precision", "status")
    columns = {
        name: heading
        for name, heading in COLUMNS.items()
        if name in always or not {getattr(row, name) for row in rows} <= {None, "naive", "off", 0}
    }
    note = f"{NOTE}; allocated and reserved are the allocator's." if "allocated_peak_gib" in columns else f"{NOTE}."
    tables = [results.write_tables(columns, note), allocations.write_tables(ALLOCATION_COLUMNS)]
    return "\n".join(table for table in tables if table)


def report_snapshot(path: Path, out: Path) -> str:
    """A snapshot's peaks by phase and largest allocations as Markdown; its picture goes into `out`.

    Raises ValueError, naming the file, where it is no snapshot or has no history.
    """
    timeline = read_timeline(load_snapshot(path))
    out.mkdir(parents=True, exist_ok=True)
    plot_timeline(timeline, out / f"{path.stem}.png", path.stem)
    lines = [
        "| phase | peak GiB | " + " | ".join(f"{category} GiB" for category in CATEGORIES) + " |",
        "| --- " + "| ---: " * (len(CATEGORIES) + 1) + "|",
    ]
    for phase in [*timeline.phases, None]:
        event = timeline.peak_event(phase)
        cells = [timeline.total[event], *timeline.held_at(event).values()]
        name = phase.name if phase is not None else "all"
        lines.append(f"| {name} | " + " | ".join(f"{size / GIB:.3f}" for size in cells) + " |")
    lines += ["", "| MiB each | of them | made in | as | by |", "| ---: | ---: | --- | --- | --- |"]
    for kind in timeline.largest(N_LARGEST):
        lines.append(f"| {kind.size / MIB:.2f} | {kind.count} | {kind.phase} | {kind.category} | {kind.line} |")
    return "\n".join(lines)


def show_snapshot(path: Path, out: Path) -> None:
    """Prints `report_snapshot`; what is no snapshot ends the program with status 2."""
    with refusing_bad_input():
        report = report_snapshot(path, out)
    show(report)
