"""From the arguments of scripts/flash_benchmark.py to its files: rows, tables and plots of attention and its peers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from cs336_systems.benchmarking.attention_cells import EagerPeerName, PeerName
from cs336_systems.benchmarking.flash_benchmark import CompiledShapes, FlashCell, FlashMeasure, FlashRow, flash_cells
from cs336_systems.benchmarking.grouped_sweep import run_grouped_sweep
from cs336_systems.benchmarking.into_files import measure_into_files
from cs336_systems.configs import check
from cs336_systems.defaults import fill_in
from cs336_systems.records import ResultsFile

_DEFAULTS: dict[str, tuple[Any, Any]] = {
    "implementation": (get_args(PeerName), ("naive", "flash-pytorch", "sdpa-flash")),
    "precision": (("bf16", "fp32"), ("fp32",)),
    "length": (tuple(2**n for n in range(7, 17)), (128, 256, 512, 1024)),
}


def run_flash_benchmark(
    command: str,
    *,
    implementation: tuple[str, ...] | None,
    precision: tuple[str, ...] | None,
    head_dim: tuple[int, ...],
    length: tuple[int, ...] | None,
    phase: tuple[str, ...],
    compiled_shapes: CompiledShapes,
    causal: bool,
    device: str,
    out: Path,
    resume: bool,
    **settings: Any,
) -> list[FlashRow]:
    """Measures the product of the first five and leaves the files under `out`; see scripts/flash_benchmark.py. What is
    None of `_DEFAULTS` is the assignment's on a GPU, and a minute's work elsewhere.

    All of an implementation's cells share a process, which starts CUDA, and compiles and tunes kernels, once for all.
    """

    def make_cells(device: str) -> list[Any]:
        varied = {
            "implementation": implementation,
            "precision": precision,
            "head_dim": head_dim,
            "length": length,
            "phase": phase,
        }
        varied = fill_in(varied, _DEFAULTS, device)
        compiled = {*get_args(PeerName)} - {*get_args(EagerPeerName)}
        if compiled.isdisjoint(varied["implementation"]):
            is_default = compiled_shapes == FlashCell.compiled_shapes
            needs = f"goes with --implementation {' or '.join(sorted(compiled))}"
            check(is_default, "compiled_shapes", compiled_shapes, needs)
        varied["length"] = tuple(sorted(varied["length"]))  # what takes too long is then known before the longer ones
        return flash_cells(**settings, compiled_shapes=compiled_shapes, device=device, is_causal=causal, **varied)

    def sweep(cells: list[FlashCell], results: ResultsFile) -> None:
        run_grouped_sweep(cells, lambda cell: cell.implementation, FlashMeasure, results, _label)

    return measure_into_files(
        command,
        "flash_benchmark",
        FlashRow,
        make_cells,
        sweep,
        write_flash_files,
        device=device,
        out=out,
        resume=resume,
    )


def _label(cell: FlashCell) -> str:
    return f"{cell.implementation} {cell.precision} head_dim {cell.head_dim} length {cell.length} {cell.phase}"


_TABLES = {
    "precision": "",
    "batch_size": "batch",
    "heads": "heads",
    "head_dim": "head_dim",
    "is_causal": "causal",
    "timed": "",
    "phase": "",
}
_COLUMNS = {
    "implementation": "implementation",
    "precision": "precision",
    "heads": "heads",
    "head_dim": "head_dim",
    "length": "length",
    "phase": "pass",
    "timed": "timed",
    "status": "status",
    "median_ms": "median ms",
    "p20_ms": "20 %",
    "p80_ms": "80 %",
    "tflops": "TFLOP/s",
    "peak_memory_gib": "peak GiB",
    "relative_error": "relative error",
}


def write_flash_files(results: ResultsFile[FlashRow]) -> str:
    """Writes CSV, LaTeX, Markdown and plots; returns the Markdown."""
    from cs336_systems.benchmarking.attention_plots import plot_flash
    from cs336_systems.benchmarking.attention_tables import (
        SPREAD,
        pivot_markdown,
        time_or_status,
        value_or_status,
        why_not_run,
        write_pivoted,
    )

    rows = results.rows
    plot_flash(rows, results.directory)

    def memory(row: FlashRow) -> str | None:
        return value_or_status(row, "peak_memory_gib") if row.phase == "both" else None

    def error(row: FlashRow) -> str | None:
        return value_or_status(row, "relative_error") if row.relative_error is not None else None

    def pivot(show: Callable[[FlashRow], str | None]) -> str:
        return pivot_markdown(rows, _TABLES, "length", "implementation", show)

    weighed = any(row.peak_memory_gib is not None for row in rows)
    return write_pivoted(
        results,
        _COLUMNS,
        {
            f"Median ms {SPREAD} (TFLOP/s)": pivot(lambda row: time_or_status(row, "tflops")),
            "Peak memory of forward and backward, GiB": pivot(memory) if weighed else "",
            "Largest error over largest value, against float64": pivot(error),
            "What could not run": why_not_run(rows, "precision"),
        },
    )
