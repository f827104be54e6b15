"""How a person goes on with a run that was stopped: the whole command to type."""

from __future__ import annotations

import shlex
import threading

_has_begun = threading.Event()


def run_begins() -> None:
    """From here on this process's run has files of its own, which `--resume` goes on from: an earlier run's have been
    kept or set aside."""
    _has_begun.set()


def has_begun() -> bool:
    """Whether `run_begins` was called: from then on the run itself says what a signal has ended, and how to go on."""
    return _has_begun.is_set()


def after_interruption(command: str, stopped: str = "Interrupted") -> str:
    """What is said after Ctrl-C, or after what `stopped` names: before the run has begun it is the command as it was
    typed that does what was asked; with --resume another run's rows, which are still where that left them, would be
    gone on from."""
    if _has_begun.is_set():
        return f"{stopped}. {to_go_on(command)}"
    how = to_go_on(command) if "--resume" in shlex.split(command) else f"To begin: {command}"
    return f"{stopped} before anything was measured. {how}"


def to_go_on(command: str, where: str = "") -> str:
    """E.g. "To go on: python scripts/benchmark.py --size tiny --resume" of a run's own command, which may have
    --resume already; `where` says where it goes on."""
    command = command.replace(" --no-resume", "")
    resumed = command if "--resume" in shlex.split(command) else f"{command} --resume"
    return f"To go on{' ' if where else ''}{where}: {resumed}"
