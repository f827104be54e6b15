"""What a rank of a launched job still does when it must end at once.

It ends by `os._exit`: an ordinary exit would wait for NCCL kernels whose peers never come. So nothing is run that an
exception would run on its way out, but for what is registered here.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import NoReturn

from cs336_systems.cli import tell
from cs336_systems.signals import STOPPED

_to_finish: list[Callable[[], object]] = []
_ending = threading.Lock()


def finish_at_end(function: Callable[[], object]) -> None:
    """`end_at_once` calls `function()` first, whenever that may be."""
    _to_finish.append(function)


@contextmanager
def finishing(function: Callable[[], None]) -> Generator[None]:
    """Inside, `end_at_once` calls `function()` first, e.g. to write tables of the rows so far."""
    _to_finish.append(function)
    try:
        yield
    finally:
        _to_finish.remove(function)


def end_at_once(status: int) -> NoReturn:
    """Ends this process with an exit status, after what is to be finished. Of several threads the first does it.

    Ctrl-C and what a launcher sends on to its ranks are not answered any more; it waits half a minute before it kills.
    Nor does a standard output or error that cannot be written to (`| head`, a full disk) keep it alive.
    """
    if threading.current_thread() is threading.main_thread():
        for number in STOPPED:
            signal.signal(number, signal.SIG_IGN)
    with _ending:
        try:
            for function in reversed(_to_finish):
                _finish(function)
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError):
                    stream.flush()
        finally:  # a thread that raised instead would leave the process running
            os._exit(status)


def _finish(function: Callable[[], object]) -> None:
    try:
        function()
    except SystemExit:  # it has said why it could not
        pass
    except BaseException:
        tell(traceback.format_exc())
