"""Runs one function call in a process of its own, so that each measurement starts with a fresh card.

Running out of memory and being killed by the system are outcomes; every other exception is raised again here with the
child's traceback. The child is forked from a server that has imported torch but has never touched a device: a cell
costs a fork, not an import.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from cs336_systems.files import NotWritten
from cs336_systems.records import Unsupported
from cs336_systems.signals import (
    leave_interrupts_to_parent,
    leave_no_semaphore,
    starting_processes,
    wait_for_fork_server,
)

# torch._dynamo takes seconds to import, and every optimizer imports it when it is made.
_PRELOADED = ["torch", "torch._dynamo", "cs336_systems.workload"]
_SET_BY_NSYS = ("NSYS_PROFILING_SESSION_ID", "NVTX_INJECTION64_PATH")
_OUT_OF_MEMORY = (
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "can't allocate memory",
    "not enough memory",
    "Cannot allocate memory",
    "failed to map segment from shared object",  # an import under `ulimit -v`
    "Storage size calculation overflowed",  # more bytes than a number can hold
)

_SIGNAL_DELAY_S = 1.0


@dataclass(frozen=True)
class Outcome:
    """What became of a call: `value` if status is "ok", else `reason` (status "oom", "killed" or "unsupported")."""

    status: str
    value: Any = None
    reason: str = ""


def run_isolated(function: Callable[..., Any], *args: Any, environment: Mapping[str, str] | None = None) -> Outcome:
    """Calls `function(*args)` in a fresh process and waits for it.

    Args:
        function: a module's top-level function; it, its arguments and its result must pickle.
        environment: variables set in the child before the call.

    Raises:
        RuntimeError: the call raised anything but running out of memory or `Unsupported` (the child's traceback is in
            the message), or the child ended by a signal other than SIGKILL and SIGTERM.
        NotWritten: the call could not write a file of its own.
    """
    context = _process_context()
    receiver, sender = context.Pipe(duplex=False)
    lifeline_end, lifeline = context.Pipe(duplex=False)
    child = context.Process(
        target=_child, args=(sender, lifeline_end, dict(environment or {}), function, args), daemon=True
    )
    try:
        wait_for_fork_server(context)
        with starting_processes():
            child.start()
        sender.close()
        lifeline_end.close()
        try:
            status, payload = receiver.recv()
        except EOFError:  # it ended without a word
            child.join()
            return _explain_exit(child.exitcode)
        child.join()
    finally:
        if child.is_alive():  # Ctrl-C: the card must be free when this returns
            child.kill()
            child.join()
        receiver.close()
        lifeline.close()
    if status == "not written":
        raise payload
    if status == "error":
        raise RuntimeError(f"{getattr(function, '__qualname__', function)} failed in its own process:\n{payload}")
    return Outcome("ok", value=payload) if status == "ok" else Outcome(status, reason=payload)


def _process_context() -> Any:
    methods = multiprocessing.get_all_start_methods()
    # nsys looks into programs that are started, and not into processes that are only forked.
    if "forkserver" not in methods or any(name in os.environ for name in _SET_BY_NSYS):
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def _explain_exit(exit_code: int | None) -> Outcome:
    if exit_code == -signal.SIGKILL:
        return Outcome("killed", reason="killed by the system (SIGKILL), as when the machine's memory runs out")
    if exit_code == -signal.SIGTERM:
        # A scheduler that ends the whole job may reach the child first: then this process's own signal ends this sleep.
        time.sleep(_SIGNAL_DELAY_S)
        return Outcome("killed", reason="ended by SIGTERM, as by a daemon that guards the machine's memory")
    ended = f"exit code {exit_code}" if exit_code is None or exit_code >= 0 else signal.Signals(-exit_code).name
    raise RuntimeError(f"the measuring process ended without a result ({ended})")


def _child(
    sender: Connection, lifeline: Connection, environment: dict[str, str], function: Callable[..., Any], args: tuple
) -> None:
    leave_interrupts_to_parent()
    os.environ.update(environment)
    try:
        threading.Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()
        leave_no_semaphore()
        message = ("ok", function(*args))
    except Unsupported as error:
        message = ("unsupported", str(error))
    except NotWritten as error:
        message = ("not written", error)
    except Exception as error:
        if is_out_of_memory(error):
            message = ("oom", str(error).strip().splitlines()[0])
        else:
            message = ("error", traceback.format_exc())
    sender.send(message)
    sender.close()


def _end_with_parent(lifeline: Connection) -> None:
    """Ends this process when its parent has gone, even by SIGKILL: nothing else would free the card."""
    try:
        lifeline.recv()
    except (EOFError, OSError):
        os._exit(1)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory ran out, the card's or the machine's, be it too little to import torch."""
    torch = sys.modules.get("torch")
    if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError)):
        return True
    return isinstance(error, (RuntimeError, OSError, ImportError)) and any(
        sign in str(error) for sign in _OUT_OF_MEMORY
    )
