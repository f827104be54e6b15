"""Reads what Nsight Systems exported to SQLite: each kernel, joined with its launch, and the ranges open at the launch.

Tables and columns are those of nsys 2021 to 2025. A launch and its kernels share a correlation id, which is a
process's own; a `globalTid` is a process's `globalPid` with the thread's number in the low 24 bits.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from cs336_systems.profiling.nsys import CAPTURE_HINT
from cs336_systems.profiling.trace import CELL_MARK, STEP, Kernel, OpenRanges, Range, Trace

KERNEL, RUNTIME, NVTX = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"
MEMCPY, MEMSET = "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET"
GRAPH, STRINGS, GPU = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE", "StringIds", "TARGET_INFO_GPU"
_ON_THE_GPU = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid")
# What is read of each table, and what a trimmed report keeps.
COLUMNS: dict[str, tuple[str, ...]] = {
    KERNEL: (*_ON_THE_GPU, "demangledName"),
    MEMCPY: (*_ON_THE_GPU, "copyKind"),
    MEMSET: _ON_THE_GPU,
    GRAPH: (*_ON_THE_GPU, "graphId"),
    RUNTIME: ("start", "end", "globalTid", "correlationId"),
    NVTX: ("start", "end", "eventType", "text", "textId", "globalTid"),
    STRINGS: ("id", "value"),
    GPU: ("name",),
}
MARK, PUSH_POP, START_END = 34, 59, 60  # NVTX_EVENTS.eventType
THREAD_BITS = 0xFFFFFF
# CUpti_ActivityMemcpyKind; torch.profiler calls them the same.
_COPY_KINDS = {1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 5: "AtoA", 6: "AtoD", 7: "DtoA", 8: "DtoD", 9: "HtoH"}
_COPY_KINDS[10] = "PtoP"
AGAIN = f"; {CAPTURE_HINT}"


def read_report(path: Path) -> Trace:
    """The trace of a report that `nsys export --type=sqlite` (or `nsys_trim`) wrote.

    A report without ranges is read, with a note; so are kernels of which no launch was recorded: they are in no range.

    Raises:
        ValueError: it is no such report, or it holds no kernels, or no launches; the message says how to capture them.
    """
    with open_report(path) as database:
        tables = check_tables(database, path)
        strings = dict(database.execute(f"SELECT id, value FROM {STRINGS}"))
        events = _nvtx(database, tables)
        ranges = sorted(_ranges(database, events, strings), key=lambda opened: (opened.start_ns, -opened.end_ns))
        kernels, without_launch = _kernels(database, tables, strings, OpenRanges(ranges))
        gpus = [name for (name,) in database.execute(f"SELECT name FROM {GPU}")] if GPU in tables else []
    notes = []
    if not ranges:
        notes.append(f"The report has no NVTX ranges, so all is one table{AGAIN}.")
    elif all(opened.name != STEP for opened in ranges):
        notes.append(f"No range is called {STEP!r}, so figures are totals, not per step.")
    if without_launch:
        notes.append(
            f"{without_launch} of {len(kernels)} kernels have no launch in the report (it began or ended between "
            "the two) and are in no range."
        )
    if GRAPH in tables and any(kernel.name.startswith("CUDA graph") for kernel in kernels):
        notes.append("CUDA graphs were recorded whole; --cuda-graph-trace=node records their kernels.")
    return Trace(
        kernels=kernels,
        ranges=ranges,
        source=path.name,
        gpu=gpus[0] if gpus else None,
        cell=_cell(events, strings),
        notes=notes,
    )


@contextmanager
def open_report(path: Path) -> Generator[sqlite3.Connection]:
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file")
    with path.open("rb") as file:
        start = file.read(16)
    if start != b"SQLite format 3\0":
        raise ValueError(f"{path}: must be a .nsys-rep file, or SQLite that `nsys export --type=sqlite` made of one")
    try:
        with closing(sqlite3.connect(read_only(path), uri=True)) as database:
            yield database
    except sqlite3.DatabaseError as error:
        raise ValueError(f"{path}: cannot be read ({error}); export it again") from error


def read_only(path: Path) -> str:
    """The file's address for SQLite, which then leaves no file beside it."""
    return f"{path.resolve().as_uri()}?mode=ro&immutable=1"


