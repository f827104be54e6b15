"""Runs the steps of reproduce_steps.py for this machine one after another, resumably, and writes the report at the end.

What a step took is kept in `reproduce.json` in the results folder: a step that ended well is not run again, and its
time is what the next estimate tells.
"""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from shutil import which

from cs336_systems.benchmarking.reproduce_steps import STEPS, Step
from cs336_systems.cli import tell
from cs336_systems.configs import check
from cs336_systems.files import write_atomically
from cs336_systems.progress import duration
from cs336_systems.provenance import has_nvidia_driver

_ROOT = Path(__file__).resolve().parents[2]
STATE = "reproduce.json"


@dataclass(frozen=True)
class Ended:
    """How a step ended: its commands, their exit status, and what they took."""

    commands: list[str]
    status: int
    seconds: float


@dataclass(frozen=True)
class Planned:
    """A step on this machine: `commands` are what is run, and `fresh` what would be in an empty folder, by which the
    step is known again. `seconds` is what it should take; `why_not` says why it is not run, if it isn't."""

    step: Step
    commands: list[list[str]]
    fresh: list[str]
    seconds: float
    why_not: str = ""


def machine_here() -> str:
    """ "cpu", "gpu" or "gpus": what this machine has. Without NVIDIA's driver it answers at once; else torch is asked,
    in a process of its own, which takes seconds and is said."""
    if not has_nvidia_driver():
        return "cpu"
    tell("Counting this machine's GPUs …")
    from cs336_systems.benchmarking.into_files import resolve_device

    count = resolve_device("auto", "", is_timed=False)[1].gpu_count
    return "cpu" if count == 0 else "gpu" if count == 1 else "gpus"


def check_machine(machine: str) -> None:
    """Raises ValueError where this machine has fewer GPUs than `machine` ("cpu", "gpu" or "gpus") stands for."""
    if machine != "cpu":
        here = machine_here()
        has = {"cpu": "no GPU", "gpu": "one GPU"}.get(here, "")
        check(here in (machine, "gpus"), "machine", machine, f"this machine has {has}; --dry-run shows the commands")


def read_state(results: Path) -> dict[str, Ended]:
    """How the steps ended whose rows are in this folder; nothing where it is new, or the file is damaged."""
    try:
        return {name: Ended(**ended) for name, ended in json.loads((results / STATE).read_text("utf-8")).items()}
    except (OSError, TypeError, ValueError, AttributeError):
        return {}


def plan(machine: str, results: Path, steps: Sequence[Step] = STEPS) -> list[Planned]:
    """What would be done for each step, in order; looks at files only."""
    state = read_state(results)
    planned = []
    for step in steps:
        commands = step.commands(machine, results, resume=(results / step.path).exists())
        fresh = [shlex.join(words) for words in step.commands(machine, ".")]  # a folder may be moved
        ended = state.get(step.folder)
        known = ended is not None and ended.commands == fresh and ended.status == 0
        seconds = ended.seconds if ended is not None and known else float(step.seconds.get(machine, 0))
        if not commands:
            why_not = f"needs {step.needs}"
        elif step.needs_program and which(step.needs_program) is None:
            why_not = f"needs {step.needs_program}"
        elif known and (results / step.path).exists():
            why_not = "done"
        else:
            why_not = ""
        planned.append(Planned(step, commands, fresh, seconds, why_not))
    return planned


def plan_table(planned: Sequence[Planned]) -> str:
    """The steps, what each needs, how long it takes and where it writes; then each command, and the total."""
    width = max(len(one.step.folder) for one in planned)
    lines = [f"{'step':{width}}  {'needs':18}  {'about':>9}", "-" * (width + 31)]
    for one in planned:
        lines.append(f"{one.step.folder:{width}}  {one.step.needs:18}  {one.why_not or duration(one.seconds):>9}")
        if not one.why_not:
            lines += [f"    python {shlex.join(words)}" for words in one.commands]
    left = [one for one in planned if not one.why_not]
    total = sum(one.seconds for one in left)
    lines.append(
        f"{len(left)} of {len(planned)} steps to run, about {duration(total)} in all: guesses for an H100 or a CPU of "
        "two cores, and what a step took here where it has run."
    )
    return "\n".join(lines)


def run_plan(planned: Sequence[Planned], results: Path, run: Callable[[list[str]], int]) -> list[str]:
    """Runs the steps that are to be run; returns the names of those that failed, and goes on behind each.

    `run` takes a command and returns its exit status; that of Ctrl-C ends all with KeyboardInterrupt. `reproduce.json`
    is on disk after each step.
    """
    state, failed = read_state(results), []
    to_run = [one for one in planned if not one.why_not]
    left = sum(one.seconds for one in to_run)
    for number, one in enumerate(to_run, start=1):
        tell(f"\n[{number} of {len(to_run)}] {one.step.folder}, about {duration(one.seconds)} of {duration(left)} left")
        began, status = time.monotonic(), 0
        for words in one.commands:
            tell(f"python {shlex.join(words)}")
            status = run(words)
            if status in (130, -signal.SIGINT):
                raise KeyboardInterrupt
            if status != 0:
                failed.append(one.step.folder)
                tell(f"{one.step.folder} ended with status {status}; going on.")
                break
        state[one.step.folder] = Ended(one.fresh, status, round(time.monotonic() - began, 1))
        _keep(results, state)
        left -= one.seconds
    return failed


def _keep(results: Path, state: dict[str, Ended]) -> None:
    document = {name: asdict(ended) for name, ended in state.items()}
    write_atomically(results / STATE, json.dumps(document, indent=1) + "\n")


def run_script(words: list[str]) -> int:
    """Runs one of this repository's scripts to its end, whatever interrupts this process meanwhile.

    Ctrl-C reaches the child by itself; it finishes its files and ends with 130. Where this process is asked to end
    (SIGTERM), the child is too.
    """
    process = subprocess.Popen([sys.executable, str(_ROOT / words[0]), *words[1:]])
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.wait()
        return 130
    except BaseException:
        process.terminate()
        process.wait()
        raise
