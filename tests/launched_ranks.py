"""What the tests of launched ranks share: ranks with a launcher's environment, forked from the tests' fork server."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cs336_systems.distributed.launcher import launcher
from cs336_systems.distributed.process_group import RankContext, run_ranks
from cs336_systems.distributed.spawn import start_context
from tests.distributed_helpers import OPTIONS


def write_to(output: Path) -> None:
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")


def run_to_end(processes: list[Any]) -> list[int]:
    """Starts processes and returns their exit codes."""
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
        if process.is_alive():
            process.kill()
            process.join()
    return [process.exitcode for process in processes]


def torchrun_environment(rank: int, world_size: int, port: int, _: Path) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the agent, here the test, holds the store
    }


def srun_environment(rank: int, world_size: int, _: int, directory: Path) -> dict[str, str]:
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(world_size),
        "SLURM_STEP_TASKS_PER_NODE": str(world_size),
        "CS336_RENDEZVOUS_DIR": str(directory),
    }


ENVIRONMENTS: dict[str, Callable[[int, int, int, Path], dict[str, str]]] = {
    "torchrun": torchrun_environment,
    "slurm": srun_environment,
}


def rank_process(environment: dict[str, str], output: Path, function: Callable, args: tuple, world_size: int) -> None:
    os.environ.update(environment)
    write_to(output)
    for _ in range(2):  # one group after another
        print(launcher(), run_ranks(function, *args, world_size=world_size, options=OPTIONS), flush=True)


def launch(kind: str, directory: Path, function: Any, *args: Any, world_size: int = 3) -> tuple[list[int], list[str]]:
    """Exit codes and outputs of the ranks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    outputs = [directory / f"output-{rank}" for rank in range(world_size)]
    processes = [
        start_context().Process(
            target=rank_process,
            args=(
                ENVIRONMENTS[kind](rank, world_size, store.port, directory),
                outputs[rank],
                function,
                args,
                world_size,
            ),
        )
        for rank in range(world_size)
    ]
    return run_to_end(processes), [output.read_text() for output in outputs]


def sum_of_ranks(context: RankContext, offset: int) -> tuple[int, float]:
    total = torch.tensor(float(context.rank + offset))
    dist.all_reduce(total)
    return context.local_rank, total.item()
