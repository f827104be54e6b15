"""How a person goes on with a run that was stopped: the whole command to type."""

from __future__ import annotations

import shlex


def to_go_on(command: str, where: str = "") -> str:
    """E.g. "To go on: python scripts/benchmark.py --size tiny --resume" of a run's own command, which may have
    --resume already; `where` says where it goes on."""
    command = command.replace(" --no-resume", "")
    resumed = command if "--resume" in shlex.split(command) else f"{command} --resume"
    return f"To go on{' ' if where else ''}{where}: {resumed}"
