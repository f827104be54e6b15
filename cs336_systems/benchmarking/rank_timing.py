"""Times a step of several ranks by the slowest of them, whole and by its phases. All functions are collective calls,
with the same result on every rank."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from cs336_systems.records import Statistics

PHASED_STEPS = 3


def of_all_ranks(value: Any) -> list[Any]:
    """Each rank's value, in order."""
    import torch.distributed as dist

    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def slowest(times_ms: Sequence[float]) -> Statistics:
    """Over repeats, of which the slowest rank's time counts."""
    return Statistics.of([max(repeat) for repeat in zip(*of_all_ranks(times_ms), strict=True)])


def time_whole_steps(context: Any, cell: Any, step: Callable[[Callable[[str], Any]], object]) -> dict[str, Any]:
    """Warms up and times `step(phase)` as the cell says: a row's fields of time and memory."""
    import torch

    from cs336_systems.benchmarking.timing import time_step

    on_gpu = context.device.type == "cuda"

    def on_warm() -> None:
        gc.collect()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(context.device)

    def whole(_: Any) -> None:
        step(nullcontext)  # the device runs from one phase into the next, as in training

    times_ms = time_step(whole, cell.warmup, cell.steps, context.device, on_warm)["step"]
    peak = torch.cuda.max_memory_allocated(context.device) / 2**30 if on_gpu else None
    statistics = slowest(times_ms)
    return {
        "step_mean_ms": statistics.mean,
        "step_std_ms": statistics.std,
        "step_median_ms": statistics.median,
        "step_min_ms": statistics.min,
        "tokens_per_s": cell.batch_size * cell.ctx * cell.world_size / statistics.median * 1e3,
        "peak_memory_gib": max(of_all_ranks(peak)) if on_gpu else None,
    }


def together(phase: Callable[[str], Any], device: Any) -> Callable[[str], Any]:
    """`phase`, which opens a timed phase, on all ranks at once: the wait for a rank that was slower in the phase before
    would count as this one's communication otherwise. A collective call at the beginning of each phase."""

    def open_together(name: str) -> Any:
        import torch.distributed as dist

        from cs336_systems.benchmarking.timing import synchronize

        synchronize(device)
        dist.barrier()
        return phase(name)

    return open_together


def time_phases(context: Any, step: Callable[[Callable[[str], Any]], object]) -> dict[str, float]:
    """The median milliseconds of each phase, in steps whose ranks wait for each other at each phase's edges."""
    from cs336_systems.benchmarking.timing import time_step

    phased = time_step(lambda phase: step(together(phase, context.device)), 0, PHASED_STEPS, context.device)
    return {name: slowest(times_ms).median for name, times_ms in phased.items()}
