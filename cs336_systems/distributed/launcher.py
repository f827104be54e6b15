"""Who started this process as one rank of several, torchrun or Slurm's srun, and by what command: no torch here."""

from __future__ import annotations

import os

from cs336_systems.distributed import slurm


def launcher() -> str | None:
    """Who started this process as one of several ranks: "torchrun", "slurm" (srun with several tasks) or nobody."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return "torchrun"
    return "slurm" if slurm.is_task_of_several(os.environ) else None


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
