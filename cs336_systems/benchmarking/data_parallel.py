"""The data-parallel benchmark on one rank: an implementation by its name, a step with it, and what is measured of it.

Handout, naive DDP, flat, overlapped and bucketed: time a step, time communicating, and how much of that is hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, Literal

from cs336_systems.benchmarking.rank_arguments import check_mb
from cs336_systems.benchmarking.rank_cells import MeasuredStep, RankCell, check_train_step, nccl_label
from cs336_systems.benchmarking.rank_timing import slowest, time_whole_steps, together
from cs336_systems.configs import check
from cs336_systems.intervals import StepIntervals, covered_share, total_length
from cs336_systems.sweep_cells import cells_of

Implementation = Literal[
    "none", "naive", "flat", "overlapped", "bucketed", "bucketed-zeroed", "bucketed-in-place", "torch-ddp"
]
OWN_BUCKETED: tuple[str, ...] = ("bucketed", "bucketed-zeroed", "bucketed-in-place")
BUCKETED: tuple[str, ...] = (*OWN_BUCKETED, "torch-ddp")
COMM_WARMUP, COMM_REPEATS = 1, 3
NCCL_DEFAULTS: dict[str, Any] = {"max_ctas": None, "high_priority": False}


@dataclass(frozen=True)
class DataParallelCell(RankCell):
    """A train step of `world_size` ranks, `batch_size` sequences on each, with one implementation.

    `none` is the same step without communication. `bucketed` sets gradients to None and copies each new one into its
    bucket; `bucketed-zeroed` zeroes the views and copies nothing; `bucketed-in-place` has no buckets' memory; and
    `torch-ddp` is PyTorch's, with bucket views. `bucket_size_mb` is in MB (10**6 bytes).
    """

    implementation: Implementation = "bucketed"
    bucket_size_mb: float | None = None
    comm_dtype: str | None = None
    max_ctas: int | None = None
    high_priority: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_train_step(self)
        has_buckets = self.implementation in BUCKETED
        check(
            (self.bucket_size_mb is not None) == has_buckets,
            "bucket_size_mb",
            self.bucket_size_mb,
            f"must {'be' if has_buckets else 'not be'} given for {self.implementation}",
        )
        if self.bucket_size_mb is not None:
            check_mb("bucket_size_mb", self.bucket_size_mb, 1e-6, "at least one byte, 1e-06,")
        check(self.comm_dtype in (None, "bf16", "fp16"), "comm_dtype", self.comm_dtype, "must be bf16 or fp16")


@dataclass(frozen=True)
class DataParallelRow(MeasuredStep, DataParallelCell):
    """A cell and what it measured. Times are of the slowest rank.

    `communication_ms` is finish_gradient_synchronization alone, begun by all ranks at once after a backward pass that
    communicated nothing, with the copies into and out of buffers that it needs.
    `exposed_ms` is by how much the median step is longer than the one without communication in the same run, and
    `predicted_overhead_ms` what the handout's model says of that. `collective_ms` is the time in which a collective ran
    in one profiled step on rank 0, and `covered_share` the share of it in which backward computed, too.
    `peak_memory_gib` is the allocator's peak during the measured steps, of the rank with the most; None on a CPU.
    """

    tokens_per_s: float | None = None
    communication_ms: float | None = None
    exposed_ms: float | None = None
    exposed_share: float | None = None
    predicted_overhead_ms: float | None = None
    collective_ms: float | None = None
    covered_share: float | None = None
    n_collectives: int | None = None
    gradient_mb: float | None = None
    peak_memory_gib: float | None = None


def wrap(cell: DataParallelCell, model: Any) -> Any:
    """The model in the cell's implementation. This is the one place that knows them by name. A collective call."""
    import torch

    from cs336_systems.distributed.ddp_bucketed import BucketedDDP
    from cs336_systems.distributed.ddp_flat import FlatDDP
    from cs336_systems.distributed.ddp_naive import NaiveDDP
    from cs336_systems.distributed.ddp_overlapped import OverlappedDDP

    if cell.implementation == "none":
        return model
    if cell.implementation == "torch-ddp":
        assert cell.bucket_size_mb is not None
        return torch.nn.parallel.DistributedDataParallel(
            model,
            bucket_cap_mb=cell.bucket_size_mb * 1e6 / 2**20,  # PyTorch counts in MiB
            gradient_as_bucket_view=True,
            broadcast_buffers=False,  # as here
        )
    unbucketed = {"naive": NaiveDDP, "flat": FlatDDP, "overlapped": OverlappedDDP}
    if cell.implementation in unbucketed:
        return unbucketed[cell.implementation](model)
    assert cell.bucket_size_mb is not None
    return BucketedDDP(
        model,
        cell.bucket_size_mb,
        gradient_as_bucket_view=cell.implementation != "bucketed-in-place",
        bucket_comm_dtype={None: None, "bf16": torch.bfloat16, "fp16": torch.float16}[cell.comm_dtype],
    )


