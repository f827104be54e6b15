"""Timing a step of several ranks: what is one rank's slowness must not count as another's communication."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from cs336_systems.benchmarking.data_parallel import COMM_REPEATS, COMM_WARMUP, _communication_ms
from cs336_systems.benchmarking.rank_timing import PHASED_STEPS, time_phases
from cs336_systems.distributed.process_group import RankContext
from tests.distributed_helpers import run_gloo


class _UnequalStep:
    """A step whose rank 1 computes for longer; the phase after it notes whether rank 1 had done so when it began."""

    def __init__(self, name: str) -> None:
        self.name, self.n_computed = name, 0
        self.had_computed: list[bool] = []
        self.model = self

    def compute_gradients(self, phase: Callable[[str], Any]) -> None:
        with phase("backward"):
            self.n_computed += 1
            if dist.get_rank() == 1:
                time.sleep(0.1)
                _get_default_store().set(f"{self.name}{self.n_computed}", "done")

    def finish(self) -> None:
        self.had_computed.append(_get_default_store().check([f"{self.name}{self.n_computed}"]))

    def finish_gradient_synchronization(self) -> None: ...

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def __call__(self, phase: Callable[[str], Any]) -> None:
        self.compute_gradients(phase)
        with phase("synchronization"):
            self.finish()


def _time_unequal_ranks(context: RankContext) -> tuple[list[bool], list[bool]]:
    phased, alone = _UnequalStep("phased"), _UnequalStep("alone")
    assert {*time_phases(context, phased)} == {"step", "backward", "synchronization"}
    _communication_ms(alone, context.device)  # ty: ignore[invalid-argument-type]
    return phased.had_computed, alone.had_computed


def test_ranks_begin_a_phase_at_once() -> None:
    for phased, alone in run_gloo(_time_unequal_ranks):
        assert phased == [True] * PHASED_STEPS
        assert alone == [True] * (COMM_WARMUP + COMM_REPEATS)
