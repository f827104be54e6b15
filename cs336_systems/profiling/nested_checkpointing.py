"""How the memory and time of checkpointing schemes grow with the number of layers, measured on a stack of small ones.

No checkpoints: O(L) memory. Segments of √L layers: O(√L), one more forward. Nested halves: O(log L), for O(L log L)
time (Chen et al. 2016, sections 4.1 and 4.4). It runs on a CPU in seconds, storages counted as they come and go.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cs336_systems.checkpointing import checkpoint_blocks, run_nested
from cs336_systems.configs import check
from cs336_systems.figures import COLOURS, new_figure, save_figure
from cs336_systems.profiling.storage_trace import StorageTrace
from cs336_systems.progress import progress
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


class _Layer(nn.Module):
    """x + tanh(x w), which keeps its input and the tanh for backward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / math.sqrt(width))
        self.n_runs = 0

    def forward(self, x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
        self.n_runs += 1
        return x + torch.tanh(x @ self.weight)


class _Stack(nn.Module):
    """Layers in a row, under the name that `checkpoint_blocks` looks for."""

    def __init__(self, n_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(WIDTH) for _ in range(n_layers))

    def forward(self, x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
        for layer in self.layers:
            x = layer(x)
        return x


def nested_cells(layers: Sequence[int]) -> list[tuple[Scheme, int]]:
    """Each scheme at each depth. Raises ValueError for a depth below 2."""
    for n_layers in layers:
        check(n_layers >= 2, "layers", n_layers, "must be at least 2")
    return [(scheme, n_layers) for scheme in SCHEMES for n_layers in layers]


def run_nested_sweep(cells: Sequence[tuple[Scheme, int]], results: ResultsFile) -> None:
    """Adds a row for each cell that `results` does not have yet."""
    have = {(row.scheme, row.n_layers) for row in results.rows}
    to_measure = [cell for cell in cells if cell not in have]
    n_threads = torch.get_num_threads()
    torch.set_num_threads(
        1
    )  # thousands of small calls, in which threads that wait for a busy core cost most of the time
    try:
        with progress(len(cells), len(cells) - len(to_measure)) as bar:
            for scheme, n_layers in to_measure:
                bar.set_description(f"{scheme}, {n_layers} layers")
                results.append(measure_scheme(scheme, n_layers))
                bar.update()
    finally:
        torch.set_num_threads(n_threads)


def write_nested(results: ResultsFile) -> str:
    """Writes the table and the picture, and returns what a person reads."""
    plot_schemes(results.rows, results.path.with_suffix(".png"))
    return results.write_tables(COLUMNS, NOTE)


def measure_scheme(scheme: Scheme, n_layers: int) -> NestedRow:
    """Runs forward and backward of `n_layers` layers under a scheme; segments are of √L layers."""
    stack = _Stack(n_layers)
    layers: list[_Layer] = [layer for layer in stack.modules() if isinstance(layer, _Layer)]
    every = max(1, round(math.sqrt(n_layers))) if scheme == "segments" else None
    if every is not None:
        checkpoint_blocks(stack, every)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with StorageTrace([x, *stack.parameters()], has_stacks=False) as trace:
        before = trace.live_bytes
        output = run_nested(layers, x) if scheme == "nested" else stack(x)
        kept = trace.live_bytes - before
        output.backward(torch.ones_like(output))
    growth = {"none": n_layers, "segments": math.sqrt(n_layers), "nested": math.log2(n_layers) + 1}[scheme]
    peak = (trace.peak_bytes - before) / x.nbytes
    return NestedRow(
        scheme=scheme,
        n_layers=n_layers,
        every=every,
        kept_activations=kept / x.nbytes,
        peak_activations=peak,
        forwards_per_layer=sum(layer.n_runs for layer in layers) / n_layers,
        growth=GROWTH[scheme],
        peak_over_growth=peak / growth,
    )


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