class DataParallelStep:
    """A rank's model, its part of the batch, and its train step, called as `step(phase)`."""

    def __init__(self, context: Any, cell: DataParallelCell) -> None:
        import torch

        from cs336_systems.workload import Workload

        self.workload = Workload(replace(cell, device=str(context.device)))
        self.cell = cell
        self.model = wrap(cell, self.workload.model)
        # Each rank's part of the batch is its own; the weights are rank 0's.
        torch.manual_seed(cell.seed + context.rank)
        for tokens in (self.workload.inputs, self.workload.targets):
            tokens.random_(0, cell.vocab_size)

    def __call__(self, phase: Callable[[str], Any]) -> None:
        self.compute_gradients(phase)
        with phase("synchronization"):
            self.finish()
        assert self.workload.optimizer is not None
        with phase("optimizer"):
            self.workload.optimizer.step()

    def compute_gradients(self, phase: Callable[[str], Any]) -> None:
        """Forward and backward."""
        from cs336_basics.nn_utils import cross_entropy

        self.model.zero_grad(set_to_none=self.cell.implementation != "bucketed-zeroed")
        with phase("forward"), self.workload.autocast():
            logits = self.model(self.workload.inputs)
        with phase("loss"), self.workload.autocast():
            loss = cross_entropy(logits, self.workload.targets)
        del logits
        with phase("backward"):
            loss.backward()

    def finish(self) -> None:
        """Wait for the communication, or do it; nothing where the implementation has none or does it in backward."""
        if self.cell.implementation not in ("none", "torch-ddp"):
            self.model.finish_gradient_synchronization()


def measure_data_parallel(
    context: Any, cell: DataParallelCell, profile_step: Callable[..., StepIntervals] | None = None
) -> dict[str, Any]:
    """Measures the cell on this rank; a collective call, with the same numbers on every rank but rank 0's intervals.

    `profile_step(step, device)` profiles one step; without it the results that need one are None. The result has the
    row's fields, and under "intervals" the profiled step's.
    """
    step = DataParallelStep(context, cell)
    times = time_whole_steps(context, cell, step)
    parameters = [p for p in step.workload.model.parameters() if p.requires_grad]
    intervals = profile_step(step, context.device) if profile_step is not None else None
    return {
        **times,
        "communication_ms": _communication_ms(step, context.device),
        "n_collectives": _n_collectives(cell, step.model, len(parameters)),
        "gradient_mb": sum(p.numel() * p.element_size() for p in parameters) / 1e6,
        "collective_ms": total_length(intervals.communication) if intervals is not None else None,
        "covered_share": covered_share(intervals.communication, intervals.backward) if intervals is not None else None,
        "intervals": asdict(intervals) if intervals is not None else None,
    }


def _communication_ms(step: DataParallelStep, device: Any) -> float | None:
    """The median over steps, of the slowest rank, of the synchronisation alone, which all ranks begin at once."""
    from cs336_systems.benchmarking.timing import PhaseTimer

    if not hasattr(step.model, "finish_gradient_synchronization"):
        return None
    timer = PhaseTimer(device)
    for _ in range(COMM_WARMUP + COMM_REPEATS):
        with step.model.no_sync():
            step.compute_gradients(nullcontext)
        with together(timer, device)("synchronization"):
            step.finish()
    return slowest(timer.ms["synchronization"][COMM_WARMUP:]).median


def _n_collectives(cell: DataParallelCell, model: Any, n_parameters: int) -> int | None:
    by_name = {"none": 0, "naive": n_parameters, "flat": 1, "overlapped": n_parameters}
    return by_name.get(cell.implementation, getattr(model, "n_buckets", None))


def data_parallel_cells(
    base: DataParallelCell,
    *,
    precision: Sequence[str],
    batch_sizes: Mapping[int, int],
    implementation: Sequence[str],
    bucket_size_mb: Sequence[float],
    nccl: Sequence[Mapping[str, Any]] = (NCCL_DEFAULTS,),
) -> list[Any]:
    """The cells of a run, those without communication first.

    Args:
        base: what all have in common.
        batch_sizes: sequences on each rank, by number of ranks.
        bucket_size_mb: multiplies only implementations that have buckets.
        nccl: values of `max_ctas` and `high_priority`; multiplies only what communicates.

    Raises:
        ValueError: as `cells_of`.
    """
    several = []
    for kind, (world_size, batch_size) in product(precision, batch_sizes.items()):
        for name in dict.fromkeys(("none", *implementation)):
            sizes = bucket_size_mb if name in BUCKETED else (None,)
            for size, setting in product(sizes, nccl if name != "none" else (NCCL_DEFAULTS,)):
                varied = {"precision": kind, "world_size": world_size, "batch_size": batch_size, **setting}
                varied |= {"implementation": name, "bucket_size_mb": size}
                varied |= {"comm_dtype": base.comm_dtype if name in OWN_BUCKETED else None}
                several.append({**asdict(base), **varied})
    return cells_of(DataParallelCell, several)


def variant_label(cell: DataParallelCell) -> str:
    """The implementation with all but its bucket size, e.g. "bucketed, sent in bf16, 4 CTAs"."""
    sent = f", sent in {cell.comm_dtype}" if cell.comm_dtype is not None else ""
    return f"{cell.implementation}{sent}{nccl_label(asdict(cell))}"


def scheme_label(cell: DataParallelCell) -> str:
    """The implementation with its parameters, e.g. "bucketed, 4 CTAs, 25 MB"."""
    bucket = f", {cell.bucket_size_mb:g} MB" if cell.bucket_size_mb is not None else ""
    return variant_label(cell) + bucket


def cell_label(cell: DataParallelCell) -> str:
    """For example "2 ranks, fp32, bucketed, 25 MB"."""
    return f"{cell.world_size} ranks, {cell.precision}, {scheme_label(cell)}"
