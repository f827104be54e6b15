"""A step's phases as CUDA graphs: what they launch is recorded once, and then launched again as one piece a phase.

A step of small kernels waits for Python, which needs longer to launch them than the GPU to run them. A CUDA graph is a
list of launches with their arguments, which the driver replays by itself: the same kernels on the same addresses.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

Phase = Callable[[str], AbstractContextManager[None]]


class GraphedPhases:
    """Records `compute(phase)`, which opens a phase around each of its parts, at the first call, and replays it in all.

    The parts share one pool of memory, in which whatever they return stays at its address: read it after a replay, and
    leave it there. What Python does besides launching (a new learning rate, another batch) is not in a graph: only what
    the tensors hold that were there when it was recorded. Parts must not ask the device for a value, must lie in
    phases, and must not read the random generator's state (`torch.utils.checkpoint` does).

    Attributes:
        bytes_within: by how much, in bytes, the graphs' memory at its fullest exceeds what is left in it after a
            replay. The allocator's own counters do not see it, as a replay allocates nothing.
    """

    def __init__(self, compute: Callable[[Phase], None], device: torch.device) -> None:
        self._compute = compute
        self._device = device
        self._graphs: dict[str, torch.cuda.CUDAGraph] = {}
        self.bytes_within = 0

    def __call__(self, phase: Phase) -> None:
        """Runs the parts, each in its phase, and the first time before that once unphased, and recorded."""
        if not self._graphs:
            self._record()
        for name, graph in self._graphs.items():
            with phase(name):
                graph.replay()

    def _record(self) -> None:
        # Autograd runs backward on the stream that forward ran on, so that both have to run on the recorded one before:
        # what is compiled, tuned and made at a first call must not be in a graph.
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._compute(lambda name: nullcontext())
        stream.synchronize()
        pool = torch.cuda.graph_pool_handle()
        graphs: dict[str, torch.cuda.CUDAGraph] = {}

        @contextmanager
        def recorded(name: str) -> Generator[None]:
            graphs[name] = torch.cuda.CUDAGraph()
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # so may be a phase
                with torch.cuda.graph(graphs[name], pool=pool, stream=stream):
                    yield

        torch.cuda.reset_peak_memory_stats(self._device)
        self._compute(recorded)
        fullest = torch.cuda.max_memory_allocated(self._device)
        self.bytes_within = fullest - torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)  # whoever adds bytes_within to the counters counts it once
        self._graphs = graphs
