"""How a person goes on with a run that was stopped: the whole command to type."""

from __future__ import annotations

import os
import shlex

from cs336_systems.distributed import slurm


def to_go_on(command: str, where: str = "") -> str:
    """E.g. "To go on: python scripts/benchmark.py --size tiny --resume" of a run's own command, which may have
    --resume already; `where` says where it goes on. That torchrun or srun started it is not in the command."""
    command = command.replace(" --no-resume", "")
    resumed = command if "--resume" in shlex.split(command) else f"{command} --resume"
    is_launched = "RANK" in os.environ or slurm.is_task_of_several(os.environ)
    launcher = ", under the same launcher" if is_launched else ""
    return f"To go on{' ' if where else ''}{where}{launcher}: {resumed}"
