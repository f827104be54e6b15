"""What others take of a CPU, from readings of /proc/stat that are made up: never from this machine's own load."""

import math
import os
import time
from dataclasses import replace

import pytest

from cs336_systems import cpu_cores, cpu_load
from cs336_systems.cpu_load import cores_taken, with_cpu_load
from tests.example_rows import RUN

# user nice system idle iowait irq softirq steal guest guest_nice
BEFORE = """cpu  1000 40 300 9000 500 6 60 12 100 0
cpu0 600 20 100 5000 200 3 30 6 100 0
cpu1 400 20 200 4000 300 3 30 6 0 0
intr 12345 0 9
ctxt 777
"""


def _after(*added):
    """Each core's line of BEFORE with these ticks more."""
    cores = [line.split() for line in BEFORE.splitlines()[1:3]]
    lines = [
        f"{name} " + " ".join(str(int(value) + more) for value, more in zip(values, ticks, strict=True))
        for (name, *values), ticks in zip(cores, added, strict=True)
    ]
    return "\n".join(["cpu  1 2 3 4 5 6 7 8 9 10", *lines, "ctxt 778"])


IDLE = (0, 0, 0, 30, 0, 0, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("added", "taken"),
    [
        ((IDLE, IDLE), 0.0),
        (((30, 0, 0, 0, 0, 0, 0, 0, 0, 0), IDLE), 1.0),
        (((0, 0, 0, 15, 0, 0, 0, 15, 0, 0), IDLE), 0.5),  # taken by the host of a virtual machine
        (((0, 0, 0, 0, 30, 0, 0, 0, 0, 0), IDLE), 0.0),  # a core that waits for a disk is free
        (((6, 3, 3, 18, 0, 0, 0, 0, 6, 3), (0, 0, 0, 15, 0, 5, 10, 0, 0, 0)), 0.4 + 0.5),  # a guest's are user's
        (((30, 0, 0, 0, 0, 0, 0, 0, 30, 0), (10, 0, 0, 10, 0, 0, 0, 10, 0, 0)), 1.0 + 2 / 3),
        ((IDLE, (0,) * 10), 0.0),  # a core that was asleep
        (((0, 0, 0, 30, -5, 0, 0, 0, 0, 0), IDLE), 0.0),  # iowait can go back
    ],
)
def test_cores_that_others_use(added, taken):
    assert cores_taken(BEFORE, _after(*added), {0, 1}) == pytest.approx(taken)


def test_only_cores_that_the_run_may_use_count():
    after = _after((30, 0, 0, 0, 0, 0, 0, 0, 0, 0), (3, 0, 0, 27, 0, 0, 0, 0, 0, 0))
    assert cores_taken(BEFORE, after, {0}) == 1.0
    assert cores_taken(BEFORE, after, {1}) == pytest.approx(0.1)
    assert cores_taken(BEFORE, after, {1, 7}) == pytest.approx(0.1)


@pytest.mark.parametrize(("before", "after"), [("", ""), (BEFORE, BEFORE), ("cpu  1 2 3 4\n", "cpu  2 3 4 5\n")])
def test_readings_that_do_not_say(before, after):
    assert cores_taken(before, after, {0, 1}) is None


def _look(monkeypatch, tmp_path, after, n_threads, load=99.0, run=RUN, quota=math.inf, **when):
    """Two cores, and an interval in which the file comes to read as `after`."""
    stat, slept = tmp_path / "stat", []

    def sleep(seconds):
        slept.append(seconds)
        stat.write_text(after)

    if after is not None:
        stat.write_text(BEFORE)
    monkeypatch.setattr(cpu_load, "_STAT", stat)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0), raising=False)
    for module in (cpu_cores, cpu_load):
        monkeypatch.setattr(module, "cpu_quota", lambda: quota)
    monkeypatch.setattr(time, "sleep", sleep)
    run = with_cpu_load(run, n_threads, " Advice.", **when)
    assert slept == ([] if after is None else [0.3])
    return run


