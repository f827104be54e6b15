"""What the cells and rows share of the benchmarks that train a model on several ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cs336_systems.configs import BenchmarkCell, check


@dataclass(frozen=True)
class RankCell(BenchmarkCell):
    """A train step of `world_size` ranks, `batch_size` sequences on each, with one of the implementations that a kind
    of cell names in the field's type, a Literal."""

    world_size: int = 2
    implementation: str = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.world_size >= 1, "world_size", self.world_size, "must be at least 1")


def check_train_step(cell: RankCell) -> None:
    """Raises ValueError for a cell that is no train step, or one with a gradient scaler."""
    check(cell.mode == "train-step", "mode", cell.mode, "must be train-step")
    check(cell.precision != "fp16", "precision", cell.precision, "must be fp32, tf32 or bf16 here")


@dataclass(frozen=True)
class MeasuredStep:
    """What became of a cell, and its step's time, the slowest rank's; a row's fields after its cell's."""

    status: str = "ok"
    reason: str = ""
    step_mean_ms: float | None = None
    step_std_ms: float | None = None
    step_median_ms: float | None = None
    step_min_ms: float | None = None


def nccl_label(setting: Mapping[str, Any]) -> str:
    """What a cell's label says of NCCL's options, e.g. ", 4 CTAs, high priority"; nothing for NCCL's own."""
    ctas = f", {setting['max_ctas']} CTAs" if setting["max_ctas"] is not None else ""
    return ctas + (", high priority" if setting["high_priority"] else "")
