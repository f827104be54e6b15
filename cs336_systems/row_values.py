"""What the values of a row that is read from a file must be, by the types of its dataclass: others than this package
write these files too, and damage them."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

Status = Literal["ok", "oom", "killed", "unsupported", "skipped", "stopped", "interrupted"]
# What has these units was measured with a clock or counted, and is finite; an error or a loss may not be.
_FINITE = ("_ms", "_s", "_gib", "_mib", "_mb", "tflops")
_NAMES = {float: "a number", int: "a whole number", str: "a text", bool: "true or false", NoneType: "null"}


def check_values(row_type: type, row: Mapping[str, Any], where: str = "") -> None:
    """Raises ValueError, which begins with `where` and names the column, its value and what it must be, for the first
    of the columns of `row_type` that has another type in the row."""
    for name, kinds in _hints(row_type).items():
        if name not in row:
            continue
        value = row[name]
        if value is None and row.get("status", "ok") != "ok":  # not measured
            continue
        if name == "status":
            kinds = (Status,)
        if not any(_is(value, kind) for kind in kinds):
            raise ValueError(f"{where}{name}={value!r}: must be {' or '.join(map(_in_words, kinds))}")
        if isinstance(value, float) and not math.isfinite(value) and name.endswith(_FINITE):
            raise ValueError(f"{where}{name}={value!r}: must be a finite number")


@functools.cache
def _hints(row_type: type) -> dict[str, tuple[Any, ...]]:
    """Each field's type, or types."""
    hints = get_type_hints(row_type).items()
    return {name: get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,) for name, hint in hints}


def _is(value: object, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    return type(value) in ((int, float) if kind is float else (kind,))  # true is no number


def _in_words(kind: Any) -> str:
    return f"one of {', '.join(map(str, get_args(kind)))}" if get_origin(kind) is Literal else _NAMES[kind]
