"""How many of this machine's CPU cores this process may use: those that it is bound to, as far as a quota allows.

A container is often given the time of a few cores on a machine of many, all of which it sees: threads beyond the quota
are stopped for the rest of each period (0.1 s) in which they have used it up.
"""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path

from cs336_systems.control_groups import control_groups


def cores_bound_to() -> set[int]:
    """The numbers of the cores on which the system lets this process run (taskset, cpuset); all, where it is not
    told."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def cpu_quota(root: Path = Path("/")) -> float:
    """How many cores' time the control group of this process, and those that it is in, may use, e.g. 1.5; infinity
    without such a limit. Under `root` are proc and sys."""
    quotas = [math.inf]
    for group, version in control_groups("cpu", root):
        with suppress(OSError, ValueError, ZeroDivisionError):  # none, or "max"
            if version == 2:
                quota_us, period_us = map(int, (group / "cpu.max").read_text().split())
            else:
                quota_us, period_us = (int((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
            quotas += [quota_us / period_us] if quota_us > 0 else []  # version 1 has -1 for none
    return min(quotas)


def usable_cores() -> int:
    """The whole cores that this process may use at once, at least 1."""
    return max(1, int(min(len(cores_bound_to()), cpu_quota())))
