"""What the tests of scripts share: a script as a process of its own, without the seconds that importing torch takes."""

from __future__ import annotations

import atexit
import io
import json
import multiprocessing.process
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from cs336_systems import cpu_load
from cs336_systems.distributed.spawn import start_context
from cs336_systems.signals import STOPPED
from tests.distributed_helpers import ROOT  # its import starts the fork server

END_S = 120.0  # on a busy machine


class ScriptProcess:
    """`python scripts/<name>.py <arguments>` in a process forked from the tests' fork server: with signals, files and
    children of its own, as if started from a shell.

    Args:
        folder: where its standard output and error are kept.
        environment: variables that it has besides this process's.
        stdout: a file that standard output goes to instead.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        *arguments: Any,
        environment: Mapping[str, str] | None = None,
        stdout: str | Path | None = None,
    ) -> None:
        self._stdout, self._stderr = Path(stdout or folder / "stdout"), folder / "stderr"
        variables = {**os.environ, **(environment or {})}
        argv = [str(ROOT / "scripts" / f"{name}.py"), *map(str, arguments)]
        address = forkserver._forkserver._forkserver_address
        self.process = start_context().Process(target=_run, args=(argv, variables, self._stdout, self._stderr, address))
        self.process.start()
        self.pid: int = self.process.pid

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, at a moment in which a process that it started runs: in the middle of its next request it would take
        the tests' fork server with it."""
        while True:
            self.send_signal(signal.SIGSTOP)
            if [pid for pid in forked_processes() if pid != self.pid]:
                break
            self.send_signal(signal.SIGCONT)
            time.sleep(0.01)
        self.send_signal(signal.SIGKILL)

    def wait(self) -> int:
        """Its exit status, or the negative number of the signal that ended it."""
        self.process.join(END_S)
        if self.process.exitcode is None:
            self.process.kill()
            raise AssertionError(f"did not end within {END_S} s: {self.errors}")
        return self.process.exitcode

    @property
    def output(self) -> str:
        return self._stdout.read_text()

    @property
    def errors(self) -> str:
        return self._stderr.read_text()


def _run(argv: list[str], environment: dict[str, str], stdout: Path, stderr: Path, server_address: str) -> None:
    # The processes that it starts are forked from the same server: else it would start one, which imports torch anew.
    server: Any = forkserver._forkserver
    multiprocessing.process._parent_process = None  # as a script that a person starts
    server._forkserver_address, server.ensure_running = server_address, lambda: None
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPED)  # the fork server's processes have some of them blocked
    encoding = os.environ.get("PYTHONIOENCODING", "utf-8")
    for number, path in ((1, stdout), (2, stderr)):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", closefd=False), encoding)
    sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", closefd=False), encoding, "backslashreplace", line_buffering=True)
    cpu_load._STAT = Path(os.devnull)  # the tests themselves load the machine, and scripts tell of that
    os.getloadavg = lambda: (0.0, 0.0, 0.0)
    sys.argv = argv
    runpy.run_path(argv[0], run_name="__main__")


def rows_in(out: Path, name: str) -> list[dict[str, Any]]:
    """The rows of `<name>.json` in a folder, as they are on disk; none where there is no such file."""
    path = out / f"{name}.json"
    return json.loads(path.read_text())["rows"] if path.exists() else []


def wait_until(condition: Callable[[], Any], what: str = "it") -> Any:
    """The condition's value as soon as that is true."""
    end_s = time.monotonic() + END_S
    while not (value := condition()):
        assert time.monotonic() < end_s, f"{what} did not happen within {END_S} s"
        time.sleep(0.01)
    return value


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it has not ended (a zombie has)."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat")
        return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def forked_processes() -> list[int]:
    """All that the tests' fork server has forked and that still run; none where there is no /proc."""
    server = forkserver._forkserver._forkserver_pid
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == server and state != "Z":
                found.append(int(stat.parent.name))
    return found


# Forks for each line of its input, and the fork goes on as a Python that a person has just started, with the light part
# of the package imported; it ends as such a Python does.
_LIGHT_SERVER = """
import json, os, runpy, sys
from dataclasses import make_dataclass
import tqdm, tyro
import cs336_systems.benchmarking.into_files, cs336_systems.cli, cs336_systems.help_text
tyro.cli(make_dataclass("Arguments", [("size", tuple[str, ...], ())]), args=[])  # imports what it needs only then
for request in sys.stdin:
    pid = os.fork()
    if pid == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
else:
    sys.exit()
sys.argv, also, environment, folder, shown = json.loads(request)
os.environ.clear()
os.environ.update(environment)
os.chdir(folder)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
for number in (1, 2):
    os.dup2(os.open(shown, os.O_WRONLY | os.O_APPEND), number)
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    slow = {"torch", "triton", "numpy", "pandas", "matplotlib"} & set(sys.modules)
    assert not slow, f"imported {slow}"
    exec(also)
"""


@cache
def _light_server() -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    server = subprocess.Popen([sys.executable, "-c", _LIGHT_SERVER], cwd=ROOT, text=True, **pipes)
    atexit.register(server.communicate)  # it ends with its input
    return server


def run_without_torch(name: str, *arguments: str, also: str = "") -> tuple[int, str]:
    """A script's exit status and what it printed, in a process of its own, which must import nothing that takes long.
    `also` are more statements that it runs at its end."""
    server, argv = _light_server(), [str(ROOT / "scripts" / f"{name}.py"), *arguments]
    with tempfile.NamedTemporaryFile("r", encoding="utf-8") as shown:
        print(json.dumps([argv, also, dict(os.environ), os.getcwd(), shown.name]), file=server.stdin, flush=True)
        status, text = int(server.stdout.readline()), shown.read()
    assert "AssertionError" not in text, text
    return status, text


def refused_without_torch(name: str, *arguments: str) -> str:
    """What a script prints that refuses its arguments; nor may it leave a fork server, which would import torch yet."""
    no_server = (
        "from multiprocessing.forkserver import _forkserver; "
        "assert _forkserver._forkserver_pid is None, 'a fork server was started'"
    )
    status, shown = run_without_torch(name, *arguments, also=no_server)
    assert status == 2, shown
    return shown


def assert_help_needs_no_torch(name: str, *flags: str) -> None:
    """`--help` answers at once, and shows the flags."""
    status, shown = run_without_torch(name, "--help")
    assert status == 0, shown
    for flag in flags:
        assert flag in shown
