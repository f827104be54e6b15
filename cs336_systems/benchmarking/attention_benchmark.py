"""Attention alone, without heads: forward passes, the memory in use before backward, backward passes.

Handout, item attention alone: batch 8, 100 passes each, eager and compiled, and memory by formula where it runs out.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cs336_systems.accounting.memory import attention_saved_tensors, compute_bytes
from cs336_systems.benchmarking.attention_cells import (
    AttentionCell,
    EagerPeerName,
    allocated_gib,
    check_not_empty,
    make_inputs,
    peak_allocated_gib,
    prepare_device,
    reset_peak,
    without_leftovers,
)
from cs336_systems.benchmarking.grouped_sweep import run_grouped_sweep
from cs336_systems.benchmarking.into_files import measure_into_files
from cs336_systems.configs import check
from cs336_systems.defaults import fill_in
from cs336_systems.records import ResultsFile, Statistics
from cs336_systems.sweep_cells import cells_of, combinations

if TYPE_CHECKING:
    import torch
    from torch import Tensor

CompileAttention = Literal["off", "on"]


@dataclass(frozen=True)
class AttentionBenchmarkCell(AttentionCell):
    """One implementation on (batch_size, length, head_dim) inputs; `warmup` and `steps` count passes."""

    implementation: EagerPeerName
    batch_size: int = 8
    compile: CompileAttention = "off"
    warmup: int = 5
    steps: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.batch_size >= 1, "batch_size", self.batch_size, "must be at least 1")
        check(self.warmup >= 0, "warmup", self.warmup, "must be 0 or more")
        check(self.steps >= 1, "steps", self.steps, "must be at least 1")


@dataclass(frozen=True)
class AttentionBenchmarkRow(AttentionBenchmarkCell):
    """A cell and what it measured; results are None where the status is not "ok", except for the formulas.

    `memory_before_backward_gib` is what the allocator has given out between forward and backward: q, k, v, dO, the
    output and what backward needs; `peak_memory_gib` the most at any time in both. Neither is known without a GPU.
    `formula_gib` is what `memory_before_backward_gib` should be, counted tensor by tensor for the eager implementation;
    `scores_formula_gib` is the part of it that grows with the length squared: exponentials, probabilities and mask.
    """

    status: str = "ok"
    reason: str = ""
    forward_mean_ms: float | None = None
    forward_std_ms: float | None = None
    forward_median_ms: float | None = None
    forward_min_ms: float | None = None
    backward_mean_ms: float | None = None
    backward_std_ms: float | None = None
    backward_median_ms: float | None = None
    backward_min_ms: float | None = None
    memory_before_backward_gib: float | None = None
    peak_memory_gib: float | None = None
    formula_gib: float | None = None
    scores_formula_gib: float | None = None


def memory_formula_bytes(cell: AttentionBenchmarkCell) -> dict[str, int]:
    """Bytes in use before backward, by tensor: q, k, v, dO, the output, and what the implementation keeps.

    For example, plain attention in fp32 at batch 8 and length 16,384 keeps two (8, 16384, 16384) tensors of 8 GiB.
    """
    width = compute_bytes(cell.precision)
    family = "sdpa" if cell.implementation.startswith("sdpa") else cell.implementation
    kept = attention_saved_tensors(cell.batch_size, 1, cell.length, cell.head_dim, width, family)  # ty: ignore[invalid-argument-type]
    if not cell.is_causal:
        kept.pop("causal mask", None)
    operand = cell.batch_size * cell.length * cell.head_dim * width
    return {"attention output by head": operand, **kept, "dO": operand}


def formulas(cell: AttentionBenchmarkCell) -> dict[str, float]:
    """The row's formulas, GiB; known whatever becomes of the cell."""
    by_tensor = memory_formula_bytes(cell)
    squared = ["attention exponentials", "attention probabilities"] if cell.implementation == "naive" else []
    return {
        "formula_gib": sum(by_tensor.values()) / 2**30,
        "scores_formula_gib": (sum(by_tensor[name] for name in squared) + by_tensor.get("causal mask", 0)) / 2**30,
    }


def measure_attention(cell: AttentionBenchmarkCell) -> dict[str, Any]:
    """The row's results. Raises `Unsupported` with the implementation's reason."""
    from cs336_systems.benchmarking.attention_peers import compile_once, open_peer

    device = prepare_device(cell)
    with open_peer(cell.implementation, device) as attention:
        if cell.compile == "on":
            attention = compile_once(attention, False, cell)
        return without_leftovers(lambda: _time_passes(cell, attention, device), device)