def check_tables(database: sqlite3.Connection, path: Path) -> dict[str, set[str]]:
    """The columns of each table that is read here and is there."""
    tables = {}
    for table, columns in COLUMNS.items():
        there = {row[1] for row in database.execute(f"PRAGMA table_info({table})")}
        if there:
            tables[table] = there
            missing = sorted(set(columns) - there - {"textId"})  # early exports have the text itself only
            if missing:
                raise ValueError(
                    f"{path}: its table {table} has no column {missing[0]}, as exports of another "
                    "version of nsys may; export it again with nsys 2021 or later"
                )
    if STRINGS not in tables:
        raise ValueError(f"{path}: is no report of nsys, it has no table {STRINGS}{AGAIN}")
    if not tables.keys() & {KERNEL, GRAPH}:
        raise ValueError(
            f"{path}: has no kernels (no table {KERNEL}): nothing ran on a GPU while nsys recorded, or "
            f"--trace had no cuda{AGAIN}"
        )
    if RUNTIME not in tables:
        raise ValueError(
            f"{path}: has kernels but no launches (no table {RUNTIME}), so none can be put into a range; "
            f"--trace must have cuda, not cuda-hw{AGAIN}"
        )
    return tables


def _nvtx(database: sqlite3.Connection, tables: dict[str, set[str]]) -> list[tuple[Any, ...]]:
    if NVTX not in tables:
        return []
    text = "textId" if "textId" in tables[NVTX] else "NULL"
    return list(
        database.execute(
            f"SELECT start, end, eventType, text, {text}, globalTid FROM {NVTX} WHERE eventType IN (?, ?, ?)",
            (MARK, PUSH_POP, START_END),
        )
    )


def _ranges(database: sqlite3.Connection, events: list[tuple[Any, ...]], strings: dict[int, str]) -> list[Range]:
    """Push/pop ranges with their thread, start/end ranges without; one that never closed ends with the report."""
    last = database.execute(f"SELECT MAX(end) FROM {RUNTIME}").fetchone()[0] or 0
    return [
        Range(
            name=text or strings.get(text_id, ""),
            start_ns=start,
            end_ns=max(start, last) if end is None else end,
            process=thread & ~THREAD_BITS,
            thread=thread if kind == PUSH_POP else None,
        )
        for start, end, kind, text, text_id, thread in events
        if kind != MARK
    ]


def _cell(events: list[tuple[Any, ...]], strings: dict[int, str]) -> dict[str, Any] | None:
    for _, _, kind, text, text_id, _ in events:
        mark = text or strings.get(text_id, "")
        if kind == MARK and mark.startswith(CELL_MARK):
            return json.loads(mark.removeprefix(CELL_MARK))
    return None


def _kernels(
    database: sqlite3.Connection, tables: dict[str, set[str]], strings: dict[int, str], opened: OpenRanges
) -> tuple[list[Kernel], int]:
    """All that ran on the GPUs, in order of its start, and of how many no launch was recorded."""
    launches: dict[tuple[int, int], tuple[int, int]] = {}
    for start, thread, correlation in database.execute(
        f"SELECT start, globalTid, correlationId FROM {RUNTIME} ORDER BY start DESC"
    ):
        launches[thread & ~THREAD_BITS, correlation] = (start, thread)  # the outermost call, where calls nest
    kernels, without_launch = [], 0
    for table, name_column in ((KERNEL, "demangledName"), (MEMCPY, "copyKind"), (MEMSET, "NULL"), (GRAPH, "graphId")):
        if table not in tables:
            continue
        for start, end, device, stream, correlation, process, name_of in database.execute(
            f"SELECT {', '.join(_ON_THE_GPU)}, {name_column} FROM {table}"
        ):
            launch_ns, thread = launches.get((process, correlation), (None, None))
            without_launch += launch_ns is None
            kernels.append(
                Kernel(
                    name=_name(table, name_of, strings),
                    start_ns=start,
                    end_ns=end,
                    stream=stream,
                    device=device,
                    process=process,
                    launch_ns=launch_ns,
                    ranges=() if launch_ns is None else opened.at(process, thread, launch_ns),
                )
            )
    return sorted(kernels, key=lambda kernel: (kernel.start_ns, kernel.end_ns)), without_launch


def _name(table: str, name_of: Any, strings: dict[int, str]) -> str:
    if table == KERNEL:
        return strings.get(name_of, f"kernel {name_of}")
    if table == MEMCPY:
        return f"Memcpy {_COPY_KINDS.get(name_of, 'of another kind')}"
    return "Memset" if table == MEMSET else f"CUDA graph {name_of}"
