"""Two signals in quick succession, as of a person who also presses Ctrl-C: one end, told once."""

from __future__ import annotations

import subprocess
import sys

from tests.distributed_helpers import ROOT

_BOTH = """
import os, signal, sys, threading, time
def send_both(*_):
    time.sleep(0.3)  # by then the main thread waits
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), number)
"""


def _run(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _BOTH + code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)


def test_two_signals_while_the_fork_server_starts_end_the_wait():
    run = _run("""
from types import SimpleNamespace
from cs336_systems import signals
signals._start_first = send_both
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: sys.exit(128 + number))
signals.wait_for_fork_server(SimpleNamespace(get_start_method=lambda: "forkserver"))
""")
    assert run.returncode in (130, 143), run.stderr
    assert "RuntimeError" not in run.stderr


def test_two_signals_are_told_once():
    run = _run("""
from dataclasses import make_dataclass
from cs336_systems.cli import parse, tell
from cs336_systems.resuming import run_begins
parse(make_dataclass("Arguments", []), "")
run_begins()
threading.Thread(target=send_both, daemon=True).start()
try:
    for _ in range(2000):  # whichever thread the system interrupts
        time.sleep(0.01)
except (KeyboardInterrupt, SystemExit) as error:
    tell("told")
    raise SystemExit(130 if isinstance(error, KeyboardInterrupt) else error.code)
""")
    assert run.returncode in (130, 143)
    assert run.stderr == "told\n"
