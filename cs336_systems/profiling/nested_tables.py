"""What is measured of nested checkpointing (nested_checkpointing.py): its cells and rows, their table and picture; no
torch here, so that cells can be refused at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cs336_systems.configs import check
from cs336_systems.figures import COLOURS, new_figure, save_figure
from cs336_systems.records import ResultsFile

Scheme = Literal["none", "segments", "nested"]
SCHEMES: tuple[Scheme, ...] = ("none", "segments", "nested")
GROWTH = {"none": "L", "segments": "√L", "nested": "log2 L + 1"}
ROWS, WIDTH = 2048, 16  # an activation is 128 times a weight, so that gradients hardly count


@dataclass(frozen=True)
class NestedRow:
    """A scheme on `n_layers` layers, memory in activations of (ROWS, WIDTH) float32.

    `peak_activations` is the most held at once over forward and backward, beyond weights and input; `kept_activations`
    what is held between the two. `forwards_per_layer` counts how often a layer ran. `peak_over_growth` is the peak over
    what it should grow with (`growth`: L, √L or log2 L + 1), so that it hardly changes with L where theory holds.
    """

    scheme: str
    n_layers: int
    every: int | None
    kept_activations: float
    peak_activations: float
    forwards_per_layer: float
    growth: str
    peak_over_growth: float


def nested_cells(layers: Sequence[int]) -> list[tuple[Scheme, int]]:
    """Each scheme at each depth. Raises ValueError for a depth below 2."""
    for n_layers in layers:
        check(n_layers >= 2, "layers", n_layers, "must be at least 2")
    return [(scheme, n_layers) for scheme in SCHEMES for n_layers in layers]


COLUMNS = {
    "scheme": "scheme",
    "n_layers": "layers L",
    "every": "segments of",
    "kept_activations": "kept between forward and backward",
    "peak_activations": "peak",
    "forwards_per_layer": "forwards a layer",
    "growth": "should grow with",
    "peak_over_growth": "peak over that",
}
NOTE = f"Memory in activations of {ROWS} × {WIDTH}, weights and input not counted."


def plot_schemes(rows: Sequence[NestedRow], path: Path) -> None:
    """Peak memory, and forwards a layer, over the number of layers; a line a scheme."""
    figure, axes = new_figure(columns=2)
    for colour, scheme in zip(COLOURS, SCHEMES, strict=False):
        chosen = [row for row in rows if row.scheme == scheme]
        x = [row.n_layers for row in chosen]
        label = f"{scheme}: {GROWTH[scheme]}"
        axes[0][0].plot(x, [row.peak_activations for row in chosen], "o-", color=colour, markersize=3.5, label=label)
        axes[0][1].plot(x, [row.forwards_per_layer for row in chosen], "o-", color=colour, markersize=3.5)
    for axis, label in zip(axes[0], ("peak, in activations", "forwards a layer"), strict=True):
        axis.set_xscale("log", base=2)
        axis.set_xlabel("layers")
        axis.set_ylabel(label)
    axes[0][0].set_yscale("log", base=2)
    axes[0][0].legend(frameon=False, fontsize=8)
    save_figure(figure, path)


def write_nested(results: ResultsFile) -> str:
    """Writes the table and the picture, and returns what a person reads."""
    plot_schemes(results.rows, results.path.with_suffix(".png"))
    return results.write_tables(COLUMNS, NOTE)
