"""What a profiler recorded, whichever it was: kernels, and the named ranges that were open when each was launched.

`nsys_report` and `torch_trace` both make a `Trace`; tables, verdict and pictures are made from it and nothing else.
"""

from __future__ import annotations

import functools
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

# The ranges of a step, as benchmark.py --nvtx marks them.
STEP = "step"
PHASES = ("forward", "loss", "backward", "optimizer")
BLOCK = "block"  # "block 0", "block 1", …
SCORES, SOFTMAX, FINAL_MATMUL = "scores", "softmax", "final matmul"
ATTENTION = "attention"  # of the attentions that are not made of those three parts
# A mark, not a range: behind this prefix a BenchmarkCell as JSON says what ran.
CELL_MARK = "cs336 cell "


@functools.lru_cache(maxsize=4096)
def _without_number(name: str) -> str:
    return re.sub(r" \d+$", "", name)


@dataclass(frozen=True, slots=True, eq=False)
class Range:
    """A named span of time on the host. `thread` None: it was started for the whole process, not for one thread."""

    name: str
    start_ns: int
    end_ns: int
    process: int
    thread: int | None

    @property
    def kind(self) -> str:
        """The name without its number: "block" for "block 3"."""
        return _without_number(self.name)


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel, copy or graph on a GPU, or one operator on a CPU (then `stream` is the thread).

    `ranges` were open when it was launched, outermost first; it ran later. `launch_ns` is when the host asked for it,
    None if that was not recorded.
    """

    name: str
    start_ns: int
    end_ns: int
    stream: int
    device: int
    process: int
    launch_ns: int | None
    ranges: tuple[Range, ...]

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns

    def is_in(self, kind: str) -> bool:
        """Whether it was launched within a range of this kind or name."""
        return any(kind in (opened.kind, opened.name) for opened in self.ranges)


@dataclass(frozen=True)
class Trace:
    """What one report holds, in order of time.

    Attributes:
        kernels, ranges: in order of their start.
        source: where it is from, for a heading.
        unit: "kernel", or on a CPU "operator".
        gpu: the card's name as its maker has it; None if there was none, or it is not known.
        cell: the `BenchmarkCell` that ran, as a dict, if the report says.
        notes: what a reader must know about what is missing.
    """

    kernels: list[Kernel]
    ranges: list[Range]
    source: str
    unit: str = "kernel"
    gpu: str | None = None
    cell: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def steps(self) -> list[Range]:
        """The measured steps."""
        return [opened for opened in self.ranges if opened.name == STEP]

    @property
    def n_steps(self) -> int:
        """What totals are divided by: the number of steps, or 1 where none is marked."""
        return len(self.steps) or 1

    def kinds(self) -> list[str]:
        """The kinds of ranges in which some kernel was launched, in order of their first appearance."""
        return list(dict.fromkeys(opened.kind for opened in self.ranges if opened.kind in self._launched_in))

    def within(self, kind: str | None) -> list[Kernel]:
        """The kernels launched in ranges of a kind or name; None: those launched in a step, or all without steps."""
        if kind is None and not self.steps:
            return self.kernels
        return self._launched_in.get(kind or STEP, [])

    @functools.cached_property
    def _launched_in(self) -> dict[str, list[Kernel]]:
        kernels: dict[str, list[Kernel]] = defaultdict(list)
        for kernel in self.kernels:
            for name in {name for opened in kernel.ranges for name in (opened.kind, opened.name)}:
                kernels[name].append(kernel)
        return dict(kernels)


class OpenRanges:
    """Which ranges were open at a time, in one thread of a process.

    A thread that never opens a range itself, as autograd's, counts as working for the process's main thread: what it
    launches belongs to the ranges open there at that time.
    """

    def __init__(self, ranges: Iterable[Range]) -> None:
        by_thread: dict[tuple[int, int | None], list[Range]] = defaultdict(list)
        for opened in ranges:
            by_thread[opened.process, opened.thread].append(opened)
        self._stacks = {owner: _Stacks(opened) for owner, opened in by_thread.items()}
        self._main: dict[int, int | None] = {}
        for process in {process for process, _ in by_thread}:
            threads = {t: opened for (p, t), opened in by_thread.items() if p == process and t is not None}
            # The kernel numbers a process after its main thread; the low 24 bits of nsys's ids are the thread.
            numbered = [t for t in threads if t & 0xFFFFFF == (process >> 24) & 0xFFFFFF or t == process]
            longest = sorted(threads, key=lambda t: -sum(r.end_ns - r.start_ns for r in threads[t]))
            self._main[process] = next(iter(numbered or longest), None)

    def at(self, process: int, thread: int | None, time_ns: int) -> tuple[Range, ...]:
        """The ranges open at `time_ns`, outermost first."""
        owners = dict.fromkeys(((process, None), (process, self._main.get(process)), (process, thread)))
        stacks = [self._stacks[owner].at(time_ns) for owner in owners if owner in self._stacks]
        if len(stacks) == 1:
            return stacks[0]
        return tuple(sorted((opened for stack in stacks for opened in stack), key=_outermost_first))


class _Stacks:
    """One thread's open ranges between any two of its edges; ranges may nest or cross."""

    def __init__(self, ranges: Sequence[Range]) -> None:
        edges = sorted({edge for opened in ranges for edge in (opened.start_ns, opened.end_ns)})
        opens, closes = defaultdict(list), defaultdict(list)
        for opened in ranges:
            if opened.end_ns > opened.start_ns:
                opens[opened.start_ns].append(opened)
                closes[opened.end_ns].append(opened)
        self._edges = edges
        self._open: list[tuple[Range, ...]] = []
        current: list[Range] = []
        for edge in edges:
            closed = {id(opened) for opened in closes[edge]}
            current = [opened for opened in current if id(opened) not in closed] + opens[edge]
            self._open.append(tuple(sorted(current, key=_outermost_first)))

    def at(self, time_ns: int) -> tuple[Range, ...]:
        index = bisect_right(self._edges, time_ns) - 1
        return self._open[index] if index >= 0 else ()


def _outermost_first(opened: Range) -> tuple[int, int]:
    return opened.start_ns, -opened.end_ns
