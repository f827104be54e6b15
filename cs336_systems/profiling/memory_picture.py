"""The active-memory timeline as a picture: what is held after each allocation and free, stacked by what holds it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cs336_systems.figures import new_figure, save_figure
from cs336_systems.profiling.memory_timeline import CATEGORIES, MemoryTimeline

_COLOURS = dict(
    zip(CATEGORIES, ("#0072B2", "#009E73", "#E69F00", "#CC79A7", "#D55E00", "#56B4E9", "#999999"), strict=True)
)
_MOST_POINTS = 3000  # more than the picture has columns
_GIB, _MIB = 2**30, 2**20


def plot_timeline(timeline: MemoryTimeline, path: Path, title: str) -> None:
    """Stacked bytes over the events, phases marked by lines and names, and the peak by a dot."""
    points = _points_to_draw(timeline.total)
    unit, scale = _unit(timeline.total.max())
    figure, axes = new_figure(width=9.5, height=4.2)
    axis = axes[0][0]
    drawn = [category for category in CATEGORIES if timeline.series[category].any()]
    axis.stackplot(
        points,
        [timeline.series[category][points] / scale for category in drawn],
        labels=drawn,
        colors=[_COLOURS[category] for category in drawn],
        step="post",
        linewidth=0,
    )
    top = timeline.total.max() / scale
    for phase in timeline.phases:
        axis.axvline(phase.first, color="black", linewidth=0.6, linestyle=":")
        if phase.end - phase.first > timeline.n_events / 28:
            axis.text((phase.first + phase.end) / 2, top * 1.03, phase.name, ha="center", fontsize=8)
    peak = timeline.peak_event()
    axis.plot(peak, top, "k.", markersize=5)
    phase = timeline.phase_at(peak)
    said = f"peak {top:.2f} {unit}" + (f" in {phase}" if phase else "")
    if timeline.oom_bytes is not None:
        said += f"; then {timeline.oom_bytes / scale:.2f} {unit} were asked for and not there"
    axis.set_title(f"{title}: {said}", fontsize=9, loc="left", pad=14)
    axis.set_xlabel("events of the allocator's history: allocations and frees, in order")
    axis.set_ylabel(f"{unit} in use")
    axis.set_xlim(0, timeline.n_events)
    axis.set_ylim(0, top * 1.01)
    axis.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), reverse=True)
    save_figure(figure, path)


def plot_peaks(rows: Sequence[Any], path: Path) -> None:
    """What holds the memory at each `MemoryRow`'s peak, a bar a row, in a panel for each mode and precision."""
    panels = list(dict.fromkeys((row.size, row.mode, row.precision) for row in rows))
    figure, axes = new_figure(columns=len(panels), width=2.9, height=3.6)
    most = max((row.peak_gib or 0.0 for row in rows), default=0.0)
    for axis, panel in zip(axes[0], panels, strict=True):
        chosen = [row for row in rows if (row.size, row.mode, row.precision) == panel]
        for x, row in enumerate(chosen):
            bottom = 0.0
            for category in CATEGORIES:
                size = getattr(row, f"{category.replace(' ', '_')}_gib") or 0.0
                axis.bar(x, size, 0.8, bottom=bottom, color=_COLOURS[category], label=category if size else None)
                bottom += size
            if row.status != "ok":
                axis.text(x, bottom, f" {row.status}", rotation=90, ha="center", va="bottom", fontsize=7)
        axis.set_xticks(range(len(chosen)), [_bar_label(row) for row in chosen], fontsize=7)
        axis.set_title(" ".join(panel), fontsize=9)
        axis.set_xlabel("context length")
        axis.set_ylim(0, most * 1.12)
    axes[0][0].set_ylabel("GiB in use at the peak")
    entries: dict[str, Any] = {}
    for axis in axes.flat:
        handles, labels = axis.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    ordered = [category for category in reversed(CATEGORIES) if category in entries]
    axes[0][-1].legend(
        [entries[name] for name in ordered],
        ordered,
        frameon=False,
        fontsize=8,
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
    )
    save_figure(figure, path)


def _bar_label(row: Any) -> str:
    extras = [row.attention] if row.attention != "naive" else []
    extras += [f"every {row.checkpoint_every}"] if row.checkpoint_every else []
    return "\n".join([str(row.ctx), *extras])


def _points_to_draw(total: np.ndarray) -> np.ndarray:
    """Indices of the series, in order: all of them, or of each of many equal stretches the one with the most bytes."""
    if len(total) <= _MOST_POINTS:
        return np.arange(len(total))
    stretches = np.array_split(np.arange(len(total)), _MOST_POINTS)
    return np.array([stretch[total[stretch].argmax()] for stretch in stretches])


def _unit(most: float) -> tuple[str, int]:
    return ("GiB", _GIB) if most >= _GIB else ("MiB", _MIB)
