"""How much of this machine's CPU others use as a run begins to time its own work there, and as it ends: looked at,
told, recorded.

A run's threads wait for one another, so that a step takes as long as on the core that others use most. A training step
of `tiny` (batch 4, context 128) on two threads and two cores, beside another process that kept a core busy for 0.2,
0.3, 0.5 and all of its time, took 1.1, 1.25, 1.5 and 2.0 times as long (the median); beside two such processes 3
times, beside four 6.6 times. On one thread, which leaves the other core to others, it took no longer beside one, and
1.3 times as long beside two. So what counts is what others use beyond the cores that the run leaves free. The load
average cannot tell that: it is of the last minute, and blames a run's own predecessor, or the run itself as it ends.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from cs336_systems.cli import tell
from cs336_systems.cpu_cores import cores_bound_to, cpu_quota, usable_cores
from cs336_systems.provenance import Provenance

_STAT = Path("/proc/stat")
# 30 ticks of the kernel's clock on each core: an idle machine shows 0.00 to 0.03 cores.
_LOOK_S = 0.3
# Of a core, beyond those left free: from here on times grow by more than they scatter.
_NOTICEABLE_CORES = 0.25
# Where the system tells the load average only.
_NOTICEABLE_LOAD_PER_CORE = 1.5


def with_cpu_load(provenance: Provenance, n_threads: int, advice: str = "", is_end: bool = False) -> Provenance:
    """The provenance with what others take of the CPU, told on standard error with the `advice`, if times there are
    longer for it, and it is more than was known; else as it was.

    Threads beyond the quota of this process's control group (cpu_cores.py) are told of, too; those that wait for it
    take no core from others.

    Call it when nothing of the run's own is at work, as it takes all that is for others'. It sleeps for 0.3 s.

    Args:
        provenance: of a run on a CPU.
        n_threads: how many threads are timed at once, in all processes together.
        is_end: the run has been timed.
    """
    cores, quota = cores_bound_to(), cpu_quota()
    if n_threads > quota and not is_end:
        fewer = f" OMP_NUM_THREADS={usable_cores()} goes without." if n_threads > usable_cores() else ""
        tell(
            f"A quota gives this process the time of {quota:.1f} cores, for {n_threads} thread{'s' * (n_threads > 1)}, "
            f"which the system stops in between: times on its CPU are too long.{fewer}"
        )
    before = _read(_STAT)
    if before:
        time.sleep(_LOOK_S)
    taken = cores_taken(before, _read(_STAT), cores)
    load = os.getloadavg()[0] if taken is None and not is_end and hasattr(os, "getloadavg") else 0.0
    if taken is not None and taken > max(0, len(cores) - min(n_threads, quota)) + _NOTICEABLE_CORES:
        if round(taken, 1) <= (provenance.busy_cores or 0.0):
            return provenance
        provenance = replace(provenance, busy_cores=round(taken, 1))
        what = f"others use {taken:.1f} of its {len(cores)} cores"
    elif load > _NOTICEABLE_LOAD_PER_CORE * len(cores):
        provenance = replace(provenance, busy_load=round(load, 1))
        what = f"load {load:.1f}, cores {len(cores)}"
    else:
        return provenance
    when = "is busy as the run ends" if is_end else "is busy"
    tell(f"This machine {when} ({what}): times on its CPU are too long, though their spread may be small.{advice}")
    return provenance


def cores_taken(before: str, after: str, cores: Collection[int]) -> float | None:
    """How many of the cores, by number, were busy between two readings of Linux's /proc/stat, e.g. 1.25 of {0, 1}; what
    the host of a virtual machine gave to others (steal) counts as busy. None where the readings do not say: there is no
    such file, or its counts stand still."""
    first, last = _ticks(before), _ticks(after)
    shares = []
    for core in cores:
        if core in first and core in last:
            busy, idle = (max(0, end - start) for start, end in zip(first[core], last[core], strict=True))
            if busy + idle:
                shares.append(busy / (busy + idle))
    return sum(shares) if shares else None


def _ticks(stat: str) -> dict[int, tuple[int, int]]:
    """Busy and idle ticks by core, of lines such as "cpu1 user nice system idle iowait irq softirq steal …"; what
    follows is in user and nice already."""
    ticks = {}
    for line in stat.splitlines():
        name, *values = line.split() or [""]
        if name.startswith("cpu") and name[3:].isdigit():
            counts = [int(value) for value in values[:8]]
            idle = sum(counts[3:5])
            ticks[int(name[3:])] = sum(counts) - idle, idle
    return ticks


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
