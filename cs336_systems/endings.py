"""How a script ends that a signal stops, or an error that nobody caught: with the right status, and in a line where
that says all. What becomes of signals while processes are started or files replaced is in signals.py."""

from __future__ import annotations

import atexit
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

from cs336_systems.distributed.launcher import launched_rank
from cs336_systems.resuming import after_interruption, has_begun
from cs336_systems.signals import IN_SUCCESSION_S, STOPPED, answer_requests

_AFTER_AN_IMPORT_S = 0.05


class Ending:
    """The end of a script, from `answer_errors` and `answer_signals` on.

    Args:
        is_resumable: whether how to go on is to be said.
        command_line: what was typed, to be run again.
        tell: prints a line to standard error.
    """

    def __init__(self, is_resumable: bool, command_line: Callable[[], str], tell: Callable[[str], None]) -> None:
        self._is_resumable, self._command_line, self._tell = is_resumable, command_line, tell
        self._began_s = -math.inf  # when a signal last began to end the program

    def answer_errors(self) -> None:
        """An error that nobody catches ends the program in a line, if it can."""
        sys.excepthook = self._in_a_line

    def answer_signals(self) -> None:
        """A scheduler's request to stop, and a closed terminal, are answered as an exit: files are finished, and
        temporary ones removed."""
        answer_requests(self._exit_by_signal)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._exit_by_signal)

    def _exit_by_signal(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-C is a KeyboardInterrupt; any other an exit, with a line, as after Ctrl-C, where the run has not begun,
        as that has one of its own.

        Not in the middle of an import, though: some modules swallow whatever is raised there, and the program would go
        on. Before the run it ends there, as there is nothing to finish; later the signal is sent again until it is
        over.

        Another signal right after the one that ends the program is the same request: it would break off what is told
        of the first, or the interpreter's own end."""
        if time.monotonic() - self._began_s < IN_SUCCESSION_S:
            return
        is_importing = _is_importing(frame)
        if is_importing and has_begun():
            again = threading.Timer(_AFTER_AN_IMPORT_S, os.kill, (os.getpid(), number))
            again.daemon = True
            again.start()
            return
        self._began_s = time.monotonic()
        if not has_begun() and (is_importing or number != signal.SIGINT):
            with suppress(RuntimeError):  # standard error was being written to
                self._tell_of_the_end(STOPPED[signal.Signals(number)])
        if is_importing:
            atexit._run_exitfuncs()
            with suppress(OSError):
                sys.stdout.flush()
            os._exit(128 + number)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + number)

    def _in_a_line(self, kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        """Ctrl-C that nobody caught is a line, with how to go on where the script can, and so is an error with the
        attribute `in_a_line`, which has it; any other error keeps its traceback."""
        if issubclass(kind, KeyboardInterrupt):
            self._tell_of_the_end("Interrupted")
            raise SystemExit(128 + signal.SIGINT)  # or it is 1, as of a failed run, if something was imported here
        if line := getattr(error, "in_a_line", ""):
            self._tell(f"\nerror: {line}")
        else:
            sys.__excepthook__(kind, error, traceback)

    def _tell_of_the_end(self, stopped: str) -> None:
        """How to go on is said where the script can, by the first rank of a launched job."""
        is_told_how = self._is_resumable and launched_rank() in (None, 0)
        self._tell(f"\n{after_interruption(self._command_line(), stopped) if is_told_how else f'{stopped}.'}")


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
