"""A sweep's cells: the product of its parameters, of which some combinations may not be possible.

A value that can never be (a context of 0) is bad input. Values that can each be, but not together or not on the
device, are `Incompatible`: such a combination stands in the sweep as an `Impossible`, which becomes a row that has it,
while the others are measured. Where no combination is possible, that is bad input too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from itertools import product
from typing import Any

from cs336_systems.configs import BenchmarkCell, Incompatible, check, named_shape


@dataclass(frozen=True)
class Impossible:
    """A combination that cannot be measured: the fields of what would be its cell, each with its value, and why."""

    values: tuple[tuple[str, Any], ...]
    reason: str

    @classmethod
    def of(cls, cell: Any, reason: str) -> Impossible:
        """What stands for a cell that cannot run here."""
        return cls(tuple(asdict(cell).items()), reason)


def combinations(**parameters: Any) -> list[dict[str, Any]]:
    """The product of all parameters, the last one varying fastest: each is one value or a tuple of values.

    For example `combinations(a=1, b=(2, 3))` is `[{"a": 1, "b": 2}, {"a": 1, "b": 3}]`.
    """
    varied = [value if isinstance(value, tuple) else (value,) for value in parameters.values()]
    return [dict(zip(parameters, values, strict=True)) for values in product(*varied)]


def cells_of(cell_type: Any, several: Iterable[Mapping[str, Any]]) -> list[Any]:
    """A cell of `cell_type`, or what stands for it, for each of the combinations of its fields. One that is there twice
    is one.

    Raises:
        ValueError: for the first value that can never be, and for the first combination if none is possible.
    """
    cells = list(dict.fromkeys(_make_cell(cell_type, values) for values in several))
    check_any_possible(cells)
    return cells


def _make_cell(cell_type: Any, values: Mapping[str, Any]) -> Any:
    try:
        return cell_type(**values)
    except Incompatible as error:
        defaults = {field.name: field.default for field in fields(cell_type) if field.default is not MISSING}
        return Impossible(tuple({**defaults, **values}.items()), str(error))


def possible(cells: Iterable[Any]) -> list[Any]:
    """The cells that can be measured."""
    return [cell for cell in cells if not isinstance(cell, Impossible)]


def check_any_possible(cells: Sequence[Any]) -> None:
    """Raises ValueError with the first one's reason where there are cells and none can be measured."""
    if cells and not possible(cells):
        raise ValueError(cells[0].reason)


# Those that Triton compiles, and that do not run everywhere.
COMPILED_ATTENTION = ("flash-triton", "flash-hopper")
# For each parameter that a cell may have and not read: whether it reads it, and what that takes.
_READS: dict[str, tuple[Callable[[BenchmarkCell], bool], str]] = {
    "optimizer": (
        lambda cell: cell.mode == "train-step",
        "goes with --mode train-step; other steps have no optimizer",
    ),
    "checkpoint_every": (
        lambda cell: cell.mode != "forward",
        "goes with --mode forward-backward or train-step; forward alone keeps nothing for backward",
    ),
    "kernels": (
        lambda cell: cell.kernels != "loss" or cell.mode != "forward",
        "is of loss and optimizer, and goes with --mode forward-backward or train-step; with forward must be plain or "
        "fused",
    ),
    "cold_caches": (
        lambda cell: cell.compile != "off" or cell.kernels != "plain" or cell.attention in COMPILED_ATTENTION,
        "goes with what is compiled: --compile on or blocks, --kernels loss or fused, --attention "
        f"{' or '.join(COMPILED_ATTENTION)}",
    ),
}


def check_read(cells: Sequence[BenchmarkCell]) -> None:
    """Raises ValueError for a parameter's value, other than its default, that none of the cells that have it reads."""
    for name, (reads, why) in _READS.items():
        given = [cell for cell in cells if getattr(cell, name) != getattr(BenchmarkCell, name)]
        if given:
            check(any(map(reads, given)), name, getattr(given[0], name), why)


def as_read(cell: BenchmarkCell) -> BenchmarkCell:
    """The cell with the defaults of the parameters that it does not read: all that are measured alike are equal."""
    return replace(
        cell, **{name: getattr(BenchmarkCell, name) for name, (reads, _) in _READS.items() if not reads(cell)}
    )


def sweep_cells(shapes: Iterable[dict[str, Any]], **parameters: Any) -> list[Any]:
    """A `BenchmarkCell`, or what stands for it, for each shape (`named_shape`'s, or one of one's own) and each of the
    parameters' `combinations`, which take the place of the shape's values. Each is `as_read`, so that what would be
    measured alike is one.

    Raises ValueError as `cells_of` and `check_read`.
    """
    varied = combinations(**parameters)
    cells = cells_of(BenchmarkCell, ({**shape, **values} for shape in shapes for values in varied))
    check_read(possible(cells))
    return list(dict.fromkeys(cell if isinstance(cell, Impossible) else as_read(cell) for cell in cells))


def named_cells(sizes: Iterable[str], **parameters: Any) -> list[Any]:
    """`sweep_cells` of named sizes: `named_cells(("small", "large"), ctx=(128, 256), mode="forward")` are four cells.

    Raises ValueError for a size that has no name here, and as `cells_of`.
    """
    return sweep_cells(map(named_shape, sizes), **parameters)
