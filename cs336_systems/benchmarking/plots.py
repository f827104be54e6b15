"""Pictures of benchmark rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cs336_systems.figures import PHASE_COLOURS, new_figure, save_figure

if TYPE_CHECKING:
    from cs336_systems.benchmarking.model_benchmark import BenchmarkRow

_AXES = (
    "ctx",
    "warmup",
    "compile",
    "cuda_graphs",
    "attention",
    "kernels",
    "optimizer",
    "master_weights",
    "checkpoint_every",
    "precision",
    "mode",
    "batch_size",
    "steps",
    "seed",
    "device",
)


def plot_phases(rows: Sequence[BenchmarkRow], path: Path) -> None:
    """Stacked bars of the phases' mean times: a panel a size, groups along the first parameter that varies, bars within
    a group along the others. The whiskers are the step's standard deviation; a cell without a time shows its status."""
    varied = [name for name in _AXES if len({getattr(row, name) for row in rows}) > 1]
    group_by, within = (varied[0], varied[1:]) if varied else ("ctx", [])
    heading = _HEADINGS.get(group_by, group_by)
    sizes = list(dict.fromkeys(row.size for row in rows))
    columns = min(len(sizes), 3)
    figure, axes = new_figure(columns, -(-len(sizes) // columns), width=max(3.2, 9.6 / columns))
    for axis in axes.flat[len(sizes) :]:
        axis.set_visible(False)
    for axis, size in zip(axes.flat, sizes, strict=False):
        _draw_panel(axis, [row for row in rows if row.size == size], group_by, within)
        axis.set_title(size)
        axis.set_xlabel(heading if not within else f"{heading}; bars: {_join(within, ' / ')}")
        axis.set_ylabel("ms a step")
    entries: dict[str, Any] = {}
    for axis in axes.flat:
        handles, labels = axis.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    axes.flat[0].legend(entries.values(), entries.keys(), frameon=False, fontsize=8)
    save_figure(figure, path)


def _draw_panel(axis: Any, rows: Sequence[BenchmarkRow], group_by: str, within: list[str]) -> None:
    groups = list(dict.fromkeys(getattr(row, group_by) for row in rows))
    bars = list(dict.fromkeys(_bar_label(row, within) for row in rows))
    width = 0.8 / len(bars)
    for row in rows:
        bar = bars.index(_bar_label(row, within))
        x = groups.index(getattr(row, group_by)) + (bar - (len(bars) - 1) / 2) * width
        if row.status != "ok":
            axis.text(x, 0, f" {row.status}", rotation=90, ha="center", va="bottom", fontsize=7, color="#999999")
            continue
        bottom = 0.0
        for phase, colour in PHASE_COLOURS.items():
            time = getattr(row, f"{phase}_mean_ms")
            if time is not None:
                axis.bar(x, time, width * 0.92, bottom=bottom, color=colour, label=phase)
                bottom += time
        axis.errorbar(x, bottom, yerr=row.step_std_ms, color="black", elinewidth=0.8, capsize=2)
        if within:
            axis.text(
                x,
                bottom + (row.step_std_ms or 0.0),
                f" {_bar_label(row, within)}",
                rotation=90,
                ha="center",
                va="bottom",
                fontsize=6,
            )
    axis.set_xticks(range(len(groups)), [str(group) for group in groups])
    axis.margins(y=0.25 if within else 0.08)
    axis.set_ylim(bottom=0)  # a deviation larger than its mean would pull the axis below


def _bar_label(row: BenchmarkRow, within: list[str]) -> str:
    return _join([_LABELS.get((name, getattr(row, name)), str(getattr(row, name))) for name in within], " ")


_HEADINGS = {"ctx": "context length", "warmup": "warm-up steps", "checkpoint_every": "blocks in a checkpointed segment"}
_LABELS = {
    ("compile", "on"): "compiled",
    ("compile", "off"): "eager",
    ("compile", "blocks"): "compiled blocks",
    ("cuda_graphs", "on"): "graphs",
    ("cuda_graphs", "off"): "launches",
    ("master_weights", "on"): "master weights",
    ("master_weights", "off"): "float32 weights",
    ("kernels", "plain"): "plain",
    ("kernels", "loss"): "fused loss",
    ("kernels", "fused"): "fused kernels",
}


def _join(parts: Sequence[str], separator: str) -> str:
    return separator.join(part.replace("_", " ") for part in parts)
