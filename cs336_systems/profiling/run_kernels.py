"""From the arguments of scripts/profile_kernels.py to its files: one cell under torch.profiler, in this process."""

from __future__ import annotations

import gzip
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from cs336_systems.cli import refusing_bad_input, show
from cs336_systems.configs import BenchmarkCell, check, named_cell
from cs336_systems.defaults import SIZES, fill_in
from cs336_systems.feasibility import check_memory, missing_here
from cs336_systems.files import write_atomically
from cs336_systems.profiling.analysis import Analysis, analyze, write_analyses
from cs336_systems.profiling.run_analysis import benchmark_row, cell_name
from cs336_systems.profiling.step_answers import StepRow
from cs336_systems.progress import progress
from cs336_systems.provenance import check_without_torch
from cs336_systems.records import ResultsFile
from cs336_systems.sweep_cells import check_read


def run_kernels(
    command: str,
    *,
    size: str | None,
    ctx: int,
    device: str,
    benchmark: Path | None,
    top: int,
    out: Path,
    **parameters: Any,
) -> Analysis:
    """Profiles the cell and writes the trace as <cell>.json.gz, and what `write_analyses` does, under `out`.

    Bad input ends the program with status 2 before anything is built, running out of memory with status 1.
    """

    def make_cell(device: str) -> BenchmarkCell:
        (name,) = fill_in({"size": None if size is None else (size,)}, SIZES, device)["size"]
        cell = named_cell(name, ctx, device=device, **parameters)
        check_read([cell])
        return cell

    with refusing_bad_input():
        check(top >= 1, "top", top, "must be at least 1")
        check_without_torch(make_cell, device, out)
        import torch

        from cs336_systems.cpu_load import with_cpu_load
        from cs336_systems.profiling.torch_trace import profile_workload, read_torch_trace
        from cs336_systems.provenance import collect_provenance
        from cs336_systems.workload import Workload

        has_gpu = torch.cuda.is_available()
        if device == "auto":
            device = "cuda" if has_gpu else "cpu"
        check(device == "cpu" or (device.startswith("cuda") and has_gpu), "device", device, "is not on this machine")
        cell = make_cell(device)
        missing = missing_here(cell)
        if missing:
            raise ValueError(missing)
        check_memory([cell])
        row = benchmark_row(benchmark, cell)
        provenance = collect_provenance(command, device)
        look = partial(with_cpu_load, n_threads=torch.get_num_threads()) if device == "cpu" else None
        results = ResultsFile(out, "steps", StepRow, provenance, look=look)
    results.timing_begins()
    name = cell_name(cell)
    try:
        with progress(1) as bar:
            bar.set_description(name)
            recorded = profile_workload(Workload(cell))
            bar.update()
    except torch.OutOfMemoryError as error:
        print(f"error: {name}: {str(error).splitlines()[0]}", file=sys.stderr)
        raise SystemExit(1) from None
    results.timing_ends()
    trace = out / f"{name}.json.gz"
    write_atomically(trace, gzip.compress(json.dumps(recorded).encode("utf-8")))
    analysis = analyze(read_torch_trace(recorded, name), row)
    kept = f"the trace is whole, and scripts/analyze_nsys.py reads it: {trace}"
    show(write_analyses({name: analysis}, [], results, top, kept))
    print(f"Answers, rows, kernels, trace, tables and picture: {out}/", file=sys.stderr)
    return analysis
