"""Pictures of the attention benchmarks: a panel a shape, a line an implementation, over the length."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from cs336_systems.benchmarking.attention_cells import PeerName
from cs336_systems.figures import COLOURS, new_figure, save_figure

if TYPE_CHECKING:
    from cs336_systems.benchmarking.attention_benchmark import AttentionBenchmarkRow
    from cs336_systems.benchmarking.flash_benchmark import FlashRow


def colour_of(names: Sequence[str]) -> dict[str, str]:
    """An implementation has the same colour in every picture, whatever else is in it. Past the last colour those of
    the first are had again."""
    return dict(zip(names, itertools.cycle(COLOURS), strict=False))


COLOUR_OF = colour_of(get_args(PeerName))
# It launches flash-triton's kernels where its own are slower: there that one shows between its dashes, in its rings.
STYLE_OF = {"flash-hopper": {"linestyle": (0, (2, 2)), "markersize": 6.5, "markerfacecolor": "none", "zorder": 3}}
PHASES = ("forward", "backward", "both")


def plot_flash(rows: Sequence[FlashRow], directory: Path) -> list[Path]:
    """TFLOP/s over the length, a picture a precision (a row of panels a pass), and peak memory over the length (a row a
    precision). Returns the files; where nothing has a number, as memory without a GPU, there is none."""
    paths = []
    for precision in _values(rows, "precision"):
        chosen = [row for row in rows if row.precision == precision and row.tflops is not None]
        paths += _plot_grid(
            chosen, "phase", "tflops", f"TFLOP/s, {precision}", directory / f"flash_benchmark_tflops_{precision}.png"
        )
    weighed = [row for row in rows if row.phase == "both" and row.peak_memory_gib is not None]
    paths += _plot_grid(weighed, "precision", "peak_memory_gib", "peak GiB", directory / "flash_benchmark_memory.png")
    return paths


def _plot_grid(rows: Sequence[Any], down: str, field: str, label: str, path: Path) -> list[Path]:
    """Panels of `field` over the length: field `down` down, head_dim and whatever else makes a shape, and how it was
    timed, across. Values over more than a decade are drawn on a logarithmic scale, the same in all panels."""
    if not rows:
        return []
    values = [getattr(row, field) for row in rows]
    log = 0 < min(values) < max(values) / 10
    places = sorted(_values(rows, down), key=PHASES.index) if down == "phase" else _values(rows, down)
    shapes = _shapes(rows)
    figure, axes = new_figure(len(shapes), len(places), width=3.4, height=2.9)
    for line, place in zip(axes, places, strict=True):
        for axis, (shape, title) in zip(line, shapes.items(), strict=True):
            chosen = [row for row in rows if getattr(row, down) == place and _shape(row) == shape]
            for name in _values(chosen, "implementation"):
                measured = [row for row in chosen if row.implementation == name]
                _draw_line(axis, measured, field, COLOUR_OF[name], name, **STYLE_OF.get(name, {}))
            _label_lengths(axis, rows)
            if log:
                axis.set_yscale("log")
                axis.set_ylim(min(values) / 1.5, max(values) * 1.5)
            else:
                axis.set_ylim(bottom=0)
            axis.set_title(f"{title}, {place}", fontsize=9)
        line[0].set_ylabel(label)
    _legend(axes)
    save_figure(figure, path)
    return [path]


def plot_attention(rows: Sequence[AttentionBenchmarkRow], path: Path) -> None:
    """Forward (solid) and backward (dotted) times over the length, and under them the memory in use before backward
    (and by formula, broad and grey beneath it); a column a head_dim. Compiled implementations have hollow markers."""
    head_dims = _values(rows, "head_dim")
    figure, axes = new_figure(len(head_dims), 2, width=3.4, height=2.9)
    for column, head_dim in enumerate(head_dims):
        time_axis, memory_axis = axes[0][column], axes[1][column]
        chosen = [row for row in rows if row.head_dim == head_dim]
        for name in _values(chosen, "implementation"):
            for compiled in ("off", "on"):
                line = [row for row in chosen if (row.implementation, row.compile) == (name, compiled)]
                label = name if compiled == "off" else f"{name}, compiled"
                style = {} if compiled == "off" else {"markerfacecolor": "white"}
                measured = [row for row in line if row.status == "ok"]
                _draw_line(time_axis, measured, "forward_mean_ms", COLOUR_OF[name], label, **style)
                _draw_line(time_axis, measured, "backward_mean_ms", COLOUR_OF[name], None, linestyle=":", **style)
                weighed = [row for row in measured if row.memory_before_backward_gib is not None]
                _draw_line(memory_axis, weighed, "memory_before_backward_gib", COLOUR_OF[name], label, **style)
                if compiled == "off":
                    _draw_line(memory_axis, line, "formula_gib", "#cccccc", None, marker="", linewidth=5, zorder=1)
        for axis in (time_axis, memory_axis):
            axis.set_yscale("log")
            axis.set_title(f"head_dim {head_dim}", fontsize=9)
            _label_lengths(axis, rows)
    axes[0][0].set_ylabel("ms: forward, backward dotted")
    is_measured = any(row.memory_before_backward_gib is not None for row in rows)
    axes[1][0].set_ylabel("GiB before backward" + ("; grey: formula" if is_measured else ", by formula"))
    _legend(axes)
    save_figure(figure, path)


def _draw_line(axis: Any, rows: Sequence[Any], field: str, colour: str, label: str | None, **style: Any) -> None:
    if rows:
        rows = sorted(rows, key=lambda row: row.length)
        options = {"marker": "o", "markersize": 3.5, "linewidth": 1.3, "color": colour, "label": label} | style
        axis.plot([row.length for row in rows], [getattr(row, field) for row in rows], **options)


def _label_lengths(axis: Any, rows: Sequence[Any]) -> None:
    lengths = sorted(_values(rows, "length"))
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in lengths], fontsize=6, rotation=45)
    axis.set_xticks([], minor=True)
    axis.tick_params(axis="y", labelsize=7)
    axis.set_xlabel("length", fontsize=8)


def _legend(axes: Any) -> None:
    entries: dict[str, Any] = {}
    for axis in axes.flat:
        handles, labels = axis.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    # Beside the panels: within them, curves of eight implementations leave no room.
    axes[0][-1].legend(
        entries.values(), entries.keys(), frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1.02, 1)
    )


def _shape(row: Any) -> tuple:
    return row.batch_size, row.heads, row.head_dim, row.is_causal, row.timed


def _shapes(rows: Sequence[Any]) -> dict[tuple, str]:
    """Each shape, and how it was timed, and its panel's title: its head_dim, and what else differs between shapes."""
    shapes = list(dict.fromkeys(map(_shape, rows)))
    words: tuple[Callable[[Any], str], ...] = (
        lambda batch_size: f"batch {batch_size}, ",
        lambda heads: f"{heads} heads, ",
        lambda head_dim: f"head_dim {head_dim}",
        lambda is_causal: ", causal" if is_causal else ", not causal",
        lambda timed: f", {timed}",
    )
    said = [i for i in range(5) if i == 2 or len({shape[i] for shape in shapes}) > 1]
    return {shape: "".join(words[i](shape[i]) for i in said) for shape in shapes}


def _values(rows: Sequence[Any], name: str) -> list[Any]:
    return list(dict.fromkeys(getattr(row, name) for row in rows))
