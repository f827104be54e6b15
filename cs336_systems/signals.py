"""Ctrl-C, SIGTERM and SIGHUP (a closed terminal) while processes are started or files replaced: answered after it, by
this process and not by those it starts; what these leave behind when they are ended."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any

from cs336_systems.files import leave_room_for_sockets

# What a person calls the end of a program by each.
STOPPED = {signal.SIGINT: "Interrupted", signal.SIGTERM: "Ended by SIGTERM"}
if hasattr(signal, "SIGHUP"):
    STOPPED[signal.SIGHUP] = "Ended by SIGHUP"
# Within so long of the one before, a signal is the same request: a launcher passes on what its terminal sent to all.
IN_SUCCESSION_S = 1.0
# What a terminal sends to a program's other processes too.
_OF_A_TERMINAL = STOPPED.keys() - {signal.SIGTERM}


def stopped_by(error: BaseException) -> signal.Signals | None:
    """The signal, of `STOPPED`, that `error` is the answer to: KeyboardInterrupt, or the SystemExit that endings.py
    makes of the others; None for any other."""
    if isinstance(error, KeyboardInterrupt):
        return signal.SIGINT
    code = error.code if isinstance(error, SystemExit) else None
    return next((number for number in STOPPED if code == 128 + number != 128 + signal.SIGINT), None)


def answer_requests(handler: Any) -> dict[signal.Signals, Any]:
    """Makes `handler` that of SIGTERM and SIGHUP, and returns what was before; not of one that the process was started
    to ignore, as by nohup."""
    return {n: signal.signal(n, handler) for n in STOPPED if n != signal.SIGINT and not _is_ignored(n)}


def _is_ignored(number: int) -> bool:
    return signal.getsignal(number) is signal.SIG_IGN


def answer(number: int, handler: Any) -> None:
    """Makes `handler` the signal's, as getsignal had returned it: None for one that Python did not set."""
    signal.signal(number, handler if handler is not None else signal.SIG_DFL)


@contextmanager
def signals_waiting() -> Generator[None]:
    """The signals of `STOPPED` are answered at the end: what stands inside is done whole, or not at all."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    before = {number: signal.getsignal(number) for number in STOPPED}
    for number in before:
        signal.signal(number, lambda number, frame: received.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            answer(number, handler)
        if received:
            signal.raise_signal(received[0])


@contextmanager
def starting_processes() -> Generator[None]:
    """`signals_waiting`, for what starts processes: in the middle of a fork request a signal would end the fork server,
    which dies of a request cut short, and with it everything that was forked from it is lost to its parents.

    A process that is started inside, the fork server too, has SIGINT and SIGHUP blocked until
    `leave_interrupts_to_parent`: a terminal sends them to all of them, in whatever state they are.
    """
    leave_room_for_sockets()
    on_main_thread = threading.current_thread() is threading.main_thread()
    if not on_main_thread or not hasattr(signal, "pthread_sigmask"):
        with signals_waiting():
            yield
        return
    with signals_waiting():
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        try:
            _block_what_a_terminal_sends()
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # one that waited is received here


def _block_what_a_terminal_sends() -> None:
    """In this thread, from which processes then have it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _OF_A_TERMINAL)
    resource_tracker.ensure_running()  # multiprocessing would start it before the fork server, and it unblocks
    signal.pthread_sigmask(signal.SIG_BLOCK, _OF_A_TERMINAL)


def wait_for_fork_server(context: Any) -> None:
    """Returns when a fork server has imported what it preloads, which takes seconds, and answers: signals are answered
    meanwhile, which `starting_processes` would put off."""
    on_main_thread = threading.current_thread() is threading.main_thread()
    if on_main_thread and context.get_start_method() == "forkserver" and not _server_is_up.is_set():
        threading.Thread(target=_start_first, args=(context,), name="fork server", daemon=True).start()
        while not _server_is_up.is_set():  # its wait() would be broken by a second handler that raises
            time.sleep(0.01)


_server_is_up = threading.Event()


def _start_first(context: Any) -> None:
    """A process that does nothing, which is there when the server is. This thread is never interrupted."""
    try:
        _block_what_a_terminal_sends()
        leave_room_for_sockets()
        process = context.Process(target=leave_interrupts_to_parent)
        process.start()
        process.join()
    except (OSError, EOFError):  # whoever needs a process will meet it too
        pass
    finally:
        _server_is_up.set()


@contextmanager
def ended_by_signals() -> Generator[None]:
    """Inside, the signals of `STOPPED` end this process at once and without a word, even where it waits in a library
    that lets no Python handler run: for one that has nothing to finish."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_DFL) for number in STOPPED if not _is_ignored(number)}
    try:
        yield
    finally:
        for number, handler in before.items():
            answer(number, handler)


def leave_interrupts_to_parent() -> None:
    """In a process just started: Ctrl-C and a closed terminal are the parent's to answer."""
    for number in _OF_A_TERMINAL:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _OF_A_TERMINAL)


def leave_unwinding_untold() -> None:
    """In a process that a signal has ended, which has said so: what else goes wrong as its objects are dropped is no
    news. PyTorch's checkpoints inside of checkpoints print a traceback each where backward was cut short."""
    sys.unraisablehook = lambda unraisable: None


def leave_no_semaphore() -> None:
    """In a process just started, which a signal may end: its progress bars, and the one that torch.compile makes and
    never shows, get a lock of threads. tqdm's own is a semaphore, of which the end of a process that cannot give it
    back makes a warning at the end of the program; and no other process could hold that lock."""
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())
