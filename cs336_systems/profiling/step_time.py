"""Where the time of a step goes, by what the GPU did: each moment of it counts once.

The parts add up to the step: computing (matrix products, attention), moving bytes, unknown, communicating with nothing
else running, and idle, which is either waiting for the host to launch the next kernel, or not.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from cs336_systems.accounting.flops import matmul_flops_by_part, peak_tflops
from cs336_systems.configs import BenchmarkCell
from cs336_systems.intervals import intersect, merge, total_length
from cs336_systems.profiling.kernel_classes import COMPUTES, MOVES_BYTES, kernel_class
from cs336_systems.profiling.kernel_tables import of_classes, total_ms
from cs336_systems.profiling.trace import PHASES, Kernel, Trace

Span = tuple[float, float]
PARTS = ("computing", "moving", "unknown", "communicating", "waiting", "idle")


@dataclass(frozen=True)
class StepTime:
    """One step's time in ms, mean over steps and GPUs, and its parts; they add up to `step_ms`.

    Attributes:
        step_ms: from the first step's start to the last one's end, divided by their number; less `profiler_ms`.
        computing_ms: while matrix products or attention ran.
        moving_ms: while only kernels of `MOVES_BYTES` ran, or they beside unknown ones.
        unknown_ms: while only kernels ran whose names tell nothing, or whole CUDA graphs.
        communicating_ms: while only collectives ran: exposed communication.
        waiting_ms: while nothing ran, and the next kernel had not been launched when the one before it ended.
        idle_ms: while nothing ran for other reasons: launched kernels that had not begun yet.
        profiler_ms: what the profiler itself added to each step, taken out of `waiting_ms`; None if it is not known.
        waiting_by_phase: `waiting_ms` by the phase whose kernel was waited for.
        kernels, kernels_by_phase: launches a step.
        mean_kernel_us: of a kernel's duration.
        matmul_tflops: the model's matrix products over the time of their kernels; None if what ran is not known, or
            if attention's own kernels do part of them.
        matmul_peak_share: that beside the card's dense peak in the cell's precision.
    """

    step_ms: float
    computing_ms: float
    moving_ms: float
    unknown_ms: float
    communicating_ms: float
    waiting_ms: float
    idle_ms: float
    profiler_ms: float | None
    waiting_by_phase: dict[str, float]
    kernels: float
    kernels_by_phase: dict[str, float]
    mean_kernel_us: float
    matmul_tflops: float | None
    matmul_peak_share: float | None

    def share(self, part: str) -> float:
        """A part's share of the step, for example `share("waiting")`."""
        return getattr(self, f"{part}_ms") / self.step_ms


