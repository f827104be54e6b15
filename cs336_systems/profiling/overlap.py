"""When a step's kernels ran, and which of them communicated: one profiled step, read from torch.profiler's trace.

On a GPU the intervals are kernels'. On a CPU, where nothing is queued, they are the step's phases and gloo's
collectives, which run in threads of their own.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from cs336_systems.intervals import Interval, StepIntervals, merge

_GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCH_CATEGORIES = ("cuda_runtime", "cuda_driver")
_COMPUTING_PHASES = ("forward", "loss", "backward", "optimizer")
_GAP_MS = 0.002  # kernels that follow each other more closely are one interval


def profile_step(step: Callable[[Callable[[str], Any]], object], device: torch.device | str) -> StepIntervals:
    """Run `step` twice under the profiler and return the second's intervals.

    Args:
        step: called as `step(phase)`; it opens `phase("backward")` around its backward pass, and so on.
        device: where it runs; waited for before and after.
    """
    device = torch.device(device)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    # The profiler's own start falls into a first step that is not recorded.
    once = schedule(wait=0, warmup=1, active=1, repeat=1)
    with profile(activities=activities, schedule=once, acc_events=True) as profiler:
        for _ in range(2):
            step(record_function)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            profiler.step()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        return read_trace(json.loads(file.read_text(encoding="utf-8")))


def read_trace(trace: dict[str, Any]) -> StepIntervals:
    """The intervals of a Chrome trace (times in µs) in milliseconds after its first phase's start.

    A kernel belongs to backward if it was launched during the phase of that name, in whichever thread (autograd
    launches from its own); the kernel itself runs later.

    Raises:
        ValueError: the trace has no phase "backward".
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    phases = {event["name"]: _span(event) for event in events if event.get("cat") == "user_annotation"}
    if "backward" not in phases:
        raise ValueError(f"trace: must have a phase 'backward'; it has {sorted(phases)}")
    start = min(span[0] for name, span in phases.items() if name in _COMPUTING_PHASES)
    kernels = [event for event in events if event.get("cat") in _GPU_CATEGORIES]
    if kernels:
        communication = [_span(event) for event in kernels if _communicates(event)]
        computing = [event for event in kernels if not _communicates(event)]
        launched_at = {
            event["args"]["correlation"]: event["ts"]
            for event in events
            if event.get("cat") in _LAUNCH_CATEGORIES and "correlation" in event.get("args", {})
        }
        first, last = phases["backward"]
        backward = [
            _span(event)
            for event in computing
            if first <= launched_at.get(event.get("args", {}).get("correlation"), -1.0) <= last
        ]
        computation = [_span(event) for event in computing]
    else:
        annotations = [event for event in events if event.get("cat") == "user_annotation"]
        communication = [_span(event) for event in annotations if event["name"].startswith("gloo:")]
        computation = [span for name, span in phases.items() if name in _COMPUTING_PHASES]
        backward = [phases["backward"]]
    return StepIntervals(
        computation=_milliseconds(computation, start),
        backward=_milliseconds(backward, start),
        communication=_milliseconds(communication, start),
    )


def _communicates(kernel: dict[str, Any]) -> bool:
    return "nccl" in kernel["name"].lower()


def _span(event: dict[str, Any]) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def _milliseconds(spans: list[Interval], start: float) -> list[Interval]:
    return merge((((first - start) / 1e3, (last - start) / 1e3) for first, last in spans), gap=_GAP_MS)