@pytest.mark.parametrize(
    ("busy_ticks", "n_threads", "recorded"),
    [(7, 2, None), (9, 2, 0.3), (30, 2, 1.0), (30, 8, 1.0), (30, 1, None), (7, 1, None)],
)
def test_what_others_use_is_told_where_the_runs_threads_wait_for_it(
    monkeypatch, tmp_path, capsys, busy_ticks, n_threads, recorded
):
    """30 ticks on each core; one thread leaves the other core to others."""
    after = _after((busy_ticks, 0, 0, 30 - busy_ticks, 0, 0, 0, 0, 0, 0), IDLE)
    assert _look(monkeypatch, tmp_path, after, n_threads) == replace(RUN, busy_cores=recorded)
    told = f"This machine is busy (others use {recorded} of its 2 cores): times on its CPU are too long, "
    told += "though their spread may be small. Advice.\n"
    assert capsys.readouterr().err == ("" if recorded is None else told)


@pytest.mark.parametrize(
    ("known", "busy_ticks", "recorded"),
    [(None, 7, None), (None, 30, 1.0), (0.5, 30, 1.0), (0.5, 9, 0.5), (1.0, 30, 1.0), (1.0, 0, 1.0)],
)
def test_the_larger_of_both_looks_is_recorded_and_told_once(monkeypatch, tmp_path, capsys, known, busy_ticks, recorded):
    after = _after((busy_ticks, 0, 0, 30 - busy_ticks, 0, 0, 0, 0, 0, 0), IDLE)
    begun = replace(RUN, busy_cores=known)
    assert _look(monkeypatch, tmp_path, after, 2, run=begun, is_end=True) == replace(RUN, busy_cores=recorded)
    told = f"This machine is busy as the run ends (others use {recorded} of its 2 cores): times"
    assert capsys.readouterr().err.startswith(told) == (recorded != known)


def test_a_load_average_that_is_the_runs_own_is_not_told(monkeypatch, tmp_path, capsys):
    assert _look(monkeypatch, tmp_path, None, 2, load=99.0, is_end=True) == RUN
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("after", [None, BEFORE])
@pytest.mark.parametrize(("load", "recorded"), [(3.0, None), (3.1, 3.1)])
def test_the_load_average_where_the_system_tells_no_more(monkeypatch, tmp_path, capsys, after, load, recorded):
    assert _look(monkeypatch, tmp_path, after, 2, load) == replace(RUN, busy_load=recorded)
    assert ("This machine is busy (load 3.1, cores 2)" in capsys.readouterr().err) == (recorded is not None)


def test_a_system_that_tells_nothing(monkeypatch):
    monkeypatch.delattr(os, "getloadavg", raising=False)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert with_cpu_load(RUN, 2) == RUN


@pytest.mark.parametrize(
    ("quota", "n_threads", "told"),
    [
        (2.0, 2, ""),
        (1.0, 2, "the time of 1.0 cores, for 2 threads, which the system stops in between: times on its CPU are too "),
        (0.5, 1, "the time of 0.5 cores, for 1 thread, which the system stops in between: times on its CPU are too "),
    ],
)
def test_threads_beyond_a_quota_are_told_as_a_run_begins(monkeypatch, tmp_path, capsys, quota, n_threads, told):
    """On an idle machine, and with how many there would be none."""
    assert _look(monkeypatch, tmp_path, _after(IDLE, IDLE), n_threads, quota=quota) == RUN
    shown = capsys.readouterr().err
    assert shown.startswith(f"A quota gives this process {told}" if told else "")
    assert shown.endswith("OMP_NUM_THREADS=1 goes without.\n" if n_threads > 1 and told else "long.\n" if told else "")
    _look(monkeypatch, tmp_path, _after(IDLE, IDLE), n_threads, quota=quota, is_end=True)
    assert capsys.readouterr().err == ""


def test_threads_that_a_quota_stops_take_no_core_from_others(monkeypatch, tmp_path):
    """One core's time for two threads leaves the other core to others."""
    busy = _after((30, 0, 0, 0, 0, 0, 0, 0, 0, 0), IDLE)
    assert _look(monkeypatch, tmp_path, busy, 2, quota=1.0) == RUN
    assert _look(monkeypatch, tmp_path, busy, 2, quota=2.0) == replace(RUN, busy_cores=1.0)
