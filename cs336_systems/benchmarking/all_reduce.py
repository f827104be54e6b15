"""The all-reduce benchmark: time over buffer size and number of ranks, bandwidths, and the line through the times.

Handout, distributed communication: float32 buffers, 5 warm-ups, synchronised, times gathered from all ranks. Every rank
does the same number of repeats, and of each repeat the slowest rank's time counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from cs336_systems.accounting.communication import LinearCost, all_reduce_bus_bytes, fit_linear_cost
from cs336_systems.benchmarking.rank_arguments import check_mb
from cs336_systems.benchmarking.rank_timing import slowest, together
from cs336_systems.configs import check

BYTES_PER_MB = 10**6
ITEM_BYTES = 4  # float32
HANDOUT_PROCESSES = (2, 4, 6)


@dataclass(frozen=True)
class AllReduceCell:
    """One buffer size on one number of ranks. `size_mb` is in MB (10**6 bytes)."""

    device: str
    world_size: int
    size_mb: float
    warmup: int = 5
    repeats: int = 20
    max_ctas: int | None = None
    high_priority: bool = False

    def __post_init__(self) -> None:
        check(self.device in ("cpu", "cuda"), "device", self.device, "must be cpu or cuda")
        check(self.world_size >= 1, "world_size", self.world_size, "must be at least 1")
        check_size("size_mb", self.size_mb)
        check(self.warmup >= 0, "warmup", self.warmup, "must be 0 or more")
        check(self.repeats >= 1, "repeats", self.repeats, "must be at least 1")

    @property
    def n_bytes(self) -> int:
        """The buffer's size, whole float32 elements."""
        return int(self.size_mb * BYTES_PER_MB) // ITEM_BYTES * ITEM_BYTES


@dataclass(frozen=True)
class AllReduceRow(AllReduceCell):
    """A cell's times, of the slowest rank in each repeat, and bandwidths from their median: the buffer's bytes over the
    time (algorithm), and the bytes that each rank sends in a ring (bus)."""

    backend: str = ""
    status: str = "ok"
    reason: str = ""
    mean_ms: float | None = None
    std_ms: float | None = None
    median_ms: float | None = None
    min_ms: float | None = None
    algorithm_gb_per_s: float | None = None
    bus_gb_per_s: float | None = None


@dataclass(frozen=True)
class AllReduceFit:
    """time = call_cost_us + bytes / bandwidth_gb_per_s for one number of ranks, and how far it is from the median that
    it fits worst, as a share of that."""

    backend: str
    world_size: int
    max_ctas: int | None
    call_cost_us: float
    bandwidth_gb_per_s: float
    worst_relative_error: float

    def cost(self) -> LinearCost:
        """In seconds and bytes."""
        return LinearCost(self.call_cost_us / 1e6, self.bandwidth_gb_per_s * 1e9)


def check_size(name: str, size_mb: float) -> None:
    """Raises ValueError, with this name, for a buffer that cannot be."""
    smallest = ITEM_BYTES / BYTES_PER_MB
    check_mb(name, size_mb, smallest, f"at least one float32, {smallest:g},")


def all_reduce_cells(
    device: str, processes: Sequence[int], sizes_mb: Sequence[float], **parameters: Any
) -> list[AllReduceCell]:
    """The product of numbers of ranks and sizes; keyword arguments are `AllReduceCell`'s other fields.

    Raises:
        ValueError: for the first that cannot be.
    """
    for mb in sizes_mb:
        check_size("sizes_mb", mb)
    return [AllReduceCell(device, n, mb, **parameters) for n, mb in product(processes, sizes_mb)]


