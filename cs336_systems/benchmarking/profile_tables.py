"""The README's tables of profiles, memory, checkpoints, precisions and training runs, from the committed rows.

A table whose rows are not there yet is empty.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cs336_systems.benchmarking.convergence import ConvergenceRow, convergence_table
from cs336_systems.benchmarking.precision_benchmark import PrecisionRow, speedup_table
from cs336_systems.provenance import Provenance
from cs336_systems.records import format_value, read_results


def _read(path: Path) -> tuple[list[dict[str, Any]], str]:
    """Rows as plain JSON (the profilers' types are above the benchmarks), and by what they were measured."""
    if not path.exists():
        return [], ""
    document = json.loads(path.read_text(encoding="utf-8"))
    used = sorted({row["run"] for row in document["rows"]})
    runs = [Provenance(**document["runs"][index]) for index in used]
    return document["rows"], "\n\n".join(f"*{run.summary()}*" for run in runs)


def _table(headings: Sequence[str], body: Sequence[Sequence[object]], provenance: str) -> str:
    lines = [headings, [":--", *["--:"] * (len(headings) - 1)], *[[format_value(cell) for cell in row] for row in body]]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines) + f"\n\n{provenance}" if body else ""


def _percent(share: float | None, signed: bool = False) -> str | None:
    return None if share is None else f"{share:+.1%}" if signed else f"{share:.0%}"


def _cell(row: dict[str, Any]) -> str:
    return f"{row['size']}, {row['ctx']}"


def nsys(results: Path) -> str:
    """Each profiled step: its time with and without nsys, and what its kernels do."""
    rows, provenance = _read(results / "nsys" / "steps.json")
    body = [
        [
            _cell(row),
            row["step_benchmark_ms"] if row["status"] == "ok" else row["status"].upper(),
            row["step_ms"],
            _percent(row["slowdown"], signed=True),
            row["forward_benchmark_ms"],
            row["forward_kernel_ms"],
            row["kernels"],
            _percent(row["forward_matmul_share"]),
            _percent(row["step_matmul_share"]),
            row["softmax_time_ratio"],
            row["softmax_flop_ratio"],
            _percent(row["waiting_share"]),
            row["binding"],
        ]
        for row in rows
    ]
    headings = ["size, ctx", "step ms", "under nsys", "more", "forward ms", "its kernels ms", "kernels a step"]
    headings += ["products of forward", "of the step", "softmax ÷ attention's products, time", "operations"]
    return _table([*headings, "waiting for launches", "bound by"], body, provenance)


def agreement(results: Path) -> str:
    """Kernel time by phase and class in nsys's report and torch.profiler's of the same step."""
    rows, provenance = _read(results / "nsys" / "agreement.json")
    body = [
        [f"{row['range']}, {row['kind']}", row["first_ms"], row["second_ms"], _percent(row["difference"], signed=True)]
        for row in rows
        if row["range"] in ("forward", "backward", "optimizer") and row["share"] >= 0.05
    ]
    return _table(["range, class", "nsys ms", "torch.profiler ms", "difference"], body, provenance)


def checkpointing(results: Path) -> str:
    """The step over blocks in a checkpointed segment: peak beside the formula, and what it costs in time."""
    rows, provenance = _read(results / "checkpointing_model" / "checkpointing.json")
    body = [
        [
            f"{_cell(row)}, {row['precision']}, {row['attention']}",
            row["checkpoint_every"] or "none",
            row["peak_memory_gib"] if row["status"] == "ok" else row["status"].upper(),
            row["peak_predicted_gib"],
            row["kept_predicted_gib"],
            row["step_median_ms"],
            row["step_over_none"],
            row["flops_over_none"],
        ]
        for row in rows
    ]
    headings = ["size, ctx", "blocks a segment", "peak GiB", "predicted", "kept, predicted", "step ms"]
    return _table([*headings, "× without", "× FLOPs"], body, provenance)


def memory_by_formula(results: Path) -> str:
    """What is kept for backward and the step's peak, beside the formulas, with each attention and with checkpoints."""
    rows, provenance = _read(results / "memory_check" / "memory.json")
    body = [
        [
            f"{_cell(row)}, {row['precision']}, {row['attention']}"
            + (f", checkpoints every {row['checkpoint_every']}" if row["checkpoint_every"] else ""),
            row["kept_gib"] if row["status"] == "ok" else row["status"].upper(),
            row["kept_predicted_gib"],
            _off(row["kept_gib"], row["kept_predicted_gib"]),
            row["peak_gib"],
            row["peak_predicted_gib"],
            _off(row["peak_gib"], row["peak_predicted_gib"]),
        ]
        for row in rows
        if row["mode"] == "train-step"
    ]
    headings = ["size, ctx", "kept for backward GiB", "predicted", "off by", "peak GiB", "predicted", "off by"]
    return _table(headings, body, provenance)


def _off(measured: float | None, predicted: float | None) -> str | None:
    return _percent(measured / predicted - 1, signed=True) if measured and predicted else None


def mixed_precision(results: Path) -> str:
    """The train step in each precision beside float32."""
    path = results / "mixed_precision" / "benchmark.json"
    if not path.exists():
        return ""
    return f"{speedup_table(read_results(path, PrecisionRow)[1])}\n\n{_read(path)[1]}"


def convergence(results: Path) -> str:
    """Final losses of each way to train one small model, over seeds."""
    path = results / "convergence" / "convergence.json"
    if not path.exists():
        return ""
    return f"{convergence_table(read_results(path, ConvergenceRow)[1])}\n\n{_read(path)[1]}"


PROFILE_BLOCKS: dict[str, Callable[[Path], str]] = {
    "nsys": nsys,
    "agreement": agreement,
    "checkpointing": checkpointing,
    "memory-by-formula": memory_by_formula,
    "mixed-precision": mixed_precision,
    "convergence": convergence,
}
