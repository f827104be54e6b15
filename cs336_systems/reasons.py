"""Rows that have no measurement, in tables for people: behind those that have one, and each told why below the table.

A reason may be long (PyTorch's on memory is half a dozen sentences): a column of it would leave no room for numbers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

# Behind this, PyTorch's message has the allocator's state and advice, which CSV and JSON keep.
_ALLOCATOR_STATE = re.compile(r"\s*GPU \d+ has a total capacity\b.*", re.DOTALL)
_LATEX_ESCAPES = str.maketrans(
    {character: f"\\{character}" for character in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
)


def measured_first(rows: Sequence[Any]) -> list[Any]:
    """The rows in their order, but those whose status is not "ok" at the end; all as they are without a status."""
    return sorted(rows, key=lambda row: getattr(row, "status", "ok") != "ok")


def short_reason(row: Any) -> str:
    """A row's reason as a table's note has it, e.g. "CUDA out of memory. Tried to allocate 2.00 GiB."; "" without."""
    return " ".join(_ALLOCATOR_STATE.sub("", getattr(row, "reason", "") or "").split())


def number_reasons(rows: Sequence[Any]) -> tuple[list[str], list[str]]:
    """Each row's status, with the number of its reason if it has one, and the reasons in the order of their numbers.

    For example `["ok", "oom [1]", "unsupported [2]", "oom [1]"]` and `["no room", "no GPU"]`.
    """
    numbers: dict[str, int] = {}
    statuses = []
    for row in rows:
        reason = short_reason(row)
        number = f" [{numbers.setdefault(reason, len(numbers) + 1)}]" if reason else ""
        statuses.append(f"{row.status}{number}")
    return statuses, list(numbers)


def list_in_markdown(reasons: Sequence[str]) -> str:
    """A list item a reason, with its number; "" for none."""
    return "\n".join(f"- [{number}] {reason}" for number, reason in enumerate(reasons, start=1))


def list_in_latex(reasons: Sequence[str]) -> str:
    """A paragraph a reason, with its number, to stand behind a table; "" for none."""
    return "".join(
        f"\n[{number}] {reason.translate(_LATEX_ESCAPES)}\n" for number, reason in enumerate(reasons, start=1)
    )
