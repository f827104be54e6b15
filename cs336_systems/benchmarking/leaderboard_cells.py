"""What the leaderboard step's benchmark measures: a cell of parameters, and its row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cs336_systems.accounting.memory_plan import predict_memory
from cs336_systems.benchmarking.rank_cells import MeasuredStep, RankCell, nccl_label
from cs336_systems.configs import check

Implementation = Literal["fused", "torch"]


@dataclass(frozen=True)
class LeaderboardCell(RankCell):
    """A train step of `world_size` ranks, `batch_size` sequences on each.

    `fused` is this project's: fused kernels, FlashAttention, FSDP, AdamW in one launch, and checkpoints that keep
    attention's output. `torch` is PyTorch's: FSDP2 by block, SDPA, compiled blocks, cross-entropy over checkpointed
    chunks of tokens, fused AdamW, and plain checkpoints. `precision` is that of parameters, gradients and AdamW's
    moments, bf16 or fp32, and there is no autocast. The last `kept_blocks` blocks are not checkpointed; those of
    `fused` make again what elementwise kernels return, and keep the rest. `predicted_gib` is the peak by
    accounting/memory_plan.py (of fused only), which might use `memory_gib`.
    """

    implementation: Implementation = "fused"
    kept_blocks: int = 0
    memory_gib: float | None = None
    predicted_gib: float | None = None
    max_ctas: int | None = None
    high_priority: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.precision in ("bf16", "fp32"), "precision", self.precision, "must be bf16 or fp32 here")
        check(
            0 <= self.kept_blocks <= self.num_layers,
            "kept_blocks",
            self.kept_blocks,
            f"must be between 0 and {self.num_layers}, the model's blocks",
        )

    @property
    def recomputes(self) -> bool:
        """Whether blocks that are not checkpointed make again what elementwise kernels return."""
        return self.implementation == "fused"

    def rank_peak_bytes(self) -> int:
        """The most that a rank holds in a step, by the plan's formula; `torch`, for which there is none, holds more."""
        shape = self.model_config(), self.batch_size * self.ctx, self.world_size
        kept = self.kept_blocks
        return predict_memory(*shape, kept, precision=self.precision, recomputes=self.recomputes).peak_bytes

    def memory_options(self) -> str:
        """What lessens it beside a smaller model, batch or more ranks."""
        return "fewer --kept-blocks or a smaller --memory-gib" if self.kept_blocks else ""


@dataclass(frozen=True)
class LeaderboardRow(MeasuredStep, LeaderboardCell):
    """A cell and what it measured. Times are of the slowest rank.

    The phases are those of steps that wait at each phase's edges; forward has the loss in it, and FSDP2 synchronizes in
    backward. `tflops` and `peak_share` are one rank's, of the model's FLOPs: three times forward, attention counted as
    causal (`train_step_flops`); what checkpoints run again is not in them. `peak_memory_gib` is the allocator's peak
    during the measured steps, of the rank with the most (None on a CPU).
    """

    forward_ms: float | None = None
    backward_ms: float | None = None
    synchronization_ms: float | None = None
    optimizer_ms: float | None = None
    tokens_per_s: float | None = None
    tflops: float | None = None
    peak_share: float | None = None
    peak_memory_gib: float | None = None


def cell_label(cell: LeaderboardCell) -> str:
    """For example "fused ×2, 24 of 34 blocks kept"."""
    setting = {"max_ctas": cell.max_ctas, "high_priority": cell.high_priority}
    kept = f"{cell.kept_blocks} of {cell.num_layers} blocks kept"
    return f"{cell.implementation}{nccl_label(setting)} ×{cell.world_size}, {kept}"