def step_time(trace: Trace, unprofiled_ms: float | None = None) -> StepTime:
    """The parts of a step of a GPU's trace; of the whole trace, where no step is marked.

    A profiler slows each launch, and kernels hardly, so that a step that waits for launches waits longer. With
    `unprofiled_ms`, the step's time without a profiler, what it has more is taken out of the waiting.

    Raises:
        ValueError: no kernel was launched in a step, or the trace is a CPU's.
    """
    kernels = trace.within(None)
    if trace.unit != "kernel" or not kernels:
        raise ValueError(f"{trace.source}: no kernel was launched in a step")
    by_gpu: dict[tuple[int, int], list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        by_gpu[kernel.process, kernel.device].append(kernel)
    parts: dict[str, float] = defaultdict(float)
    waiting_by_phase: dict[str, float] = defaultdict(float)
    for (process, _), own in by_gpu.items():
        steps = [step for step in trace.steps if step.process == process]
        first = min((step.start_ns for step in steps), default=own[0].start_ns)
        last = max([step.end_ns for step in steps] + [kernel.end_ns for kernel in own])
        _add_parts(own, (first, last), parts, waiting_by_phase)
    # Every process marks the same steps, each its own.
    per_step = 1e6 * sum(len({s.start_ns for s in trace.steps if s.process == process}) or 1 for process, _ in by_gpu)
    n_steps = per_step / 1e6
    tflops = matmul_tflops(trace)
    precision = (trace.cell or {}).get("precision", "fp32")
    peak = peak_tflops(trace.gpu, precision) if trace.gpu else None
    added = None
    if unprofiled_ms is not None:
        added = min(max(parts["step"] - unprofiled_ms * per_step, 0.0), parts["waiting"])
    left = 1 - (added or 0.0) / parts["waiting"] if parts["waiting"] else 1.0
    parts["step"] -= added or 0.0
    parts["waiting"] *= left
    return StepTime(
        **{f"{name}_ms": parts[name] / per_step for name in ("step", *PARTS)},
        profiler_ms=None if added is None else added / per_step,
        waiting_by_phase={phase: ns * left / per_step for phase, ns in waiting_by_phase.items()},
        kernels=len(kernels) / n_steps,
        kernels_by_phase={p: sum(kernel.is_in(p) for kernel in kernels) / n_steps for p in PHASES},
        mean_kernel_us=total_ms(kernels) / len(kernels) * 1e3,
        matmul_tflops=tflops,
        matmul_peak_share=tflops / peak if tflops and peak else None,
    )


def _add_parts(
    kernels: Sequence[Kernel], window: Span, parts: dict[str, float], waiting_by_phase: dict[str, float]
) -> None:
    def spans(classes: Sequence[str], inside: bool) -> list[Span]:
        return [(k.start_ns, k.end_ns) for k in kernels if (kernel_class(k.name) in classes) == inside]

    computing = spans(COMPUTES, True)
    known = spans((*COMPUTES, *MOVES_BYTES), True)
    working = spans(("collective",), False)
    everything = [(kernel.start_ns, kernel.end_ns) for kernel in kernels]
    busy = total_length(everything)
    parts["step"] += window[1] - window[0]
    parts["computing"] += total_length(computing)
    parts["moving"] += total_length(known) - total_length(computing)
    parts["unknown"] += total_length(working) - total_length(known)
    parts["communicating"] += busy - total_length(working)
    starts = [kernel.start_ns for kernel in kernels]
    for start, end in _gaps(everything, window):
        index = bisect_left(starts, end)
        following = kernels[index] if index < len(kernels) else None
        if following is None or following.launch_ns is None or following.launch_ns >= start:
            parts["waiting"] += end - start
            phase = next((opened.name for opened in following.ranges if opened.name in PHASES), "") if following else ""
            waiting_by_phase[phase or "between phases"] += end - start
        else:
            parts["idle"] += end - start


def _gaps(busy: Sequence[Span], window: Span) -> list[Span]:
    """The times of the window that no interval covers."""
    inside = intersect(busy, [window])
    edges = [window[0], *(edge for span in merge(inside) for edge in span), window[1]]
    return [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end]


def cell_of(trace: Trace) -> BenchmarkCell | None:
    """What ran, where the report says so."""
    return BenchmarkCell(**trace.cell) if trace.cell else None


def matmul_tflops(trace: Trace, phase: str | None = None) -> float | None:
    """TFLOP/s of the "matmul" kernels of a step, or of its forward pass: the model's operations over their time.

    None where the trace does not say what ran, where blocks are computed twice (checkpoints), or none ran.
    """
    cell = cell_of(trace)
    time_ms = total_ms(of_classes(trace.within(phase), ("matmul",))) / trace.n_steps
    if cell is None or cell.checkpoint_every or not time_ms:
        return None
    flops = matmul_flops_by_part(cell.model_config(), cell.batch_size, cell.ctx)
    attention = ("attention_scores", "attention_values")
    counted = sum(n for part, n in flops.items() if cell.attention == "naive" or part not in attention)
    passes = 1 if phase == "forward" or cell.mode == "forward" else 3
    return counted * passes / (time_ms / 1e3) / 1e12
