"""Made nsys reports: SQLite as `nsys export` of version 2025.3 lays it out, row by row as a test asks for it."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from cs336_systems.profiling.trace import CELL_MARK

# In the order of their starts.
RANGES_OF_A_STEP = ["step", "forward", "block", "scores", "softmax", "final matmul", "loss", "backward", "optimizer"]

_SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE TARGET_INFO_GPU (vmId INTEGER, id INTEGER, name TEXT, busLocation TEXT, smCount INTEGER);
CREATE TABLE META_DATA_EXPORT (name TEXT, value TEXT);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER, greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
    demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, mangledName INTEGER, launchType INTEGER,
    gridX INTEGER NOT NULL, graphNodeId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, bytes INTEGER NOT NULL,
    copyKind INTEGER NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, bytes INTEGER NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    graphId INTEGER NOT NULL, contextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
    graphExecId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL,
    globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL,
    callchainId INTEGER);
CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER,
    category INTEGER, color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER,
    domainId INTEGER, uint64Value INTEGER);
"""
KERNEL, RUNTIME, NVTX = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"
MEMCPY, MEMSET, GRAPH = (f"CUPTI_ACTIVITY_KIND_{name}" for name in ("MEMCPY", "MEMSET", "GRAPH_TRACE"))
PID = 4321
GPU_NAME = "NVIDIA H100 80GB HBM3"


def global_pid(pid: int = PID) -> int:
    """nsys's number of a process: hardware and machine above it, room for a thread below."""
    return (1 << 56) | (pid << 24)


def global_tid(tid: int, pid: int = PID) -> int:
    return global_pid(pid) | tid


class MadeReport:
    """A report under construction. Times are in ns, threads are numbered as the system does (the main one as its
    process), and a table in `without` is left out, as nsys does where nothing was recorded for it."""

    def __init__(self) -> None:
        self._strings: dict[str, int] = {}
        self._rows: list[tuple[str, dict[str, Any]]] = []
        self._correlation = 0

    def string(self, text: str) -> int:
        return self._strings.setdefault(text, len(self._strings) + 1)

    def add(self, table: str, **columns: Any) -> None:
        self._rows.append((table, columns))

    def launch(self, start: int, tid: int = PID, pid: int = PID, correlation: int | None = None) -> int:
        """A launch call; returns its correlation id."""
        if correlation is None:
            self._correlation += 1
            correlation = self._correlation
        name = self.string("cudaLaunchKernel_v7000")
        thread = global_tid(tid, pid)
        common = {"eventClass": 0, "nameId": name, "returnValue": 0}
        self.add(RUNTIME, start=start, end=start + 5, globalTid=thread, correlationId=correlation, **common)
        return correlation

    def ran(self, table: str, start: int, end: int, correlation: int, pid: int = PID, **columns: Any) -> None:
        columns = {"deviceId": 0, "streamId": 7, **columns}
        self.add(table, start=start, end=end, correlationId=correlation, globalPid=global_pid(pid), **columns)

    def kernel(
        self, name: str, start: int, end: int, launch: int | None, tid: int = PID, pid: int = PID, **columns: Any
    ) -> None:
        """A kernel and its launch at the time `launch`; None: the launch was not recorded."""
        correlation = 10**6 + start if launch is None else self.launch(launch, tid, pid)
        self.one_of_a_launch(name, start, end, correlation, pid, **columns)

    def one_of_a_launch(
        self, name: str, start: int, end: int, correlation: int, pid: int = PID, **columns: Any
    ) -> None:
        names = {"demangledName": self.string(name), "shortName": self.string("short"), "gridX": 1}
        self.ran(KERNEL, start, end, correlation, pid, **names, **columns)

    def range(
        self, name: str, start: int, end: int | None, tid: int = PID, pid: int = PID, *, push: bool = True
    ) -> None:
        """A push/pop range of a thread, or a start/end range of the process. Half of them keep their text elsewhere."""
        registered = len(self._rows) % 2 == 0
        text = {"textId": self.string(name)} if registered else {"text": name}
        kind = 59 if push else 60
        self.add(NVTX, start=start, end=end, eventType=kind, globalTid=global_tid(tid, pid), domainId=0, **text)

    def cell(self, cell: dict[str, Any], start: int = 0) -> None:
        mark = CELL_MARK + json.dumps(cell)
        self.add(NVTX, start=start, eventType=34, text=mark, globalTid=global_tid(PID), domainId=0)

    def write(self, path: Path, without: tuple[str, ...] = ()) -> Path:
        with closing(sqlite3.connect(path)) as database:
            database.executescript(_SCHEMA)
            database.executemany("INSERT INTO StringIds VALUES (?, ?)", [(i, s) for s, i in self._strings.items()])
            database.execute("INSERT INTO TARGET_INFO_GPU VALUES (0, 0, ?, '', 132)", (GPU_NAME,))
            for table, columns in self._rows:
                names, marks = ", ".join(columns), ", ".join("?" * len(columns))
                database.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", tuple(columns.values()))
            for table in without:
                database.execute(f"DROP TABLE {table}")
            database.commit()
        return path
