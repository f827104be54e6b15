"""The cores that a process may use, from files of control groups that are made up: never from this machine's own."""

import math
import os

import pytest

from cs336_systems import cpu_cores
from cs336_systems.cpu_cores import cpu_quota, usable_cores


def _write(root, groups, **files):
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("groups", "files", "quota"),
    [
        ("0::/", {"sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),  # a container's own group, at the top
        ("0::/a/b", {"sys/fs/cgroup/a/b/cpu.max": "max 100000", "sys/fs/cgroup/a/cpu.max": "200000 50000"}, 4.0),
        ("0::/a/b", {"sys/fs/cgroup/a/b/cpu.max": "100000 100000", "sys/fs/cgroup/a/cpu.max": "200000 100000"}, 1.0),
        ("0::/", {"sys/fs/cgroup/cpu.max": "max 100000"}, math.inf),
        ("0::/other", {"sys/fs/cgroup/a/cpu.max": "100000 100000"}, math.inf),
        (
            "3:cpuset:/\n2:cpu,cpuacct:/job\n0::/",
            {"sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "250000", "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000"},
            2.5,
        ),
        (
            "2:cpu:/",
            {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"},
            math.inf,
        ),
        ("2:cpu:/", {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "100000"}, math.inf),
    ],
)
def test_the_quota_is_the_least_of_the_groups(tmp_path, groups, files, quota):
    assert cpu_quota(_write(tmp_path, groups, **files)) == quota


def test_no_quota_where_there_are_no_such_files(tmp_path):
    assert cpu_quota(tmp_path) == math.inf


@pytest.mark.parametrize(("bound", "quota", "usable"), [(8, math.inf, 8), (8, 2.5, 2), (2, 4.0, 2), (8, 0.5, 1)])
def test_usable_cores(monkeypatch, bound, quota, usable):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(bound)), raising=False)
    monkeypatch.setattr(cpu_cores, "cpu_quota", lambda: quota)
    assert usable_cores() == usable
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: bound)
    assert usable_cores() == usable


def test_everything_that_counts_cores_counts_those():
    """None asks the system by itself, which tells a container of all that its machine has."""
    from tests.distributed_helpers import ROOT

    asking = [path.name for path in (ROOT / "cs336_systems").rglob("*.py") if "os.cpu_count" in path.read_text()]
    assert asking == ["cpu_cores.py"]
