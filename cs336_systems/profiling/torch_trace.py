"""The same records from torch.profiler, for those who have no nsys: a step's trace, and a step recorded.

On a CPU there are no kernels; operators take their place. One that as a rule spends most of its time in operators that
it calls gives way to them, so that no time counts twice.
"""

from __future__ import annotations

import errno
import json
import math
import os
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from cs336_systems.files import NotWritten
from cs336_systems.profiling.ranges import marked_model
from cs336_systems.profiling.trace import STEP, Kernel, OpenRanges, Range, Trace
from cs336_systems.workload import Workload

_KINETO_SILENT = "5"  # above its errors
_GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCH_CATEGORIES = ("cuda_runtime", "cuda_driver")
_TORCHS_OWN = ("ProfilerStep#", "Optimizer.")  # ranges that torch opens by itself


def record_steps(step: Callable[[], object], device: torch.device | str, steps: int = 1) -> dict[str, Any]:
    """Runs `step()` once unrecorded, then `steps` times recorded, and returns the Chrome trace.

    The profiler's own start falls into the first. Each recorded step is in a range "step", at whose end the device is
    waited for. Raises NotWritten where the profiler's file did not fit on the disk.
    """
    device = torch.device(device)
    if not torch.cuda.is_available():
        # Or the profiler's library writes to standard error that it counted GPUs and there was no driver.
        os.environ.setdefault("KINETO_LOG_LEVEL", _KINETO_SILENT)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    recorded = schedule(wait=0, warmup=1, active=steps, repeat=1)
    with profile(activities=activities, schedule=recorded, acc_events=True) as profiler:
        for _ in range(1 + steps):
            with record_function(STEP):
                step()
                _wait(device)
            profiler.step()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        try:
            return json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            reason = "the profiler left no whole trace there, as where the disk is full"
            raise NotWritten(errno.ENOSPC, reason, str(file)) from error


def profile_workload(workload: Workload) -> dict[str, Any]:
    """The trace of the cell's steps, behind its warm-up, with the ranges that `benchmark.py --nvtx` marks; like it,
    each phase begins and ends with waiting for the device."""

    @contextmanager
    def phase(name: str) -> Generator[None]:
        with record_function(name):
            _wait(workload.device)
            yield
            _wait(workload.device)

    eager = workload.cell.compile == "off"
    with marked_model(workload.model, record_function) if eager else nullcontext():
        for _ in range(workload.cell.warmup):
            workload.step(lambda name: nullcontext())
        trace = record_steps(lambda: workload.step(phase), workload.device, workload.cell.steps)
    return trace | {"cell": asdict(workload.cell)}


def read_torch_trace(trace: dict[str, Any], source: str = "torch.profiler") -> Trace:
    """The kernels and ranges of a Chrome trace that torch.profiler exported (times in µs), a CPU's operators if it has
    no kernels.

    Raises:
        ValueError: it is no such trace.
    """
    _check_trace(trace)
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    ranges = sorted(
        (
            Range(event["name"], *_span(event), process=event.get("pid", 0), thread=event.get("tid", 0))
            for event in events
            if event.get("cat") == "user_annotation" and not event["name"].startswith(_TORCHS_OWN)
        ),
        key=lambda opened: (opened.start_ns, -opened.end_ns),
    )
    on_gpu = [event for event in events if event.get("cat") in _GPU_CATEGORIES]
    opened = OpenRanges(ranges)
    kernels = _kernels(on_gpu, events, opened) if on_gpu else _operators(events, opened)
    devices = trace.get("deviceProperties") or [{}]
    without_launch = sum(kernel.launch_ns is None for kernel in kernels)
    return Trace(
        kernels=sorted(kernels, key=lambda kernel: (kernel.start_ns, kernel.end_ns)),
        ranges=ranges,
        source=source,
        unit="kernel" if on_gpu else "operator",
        gpu=devices[0].get("name") if on_gpu else None,
        cell=trace.get("cell"),
        notes=[f"{without_launch} of {len(kernels)} kernels have no launch in the trace and are in no range."]
        if without_launch
        else [],
    )


