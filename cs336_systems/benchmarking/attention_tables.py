"""Rows as tables for people: one parameter down, the implementations across, a small table for each of the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cs336_systems.files import write_atomically
from cs336_systems.reasons import short_reason
from cs336_systems.records import ResultsFile, format_value


def pivot_markdown(
    rows: Sequence[Any], tables: Mapping[str, str], down: str, across: str, show: Callable[[Any], str | None]
) -> str:
    """Markdown tables of `show(row)`, with the values of field `down` down and those of field `across` across.

    Rows of which all fields in `tables` (field name to how a title says it) agree share a table; the title names those
    that differ between tables. Of several rows for one place the last is shown; rows whose `show` is None are left out,
    and so is a table without rows.
    """
    import pandas as pd

    shown = [(row, text) for row in rows if (text := show(row)) is not None]
    groups: dict[tuple, dict[Any, dict[Any, str]]] = {}
    for row, text in shown:
        group = groups.setdefault(tuple(getattr(row, name) for name in tables), {})
        group.setdefault(getattr(row, down), {})[getattr(row, across)] = text
    varied = [i for i, name in enumerate(tables) if len({getattr(row, name) for row, _ in shown}) > 1]
    parts = []
    for key, table in groups.items():
        columns = list(dict.fromkeys(column for line in table.values() for column in line))
        frame = pd.DataFrame([{down: str(place), **table[place]} for place in sorted(table)], columns=[down, *columns])
        title = ", ".join(f"{heading} {key[i]}".strip() for i, heading in enumerate(tables.values()) if i in varied)
        markdown = frame.fillna("–").to_markdown(
            index=False, disable_numparse=True, colalign=["right"] * len(frame.columns)
        )
        parts.append(f"**{title}**\n\n{markdown}" if title else markdown)
    return "\n\n".join(parts)


def why_not_run(rows: Sequence[Any], by: str) -> str:
    """A Markdown list of why rows have no measurement, each with its implementation and the values of field `by` that
    it goes for."""
    where: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        if row.status != "ok":
            where.setdefault((row.implementation, row.status, short_reason(row)), []).append(str(getattr(row, by)))
    return "\n".join(
        f"- {implementation} ({', '.join(dict.fromkeys(values))}): {status}{f', {reason}' if reason else ''}"
        for (implementation, status, reason), values in where.items()
    )


def write_pivoted(results: ResultsFile, columns: Mapping[str, str], sections: Mapping[str, str]) -> str:
    """Writes CSV and LaTeX (`columns`) as ever, and Markdown of `sections` (title to text; without text left out)."""
    results.write_tables(columns)
    parts = [f"## {title}\n\n{text}" for title, text in sections.items() if text]
    parts += [f"Measured: {run.summary()}" for run in results.used_runs()]
    markdown = "\n\n".join(parts) + "\n"
    write_atomically(results.path.with_suffix(".md"), markdown)
    return markdown


def varying(rows: Sequence[Any], headings: Mapping[str, str], always: Sequence[str] = ()) -> dict[str, str]:
    """Of `headings` (field to heading) those in which rows differ, and those in `always`."""
    return {n: h for n, h in headings.items() if n in always or len({getattr(row, n) for row in rows}) > 1}


def constants_note(rows: Sequence[Any], headings: Mapping[str, str]) -> str:
    """A line that says what is the same in all rows."""
    same = {h: getattr(rows[0], n) for n, h in headings.items() if n not in varying(rows, headings)}
    return "In all rows: " + ", ".join(f"{heading} {value}" for heading, value in same.items()) + "."


def value_or_status(row: Any, *names: str) -> str | None:
    """The row's fields as "1.23 (45)", or its status where it has no result; None, for a dash, where it never can."""
    if row.status != "ok":
        return None if row.status == "unsupported" else row.status
    first, *others = (format_value(getattr(row, name)) for name in names)
    return f"{first} ({', '.join(others)})" if others else first


SPREAD = "± half of what lies between the fastest and the slowest fifth of calls"


def time_or_status(row: Any, rate: str) -> str | None:
    """`value_or_status` of the median and the field `rate`, with the calls' spread (`SPREAD`, as a share of the median)
    between them, e.g. "1.23 ± 0.4% (45)"; without a spread where the row has no percentiles."""
    text = value_or_status(row, "median_ms", rate)
    if text is None or row.status != "ok" or None in (row.p20_ms, row.p80_ms):
        return text
    share = (row.p80_ms - row.p20_ms) / 2 / row.median_ms
    return text.replace(" (", f" ± {share:{'.1%' if share < 0.0995 else '.0%'}} (", 1)
