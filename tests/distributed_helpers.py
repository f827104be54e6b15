"""What the distributed tests share: gloo ranks on this machine, counted collectives, a small model and its data."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

import tests.conftest  # noqa: F401  the ranks check the jaxtyping annotations too
from cs336_systems.distributed.process_group import GroupOptions, spawn_ranks
from cs336_systems.distributed.spawn import preload_in_fork_server

preload_in_fork_server("tests.distributed_helpers")  # pytest and this package, once for all ranks of all tests
ROOT = Path(__file__).resolve().parents[1]
# A test that hangs should say so long before pytest's own limit.
OPTIONS = GroupOptions("cpu", timeout_s=60.0)

COLLECTIVES = (
    "all_reduce",
    "all_reduce_coalesced",
    "broadcast",
    "broadcast_object_list",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "gather_object",
    "barrier",
)


def run_gloo(function: Any, *args: Any, world_size: int = 2) -> list[Any]:
    """Results of `function(context, *args)` on `world_size` fresh gloo ranks, in rank order."""
    return spawn_ranks(function, *args, world_size=world_size, options=OPTIONS)


@contextmanager
def counted_collectives() -> Generator[Counter[str]]:
    """How often each function of torch.distributed is called in the block, on this rank."""
    counts: Counter[str] = Counter()

    def counting(name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return original(*args, **kwargs)

        return call

    patches = [mock.patch.object(dist, name, counting(name, getattr(dist, name))) for name in COLLECTIVES]
    for patch in patches:
        patch.start()
    try:
        yield counts
    finally:
        for patch in patches:
            patch.stop()


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_python(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Python on `arguments`, in the repository's root, with one thread a process and its output captured."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
