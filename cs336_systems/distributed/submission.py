"""A sweep of commands as Slurm jobs, through submitit (the package's optional extra `slurm`).

Each command is a job of its own. With one task a node a script spawns its ranks on that node; with as many tasks as
GPUs, on one node or several, srun starts the ranks, and process_group.py reads its environment.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cs336_systems.configs import check
from cs336_systems.files import check_writable
from cs336_systems.progress import progress

_LAST_LINES = 30
_LOOK_S = 1.0


def varied(command: str, vary: Sequence[str]) -> list[list[str]]:
    """The words of `command` with those of each of `vary` behind them, as a shell reads them. Raises ValueError where
    it could not: `varied("a.py --x", ["1", "2"])` is [["a.py", "--x", "1"], ["a.py", "--x", "2"]]."""
    return [_words("command", command) + _words("vary", more) for more in vary]


def _words(name: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ValueError(f"{name}={text.strip()!r}: cannot be read as a shell's words ({error})") from error


def submit_commands(
    commands: Sequence[Sequence[str]],
    folder: str | Path,
    *,
    cluster: str | None = None,
    name: str = "cs336",
    nodes: int = 1,
    tasks_per_node: int = 1,
    gpus_per_node: int = 0,
    cpus_per_task: int = 4,
    timeout_min: int = 60,
    partition: str | None = None,
) -> list[Any]:
    """Submit each command as a job and return submitit's jobs, which have `.job_id`, `.done()` and `.result()`.

    Args:
        commands: arguments for this Python, e.g. [["scripts/benchmark.py", "--size", "xl"]]; they run in the current
            directory.
        folder: for submitit's files and each job's output; on a cluster all nodes must see it.
        cluster: "slurm", "local" (processes on this machine), or None for Slurm where there is one, else local.
        timeout_min: after this many minutes the job is ended.

    Raises:
        ModuleNotFoundError: submitit is not installed.
        ValueError: no commands, a number below what makes sense, no Slurm for what needs it, or a folder that cannot be
            written to.
    """
    check(len(commands) > 0, "commands", "", "must be at least one")
    check(all(commands), "command", "", "must be a script and its arguments")
    least = {"nodes": 1, "tasks_per_node": 1, "gpus_per_node": 0, "cpus_per_task": 1, "timeout_min": 1}
    for label, value in zip(least, (nodes, tasks_per_node, gpus_per_node, cpus_per_task, timeout_min), strict=True):
        check(value >= least[label], label, value, f"must be at least {least[label]}")
    has_slurm = shutil.which("srun") is not None
    check(has_slurm or cluster != "slurm", "cluster", cluster, "needs Slurm, whose srun is not on the PATH")
    if cluster == "local" or not has_slurm:
        check(nodes == 1, "nodes", nodes, "is of Slurm; jobs on this machine have one node")
        check(partition is None, "partition", partition, "is of Slurm; jobs on this machine have none")
    try:
        import submitit
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("submitting jobs needs submitit: uv sync --extra slurm") from error
    check_writable(Path(folder), "folder")
    executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
    executor.update_parameters(
        name=name,
        nodes=nodes,
        tasks_per_node=tasks_per_node,
        gpus_per_node=gpus_per_node,
        cpus_per_task=cpus_per_task,
        timeout_min=timeout_min,
        # A rank that fails must not leave the others waiting.
        slurm_srun_args=["--kill-on-bad-exit=1"],
        slurm_partition=partition,
    )
    with executor.batch():  # on Slurm one job array
        return [executor.submit(run_command, list(command), str(Path.cwd())) for command in commands]


def wait_for(jobs: Sequence[Any]) -> list[str]:
    """Wait until all jobs have ended, with a progress bar over them; returns a line for each that failed, with the last
    that it printed."""
    left = list(jobs)
    with progress(len(jobs), unit="job") as bar:
        while left:
            ended = [job for job in left if job.done()]
            left = [job for job in left if job not in ended]
            bar.update(len(ended))
            if left:
                time.sleep(_LOOK_S)
    failed = []
    for job in jobs:
        try:
            job.result()
        except Exception as error:  # the job's own, or submitit's of one that was ended
            failed.append(f"{job.job_id} failed: {_last_line(error)}  (log: {job.paths.stdout})")
    return failed


def _last_line(error: Exception) -> str:
    """Of what the job printed, where submitit says that, or of what it says itself: the last with a word in it, without
    the frame that the options' parser draws."""
    text = str(error).partition("\nYou can check full logs")[0]
    lines = [line.strip(" │") for line in text.splitlines() if any(map(str.isalnum, line))]
    return lines[-1] if lines else type(error).__name__


def run_command(command: list[str], directory: str) -> str:
    """Run this Python with `command` in `directory`; returns the last lines that it printed.

    Raises:
        RuntimeError: it ended with another status than 0; the message has its last lines.
    """
    process = subprocess.Popen(
        [sys.executable, *command], cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        print(line, end="", flush=True)  # into the job's log, as it comes
        lines = [*lines[1 - _LAST_LINES :], line]
    status = process.wait()
    if status != 0:
        raise RuntimeError(f"{' '.join(command)} ended with status {status}:\n{''.join(lines)}")
    return "".join(lines)