def measure_all_reduce(context: Any, cell: AllReduceCell) -> dict[str, Any]:
    """Times the cell on this rank; returns the row's results, the same on every rank. A collective call."""
    import torch
    import torch.distributed as dist

    from cs336_systems.benchmarking.timing import PhaseTimer

    buffer = torch.ones(cell.n_bytes // ITEM_BYTES, device=context.device)
    timer = PhaseTimer(context.device)
    for _ in range(cell.warmup + cell.repeats):
        # The values: ones become world_size, and are divided back so that repeats neither overflow nor reach zero.
        with together(timer, context.device)("all-reduce"):
            dist.all_reduce(buffer)
        if buffer[-1].item() != cell.world_size:
            raise AssertionError(f"all_reduce of ones gave {buffer[-1].item()}, not {cell.world_size}")
        buffer.div_(cell.world_size)
    statistics = slowest(timer.ms["all-reduce"][cell.warmup :])
    seconds = statistics.median / 1e3
    return {
        "backend": context.backend,
        "mean_ms": statistics.mean,
        "std_ms": statistics.std,
        "median_ms": statistics.median,
        "min_ms": statistics.min,
        "algorithm_gb_per_s": cell.n_bytes / seconds / 1e9,
        "bus_gb_per_s": all_reduce_bus_bytes(cell.n_bytes, cell.world_size) / seconds / 1e9,
    }


def fit_rows(rows: Sequence[AllReduceRow]) -> list[AllReduceFit]:
    """A line through the medians of each number of ranks of which at least two sizes were measured, and whose times
    grow with the size."""
    fits = []
    for backend, world_size, max_ctas in dict.fromkeys((row.backend, row.world_size, row.max_ctas) for row in rows):
        chosen = [
            row
            for row in rows
            if (row.backend, row.world_size, row.max_ctas, row.status) == (backend, world_size, max_ctas, "ok")
        ]
        if len({row.n_bytes for row in chosen}) < 2:
            continue
        times_s = [(row.median_ms or 0.0) / 1e3 for row in chosen]
        try:
            cost = fit_linear_cost([row.n_bytes for row in chosen], times_s)
        except ValueError:  # noise: on a busy machine small buffers can take longer than large ones
            continue
        errors = [abs(cost.time_s(row.n_bytes) - t) / t for row, t in zip(chosen, times_s, strict=True)]
        fits.append(
            AllReduceFit(
                backend,
                world_size,
                max_ctas,
                call_cost_us=cost.call_cost_s * 1e6,
                bandwidth_gb_per_s=cost.bandwidth_bytes_per_s / 1e9,
                worst_relative_error=max(errors),
            )
        )
    return fits


def all_reduce_label(cell: AllReduceCell) -> str:
    """For example "2 ranks, 100 MB"."""
    return f"{cell.world_size} ranks, {cell.size_mb:g} MB"


ROW_COLUMNS = {
    "backend": "backend",
    "world_size": "ranks",
    "size_mb": "MB",
    "status": "status",
    "mean_ms": "mean ms",
    "std_ms": "± ms",
    "median_ms": "median ms",
    "algorithm_gb_per_s": "algorithm GB/s",
    "bus_gb_per_s": "bus GB/s",
}
FIT_COLUMNS = {
    "backend": "backend",
    "world_size": "ranks",
    "call_cost_us": "o (µs a call)",
    "bandwidth_gb_per_s": "w (GB/s)",
    "worst_relative_error": "worst relative error",
}


def plot_all_reduce(rows: Sequence[AllReduceRow], fits: Sequence[AllReduceFit], path: Path) -> None:
    """Time over size with the fitted lines, and bus bandwidth over size; one colour a number of ranks. Where nothing
    was measured there is no picture."""
    if all(row.status != "ok" for row in rows):
        return
    from cs336_systems.figures import COLOURS, new_figure, save_figure

    figure, axes = new_figure(columns=2)
    time_axis, bandwidth_axis = axes[0]
    measured = [row for row in rows if row.status == "ok"]
    for index, world_size in enumerate(dict.fromkeys(row.world_size for row in measured)):
        mine = sorted((row for row in measured if row.world_size == world_size), key=lambda row: row.size_mb)
        sizes, colour = [row.size_mb for row in mine], COLOURS[index % len(COLOURS)]
        label = f"{mine[0].backend}, {world_size} ranks"
        time_axis.errorbar(
            sizes, [r.median_ms for r in mine], [r.std_ms or 0.0 for r in mine], fmt="o", color=colour, label=label
        )
        bandwidth_axis.plot(sizes, [row.bus_gb_per_s for row in mine], "o-", color=colour, label=label)
        for fit in fits:
            if fit.world_size == world_size:
                line = [1e3 * fit.cost().time_s(size * BYTES_PER_MB) for size in sizes]
                time_axis.plot(sizes, line, "--", color=colour, label=f"fit o + s/w, {world_size} ranks")
    for axis, title in ((time_axis, "median ms, slowest rank"), (bandwidth_axis, "bus bandwidth, GB/s")):
        axis.set_xscale("log")
        axis.set_xlabel("buffer, MB (float32)")
        axis.set_ylabel(title)
    time_axis.set_yscale("log")
    time_axis.legend(frameon=False, fontsize=7, loc="lower right")  # times grow: the corner is empty
    save_figure(figure, path)
