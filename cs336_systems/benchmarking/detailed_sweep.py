"""A sweep over named sizes whose measurements have details: many rows a cell, in a second file beside the first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from cs336_systems.benchmarking.before_work import check_models, does_not_fit
from cs336_systems.benchmarking.into_files import measure_into_files
from cs336_systems.benchmarking.model_benchmark import cell_label
from cs336_systems.benchmarking.sweep import run_sweep
from cs336_systems.cli import refusing_bad_input
from cs336_systems.defaults import SIZES, fill_in
from cs336_systems.provenance import check_without_torch
from cs336_systems.records import DetailRows, ResultsFile
from cs336_systems.sweep_cells import named_cells


def check_detailed_sweep(
    *, size: tuple[str, ...] | None, device: str, out: Path, resume: bool, **parameters: Any
) -> None:
    """Ends the program with status 2 for what `run_detailed_sweep` would refuse of these, as far as that can be told
    without torch: called before what measures, which imports it, is imported."""
    with refusing_bad_input():
        check_without_torch(lambda device: _cells(size, device, parameters), device, out)


def _cells(size: tuple[str, ...] | None, device: str, parameters: dict[str, Any]) -> list[Any]:
    return named_cells(fill_in({"size": size}, SIZES, device)["size"], device=device, **parameters)


def run_detailed_sweep(
    command: str,
    name: str,
    row_type: Any,
    details: tuple[str, Any, str],
    measure: Callable[[Any], dict[str, Any]],
    write_files: Callable[[ResultsFile, ResultsFile], str],
    *,
    size: tuple[str, ...] | None,
    device: str,
    out: Path,
    resume: bool,
    whole_model: bool = True,
    **parameters: Any,
) -> list[Any]:
    """Measures the product of sizes (those of `defaults.py` for None) and `parameters` (`named_cells`) into files under
    `out`; returns the rows.

    `details` are the second file's name, its row type, and the key under which a measurement has its rows
    (`DetailRows`). `write_files(rows, details)` writes the tables of both, and returns what a person reads. Where no
    `whole_model` is run, memory is not checked beforehand. A cell that runs out of memory has details too, so that no
    cell need be measured for status 0. Nothing is timed.
    """
    detail_rows: list[DetailRows] = []

    def sweep(cells: list[Any], results: ResultsFile) -> None:
        detail_rows.append(DetailRows(results, *details, resume))
        known = does_not_fit if whole_model else lambda cell: None
        run_sweep(cells, measure, results, cell_label, detail_rows[0].complete, known)

    return measure_into_files(
        command,
        name,
        row_type,
        lambda device: _cells(size, device, parameters),
        sweep,
        lambda results: write_files(results, detail_rows[0].file),
        device=device,
        out=out,
        resume=resume,
        check_cells=check_models if whole_model else lambda cells: None,
        must_measure=False,
        is_timed=False,
    )
