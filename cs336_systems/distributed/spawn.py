"""Several processes of one function on this machine, and one clear error when any of them fails.

Processes are forked from a server that has imported torch once, so that each starts in a fraction of a second; where
the system has no fork server they are spawned.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import re
import signal
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from cs336_systems.signals import (
    leave_interrupts_to_parent,
    leave_no_semaphore,
    starting_processes,
    wait_for_fork_server,
)

# After the first failure, the time in which other ranks may report theirs: a rank whose peer was killed often raises
# "connection closed" before the death of that peer is seen, and the error should name the cause.
_GRACE_S = 1.0
_TERMINATE_S = 5.0
_WAITED_TOO_LONG = re.compile("time(d )?.?out", re.IGNORECASE)  # in the words of gloo, NCCL and the store


class RankFailedError(RuntimeError):
    """A rank raised or died. `rank` is its number, `cause_traceback` its traceback ("" if it died without one), and
    `exit_code` its exit status (negative: the signal that killed it). `__cause__` is the exception that it raised."""

    def __init__(self, message: str, rank: int, cause_traceback: str, exit_code: int) -> None:
        super().__init__(message)
        self.rank = rank
        self.cause_traceback = cause_traceback
        self.exit_code = exit_code


@dataclass
class _Report:
    """A rank's last word: its result, or the exception that it raised and when."""

    value: Any = None
    error: BaseException | None = None
    error_name: str = ""
    error_traceback: str = ""
    time_s: float = 0.0


@dataclass
class _Rank:
    process: Any
    connection: Connection
    report: _Report | None = None
    end_s: float | None = None

    def failed(self) -> bool:
        return self.end_s is not None and (self.report is None or bool(self.report.error_name))


_IN_SERVER = "CS336_IN_FORK_SERVER"
_preloaded_modules = ["torch", "torch.distributed"]


def start_fork_server(*modules: str) -> None:
    """Start the fork server now, with these modules imported besides torch; a module that it can't import is left to
    the ranks. It returns at once, while the server imports. Once it runs, this does nothing.

    A module may call this as it is imported, and be among `modules`: in the server and in ranks it does nothing.
    """
    if multiprocessing.parent_process() is not None or _IN_SERVER in os.environ:
        return
    _preloaded_modules.extend(module for module in modules if module not in _preloaded_modules)
    if start_context().get_start_method() == "forkserver":
        from multiprocessing import forkserver

        os.environ[_IN_SERVER] = "1"  # the server inherits it
        try:
            with starting_processes():
                forkserver.ensure_running()
        finally:
            del os.environ[_IN_SERVER]


