"""What the tests of refusals by memory share: a machine of so much memory, and a cell on ranks."""

from dataclasses import asdict
from typing import Any

import pytest

from cs336_systems import feasibility
from cs336_systems.benchmarking.sharding_cells import ShardingCell
from cs336_systems.configs import named_cell
from cs336_systems.feasibility import GIB, Memory


def limit_memory(monkeypatch: pytest.MonkeyPatch, gib: float, whole_gib: float = 0.0) -> None:
    """This machine has so many GiB free, of as many or of `whole_gib`."""
    memory = Memory(int((whole_gib or gib) * GIB), int(gib * GIB))
    monkeypatch.setattr(feasibility, "machine_memory", lambda: memory)


def on_ranks(implementation: Any, world_size: int, device: str = "cpu") -> ShardingCell:
    shape = asdict(named_cell("small", 32, batch_size=1, device=device))
    return ShardingCell(**shape, world_size=world_size, implementation=implementation)
