"""Ranks that Slurm's srun started: who they are, and how they meet.

No port is agreed on in advance: rank 0 binds a free one and publishes it in a file on the shared file system.
"""

from __future__ import annotations

import atexit
import functools
import os
import socket
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist


def is_task_of_several(environment: Mapping[str, str]) -> bool:
    """Whether srun started this process as one task of several. A batch script, and a shell that srun opened as its
    only task, are none."""
    return "SLURM_PROCID" in environment and "SLURM_STEP_ID" in environment and n_tasks(environment) > 1


def n_tasks(environment: Mapping[str, str]) -> int:
    """How many tasks this job step has, on all nodes."""
    return int(environment.get("SLURM_STEP_NUM_TASKS", environment.get("SLURM_NTASKS", "1")))


def n_nodes(environment: Mapping[str, str]) -> int:
    """How many nodes this job step is on."""
    return int(environment.get("SLURM_STEP_NUM_NODES", environment.get("SLURM_NNODES", "1")))


def placement(environment: Mapping[str, str]) -> tuple[int, int, int, int]:
    """(rank, world_size, local_rank, local_world_size) of this task."""
    rank = int(environment["SLURM_PROCID"])
    per_node = _tasks_per_node(
        environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_TASKS_PER_NODE", str(n_tasks(environment))))
    )
    return (
        rank,
        n_tasks(environment),
        int(environment["SLURM_LOCALID"]),
        per_node[int(environment.get("SLURM_NODEID", "0"))],
    )


def _tasks_per_node(text: str) -> list[int]:
    """Slurm's "4(x2),3" is [4, 4, 3]."""
    counts: list[int] = []
    for part in text.split(","):
        count, _, repeat = part.partition("(x")
        counts += [int(count)] * int(repeat.rstrip(")") or 1)
    return counts


def rendezvous(environment: Mapping[str, str], rank: int, timeout_s: float) -> dist.TCPStore:
    """A store that all tasks of this job step share: rank 0 hosts it on a free port.

    The address travels through a file in CS336_RENDEZVOUS_DIR, or else in the directory that the job was submitted
    from; both must be seen by all nodes. It is removed once all ranks have met, or rank 0 ends.

    Raises:
        TimeoutError: rank 0 published no address within `timeout_s` seconds.
    """
    import torch.distributed as dist

    from cs336_systems.distributed.last_words import finish_at_end

    directory = Path(environment.get("CS336_RENDEZVOUS_DIR", environment.get("SLURM_SUBMIT_DIR", ".")))
    job, step = environment.get("SLURM_JOB_ID", "0"), environment.get("SLURM_STEP_ID", "0")
    file = directory / f".rendezvous-{job}-{step}-{environment.get('SLURM_RESTART_COUNT', '0')}"
    world_size, timeout = n_tasks(environment), timedelta(seconds=timeout_s)
    if rank == 0:
        host = own_host(environment)
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        partial = file.with_suffix(f".{os.getpid()}")
        remove = functools.partial(file.unlink, missing_ok=True)
        atexit.register(remove)
        finish_at_end(remove)
        partial.write_text(f"{host} {store.port}")
        partial.replace(file)  # atomic: no reader sees half an address
    else:
        host, port = _published_address(file, timeout_s)
        store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    if store.add("met", 1) == world_size:
        file.unlink(missing_ok=True)
    return store


def own_host(environment: Mapping[str, str]) -> str:
    """The name under which the step's other nodes reach this one; the loopback address if there is no other."""
    if n_nodes(environment) == 1:
        return "127.0.0.1"
    return environment.get("SLURMD_NODENAME", socket.gethostname())


def _published_address(file: Path, timeout_s: float) -> tuple[str, int]:
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        try:
            host, port = file.read_text().split()
            return host, int(port)
        except FileNotFoundError:
            time.sleep(0.1)
    raise TimeoutError(f"rank 0 published no address in {file} within {timeout_s:g} s")