def start_context() -> Any:
    """The multiprocessing context: a fork server with torch imported, or spawn where there is none (Windows)."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # Importing torch takes seconds and initialises no GPU, so that it may come before the fork.
    context.set_forkserver_preload(_preloaded_modules)
    return context


def spawn_processes(
    function: Callable[..., Any], args: tuple, n_processes: int, waits_s: float | None = None
) -> list[Any]:
    """Run `function(index, *args)` in `n_processes` processes; return their results in the order of the indices.

    `waits_s` is how long a process waits for another, in seconds, if it has a limit: an error that comes of that says
    so, and which processes kept it waiting.

    Raises:
        RankFailedError: a process raised, or ended without a result. The others are ended first, within seconds.
    """
    context = start_context()
    # Plain pickle copies tensors, where multiprocessing's would share memory that ends with the process that made it.
    call = pickle.dumps((function, args))
    ranks: list[_Rank] = []
    wait_for_fork_server(context)
    try:
        for index in range(n_processes):
            with starting_processes():  # or one between the fork and the list would leave a rank that nobody ends
                ranks.append(_start(context, index, call))
        start_s = time.time()
        _wait_for(ranks, until_s=None)
        if any(rank.failed() for rank in ranks):
            _wait_for(ranks, until_s=time.time() + _GRACE_S)
            raise _failure(ranks, waits_s if waits_s is not None and time.time() - start_s >= waits_s else None)
        return [rank.report.value for rank in ranks if rank.report is not None]
    finally:
        _end(ranks)


def _start(context: Any, index: int, call: bytes) -> _Rank:
    receiver, sender = context.Pipe(duplex=False)
    # The fork server's environment dates from its start; the ranks shall see this process's of now.
    process = context.Process(target=_child, args=(sender, dict(os.environ), index, call), name=f"rank {index}")
    process.start()
    sender.close()
    return _Rank(process, receiver)


def _wait_for(ranks: list[_Rank], until_s: float | None) -> None:
    """Collect reports until all ranks have ended, or until `until_s`, or (where that is None) the first failure."""
    while running := [rank for rank in ranks if rank.end_s is None]:
        timeout_s = None if until_s is None else until_s - time.time()
        if timeout_s is not None and timeout_s <= 0:
            return
        by_handle: dict[Any, _Rank] = {rank.connection: rank for rank in running if rank.report is None}
        by_handle |= {rank.process.sentinel: rank for rank in running}
        for handle in wait(list(by_handle), timeout_s):
            _advance(by_handle[handle], ended=isinstance(handle, int))
        if until_s is None and any(rank.failed() for rank in ranks):
            return


def _advance(rank: _Rank, ended: bool) -> None:
    if rank.report is None and rank.connection.poll():
        try:
            rank.report = pickle.loads(rank.connection.recv_bytes())
        except EOFError:  # it died without a word: its sentinel tells the rest
            ended = True
    if ended and rank.end_s is None:
        rank.process.join()
        rank.end_s = time.time()
    elif rank.report is not None and rank.report.error_name:
        # It raised. Its process may linger in a library's exit handlers; it has nothing more to say.
        rank.end_s = rank.report.time_s


def _failure(ranks: list[_Rank], waits_s: float | None) -> RankFailedError:
    """The error that names the cause. `waits_s`: a rank's limit for its wait for another, if it may have passed."""

    def order(index: int) -> tuple[int, float]:
        rank = ranks[index]
        # The peers of a rank that is gone raise, or NCCL's watchdog aborts them, perhaps before its end is seen here.
        # Whoever ended in another way is therefore the cause (nobody has been ended from here yet).
        first = rank.report is None and rank.process.exitcode not in (None, -signal.SIGABRT)
        raised_s = rank.report.time_s if rank.report is not None else rank.end_s or 0.0
        return (0 if first else 1, raised_s)

    failed = sorted((index for index, rank in enumerate(ranks) if rank.failed()), key=order)
    cause = ranks[failed[0]]
    message = f"rank {failed[0]} of {len(ranks)} {_describe(cause)}"
    silent = [index for index, rank in enumerate(ranks) if rank.end_s is None and rank.report is None]
    if silent and waits_s is not None and _gave_up(cause):  # not to blame, but who let it wait
        what = f"{_named(silent)} alive and did not report within timeout_s={waits_s:g}"
        message = f"{what}, stopped or too slow, for which others waited: {message}"
    if cause.report is not None:
        message += f"\n\n{cause.report.error_traceback.rstrip()}"
    for index in failed[1:]:
        message += f"\n\nthen rank {index} {_describe(ranks[index])}"
    text = cause.report.error_traceback if cause.report is not None else ""
    error = RankFailedError(message, failed[0], text, 1 if cause.report is not None else cause.process.exitcode)
    error.__cause__ = cause.report.error if cause.report is not None else None
    return error


def _gave_up(rank: _Rank) -> bool:
    """Whether it ended because another let it wait too long; NCCL's watchdog then aborts it."""
    if rank.report is None:
        return rank.process.exitcode == -signal.SIGABRT
    return _WAITED_TOO_LONG.search(rank.report.error_name) is not None


def _named(indices: list[int]) -> str:
    """For example "rank 1 is", "ranks 1, 3 are"."""
    return f"rank {indices[0]} is" if len(indices) == 1 else f"ranks {', '.join(map(str, indices))} are"


def _describe(rank: _Rank) -> str:
    if rank.report is not None:
        return f"raised {rank.report.error_name}"
    code = rank.process.exitcode
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit status {code} and no result"


def _end(ranks: list[_Rank]) -> None:
    for rank in ranks:
        if rank.process.is_alive() and (rank.report is None or rank.report.error_name):
            rank.process.terminate()
            if hasattr(signal, "SIGCONT"):
                with suppress(ProcessLookupError):
                    os.kill(rank.process.pid, signal.SIGCONT)  # one that is stopped answers nothing before it goes on
    deadline_s = time.time() + _TERMINATE_S
    for rank in ranks:
        rank.process.join(max(0.0, deadline_s - time.time()))
        if rank.process.is_alive():
            rank.process.kill()
            rank.process.join()
        rank.connection.close()
        rank.process.close()


def _child(sender: Connection, environment: dict[str, str], index: int, call: bytes) -> None:
    leave_interrupts_to_parent()
    os.environ.clear()
    os.environ.update(environment)
    faulthandler.enable()
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    try:
        leave_no_semaphore()
        function, args = pickle.loads(call)
        sender.send_bytes(pickle.dumps(_Report(value=function(index, *args))))
    except BaseException as error:  # SystemExit too: a rank that leaves early fails the run
        report = _Report(None, error, _name(error), traceback.format_exc(), time.time())
        try:
            pickle.loads(pickle.dumps(report))
        except Exception:
            report.error = None  # not every exception can be rebuilt in another process
        sender.send_bytes(pickle.dumps(report))
        sender.close()
        os._exit(1)  # without exit handlers, which could wait for peers that hang


def _name(error: BaseException) -> str:
    first_line = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__


def _exit_with_parent() -> None:
    """A rank whose parent was killed would otherwise wait for its peers forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
