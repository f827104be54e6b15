"""How the memory and time of checkpointing schemes grow with the number of layers, measured on a stack of small ones.

No checkpoints: O(L) memory. Segments of √L layers: O(√L), one more forward. Nested halves: O(log L), for O(L log L)
time (Chen et al. 2016, sections 4.1 and 4.4). It runs on a CPU in seconds, storages counted as they come and go.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cs336_systems.checkpointing import checkpoint_blocks, run_nested
from cs336_systems.profiling.nested_tables import GROWTH, ROWS, WIDTH, NestedRow, Scheme
from cs336_systems.profiling.storage_trace import StorageTrace
from cs336_systems.progress import progress
from cs336_systems.records import ResultsFile


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