def _time_passes(
    cell: AttentionBenchmarkCell, attention: Callable[..., Tensor], device: torch.device
) -> dict[str, Any]:
    from cs336_systems.benchmarking.timing import time_step

    q, k, v, do = make_inputs(cell, cell.batch_size)
    before_backward: list[float | None] = []

    def step(phase: Callable[[str], AbstractContextManager[None]]) -> None:
        q.grad = k.grad = v.grad = None
        with phase("forward"):
            o = attention(q, k, v, cell.is_causal)
        before_backward.append(allocated_gib(device))
        with phase("backward"):
            o.backward(do)

    times = time_step(step, cell.warmup, cell.steps, device, on_warm=lambda: reset_peak(device))
    results: dict[str, Any] = {"memory_before_backward_gib": before_backward[-1]}
    results["peak_memory_gib"] = peak_allocated_gib(device)
    for phase in ("forward", "backward"):
        statistics = Statistics.of(times[phase])
        for name in ("mean", "std", "median", "min"):
            results[f"{phase}_{name}_ms"] = getattr(statistics, name)
    return results


_DEFAULTS: dict[str, tuple[Any, Any]] = {
    "compile": (("off", "on"), ("off",)),
    "length": ((256, 1024, 4096, 8192, 16384), (256, 1024)),
    "steps": (100, 10),
}


def run_attention_benchmark(
    command: str,
    *,
    implementation: tuple[str, ...],
    compile: tuple[str, ...] | None,
    precision: tuple[str, ...],
    head_dim: tuple[int, ...],
    length: tuple[int, ...] | None,
    causal: bool,
    device: str,
    out: Path,
    resume: bool,
    **settings: Any,
) -> list[AttentionBenchmarkRow]:
    """Measures the product of the first five and leaves the files under `out`; see scripts/attention_benchmark.py. What
    is None of `_DEFAULTS` is the assignment's on a GPU, and seconds' work elsewhere.

    The cells of one implementation and `compile` share a process.
    """

    def make_cells(device: str) -> list[Any]:
        common = fill_in({**settings, "compile": compile, "length": length}, _DEFAULTS, device)
        varied = {
            "implementation": implementation,
            "compile": common.pop("compile"),
            "precision": precision,
            "head_dim": head_dim,
            "length": common.pop("length"),
        }
        check_not_empty(**varied)
        common |= {"device": device, "is_causal": causal}
        return cells_of(AttentionBenchmarkCell, combinations(**common, **varied))

    def sweep(cells: list[AttentionBenchmarkCell], results: ResultsFile) -> None:
        run_grouped_sweep(
            cells, lambda cell: (cell.implementation, cell.compile), _make_measure, results, _label, known=formulas
        )

    return measure_into_files(
        command,
        "attention_benchmark",
        AttentionBenchmarkRow,
        make_cells,
        sweep,
        write_attention_files,
        device=device,
        out=out,
        resume=resume,
    )


def _make_measure() -> Callable[[AttentionBenchmarkCell], dict[str, Any]]:
    return measure_attention


def _label(cell: AttentionBenchmarkCell) -> str:
    compiled = " compiled" if cell.compile == "on" else ""
    return f"{cell.implementation}{compiled} {cell.precision} head_dim {cell.head_dim} length {cell.length}"


_PARAMETERS = {
    "implementation": "implementation",
    "compile": "compile",
    "precision": "precision",
    "batch_size": "batch",
    "is_causal": "causal",
    "head_dim": "head_dim",
    "length": "length",
    "warmup": "warm-up",
    "steps": "steps",
}
_RESULTS = {
    "status": "status",
    "forward_mean_ms": "forward ms",
    "forward_std_ms": "forward ± ms",
    "backward_mean_ms": "backward ms",
    "backward_std_ms": "backward ± ms",
    "memory_before_backward_gib": "GiB before backward",
    "formula_gib": "GiB by formula",
    "scores_formula_gib": "scores GiB by formula",
    "peak_memory_gib": "peak GiB",
}


def write_attention_files(results: ResultsFile[AttentionBenchmarkRow]) -> str:
    """Writes CSV, LaTeX, Markdown and a plot; returns the Markdown."""
    from cs336_systems.benchmarking.attention_plots import plot_attention
    from cs336_systems.benchmarking.attention_tables import constants_note, varying

    rows = results.rows
    plot_attention(rows, results.path.with_suffix(".png"))
    columns = varying(rows, _PARAMETERS, always=("head_dim", "length")) | _RESULTS
    return results.write_tables(columns, constants_note(rows, _PARAMETERS))
