"""Whether FSDP's gathers end before their layers could begin: read from one profiled step's kernels.

A layer waits for its weight, so its kernels never start before the gather ends. The gather is late if it ends after all
else that the layer waited for: the kernels before it, and its own launch.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.profiler import record_function

from cs336_systems.distributed.fsdp_schedule import WeightManager
from cs336_systems.distributed.fsdp_weight import ShardedWeight, WeightCollectives
from cs336_systems.intervals import intersect, total_length
from cs336_systems.profiling.overlap import read_trace
from cs336_systems.profiling.torch_trace import record_steps

_GATHER, _USE = "fsdp gather ", "fsdp use "


@dataclass(frozen=True)
class GatherTiming:
    """One use of a weight: its gather, its layer's first kernel's start and last kernel's end, and when the layer could
    have begun without waiting for the gather; in ms of the trace's clock."""

    weight: str
    gather_start_ms: float
    gather_end_ms: float
    could_begin_ms: float
    layer_start_ms: float
    layer_end_ms: float

    @property
    def late_ms(self) -> float:
        return max(0.0, self.gather_end_ms - self.could_begin_ms)


def profile_sharded_step(step: Callable[..., object], device: torch.device | str) -> dict[str, Any]:
    """Profile one step: when it computed and communicated ("intervals"), how its gathers ended (a row's fields), and
    each of these ("gathers", `GatherTiming`'s fields)."""
    with annotated_gathers():
        trace = record_steps(lambda: step(record_function), device)
    intervals = read_trace(trace)
    collective_ms = total_length(intervals.communication)
    gathers = read_gathers(trace)
    return {
        "intervals": asdict(intervals),
        "gathers": [asdict(gather) for gather in gathers],
        "collective_ms": collective_ms,
        "exposed_collective_ms": collective_ms
        - total_length(intersect(intervals.communication, intervals.computation)),
        "n_gathers": len(gathers) or None,
        "n_late": sum(gather.late_ms > 0 for gather in gathers) if gathers else None,
        "late_ms": sum(gather.late_ms for gather in gathers) if gathers else None,
    }


@contextmanager
def annotated_gathers() -> Generator[None]:
    """Within it, FSDP's gathers and uses of weights show in a profile under the weights' names."""
    collectives_cls: Any = WeightCollectives
    manager_cls: Any = WeightManager
    start_gather, acquire = collectives_cls.start_gather, manager_cls.acquire

    def annotated_start(collectives: WeightCollectives, weights: Sequence[ShardedWeight]) -> None:
        with ExitStack() as annotations:  # one in the other where weights are gathered together
            for weight in weights:
                annotations.enter_context(record_function(_GATHER + weight.name))
            start_gather(collectives, weights)

    def annotated_acquire(manager: WeightManager, weight: ShardedWeight) -> None:
        acquire(manager, weight)
        with record_function(_USE + weight.name):  # what is launched from here on may need the weight
            pass

    collectives_cls.start_gather, manager_cls.acquire = annotated_start, annotated_acquire
    try:
        yield
    finally:
        collectives_cls.start_gather, manager_cls.acquire = start_gather, acquire


def read_gathers(trace: dict[str, Any]) -> list[GatherTiming]:
    """The timings of a Chrome trace recorded within `annotated_gathers`, in order of use; empty without kernels.

    A use that found its weight still there has no gather of its own and is not listed. Weights that were gathered
    together have one kernel, and so the same start and end.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    kernels = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and "correlation" in event.get("args", {})
    }
    launches = sorted(
        (event["ts"], event["args"]["correlation"])
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and event.get("args", {}).get("correlation") in kernels
    )
    all_launch_times = [ts for ts, _ in launches]
    computing = [(ts, kernels[c]) for ts, c in launches if not _is_collective(kernels[c])]
    launch_times = [ts for ts, _ in computing]
    annotations = sorted(
        (event for event in events if event.get("cat") == "user_annotation"), key=lambda event: event["ts"]
    )
    uses = [event["ts"] for event in annotations if event["name"].startswith(_USE)]
    gathered: dict[str, tuple[float, float]] = {}  # by weight, its last gather that no use has had yet
    timings = []
    for event in annotations:
        if event["name"].startswith(_GATHER):
            first = bisect_left(all_launch_times, event["ts"])
            end = bisect_right(all_launch_times, event["ts"] + event["dur"])
            inside = [kernels[c] for _, c in launches[first:end]]
            spans = [(kernel["ts"], kernel["ts"] + kernel["dur"]) for kernel in inside if _is_collective(kernel)]
            if spans:
                gathered[event["name"].removeprefix(_GATHER)] = min(s for s, _ in spans), max(e for _, e in spans)
        elif event["name"].startswith(_USE):
            weight = event["name"].removeprefix(_USE)
            first = bisect_left(launch_times, event["ts"])
            if weight not in gathered or first == len(computing):
                continue
            before = computing[first - 1][1] if first else None
            could_begin = max(launch_times[first], before["ts"] + before["dur"] if before is not None else 0.0)
            # The layer's kernels are those launched before the next use of a weight; at least the first of them.
            next_use = bisect_right(uses, event["ts"])
            end = bisect_left(launch_times, uses[next_use]) if next_use < len(uses) else len(computing)
            last = computing[max(first, end - 1)][1]
            ends = (*gathered.pop(weight), could_begin, computing[first][1]["ts"], last["ts"] + last["dur"])
            timings.append(GatherTiming(weight, *(moment / 1e3 for moment in ends)))
    return timings


def _is_collective(kernel: dict[str, Any]) -> bool:
    return "nccl" in kernel["name"].lower()
