"""From the arguments of scripts/mixed_precision.py to its files: numbers in low precision, then the benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cs336_systems.benchmarking.before_work import check_models, without_missing
from cs336_systems.benchmarking.into_files import (
    check_any_measured,
    resolve_device,
    sweep_into_files,
)
from cs336_systems.benchmarking.isolation import run_isolated
from cs336_systems.benchmarking.model_benchmark import cell_label, table_columns, table_note
from cs336_systems.benchmarking.plots import plot_phases
from cs336_systems.benchmarking.precision_benchmark import (
    PrecisionRow,
    cache_note,
    measure_precision_cell,
    precision_columns,
    speedup_table,
)
from cs336_systems.benchmarking.sweep import run_sweep
from cs336_systems.cli import refusing_bad_input, show
from cs336_systems.configs import check
from cs336_systems.defaults import fill_in
from cs336_systems.provenance import Provenance, check_without_torch
from cs336_systems.records import ResultsFile
from cs336_systems.sweep_cells import named_cells, possible

_DEFAULTS: dict[str, tuple[Any, Any]] = {
    "size": (("small", "medium", "large", "xl", "2.7b"), ("tiny",)),
    "precision": (("fp32", "bf16", "fp16"), ("fp32", "bf16")),  # fp16's products take a CPU a minute
}


def run_mixed_precision(
    command: str,
    *,
    part: tuple[str, ...],
    device: str,
    out: Path,
    resume: bool,
    **parameters: Any,
) -> None:
    """Runs the parts asked for and leaves rows and tables of each under `out`; see scripts/mixed_precision.py.

    What is None of `_DEFAULTS` is the assignment's on a GPU, and seconds' work elsewhere. Bad input ends the program
    with status 2 before anything is measured.
    """
    with refusing_bad_input():
        for flag, values in {"part": part, **parameters}.items():
            check(values != (), flag, "", "needs at least one value")
        check_without_torch(lambda device: _cells(device, parameters), device, out)
        device, provenance, look = resolve_device(device, command, is_timed="benchmark" in part)
        cells = _cells(device, parameters)
        if "benchmark" in part:
            cells = without_missing(cells)
            check_models(possible(cells))
        results = None
        if "benchmark" in part:
            results = ResultsFile(out, "benchmark", PrecisionRow, provenance, resume, look)
    _write_parts(part, device, out, provenance)
    if results is not None:
        _benchmark(cells, results, out)


def _cells(device: str, parameters: Mapping[str, Any]) -> list[Any]:
    filled = fill_in(parameters, _DEFAULTS, device)
    return named_cells(filled.pop("size"), device=device, **filled)


def _write_parts(part: tuple[str, ...], device: str, out: Path, provenance: Provenance) -> None:
    """All but the benchmark. They compute in this process, which imports torch only now, when nothing is refused."""
    from cs336_systems.benchmarking.layer_norm_precision import (
        LAYER_NORM_COLUMNS,
        LayerNormRow,
        layer_norm_note,
        layer_norm_parts,
    )
    from cs336_systems.benchmarking.mixed_precision import (
        ACCUMULATION_COLUMNS,
        DTYPE_COLUMNS,
        AccumulationRow,
        DtypeRow,
        accumulations,
        autocast_dtypes,
    )

    if "accumulation" in part:
        _write(out, "accumulation", AccumulationRow, accumulations(), ACCUMULATION_COLUMNS, "", provenance)
    if "dtypes" in part:
        rows = run_isolated(autocast_dtypes, device).value
        _write(out, "dtypes", DtypeRow, rows, DTYPE_COLUMNS, f"The toy model on {device}.", provenance)
    if "layer-norm" in part:
        rows = layer_norm_parts()
        _write(out, "layer_norm", LayerNormRow, rows, LAYER_NORM_COLUMNS, layer_norm_note(rows), provenance)


def _write(
    out: Path, name: str, row_type: type, rows: list, columns: dict[str, str], note: str, provenance: Provenance
) -> None:
    results = ResultsFile(out, name, row_type, provenance)
    for row in rows:
        results.append(row)
    show(results.write_tables(columns, note))


def _benchmark(cells: list[Any], results: ResultsFile, out: Path) -> None:
    def write_files(results: ResultsFile) -> str:
        rows = results.rows
        notes = [table_note(rows), cache_note(rows), speedup_table(rows)]
        columns = precision_columns(rows, table_columns(rows))
        table = results.write_tables(columns, "\n\n".join(note for note in notes if note))
        plot_phases(rows, out / "benchmark.png")
        return table

    sweep_into_files(results, lambda: run_sweep(cells, measure_precision_cell, results, cell_label), write_files)
    check_any_measured(results)
