"""A picture of a step: the host's ranges, and each stream's kernels over time, coloured by what they do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cs336_systems.figures import COLOURS, PHASE_COLOURS, new_figure, save_figure
from cs336_systems.intervals import merge
from cs336_systems.profiling.kernel_classes import kernel_class
from cs336_systems.profiling.trace import ATTENTION, BLOCK, FINAL_MATMUL, SCORES, SOFTMAX, Kernel, Range, Trace

_OTHER = "#999999"
CLASS_COLOURS = {
    "matmul": COLOURS[0],
    "attention": COLOURS[5],
    "elementwise": COLOURS[1],
    "reduction": COLOURS[4],
    "softmax": COLOURS[3],
    "copy": COLOURS[2],
    "collective": COLOURS[6],
}
_PART_COLOURS = {SCORES: COLOURS[0], SOFTMAX: COLOURS[3], FINAL_MATMUL: COLOURS[5], ATTENTION: COLOURS[0]}
_PALE = 0.45  # ranges, so that their colours are not taken for classes
_GRAIN = 1 / 4000  # of the width: gaps narrower than this cannot be seen, and are closed

Span = tuple[int, int]


def plot_timeline(trace: Trace, path: Path, title: str = "") -> None:
    """Draws the first step, and below it one block's forward pass, if one is marked; the ending names the format.

    Rows from the top: the host's ranges, the times in which their kernels ran, and each stream (a CPU's thread).

    Raises:
        ValueError: the trace has no kernels.
    """
    if not trace.kernels:
        raise ValueError(f"{trace.source}: has no kernels to draw")
    views = _views(trace)
    n_streams = len(_streams(trace.kernels))
    figure, axes = new_figure(columns=1, rows=len(views), width=11, height=1.2 + 0.45 * (2 + n_streams))
    for axis, (heading, window, named) in zip(axes[:, 0], views, strict=True):
        _draw(axis, trace, window, named)
        axis.set_title(f"{title}: {heading}" if title else heading, fontsize=9)
    drawn = {kernel_class(kernel.name) for kernel in trace.kernels}
    labels = [*(name for name in CLASS_COLOURS if name in drawn), *(["other"] if drawn - CLASS_COLOURS.keys() else [])]
    handles = [_patch(CLASS_COLOURS.get(name, _OTHER)) for name in labels]
    axes[0, 0].legend(handles, labels, loc="upper left", bbox_to_anchor=(1, 1), fontsize=8, frameon=False)
    save_figure(figure, path)


def _views(trace: Trace) -> list[tuple[str, Span, dict[str, str]]]:
    """What to draw: a heading, the time, and the ranges to name with their colours."""
    step = trace.steps[0] if trace.steps else None
    kernels = [kernel for kernel in trace.kernels if step is None or step in kernel.ranges]
    if not kernels:
        step, kernels = None, trace.kernels
    unit = f"{trace.unit}s"
    views = [
        (
            f"one step, {len(kernels)} {unit}" if step else f"{len(kernels)} {unit}",
            _extent(kernels, step),
            PHASE_COLOURS,
        )
    ]
    in_blocks = [
        opened
        for opened in trace.ranges
        if opened.kind == BLOCK and (step is None or step.start_ns <= opened.start_ns < step.end_ns)
    ]
    if in_blocks:
        block = in_blocks[len(in_blocks) // 2]
        inside = [kernel for kernel in kernels if block in kernel.ranges]
        if inside:
            views.append((f"forward of {block.name}, {len(inside)} {unit}", _extent(inside, None), _PART_COLOURS))
    return views


def _extent(kernels: Sequence[Kernel], step: Range | None) -> Span:
    start = min(kernel.start_ns for kernel in kernels)
    end = max(kernel.end_ns for kernel in kernels)
    return (min(start, step.start_ns), max(end, step.end_ns)) if step else (start, end)


def _draw(axis: Any, trace: Trace, window: Span, named: dict[str, str]) -> None:
    shown = [kernel for kernel in trace.kernels if kernel.start_ns < window[1] and kernel.end_ns > window[0]]
    streams = _streams(trace.kernels)
    labels = ["host", "on the device", *(f"{'GPU' if trace.unit == 'kernel' else 'CPU'} {d}, {s}" for d, s in streams)]
    for name, colour in named.items():
        on_host = [(r.start_ns, r.end_ns) for r in trace.ranges if r.name == name]
        _bars(axis, 0, on_host, window, colour, _PALE)
        launched = _runs([kernel for kernel in shown if kernel.is_in(name)], shown)
        _bars(axis, 1, launched, window, colour, _PALE)
        for start, end in launched:
            if end - start > 0.04 * (window[1] - window[0]):
                middle = (max(start, window[0]) + min(end, window[1])) / 2
                axis.text((middle - window[0]) / 1e6, 1, name, ha="center", va="center", fontsize=7)
    for row, stream in enumerate(streams, start=2):
        own = [kernel for kernel in shown if (kernel.device, kernel.stream) == stream]
        for label in {kernel_class(kernel.name) for kernel in own}:
            spans = [(k.start_ns, k.end_ns) for k in own if kernel_class(k.name) == label]
            _bars(axis, row, spans, window, CLASS_COLOURS.get(label, _OTHER))
    axis.set_yticks(range(len(labels)), labels, fontsize=7)
    axis.set_ylim(len(labels) - 0.5, -0.5)
    axis.set_xlim(0, (window[1] - window[0]) / 1e6)
    axis.set_xlabel("ms", fontsize=8)
    axis.grid(visible=False)


def _runs(kernels: Sequence[Kernel], shown: Sequence[Kernel]) -> list[Span]:
    """From first to last of the kernels that follow each other with no other between."""
    members = {id(kernel) for kernel in kernels}
    runs: list[Span] = []
    broken = True
    for kernel in shown:
        if id(kernel) in members:
            if broken or not runs:
                runs.append((kernel.start_ns, kernel.end_ns))
            else:
                runs[-1] = (runs[-1][0], max(runs[-1][1], kernel.end_ns))
            broken = False
        else:
            broken = True
    return runs


def _bars(axis: Any, row: int, spans: Sequence[Span], window: Span, colour: str, alpha: float = 1.0) -> None:
    width = window[1] - window[0]
    inside = [
        (max(start, window[0]), min(end, window[1])) for start, end in spans if start < window[1] and end > window[0]
    ]
    drawn = merge(inside, gap=width * _GRAIN)
    bars = [((start - window[0]) / 1e6, (end - start) / 1e6) for start, end in drawn]
    axis.broken_barh(bars, (row - 0.38, 0.76), facecolors=colour, alpha=alpha, linewidth=0)


def _streams(kernels: Sequence[Kernel]) -> list[tuple[int, int]]:
    return sorted({(kernel.device, kernel.stream) for kernel in kernels})


def _patch(colour: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=colour)
