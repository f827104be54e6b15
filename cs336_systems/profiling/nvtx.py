"""NVTX ranges for Nsight Systems (nsys), and the bracket that leaves warm-up out of its report."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

import torch

from cs336_systems.profiling.ranges import marked_model
from cs336_systems.profiling.trace import CELL_MARK
from cs336_systems.records import Unsupported
from cs336_systems.workload import Workload


class NvtxWatcher:
    """Marks a workload's ranges with NVTX, and has nsys record the measured steps only.

    `mark(name)` opens a range; `capture()` goes around the measured steps. nsys heeds it under
    `--capture-range=cudaProfilerApi`; where nothing profiles, both cost a function call.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    def mark(self, name: str) -> AbstractContextManager[Any]:
        return torch.cuda.nvtx.range(name)

    @contextmanager
    def capture(self) -> Generator[None]:
        on_gpu = self._workload.device.type == "cuda"
        with torch.cuda.profiler.profile() if on_gpu else nullcontext():
            torch.cuda.nvtx.mark(CELL_MARK + json.dumps(asdict(self._workload.cell)))
            yield
            if on_gpu:
                torch.cuda.synchronize(self._workload.device)  # the last step's kernels belong to the report


@contextmanager
def watch_with_nvtx(workload: Workload) -> Generator[NvtxWatcher]:
    """For as long as it lasts, the workload's blocks and attention are marked; compiled ones are left whole.

    Raises:
        Unsupported: this PyTorch has no NVTX, as on macOS.
    """
    try:
        torch.cuda.nvtx.mark("cs336")
    except RuntimeError:
        raise Unsupported("NVTX comes with PyTorch's CUDA builds, and this one has none") from None
    watcher = NvtxWatcher(workload)
    eager = workload.cell.compile == "off"
    with marked_model(workload.model, watcher.mark) if eager else nullcontext():
        yield watcher
