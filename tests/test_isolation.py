"""A process a cell: what a child may do to itself, and what the parent then says."""

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from multiprocessing import resource_tracker
from pathlib import Path

import pytest
import torch
from tqdm import tqdm

from cs336_systems.benchmarking import isolation
from cs336_systems.benchmarking.isolation import Outcome, is_out_of_memory, run_isolated
from cs336_systems.distributed.spawn import spawn_processes
from cs336_systems.files import NotWritten
from cs336_systems.records import Unsupported
from tests.script_helpers import is_running, wait_until

ROOT = Path(__file__).resolve().parents[1]


def _double(value):
    return 2 * value


def _process_id():
    return os.getpid()


def _read(variable):
    return os.environ.get(variable)


def _run_out_of_memory():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 EiB\nmore lines")


def _really_run_out_of_memory():
    return torch.empty(1 << 60, dtype=torch.uint8)


def _be_killed(number=signal.SIGKILL):
    os.kill(os.getpid(), number)


def _be_unsupported():
    raise Unsupported("needs a flux capacitor")


def _cannot_write():
    raise NotWritten(errno.ENOSPC, "No space left", "a.png")


def _raise():
    raise KeyError("a mistake")


def _crash():
    os.kill(os.getpid(), signal.SIGSEGV)


def _left_by_a_progress_bar(index=0):
    """What the resource tracker is told of as a bar is made, as torch.compile makes one; and as a lock is."""
    register, registered = resource_tracker.register, []
    resource_tracker.register = lambda name, kind: (registered.append(kind), register(name, kind))
    tqdm([], disable=True)
    of_the_bar = list(registered)
    multiprocessing.RLock()
    return of_the_bar, registered


@pytest.mark.parametrize(
    "run",
    [lambda function: run_isolated(function).value, lambda function: spawn_processes(function, (), 1)[0]],
    ids=["isolated", "rank"],
)
def test_a_process_that_is_ended_leaves_no_semaphore_of_its_progress_bars(run):
    assert run(_left_by_a_progress_bar) == ([], ["semaphore"])


def test_a_result_comes_back_from_another_process():
    assert run_isolated(_double, 21) == Outcome("ok", value=42)
    assert len({os.getpid(), run_isolated(_process_id).value, run_isolated(_process_id).value}) == 3


def test_the_environment_is_the_childs_alone():
    assert run_isolated(_read, "CS336_TEST_VARIABLE", environment={"CS336_TEST_VARIABLE": "7"}).value == "7"
    assert run_isolated(_read, "CS336_TEST_VARIABLE").value is None


def test_running_out_of_memory_is_an_outcome():
    assert run_isolated(_run_out_of_memory) == Outcome("oom", reason="CUDA out of memory. Tried to allocate 7 EiB")
    assert run_isolated(_really_run_out_of_memory).status == "oom"


def test_being_killed_is_an_outcome():
    outcome = run_isolated(_be_killed)
    assert outcome.status == "killed"
    assert "SIGKILL" in outcome.reason
    assert run_isolated(_double, 1).value == 2  # and the next call is none the worse


def test_a_terminated_child_is_an_outcome_unless_this_process_is_to_end_too(monkeypatch):
    assert run_isolated(_be_killed, signal.SIGTERM).status == "killed"
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    # A job's end, of which the child hears first.
    monkeypatch.setattr(isolation.time, "sleep", lambda seconds: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit):
        run_isolated(_be_killed, signal.SIGTERM)
    signal.signal(signal.SIGTERM, before)


def test_unsupported_is_an_outcome_with_its_reason():
    assert run_isolated(_be_unsupported) == Outcome("unsupported", reason="needs a flux capacitor")


def test_a_file_that_does_not_fit_is_this_processs_error_too():
    with pytest.raises(NotWritten, match="No space left") as failure:
        run_isolated(_cannot_write)
    assert (failure.value.errno, failure.value.filename) == (errno.ENOSPC, "a.png")


def test_other_exceptions_come_back_with_the_childs_traceback():
    with pytest.raises(RuntimeError, match=r"(?s)_raise failed in its own process.*in _raise.*KeyError: 'a mistake'"):
        run_isolated(_raise)


def test_a_crash_is_told_as_one():
    with pytest.raises(RuntimeError, match="SIGSEGV"):
        run_isolated(_crash)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("x"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (ValueError("out of memory"), False),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), True),
        (ImportError("No module named 'torch'"), False),
    ],
)
def test_what_counts_as_out_of_memory(error, expected):
    assert is_out_of_memory(error) is expected


def test_what_counts_as_out_of_memory_needs_no_torch(monkeypatch):
    """Where memory is too little to import torch, that is the error to judge."""
    monkeypatch.setitem(sys.modules, "torch", None)
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(ImportError("libc10.so: failed to map segment from shared object"))
    assert not is_out_of_memory(KeyError())


_BEFORE_A_SLOW_IMPORT = """
import multiprocessing.forkserver, os, signal, sys
from cs336_systems.benchmarking import isolation

if __name__ == "__main__":
    isolation._PRELOADED = ["slow_to_import"]
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    try:
        isolation.run_isolated(max, 1, 2)
    finally:
        print(multiprocessing.forkserver._forkserver._forkserver_pid, flush=True)
"""
_SLOW_IMPORT = """
import pathlib, time
pathlib.Path(__file__).with_suffix(".begun").touch()
time.sleep(60)
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143)])
def test_signals_are_answered_while_the_fork_server_imports(tmp_path, number, status):
    (tmp_path / "main.py").write_text(_BEFORE_A_SLOW_IMPORT)
    (tmp_path / "slow_to_import.py").write_text(_SLOW_IMPORT)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    output = tmp_path / "output"
    with output.open("w") as stdout:
        words = [sys.executable, tmp_path / "main.py"]
        process = subprocess.Popen(words, env=environment, stdout=stdout, stderr=subprocess.DEVNULL)
    try:
        wait_until((tmp_path / "slow_to_import.begun").exists, "the import")
        time.sleep(0.2)  # by then the process waits for the server
        process.send_signal(number)
        assert process.wait(timeout=20) == status
    finally:
        process.kill()
    os.kill(int(output.read_text()), signal.SIGKILL)  # which would sleep on


def test_a_child_does_not_outlive_a_killed_parent(tmp_path):
    """The parent is killed while its child sleeps: the child must end too, and free the card."""
    script = tmp_path / "orphan.py"
    script.write_text(
        textwrap.dedent("""
        import os, pathlib, sys, time
        from cs336_systems.benchmarking import isolation

        def sleep_forever(file):
            pathlib.Path(file).write_text(str(os.getpid()))
            time.sleep(600)

        if __name__ == "__main__":
            isolation._PRELOADED.clear()  # nothing here needs torch
            isolation.run_isolated(sleep_forever, sys.argv[1])
        """)
    )
    note = tmp_path / "child"
    parent = subprocess.Popen([sys.executable, str(script), str(note)])
    child = int(wait_until(lambda: note.exists() and note.read_text()))
    parent.kill()
    parent.wait()
    wait_until(lambda: not is_running(child))
