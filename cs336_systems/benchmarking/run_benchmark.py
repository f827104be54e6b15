"""From the benchmark's arguments to its files: check, measure, and write rows, tables and a plot."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from cs336_systems.benchmarking.into_files import measure_into_files
from cs336_systems.benchmarking.model_benchmark import (
    BenchmarkRow,
    cell_label,
    measure_cell,
    table_columns,
    table_note,
)
from cs336_systems.benchmarking.plots import plot_phases
from cs336_systems.benchmarking.sweep import run_sweep
from cs336_systems.cli import refusing_bad_input
from cs336_systems.configs import SIZE_NAMES, check, check_choice, named_shape
from cs336_systems.defaults import SIZES, fill_in
from cs336_systems.records import ResultsFile
from cs336_systems.sweep_cells import sweep_cells

_SHAPE = ("d_model", "d_ff", "num_layers", "num_heads")


def run_benchmark(
    command: str,
    *,
    size: tuple[str, ...] | None,
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
        if watch is not None:
            graphs = parameters.get("cuda_graphs", ())
            check("on" not in graphs, "cuda_graphs", "on", "goes without --nvtx: ranges are marked between launches")
        given = dict(zip(_SHAPE, (d_model, d_ff, num_layers, num_heads), strict=True))
        shapes = {name: _size_parameters(name, vocab_size, given) for name in size or chain(*SIZES["size"])}

    def make_cells(device: str) -> list[Any]:
        sizes = fill_in({"size": size}, SIZES, device)["size"]
        return sweep_cells([shapes[name] for name in sizes], device=device, **parameters)

    def write_files(results: ResultsFile) -> str:
        table = results.write_tables(table_columns(results.rows), table_note(results.rows))
        plot_phases(results.rows, out / "benchmark.png")
        return table

    return measure_into_files(
        command,
        "benchmark",
        BenchmarkRow,
        make_cells,
        lambda cells, results: run_sweep(cells, partial(measure_cell, watch=watch), results, cell_label),
        write_files,
        device=device,
        out=out,
        resume=resume,
    )


def _size_parameters(name: str, vocab_size: int | None, given: dict[str, int | None]) -> dict[str, Any]:
    check_choice("size", name, SIZE_NAMES)
    if name == "custom":
        for flag, value in given.items():
            check(value is not None, flag, value, "--size custom needs it (with d_model, d_ff, num_layers, num_heads)")
        shape: dict[str, Any] = {"size": name, **given, "vocab_size": 10_000}
    else:
        for flag, value in given.items():
            check(value is None, flag, value, f"goes with --size custom; {name!r} has its own")
        shape = named_shape(name)
    if vocab_size is not None:
        shape["vocab_size"] = vocab_size
    return shape
