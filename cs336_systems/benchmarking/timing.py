"""Times a step by its phases, on the host's clock, with the device synchronised at every edge.

A step is any callable `step(phase)` that opens `with phase("forward"):` around each of its phases. The same step can be
given to a profiler, whose `phase` marks ranges instead of measuring them: the step does not know what watches it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch

Phase = Callable[[str], AbstractContextManager[None]]
Step = Callable[[Phase], object]

WHOLE_STEP = "step"
WARMUP = "warmup"


class Watcher(Protocol):
    """A profiler that takes part in timing: a range around each part of it, a bracket around the measured steps."""

    def mark(self, name: str) -> AbstractContextManager[Any]: ...
    def capture(self) -> AbstractContextManager[Any]: ...


class Unwatched:
    """The `Watcher` of a timing that no profiler looks at."""

    def mark(self, name: str) -> AbstractContextManager[Any]:
        return nullcontext()

    def capture(self) -> AbstractContextManager[Any]:
        return nullcontext()


def synchronize(device: torch.device | str) -> None:
    """Waits until everything queued on `device` is done. The device is named, since another card may be current."""
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


class PhaseTimer:
    """Collects each phase's durations in milliseconds: `.ms["forward"] == [12.1, 12.0, …]`.

    `mark(name)` opens a profiler's range around each phase; the time that this takes is outside the phase's own.
    """

    def __init__(
        self, device: torch.device | str, mark: Callable[[str], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        self.device = device
        self.mark = mark
        self.ms: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def __call__(self, name: str) -> Generator[None]:
        with self.mark(name):
            synchronize(self.device)  # what was queued before this phase is not this phase's
            start = time.perf_counter()
            yield
            synchronize(self.device)
            self.ms[name].append((time.perf_counter() - start) * 1e3)


def time_step(
    step: Step,
    warmup: int,
    steps: int,
    device: torch.device | str,
    on_warm: Callable[[], None] = lambda: None,
    watcher: Watcher | None = None,
) -> dict[str, list[float]]:
    """Runs `step` `warmup` times unmeasured, then `steps` times measured (handout, end-to-end benchmarking).

    Args:
        step: called as `step(phase)`; what it returns is dropped before the next step.
        warmup: steps before measuring; they run the same synchronisations.
        steps: measured steps.
        device: waited for at each phase's edges and at the step's.
        on_warm: called once between the two, e.g. to reset the peak-memory counter.
        watcher: its ranges are "warmup", each measured "step", and each phase; it captures the measured steps.

    Returns:
        Milliseconds of each measured step, a list a phase, and under "step" the step from its start to its end.

    Raises:
        ValueError: `warmup` below 0 or `steps` below 1.
    """
    if warmup < 0:
        raise ValueError(f"warmup={warmup}: must be 0 or more")
    if steps < 1:
        raise ValueError(f"steps={steps}: must be at least 1")
    watcher = watcher or Unwatched()
    discarded = PhaseTimer(device)
    with watcher.mark(WARMUP):
        for _ in range(warmup):
            with discarded(WHOLE_STEP):
                step(discarded)
    on_warm()
    timer = PhaseTimer(device, watcher.mark)
    with watcher.capture():
        for _ in range(steps):
            with timer(WHOLE_STEP):
                step(timer)
    return dict(timer.ms)
