"""The end-to-end benchmark: one row a cell, with each phase's time, throughput, share of peak, and peak memory.

Handout, end-to-end benchmarking: warm-up steps, then measured steps, synchronised after each; mean and deviation.
"""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from cs336_systems.configs import BenchmarkCell
from cs336_systems.records import Statistics

PHASES = ("forward", "loss", "backward", "optimizer", "step")


@dataclass(frozen=True)
class BenchmarkRow(BenchmarkCell):
    """A cell and what it measured; results are None where the status is not "ok" or the mode lacks the phase.

    `tflops` counts the model's matrix products (accounting.flops) over the median step; `peak_share` sets that beside
    the card's dense peak in the cell's precision; what checkpoints compute twice counts once. `peak_memory_gib` is the
    allocator's peak during the measured steps on a GPU, with what CUDA graphs hold for themselves at their fullest, and
    the process's peak resident set on a CPU.
    """

    status: str = "ok"
    reason: str = ""
    forward_mean_ms: float | None = None
    forward_std_ms: float | None = None
    forward_median_ms: float | None = None
    forward_min_ms: float | None = None
    loss_mean_ms: float | None = None
    loss_std_ms: float | None = None
    loss_median_ms: float | None = None
    loss_min_ms: float | None = None
    backward_mean_ms: float | None = None
    backward_std_ms: float | None = None
    backward_median_ms: float | None = None
    backward_min_ms: float | None = None
    optimizer_mean_ms: float | None = None
    optimizer_std_ms: float | None = None
    optimizer_median_ms: float | None = None
    optimizer_min_ms: float | None = None
    step_mean_ms: float | None = None
    step_std_ms: float | None = None
    step_median_ms: float | None = None
    step_min_ms: float | None = None
    tokens_per_s: float | None = None
    tflops: float | None = None
    peak_share: float | None = None
    peak_memory_gib: float | None = None


def measure_cell(
    cell: BenchmarkCell, watch: Callable[[Any], AbstractContextManager[Any]] | None = None
) -> dict[str, Any]:
    """Builds the cell's workload, times its steps, and returns the row's results. Meant for a fresh process.

    `watch(workload)` is a context that gives a `timing.Watcher`, which marks the workload's ranges for a profiler.
    """
    import torch

    from cs336_systems.accounting.flops import matmul_flops_forward, peak_tflops, train_step_flops
    from cs336_systems.benchmarking.timing import time_step
    from cs336_systems.workload import Workload

    workload = Workload(cell)
    on_gpu = workload.device.type == "cuda"

    def on_warm() -> None:
        gc.collect()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(workload.device)

    with nullcontext() if watch is None else watch(workload) as watcher:
        phases = time_step(workload.step, cell.warmup, cell.steps, workload.device, on_warm, watcher)
    results: dict[str, Any] = {}
    for phase, times in phases.items():
        statistics = Statistics.of(times)
        for name in ("mean", "std", "median", "min"):
            results[f"{phase}_{name}_ms"] = getattr(statistics, name)
    seconds = results["step_median_ms"] / 1e3
    count = matmul_flops_forward if cell.mode == "forward" else train_step_flops
    tflops = count(cell.model_config(), cell.batch_size, cell.ctx) / seconds / 1e12
    peak = peak_tflops(torch.cuda.get_device_name(workload.device), cell.precision) if on_gpu else None
    return results | {
        "tokens_per_s": cell.batch_size * cell.ctx / seconds,
        "tflops": tflops,
        "peak_share": tflops / peak if peak else None,
        "peak_memory_gib": (_peak_memory_bytes(workload.device) + workload.graph_bytes) / 2**30,
    }


def _peak_memory_bytes(device: Any) -> int:
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    # Linux counts it in KiB, macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def cell_label(cell: BenchmarkCell) -> str:
    """What a progress bar calls a cell, e.g. "small ctx 256 train-step bf16"."""
    compiled = {"off": "", "on": " compiled", "blocks": " compiled blocks"}[cell.compile]
    graphs = " graphs" if cell.cuda_graphs == "on" else ""
    attention = "" if cell.attention == "naive" else f" {cell.attention}"
    kernels = "" if cell.kernels == "plain" else f" {cell.kernels}"
    kernels += " masters" if cell.master_weights == "on" else ""
    checkpoints = f" checkpoint every {cell.checkpoint_every}" if cell.checkpoint_every else ""
    return f"{cell.size} ctx {cell.ctx} {cell.mode} {cell.precision}{attention}{kernels}{compiled}{graphs}{checkpoints}"


_PARAMETER_HEADINGS = {
    "size": "size",
    "ctx": "ctx",
    "batch_size": "batch",
    "mode": "mode",
    "precision": "precision",
    "attention": "attention",
    "kernels": "kernels",
    "compile": "compile",
    "cuda_graphs": "CUDA graphs",
    "optimizer": "optimizer",
    "master_weights": "master weights",
    "checkpoint_every": "checkpoint every",
    "warmup": "warm-up",
    # Constant in one run, but a resumed file may hold several.
    "steps": "steps",
    "seed": "seed",
    "device": "device",
    "cold_caches": "cold caches",
    "vocab_size": "vocabulary",
    "d_model": "d_model",
    "d_ff": "d_ff",
    "num_layers": "layers",
    "num_heads": "heads",
}
# Follow from the size, and are no news unless it is one without a name.
_SHAPE = ("d_model", "d_ff", "num_layers", "num_heads")
_RESULT_HEADINGS = {
    "status": "status",
    "forward_mean_ms": "forward ms",
    "forward_std_ms": "forward ± ms",
    "backward_mean_ms": "backward ms",
    "backward_std_ms": "backward ± ms",
    "optimizer_mean_ms": "optimizer ms",
    "optimizer_std_ms": "optimizer ± ms",
    "step_mean_ms": "step ms",
    "step_std_ms": "step ± ms",
    "step_median_ms": "step median ms",
    "tokens_per_s": "tokens/s",
    "tflops": "TFLOP/s",
    "peak_share": "share of peak",
    "peak_memory_gib": "peak GiB",
}


def table_columns(rows: list[BenchmarkRow]) -> dict[str, str]:
    """The columns that a person reads: parameters that vary (and size and ctx), and results that some row has."""

    def values(name: str) -> set:
        return {getattr(row, name) for row in rows}

    hidden = () if any(row.size == "custom" for row in rows) else _SHAPE
    shown = {
        name: heading
        for name, heading in _PARAMETER_HEADINGS.items()
        if name in ("size", "ctx") or (name not in hidden and len(values(name)) > 1)
    }
    shown |= {n: h for n, h in _RESULT_HEADINGS.items() if n == "status" or values(n) != {None}}
    return shown


def table_note(rows: list[BenchmarkRow]) -> str:
    """What is the same in all rows, what a step has beside the phases shown, and whose memory it is without a GPU."""
    hidden = () if any(row.size == "custom" for row in rows) else _SHAPE
    constant = {
        heading: getattr(rows[0], name)
        for name, heading in _PARAMETER_HEADINGS.items()
        if name not in hidden and len({getattr(row, name) for row in rows}) == 1
    }
    note = "In all rows: " + ", ".join(f"{heading} {value}" for heading, value in constant.items()) + "."
    if any(row.backward_mean_ms is not None for row in rows):
        note += " A step is longer than the phases shown: it has the loss too (loss_* in the CSV), and drops the last "
        note += "step's gradients."
    if any(row.peak_memory_gib is not None and not row.device.startswith("cuda") for row in rows):
        note += " Without a GPU, peak GiB is what the whole process had in memory, Python and PyTorch included."
    return note
