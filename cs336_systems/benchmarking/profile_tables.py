"""The README's tables of profiles, memory, checkpoints, precisions and training runs, from the committed rows.

A table whose rows are not there yet is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cs336_systems.benchmarking.convergence_report import ConvergenceRow, convergence_table
from cs336_systems.benchmarking.precision_benchmark import speedup_table
from cs336_systems.benchmarking.report_rows import Table, markdown_table, percent, ratio, read_rows, status_or
from cs336_systems.records import read_results


def _cell(row: Any) -> str:
    return f"{row.size}, {row.ctx}"


def profiled_steps(path: str, profiler: str = "nsys") -> Callable[[Path], str]:
    """Each profiled step: its time with and without the profiler, and what its kernels do."""

    def make(results: Path) -> str:
        body = [
            [
                _cell(row),
                status_or(row, "step_benchmark_ms"),
                row.step_ms,
                percent(row.slowdown, signed=True),
                row.forward_benchmark_ms,
                row.forward_kernel_ms,
                row.kernels,
                percent(row.forward_matmul_share),
                percent(row.step_matmul_share),
                row.softmax_time_ratio,
                row.softmax_flop_ratio,
                percent(row.waiting_share),
                row.binding,
            ]
            for row in read_rows(results / path)[0]
        ]
        headings = ["size, ctx", "step ms", f"under {profiler}", "more", "forward ms", "its kernels ms"]
        headings += ["kernels a step", "products of forward", "of the step", "softmax ÷ attention's products, time"]
        return markdown_table([*headings, "operations", "waiting for launches", "bound by"], body)

    return make


def agreement(results: Path) -> str:
    """Kernel time by phase and class in nsys's report and torch.profiler's of the same step."""
    rows, _ = read_rows(results / AGREEMENT)
    body = [
        [f"{row.range}, {row.kind}", row.first_ms, row.second_ms, percent(row.difference, signed=True)]
        for row in rows
        if row.range in ("forward", "backward", "optimizer") and (row.share or 0) >= 0.05
    ]
    return markdown_table(["range, class", "nsys ms", "torch.profiler ms", "difference"], body)


def checkpointing(results: Path) -> str:
    """The step over blocks in a checkpointed segment: peak beside the formula, and what it costs in time."""
    rows, _ = read_rows(results / CHECKPOINTING)
    body = [
        [
            f"{_cell(row)}, {row.precision}, {row.attention}",
            row.checkpoint_every or "none",
            status_or(row, "peak_memory_gib"),
            row.peak_predicted_gib,
            row.kept_predicted_gib,
            row.step_median_ms,
            row.step_over_none,
            row.flops_over_none,
        ]
        for row in rows
    ]
    headings = ["size, ctx", "blocks a segment", "peak GiB", "predicted peak GiB", "predicted kept GiB", "step ms"]
    return markdown_table([*headings, "× without", "× FLOPs"], body)


def memory_by_formula(results: Path) -> str:
    """What is kept for backward and the step's peak, beside the formulas, with each attention and with checkpoints."""
    rows, _ = read_rows(results / MEMORY_CHECK)
    body = [
        [
            f"{_cell(row)}, {row.precision}, {row.attention}"
            + (f", checkpoints every {row.checkpoint_every}" if row.checkpoint_every else ""),
            status_or(row, "kept_gib"),
            row.kept_predicted_gib,
            _off(row.kept_gib, row.kept_predicted_gib),
            row.peak_gib,
            row.peak_predicted_gib,
            _off(row.peak_gib, row.peak_predicted_gib),
        ]
        for row in rows
        if row.mode == "train-step"
    ]
    headings = [
        "size, ctx",
        "kept for backward GiB",
        "predicted kept GiB",
        "off by",
        "peak GiB",
        "predicted peak GiB",
        "off by",
    ]
    return markdown_table(headings, body)


def _off(measured: float | None, predicted: float | None) -> str | None:
    times = ratio(measured, predicted)
    return None if times is None else percent(times - 1, signed=True)


def memory_rows(names: Sequence[str]) -> Callable[[Path], str]:
    """A step's peak and what was held then, by mode, precision and context, beside the formula."""

    def make(results: Path) -> str:
        held = ("parameters", "optimizer_state", "gradients", "weight_copies", "activations", "temporaries", "other")
        rows = [row for name in names for row in read_rows(results / name)[0]]
        body = [
            [
                f"{row.size}, {row.mode}, {row.precision}, {row.ctx}",
                status_or(row, "peak_gib"),
                row.peak_predicted_gib,
                row.peak_phase,
                *(None if row[f"{name}_gib"] is None else round(row[f"{name}_gib"], 2) for name in held),
            ]
            for row in sorted(rows, key=lambda row: (row.mode, row.precision != "fp32", row.ctx))
        ]
        return markdown_table(["GiB", "peak", "predicted peak", "in", *(name.replace("_", " ") for name in held)], body)

    return make


def mixed_precision(results: Path) -> str:
    """The train step in each precision beside float32."""
    return speedup_table(read_rows(results / PRECISIONS)[0])


def convergence(results: Path) -> str:
    """Final losses of each way to train one small model, over seeds."""
    path = results / CONVERGENCE
    return convergence_table(read_results(path, ConvergenceRow)[1]) if path.exists() else ""


STEPS, AGREEMENT = "nsys/steps.json", "nsys/agreement.json"
CHECKPOINTING = "checkpointing_model/checkpointing.json"
MEMORY, MEMORY_CHECK, MEMORY_2048 = (f"{folder}/memory.json" for folder in ("memory", "memory_check", "memory_2048"))
PRECISIONS = "mixed_precision/benchmark.json"
CONVERGENCE = "convergence/convergence.json"

PROFILE_BLOCKS: dict[str, Table] = {
    "nsys": Table(profiled_steps(STEPS), (STEPS,)),
    "agreement": Table(agreement, (AGREEMENT,)),
    "checkpointing": Table(checkpointing, (CHECKPOINTING,)),
    "memory-by-formula": Table(memory_by_formula, (MEMORY_CHECK,)),
    "mixed-precision": Table(mixed_precision, (PRECISIONS,)),
    "convergence": Table(convergence, (CONVERGENCE,)),
}
