"""The checks of feasibility.py as sweeps make them: this process never opens a card, and cells may be of any kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cs336_systems.benchmarking.isolation import Outcome, run_isolated
from cs336_systems.configs import BenchmarkCell
from cs336_systems.feasibility import check_memory, memory_shortage, missing_here


def check_models(cells: Sequence[Any]) -> None:
    """Raises ValueError, naming the parameter, where a cell calls what this machine lacks, or none fits its memory."""
    check_runs_here(cells)
    check_memory([cell for cell in cells if isinstance(cell, BenchmarkCell)])


def check_runs_here(cells: Sequence[Any]) -> None:
    """Raises ValueError, naming the parameter, for an attention or kernels that cannot run on a cell's device."""
    models = [cell for cell in cells if isinstance(cell, BenchmarkCell)]
    if models and (missing := run_isolated(missing_here, models).value):
        raise ValueError(missing)


def does_not_fit(cell: Any) -> Outcome | None:
    """What becomes of a cell that takes more memory than the machine has by formula; None for others."""
    shortage = memory_shortage(cell) if isinstance(cell, BenchmarkCell) else ""
    return Outcome("oom", reason=shortage) if shortage else None