def _check_trace(trace: Any) -> None:
    """That what is read of the file is of the types that torch.profiler writes."""
    written = "trace: must be what torch.profiler's export_chrome_trace wrote; it"
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise ValueError(f"{written} has no traceEvents")
    for index, event in enumerate(trace["traceEvents"]):
        is_whole = isinstance(event, dict) and (
            event.get("ph") != "X"
            or (
                isinstance(event.get("name"), str)
                and all(_is_time(event.get(name)) for name in ("ts", "dur"))
                and all(isinstance(event.get(name, 0), (int, str)) for name in ("pid", "tid"))
                and isinstance(event.get("args", {}), dict)
            )
        )
        if not is_whole:
            raise ValueError(f"{written} has {event!r:.80} as traceEvents[{index}]")
    devices = trace.get("deviceProperties") or []
    if not isinstance(devices, list) or not all(isinstance(device, dict) for device in devices):
        raise ValueError(f"{written} has {devices!r:.80} as deviceProperties")
    if not isinstance(trace.get("cell"), (dict, type(None))):
        raise ValueError(f"{written} has {trace['cell']!r:.80} as cell")


def _is_time(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _kernels(on_gpu: list[dict[str, Any]], events: list[dict[str, Any]], opened: OpenRanges) -> list[Kernel]:
    launches = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in _LAUNCH_CATEGORIES and "correlation" in event.get("args", {})
    }
    kernels = []
    for event in on_gpu:
        arguments = event.get("args", {})
        launch = launches.get(arguments.get("correlation"))
        process, thread = (launch.get("pid", 0), launch.get("tid", 0)) if launch else (0, 0)
        launch_ns = round(launch["ts"] * 1e3) if launch else None
        kernels.append(
            Kernel(
                event["name"],
                *_span(event),
                stream=arguments.get("stream", 0),
                device=arguments.get("device", 0),
                process=process,
                launch_ns=launch_ns,
                ranges=() if launch_ns is None else opened.at(process, thread, launch_ns),
            )
        )
    return kernels


def _operators(events: list[dict[str, Any]], opened: OpenRanges) -> list[Kernel]:
    operators = [event for event in events if event.get("cat") == "cpu_op"]
    operators.sort(key=lambda event: (event.get("pid", 0), event.get("tid", 0), event["ts"], -event["dur"]))
    parents: list[int | None] = []
    children: list[list[int]] = [[] for _ in operators]
    stack: list[int] = []
    for index, event in enumerate(operators):
        while stack and not _contains(operators[stack[-1]], event):
            stack.pop()
        parents.append(stack[-1] if stack else None)
        if stack:
            children[stack[-1]].append(index)
        stack.append(index)
    gives_way = _giving_way(operators, children)
    counted, kernels = [False] * len(operators), []  # counted: it or one that called it is in the table
    for index, event in enumerate(operators):
        parent = parents[index]
        within_counted = parent is not None and counted[parent]
        counted[index] = within_counted or not gives_way[index]
        if counted[index] and not within_counted:
            start, end = _span(event)
            process, thread = event.get("pid", 0), event.get("tid", 0)
            ranges = opened.at(process, thread, start)
            kernels.append(Kernel(event["name"], start, end, thread, 0, process, start, ranges))
    return kernels


def _giving_way(operators: list[dict[str, Any]], children: list[list[int]]) -> list[bool]:
    """Whether each operator gives way to its children. Those of one name that call the same operators are judged
    together, by their median: one of them that was interrupted in its own code must not count otherwise than the rest.
    """
    works = [(event["name"], *(operators[child]["name"] for child in children[i])) for i, event in enumerate(operators)]
    shares: dict[tuple[str, ...], list[float]] = {}
    for index, event in enumerate(operators):
        if children[index]:
            in_children = sum(operators[child]["dur"] for child in children[index])
            shares.setdefault(works[index], []).append(in_children / max(event["dur"], in_children, 1e-3))
    return [work in shares and median(shares[work]) > 0.5 for work in works]


def _contains(outer: dict[str, Any], inner: dict[str, Any]) -> bool:
    same = all(outer.get(name, 0) == inner.get(name, 0) for name in ("pid", "tid"))
    return same and inner["ts"] < outer["ts"] + outer["dur"]


def _span(event: dict[str, Any]) -> tuple[int, int]:
    return round(event["ts"] * 1e3), round((event["ts"] + event["dur"]) * 1e3)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
