"""Cuts an nsys report to its first steps and to what `nsys_report` reads, so that it can be kept or sent."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from cs336_systems.profiling.nsys_report import (
    AGAIN,
    COLUMNS,
    GPU,
    GRAPH,
    KERNEL,
    MARK,
    MEMCPY,
    MEMSET,
    NVTX,
    RUNTIME,
    STRINGS,
    THREAD_BITS,
    check_tables,
    open_report,
    read_only,
    read_report,
)
from cs336_systems.profiling.trace import STEP

_RAN = (KERNEL, MEMCPY, MEMSET, GRAPH)


def trim_report(path: Path, out: Path, steps: int = 1) -> int:
    """Writes a report of the first `steps` measured steps: what was launched in them, and the ranges opened in them.

    Times are counted from the first step's start, so that they are small numbers. Returns the file's size in bytes.

    Raises:
        ValueError: `path` is no report (`nsys_report.read_report`), has no step marked, or is `out` itself.
    """
    if out.resolve() == path.resolve():
        raise ValueError(f"trim={str(out)!r}: must be another file than the report")
    if steps < 1:
        raise ValueError(f"steps={steps}: must be at least 1")
    trace = read_report(path)
    if not trace.steps:
        raise ValueError(f"{path}: has no range {STEP!r} to cut at{AGAIN}")
    first, last = trace.steps[0].start_ns, trace.steps[min(steps, len(trace.steps)) - 1].end_ns
    with open_report(path) as database:
        tables = check_tables(database, path)
    out.unlink(missing_ok=True)
    with closing(sqlite3.connect(out.resolve().as_uri(), uri=True)) as database:
        database.execute("ATTACH ? AS full", (read_only(path),))
        for table in (RUNTIME, *_RAN, NVTX, GPU, STRINGS):
            if table in tables:
                _copy(database, table, [name for name in COLUMNS[table] if name in tables[table]], first, last)
        used = [("demangledName", KERNEL), ("textId", NVTX)]
        ids = " UNION ".join(
            f"SELECT {name} FROM main.{table} WHERE {name} IS NOT NULL"
            for name, table in used
            if name in tables.get(table, ())
        )
        database.execute(f"DELETE FROM main.{STRINGS} WHERE id NOT IN ({ids})")
        ran = " UNION ".join(f"SELECT globalPid, correlationId FROM main.{table}" for table in _RAN if table in tables)
        database.execute(
            f"DELETE FROM main.{RUNTIME} "
            f"WHERE (globalTid & ~{THREAD_BITS}, correlationId) NOT IN (SELECT * FROM ({ran}))"
        )
        database.commit()
        database.execute("DETACH full")
        database.execute("VACUUM")
    return out.stat().st_size


def _copy(database: sqlite3.Connection, table: str, columns: list[str], first: int, last: int) -> None:
    """The table's rows of the time from `first` to `last`: by the launch for what ran, by its start for a range."""
    shifted = [f"{name} - {first}" if name in ("start", "end") else name for name in columns]
    if table == NVTX:
        where = f"WHERE start BETWEEN {first} AND {last} OR eventType = {MARK}"
    elif table == RUNTIME:
        where = f"WHERE start BETWEEN {first} AND {last}"
    elif table in _RAN:
        launched = f"SELECT globalTid & ~{THREAD_BITS}, correlationId FROM main.{RUNTIME}"
        where = f"WHERE (globalPid, correlationId) IN ({launched})"
    else:
        where = ""
    typed = ", ".join(f"{name} {_TYPES.get(name, 'INTEGER')}" for name in columns)
    database.execute(f"CREATE TABLE main.{table} ({typed})")
    database.execute(f"INSERT INTO main.{table} SELECT {', '.join(shifted)} FROM full.{table} {where}")


_TYPES = {"value": "TEXT", "text": "TEXT", "name": "TEXT"}
