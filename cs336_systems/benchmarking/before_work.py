"""The checks of feasibility.py as sweeps make them: this process never opens a card, and cells may be of any kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from cs336_systems.benchmarking.isolation import Outcome, run_isolated
from cs336_systems.configs import BenchmarkCell
from cs336_systems.feasibility import check_memory, memory_shortage, missing_here
from cs336_systems.sweep_cells import Impossible, check_any_possible, possible


@runtime_checkable
class SaysWhatIsMissing(Protocol):
    """A cell without a model, of which an implementation may not run everywhere."""

    def missing_here(self) -> str:
        """The parameter, its value, and what its device lacks for it; "" where nothing is known to be."""
        ...


def without_missing(cells: Sequence[Any]) -> list[Any]:
    """The cells, of which those of a model that call an attention or kernels that their device lacks are now
    `Impossible`; what others lack becomes their rows' reason when they are measured, which has all that they know.

    Raises ValueError, naming the parameter, where no cell is left that can run.
    """
    others = [cell for cell in possible(cells) if isinstance(cell, SaysWhatIsMissing)]
    if others:
        missing_of_all = run_isolated(_missing_of_all, others).value or ""
        if missing_of_all and len(others) == len(possible(cells)):
            raise ValueError(missing_of_all)
    models = [cell for cell in cells if isinstance(cell, BenchmarkCell)]
    missing: dict[Any, str] = (run_isolated(_missing, models).value or {}) if models else {}
    left = [Impossible.of(cell, missing[cell]) if cell in missing else cell for cell in cells]
    check_any_possible(left)
    return left


def _missing_of_all(cells: Sequence[SaysWhatIsMissing]) -> str:
    """The first cell's, where each of them lacks something; else ""."""
    missing = [cell.missing_here() for cell in cells]
    return missing[0] if all(missing) else ""


def _missing(cells: Sequence[BenchmarkCell]) -> dict[BenchmarkCell, str]:
    return {cell: reason for cell in cells if (reason := missing_here(cell))}


def check_models(cells: Sequence[Any]) -> None:
    """Raises ValueError, naming the parameter, where no model of the cells fits into the memory that is free."""
    check_memory([cell for cell in cells if isinstance(cell, BenchmarkCell)])


def does_not_fit(cell: Any) -> Outcome | None:
    """What becomes of a cell that takes more memory than is free by formula; None for others."""
    shortage = memory_shortage(cell) if isinstance(cell, BenchmarkCell) else ""
    return Outcome("oom", reason=shortage) if shortage else None
