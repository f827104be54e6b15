"""Rows of any results file as plain dicts, tables of them, and sentences whose numbers can only come from them.

What the README's tables and the report share. Plain JSON, because profiles are rows too, of types that the benchmarks
do not import, and because a report must also read the files of a machine on which half of them are missing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from cs336_systems.provenance import Provenance
from cs336_systems.reasons import short_reason
from cs336_systems.records import format_value


class Row(dict):
    """A row, by its columns' names as keys or attributes; a column that its file lacks is None."""

    def __missing__(self, name: str) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self[name]

    @property
    def ok(self) -> bool:
        """Measured: not out of memory, unsupported, skipped or killed. Rows without a status are all measured."""
        return self["status"] in (None, "ok")


def read_rows(path: Path) -> tuple[list[Any], list[Provenance]]:
    """The rows (`Row`) and the runs that they are from; nothing where there is no such file.

    Raises ValueError, naming the file, where it is no results file.
    """
    if not path.exists():
        return [], []
    rows, runs = _read(path, path.stat().st_mtime_ns)
    return list(rows), list(runs)


@lru_cache(maxsize=64)
def _read(path: Path, changed: int) -> tuple[list[Row], list[Provenance]]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        rows = [Row(row) for row in document["rows"]]
        used = sorted({row.pop("run") for row in rows})
        return rows, [Provenance(**document["runs"][index]) for index in used]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a results file ({error})") from error


def read_published(results: Path, name: str) -> list[Any]:
    """Figures that others measured, published/<name>.json under the results folder, as rows; no rows without it."""
    path = results / "published" / f"{name}.json"
    return [Row(row) for row in json.loads(path.read_text(encoding="utf-8"))["rows"]] if path.exists() else []


def provenance(runs: Sequence[Provenance]) -> str:
    """A line in italics for each run, to stand under a table; several fold into one."""
    lines = [f"*{run.summary()}*" for run in runs]
    if len(lines) < 2:
        return "".join(lines)
    cards = enumerate_words(list(dict.fromkeys(run.gpu or run.cpu for run in runs)))
    inner = "\n\n".join(lines)
    return f"<details><summary>Measured by {len(lines)} runs on {cards}</summary>\n\n{inner}\n\n</details>"


def markdown_table(headings: Sequence[str], body: Sequence[Sequence[object]]) -> str:
    """A table whose first column is words and whose others are numbers; nothing where there are no rows."""
    lines = [headings, [":--", *["--:"] * (len(headings) - 1)], *[[format_value(cell) for cell in row] for row in body]]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines) if body else ""


@dataclass(frozen=True)
class Table:
    """A table of results' rows, by `make(results folder)`, which is empty where there are none; called as a function,
    it has a line under it for each run of its `files`."""

    make: Callable[[Path], str]
    files: tuple[str, ...] = ()

    def __call__(self, results: Path) -> str:
        table = self.make(results)
        if not table:
            return ""
        runs = [run for name in self.files for run in read_rows(results / name)[1]]
        return "\n\n".join([table, *([provenance(runs)] if runs else [])])


def why_not_measured(rows: Sequence[Any], label: Callable[[Any], str]) -> str:
    """A Markdown list of what became of the cells without numbers, and why; those of one reason together."""
    cells: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.status != "ok":
            cells.setdefault((row.status, short_reason(row)), []).append(label(row))
    return "\n".join(f"- {'; '.join(which)}: {status}. {reason}" for (status, reason), which in cells.items())


def status_or(row: Any, name: str) -> object:
    """A row's value, or why there is none; None where there is no row."""
    return None if row is None else row[name] if row.ok else row.status.upper()


def fastest(rows: Iterable[Any]) -> Any:
    """The row with the shortest median step; None where none has one."""
    done = [row for row in rows if row.ok and row.step_median_ms]
    return min(done, key=lambda row: row.step_median_ms, default=None)


def with_spread(row: Any, name: str) -> object:
    """A row's median or mean of steps, `name`, with their standard deviation, "711.4 ± 0.5598"; as `status_or` where
    there is none, or one step only."""
    value = status_or(row, name)
    spread = row is not None and row.ok and row.step_std_ms is not None
    return f"{format_value(value)} ± {format_value(row.step_std_ms)}" if spread else value


def percent(share: float | None, signed: bool = False) -> str | None:
    """0.256 -> "26%"; signed, "+25.6%"."""
    return None if share is None else f"{share:+.1%}" if signed else f"{share:.0%}"


def fine_percent(share: float | None) -> str | None:
    """0.0256 -> "2.6%"."""
    return None if share is None else f"{share:.1%}"


def ratio(over: float | None, under: float | None) -> float | None:
    """over / under, or None where one of them is missing or the second is 0."""
    return over / under if over is not None and under else None


# ---- Sentences -------------------------------------------------------------------------------------------------------

# Names that have digits in them, and are no measurements.
NAMES_WITH_DIGITS = re.compile(
    r"FlashAttention-2|ZeRO-[123]|FSDP2|(?:b?float|bf|fp|tf)(?:16|32|64)|AdamW|all-to-1|L2 cache|N²|log2|√L", re.ASCII
)


@dataclass(frozen=True)
class Sentence:
    """`text` with every number that it has from rows in `values`, as they are written there."""

    text: str
    values: tuple[str, ...] = field(default=())


def say(template: str, **values: Any) -> Sentence | None:
    """The template with rows' values in its `{names}`; None where one of the values is missing.

    Floats are written as in the tables, whole numbers with thousands' commas. Raises ValueError for a digit in the
    template itself: a number in prose must come from rows.
    """
    bare = NAMES_WITH_DIGITS.sub("", re.sub(r"\{\w+\}", "", template))
    if re.search(r"\d", bare):
        raise ValueError(f"template={template!r}: numbers must come from rows")
    if any(value is None for value in values.values()):
        return None
    shown = {name: f"{value:,}" if type(value) is int else format_value(value) for name, value in values.items()}
    return Sentence(template.format(**shown), tuple(shown.values()))


def enumerate_words(words: Sequence[str]) -> str:
    """["a", "b", "c"] -> "a, b and c"."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def largest(pairs: Sequence[tuple[float | None, str]]) -> dict[str, Any]:
    """The largest of labelled values, `{"high": 0.02, "of": "small"}`; both None where there are none."""
    known = [(value, label) for value, label in pairs if value is not None]
    return dict(zip(("high", "of"), max(known), strict=True)) if known else {"high": None, "of": None}


def from_to(
    pairs: Sequence[tuple[float | None, str]], shown: Callable[[float], str | None] = format_value
) -> str | None:
    """Least and largest of labelled values, "1.9 (xl) to 2.2 (small)"; one alone is "1.9 (xl)", none None."""
    known = sorted((value, label) for value, label in pairs if value is not None)
    ends = [f"{shown(value)} ({label})" for value, label in dict.fromkeys([*known[:1], *known[-1:]])]
    return " to ".join(ends) or None


def failures(rows: Sequence[Any], label: str = "cell") -> Sentence | None:
    """How many rows have no measurement, and why."""
    lost = [row for row in rows if not row.ok]
    kinds = {status: sum(row.status == status for row in lost) for status in dict.fromkeys(row.status for row in lost)}
    listed = enumerate_words([f"{count} {status}" for status, count in kinds.items()])
    return say("Of {n} {label}s, {listed}.", n=len(rows), label=label, listed=listed) if lost else None
