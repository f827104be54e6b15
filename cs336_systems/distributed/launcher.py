"""Who started this process as one rank of several, torchrun or Slurm's srun, or a person who set their variables; which
rank; by what command. No torch."""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cs336_systems.distributed import slurm


@dataclass(frozen=True)
class Placement:
    """Where a rank stands, e.g. rank 5 of 8, the second (1) of the four ranks on its node."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


class RanksMissingError(RuntimeError):
    """The ranks of a launched job did not meet. `in_a_line` is what a script says of it."""

    def __init__(self, placement: Placement, timeout_s: float, error: BaseException) -> None:
        address = [os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in os.environ]
        place = f" at {':'.join(address)}" if address else ""
        who, why = f"rank {placement.rank} of {placement.world_size}", (str(error).splitlines() or [""])[0]
        if isinstance(error, TimeoutError) or re.search(r"tim(ed|e) ?out", why, re.IGNORECASE):
            last = placement.world_size - 1
            text = f"{who} waited {timeout_s:g} s for the others{place}, and not all of ranks 0 to {last} came"
        else:
            text = f"{who} could not meet the others{place}: {why}"
        super().__init__(text)
        self.in_a_line = text


def launcher() -> str | None:
    """Who started this process as one of several ranks: "torchrun" (or a person who set its variables), "slurm" (srun
    with several tasks) or nobody."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return "torchrun"
    return "slurm" if slurm.is_task_of_several(os.environ) else None


def launched_world_size() -> int | None:
    """The number of ranks that torchrun or srun started, of which this process is one; None if nobody did."""
    return launched_placement().world_size if launcher() is not None else None


def launched_rank() -> int | None:
    """This process's rank if torchrun or srun started it as one of several; else None."""
    return launched_placement().rank if launcher() is not None else None


def launched_placement() -> Placement:
    """Where this process stands among the ranks that torchrun or srun started, of which it must be one.

    Raises:
        ValueError: a variable that a person set is none that a rank can have (naming it).
    """
    if launcher() == "slurm":
        return Placement(*slurm.placement(os.environ))
    world_size = _number("WORLD_SIZE", 1)
    rank = _number("RANK", 0, world_size - 1, f", as WORLD_SIZE={world_size}")
    here = _number("LOCAL_WORLD_SIZE", 1, world_size) if "LOCAL_WORLD_SIZE" in os.environ else world_size
    local_rank = _number("LOCAL_RANK", 0, here - 1) if "LOCAL_RANK" in os.environ else rank
    return Placement(rank, world_size, local_rank, here)


def check_environment(ranks_meet: bool) -> None:
    """Raises ValueError where the variables of a launcher, or of a person in its place, are none that a rank can have;
    `ranks_meet`: nor those of where it meets the others."""
    name = launcher()
    if name is None:
        return
    launched_placement()
    if ranks_meet and (name == "torchrun" or "MASTER_PORT" in os.environ):  # tasks of srun's find each other
        missing = [variable for variable in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(variable)]
        if missing:
            raise ValueError(
                f"{' and '.join(missing)} must be set in the environment of a launched rank: the host of rank 0, and a "
                "free port there, e.g. MASTER_ADDR=127.0.0.1 MASTER_PORT=29500"
            )
        _number("MASTER_PORT", 1, 65535)


def _number(name: str, least: int, most: int | None = None, why: str = "") -> int:
    """A variable of the environment."""
    text, allowed = os.environ[name], f"at least {least}" if most is None else f"from {least} to {most}"
    with suppress(ValueError):
        number = int(text)
        if least <= number and (most is None or number <= most):
            return number
    raise ValueError(f"{name}={text!r} in the environment must be a whole number {allowed}{why}")


def launch_command() -> list[str]:
    """The words before a script's name that start it as this process was: ["python"], ["torchrun", "--nproc-per-node",
    "2"], ["srun", "--nodes", "2", "--ntasks", "8", "python"], or ["RANK=0", "WORLD_SIZE=2", "MASTER_ADDR=…",
    "MASTER_PORT=…", "python"] where no launcher set those.

    Torchrun's options are those that were typed, where the system tells (Linux); elsewhere the numbers of nodes and
    processes, from the environment, and HOST:PORT stands for several nodes' rendezvous. srun's are the numbers of nodes
    and tasks, and what each task has; its others are not known. On several nodes torchrun is to be typed on each.
    """
    name = launcher()
    if name == "torchrun":
        return _torchrun()
    return _srun() if name == "slurm" else ["python"]


def _torchrun() -> list[str]:
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        set_by_hand = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        return [*(f"{name}={os.environ[name]}" for name in set_by_hand if name in os.environ), "python"]
    return _torchrun_as_typed() or _torchrun_by_environment()


def _torchrun_as_typed() -> list[str]:
    """What stood before the script's name on the command line of this process's parent, torchrun; [] if not known."""
    try:
        typed = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode().split("\0")
        begin = next(i for i, word in enumerate(typed) if Path(word).name in ("torchrun", "torch.distributed.run"))
        return ["torchrun", *typed[begin + 1 : typed.index(sys.argv[0], begin)]]
    except (OSError, ValueError, StopIteration):
        return []


def _torchrun_by_environment() -> list[str]:
    world_size = int(os.environ["WORLD_SIZE"])
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", world_size // per_node))
    ranks = ["--nproc-per-node", str(per_node)]
    if nodes == 1:
        return ["torchrun", *ranks]
    return ["torchrun", "--nnodes", str(nodes), *ranks, "--rdzv-backend", "c10d", "--rdzv-endpoint", "HOST:PORT"]


def _srun() -> list[str]:
    words = ["srun", "--nodes", str(slurm.n_nodes(os.environ)), "--ntasks", str(slurm.n_tasks(os.environ))]
    for option in ("cpus-per-task", "gpus-per-task"):
        value = os.environ.get(f"SLURM_{option.upper().replace('-', '_')}")  # set where it was asked for
        words += [f"--{option}", value] if value else []
    return [*words, "python"]
