"""Submit a sweep to Slurm, one job for each variation of a command (or run it here, with --cluster local).

    python scripts/submit_sweep.py --gpus-per-node 2 --partition gpu \\
        --command "scripts/ddp_benchmark.py --size xl" --vary "--precision fp32" "--precision bf16"
    python scripts/submit_sweep.py --cluster local --wait --command "scripts/benchmark.py --size tiny" \\
        --vary "--ctx 64 --out out/ctx64" "--ctx 128 --out out/ctx128"

Needs submitit (`uv sync --extra slurm`). With --tasks-per-node above 1, or several nodes, srun starts the
ranks; otherwise each script spawns its own.
"""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cs336_systems.cli import fail, parse, refusing_bad_input, show, tell


@dataclass(frozen=True)
class Arguments:
    command: str
    """A script and the arguments that all jobs share. Give each job an --out of its own in --vary, or the files of one
    replace another's."""
    vary: tuple[str, ...] = ("",)
    """More arguments, one quoted group a job."""
    folder: Path = Path("out/jobs")
    """For the jobs' logs."""
    cluster: Literal["auto", "slurm", "local"] = "auto"
    """auto: Slurm where there is one, else processes on this machine."""
    nodes: int = 1
    """Nodes a job."""
    tasks_per_node: int = 1
    """1: each script spawns its ranks. The number of GPUs: srun starts one rank a GPU."""
    gpus_per_node: int = 0
    """GPUs a node."""
    cpus_per_task: int = 4
    """CPU cores a task."""
    timeout_min: int = 60
    """Minutes after which a job is ended."""
    partition: str | None = None
    """Slurm's partition. Default: Slurm's own."""
    wait: bool = False
    """Wait for the jobs, and end with status 1 if one fails."""


def main() -> None:
    # A quoted group of flags is a value, and would be taken for a flag of this script's.
    sys.argv[1:] = [f" {word}" if re.match(r"--[\w-]+ ", word) else word for word in sys.argv[1:]]
    arguments = parse(Arguments, __doc__)
    from cs336_systems.distributed.submission import submit_commands, varied, wait_for

    options = dict(vars(arguments))
    command, vary, folder, cluster, wait = (options.pop(n) for n in ("command", "vary", "folder", "cluster", "wait"))
    with refusing_bad_input():
        commands = varied(command, vary)
        try:
            jobs = submit_commands(commands, folder, cluster=None if cluster == "auto" else cluster, **options)
        except ModuleNotFoundError as error:
            fail(str(error))
    for job, words in zip(jobs, commands, strict=True):
        show(f"{job.job_id}: {shlex.join(words)}  (log: {job.paths.stdout})")
    failed = wait_for(jobs) if wait else []
    for line in failed:
        tell(f"error: {line}")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
