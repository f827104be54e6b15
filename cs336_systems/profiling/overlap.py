"""When a step computed and when it communicated, and how much of the one the other covers.

On a GPU the intervals are kernels'. On a CPU, where nothing is queued, they are the step's phases and gloo's
collectives, which run in threads of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import record_function

from cs336_systems.intervals import Interval, StepIntervals, merge
from cs336_systems.profiling.kernel_classes import kernel_class
from cs336_systems.profiling.torch_trace import read_torch_trace, record_steps
from cs336_systems.profiling.trace import PHASES, Trace

_GAP_MS = 0.002  # kernels that follow each other more closely are one interval


def profile_step(step: Callable[[Callable[[str], Any]], object], device: torch.device | str) -> StepIntervals:
    """Run `step` twice under the profiler and return the second's intervals.

    Args:
        step: called as `step(phase)`; it opens `phase("backward")` around its backward pass, and so on.
        device: where it runs; waited for before and after.
    """
    return read_trace(record_steps(lambda: step(record_function), device))


def read_trace(trace: dict[str, Any]) -> StepIntervals:
    """The intervals of a Chrome trace, as `step_intervals`."""
    return step_intervals(read_torch_trace(trace))


def step_intervals(trace: Trace) -> StepIntervals:
    """The intervals of a trace (nsys's or torch.profiler's) in milliseconds after its first phase's start.

    A kernel belongs to backward if it was launched during the phase of that name, in whichever thread (autograd
    launches from its own); the kernel itself runs later.

    Raises:
        ValueError: the trace has no phase "backward".
    """
    phases = {opened.name: (opened.start_ns, opened.end_ns) for opened in trace.ranges if opened.name in PHASES}
    if "backward" not in phases:
        named = sorted({opened.name for opened in trace.ranges})
        raise ValueError(f"trace: must have a phase 'backward'; it has {named}")
    start = min(first for first, _ in phases.values())
    if trace.unit == "kernel":
        communicating = [kernel for kernel in trace.kernels if kernel_class(kernel.name) == "collective"]
        computing = [kernel for kernel in trace.kernels if kernel_class(kernel.name) != "collective"]
        communication = [(kernel.start_ns, kernel.end_ns) for kernel in communicating]
        computation = [(kernel.start_ns, kernel.end_ns) for kernel in computing]
        backward = [(kernel.start_ns, kernel.end_ns) for kernel in computing if kernel.is_in("backward")]
    else:
        communication = [(one.start_ns, one.end_ns) for one in trace.ranges if kernel_class(one.name) == "collective"]
        computation = list(phases.values())
        backward = [phases["backward"]]
    return StepIntervals(
        computation=_milliseconds(computation, start),
        backward=_milliseconds(backward, start),
        communication=_milliseconds(communication, start),
    )


def _milliseconds(spans: list[tuple[int, int]], start: int) -> list[Interval]:
    merged = merge((((first - start) / 1e6, (last - start) / 1e6) for first, last in spans), gap=_GAP_MS)
    return [(round(first, 3), round(last, 3)) for first, last in merged]  # finer than a picture shows
