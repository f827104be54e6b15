"""Who started this process as one rank of several, torchrun or Slurm's srun; which rank; by what command. No torch."""

from __future__ import annotations

import os
from dataclasses import dataclass

from cs336_systems.distributed import slurm


@dataclass(frozen=True)
class Placement:
    """Where a rank stands, e.g. rank 5 of 8, the second (1) of the four ranks on its node."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def launcher() -> str | None:
    """Who started this process as one of several ranks: "torchrun", "slurm" (srun with several tasks) or nobody."""
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
    """Where this process stands among the ranks that torchrun or srun started, of which it must be one."""
    if launcher() == "slurm":
        return Placement(*slurm.placement(os.environ))
    world_size = int(os.environ["WORLD_SIZE"])
    return Placement(
        rank=int(os.environ["RANK"]),
        world_size=world_size,
        local_rank=int(os.environ.get("LOCAL_RANK", os.environ["RANK"])),
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", world_size)),
    )


def launch_command() -> list[str]:
    """The words before a script's name that start it as this process was, from the environment: ["python"],
    ["torchrun", "--nproc-per-node", "2"], or ["srun", "--nodes", "2", "--ntasks", "8", "python"].

    Torchrun on several nodes is to be typed on each of them, and does not leave its rendezvous in the environment:
    HOST:PORT stands for that.
    """
    name = launcher()
    if name == "torchrun":
        return _torchrun()
    return _srun() if name == "slurm" else ["python"]


def _torchrun() -> list[str]:
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
