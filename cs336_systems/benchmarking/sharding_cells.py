"""What the sharding benchmarks measure: a cell of parameters, and the rows of its times and of its memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from cs336_systems.accounting.training_memory import Sharding, TrainingMemory, training_memory
from cs336_systems.benchmarking.rank_cells import MeasuredStep, RankCell, check_train_step, nccl_label
from cs336_systems.configs import check_together

Implementation = Literal["none", "ddp", "sharded-optimizer", "torch-ddp", "torch-zero", "fsdp", "torch-fsdp2"]
# What each divides over the ranks, in the words of the memory formula.
DIVIDES: dict[str, Sharding] = {
    "none": "none",
    "ddp": "none",
    "torch-ddp": "none",
    "sharded-optimizer": "optimizer",
    "torch-zero": "optimizer",
    "fsdp": "fsdp",
    "torch-fsdp2": "fsdp",
}
# Those whose gradients are views into buckets, which last from step to step.
IN_BUCKETS = ("ddp", "sharded-optimizer", "torch-ddp", "torch-zero")
MOMENTS = ("after build", "before optimizer step", "after optimizer step")


@dataclass(frozen=True)
class ShardingCell(RankCell):
    """A train step of `world_size` ranks, `batch_size` sequences on each, with one implementation.

    `none` is the step without communication; `ddp` and `torch-ddp` keep everything whole (the project's bucketed
    wrapper and PyTorch's); `sharded-optimizer` and `torch-zero` add to these a divided optimizer; `fsdp` and
    `torch-fsdp2` divide weights and gradients too, the latter by Transformer block. bf16 is autocast over float32
    weights, and for the last two bfloat16 weights and gradients in communication, float32 masters.
    """

    implementation: Implementation = "sharded-optimizer"
    max_ctas: int | None = None
    high_priority: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_train_step(self)
        check_together(
            self,
            self.compile == "off" or DIVIDES[self.implementation] != "fsdp",
            "compile",
            self.compile,
            f"must be off for {self.implementation}, whose hooks torch.compile must not span",
        )

    def rank_memory(self) -> TrainingMemory:
        """A rank's memory by formula."""
        return training_memory(
            self.model_config(),
            self.batch_size,
            self.ctx,
            self.precision,
            self.attention,
            self.checkpoint_every or None,
            sharding=DIVIDES[self.implementation],
            num_devices=self.world_size,
            keeps_gradients=self.implementation in IN_BUCKETS,
        )

    def rank_peak_bytes(self) -> int:
        """The most that a rank holds in a step, by formula."""
        return self.rank_memory().peak


@dataclass(frozen=True)
class ShardingRow(MeasuredStep, ShardingCell):
    """A cell and what it measured. Times are of the slowest rank.

    `optimizer_ms` is the optimizer's step by itself, with its communication. `peak_memory_gib` is the allocator's peak
    during the measured steps, of the rank with the most (None on a CPU), and `predicted_peak_gib` the formula's.
    `collective_ms` is the time in which a collective ran in one profiled step on rank 0, and `exposed_collective_ms`
    the part of it in which nothing computed. Of that step's gathers ahead of layers (fsdp on a GPU), `n_late` ended
    after the layer could have begun, `late_ms` later in all.
    """

    optimizer_ms: float | None = None
    tokens_per_s: float | None = None
    peak_memory_gib: float | None = None
    predicted_peak_gib: float | None = None
    collective_ms: float | None = None
    exposed_collective_ms: float | None = None
    n_gathers: int | None = None
    n_late: int | None = None
    late_ms: float | None = None


@dataclass(frozen=True)
class ShardingMemoryRow(ShardingCell):
    """What one rank's memory held at one moment of a step that is not the first, beside the formula.

    `rest_gib` is what the allocator had given out beyond parameters, gradients and optimizer state, and
    `peak_since_gib` its peak since the moment before; both None on a CPU.
    """

    rank: int = 0
    moment: str = MOMENTS[0]
    parameters_gib: float = 0.0
    gradients_gib: float = 0.0
    optimizer_state_gib: float = 0.0
    rest_gib: float | None = None
    total_gib: float | None = None
    peak_since_gib: float | None = None
    predicted_parameters_gib: float = 0.0
    predicted_gradients_gib: float = 0.0
    predicted_optimizer_state_gib: float = 0.0


def scheme_label(cell: ShardingCell) -> str:
    """For example "fsdp, 4 CTAs, high priority"."""
    return f"{cell.implementation}{nccl_label(asdict(cell))}"


def cell_label(cell: ShardingCell) -> str:
    """For example "sharded-optimizer fp32 ×2"."""
    return f"{scheme_label(cell)} {cell.precision} ×{cell.world_size}"
