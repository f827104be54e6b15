"""From the benchmark's arguments to its files: check, measure, and write rows, tables and a plot."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from cs336_systems.benchmarking.isolation import run_isolated
from cs336_systems.benchmarking.model_benchmark import (
    BenchmarkRow,
    cell_label,
    measure_cell,
    sweep_cells,
    table_columns,
    table_note,
)
from cs336_systems.benchmarking.plots import plot_phases
from cs336_systems.benchmarking.sweep import run_sweep
from cs336_systems.cli import refusing_bad_input
from cs336_systems.configs import MODEL_SIZES, SIZE_NAMES, check
from cs336_systems.provenance import Provenance, collect_provenance
from cs336_systems.records import ResultsFile, check_writable, explaining_full_disk

_SHAPE = ("d_model", "d_ff", "num_layers", "num_heads")


def run_benchmark(
    command: str,
    *,
    size: tuple[str, ...],
    device: str,
    out: Path,
    resume: bool,
    vocab_size: int | None,
    d_model: int | None,
    d_ff: int | None,
    num_layers: int | None,
    num_heads: int | None,
    watch: Callable[..., Any] | None = None,
    **parameters: Any,
) -> list[BenchmarkRow]:
    """Measures the product of all parameters and leaves the files under `out`; see scripts/benchmark.py.

    `watch`, a top-level function, marks ranges for a profiler (`measure_cell`).

    Bad input ends the program with status 2 before anything is built. Ctrl-C and errors leave the rows so far on disk.
    """
    with refusing_bad_input():
        for flag, values in {"size": size, **parameters}.items():
            check(values != (), flag, (), "needs at least one value")
        given = dict(zip(_SHAPE, (d_model, d_ff, num_layers, num_heads), strict=True))
        sizes = [_size_parameters(name, vocab_size, given) for name in size]
        sweep_cells(sizes, device="cpu" if device == "auto" else device, **_without_tf32(parameters))
        check_writable(out)
        device, provenance = resolve_device(device, command)
        cells = sweep_cells(sizes, device=device, **parameters)
        results = ResultsFile(out, "benchmark", BenchmarkRow, provenance, resume=resume)
    try:
        with explaining_full_disk(results):
            run_sweep(cells, partial(measure_cell, watch=watch), results, cell_label)
    except KeyboardInterrupt:
        print("\nInterrupted; --resume goes on from here.", file=sys.stderr)
        raise SystemExit(130) from None
    finally:
        with explaining_full_disk(results):
            if results.rows:
                table = results.write_tables(table_columns(results.rows), table_note(results.rows))
                plot_phases(results.rows, out / "benchmark.png")
                # Last, since standard output may be closed or full too.
                print(table)
                print(f"Rows, tables and plot: {out}/benchmark.{{json,csv,md,tex,png}}", file=sys.stderr)
    return results.rows


def resolve_device(device: str, command: str) -> tuple[str, Provenance]:
    """What `device` stands for on this machine ("auto": a GPU if there is one), and the run's provenance.

    Asked in a process of its own, so that this one never opens the card. Raises ValueError where there is no such card.
    """
    outcome = run_isolated(_probe, device, command)
    check(outcome.status == "ok", "device", device, f"cannot be looked at ({outcome.reason})")
    resolved, provenance, available = outcome.value
    check(resolved in available, "device", device, f"is not on this machine; it has {', '.join(available)}")
    return resolved, provenance


def _probe(device: str, command: str) -> tuple[str, Provenance, list[str]]:
    import torch

    available = ["cpu"]
    if torch.backends.mps.is_available():
        available.append("mps")
    if torch.cuda.is_available():
        available += ["cuda", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    if device == "auto":
        device = "cuda" if "cuda" in available else "mps" if "mps" in available else "cpu"
    return device, collect_provenance(command, device if device in available else "cpu"), available


def _size_parameters(name: str, vocab_size: int | None, given: dict[str, int | None]) -> dict[str, Any]:
    check(name in SIZE_NAMES, "size", name, f"must be one of {', '.join(SIZE_NAMES)}")
    if name == "custom":
        for flag, value in given.items():
            check(value is not None, flag, value, "--size custom needs it (with d_model, d_ff, num_layers, num_heads)")
        shape: dict[str, Any] = dict(given)
        shape["vocab_size"] = 10_000
    else:
        for flag, value in given.items():
            check(value is None, flag, value, f"goes with --size custom; {name!r} has its own")
        shape = {flag: getattr(MODEL_SIZES[name], flag) for flag in (*_SHAPE, "vocab_size")}
    if vocab_size is not None:
        shape["vocab_size"] = vocab_size
    return {"size": name, **shape}


def _without_tf32(parameters: dict[str, Any]) -> dict[str, Any]:
    """For the checks that need no device: whether tf32 can run is known only once the device is."""
    precisions = tuple("fp32" if precision == "tf32" else precision for precision in parameters["precision"])
    return parameters | {"precision": precisions}
