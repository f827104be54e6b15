"""From a snapshot of the allocator's history to who held how much and when: no GPU and no torch needed.

An allocation is what it was noted to be (parameters, gradients, optimizer state, copies of weights); of the others,
those that outlive forward into backward are activations, and those that do not are temporaries.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cs336_systems.profiling.autograd_nodes import model_line
from cs336_systems.profiling.memory_recording import END, EXTRA_KEY, MARK_FUNCTION, START, Snapshot

CATEGORIES = (
    "parameters",
    "optimizer state",
    "gradients",
    "weight copies",
    "activations",
    "temporaries",
    "other",  # there before the recording, and none of these: token ids, RoPE's table, libraries' workspaces
)
BEFORE = "before"  # the phase of what was there when the recording began
_FREES = ("free_requested", "free")  # from when on the program no longer holds it


@dataclass
class Allocation:
    """One piece of memory, from event `start` (-1: before the recording) up to event `end`, in bytes as requested.

    `line` is the model's line that made it, or what backward ran: "MulBackward0 of cs336_basics/model.py:110 silu".
    """

    address: int
    size: int
    start: int
    end: int
    line: str = ""
    is_recomputed: bool = False
    phase: str = BEFORE
    category: str = "other"


@dataclass(frozen=True)
class Phase:
    """A phase and its events: `first` ≤ event < `end`."""

    name: str
    first: int
    end: int


@dataclass(frozen=True)
class LargeAllocations:
    """Allocations alike in size, line, phase and category."""

    size: int
    count: int
    line: str
    phase: str
    category: str


@dataclass(frozen=True)
class MemoryTimeline:
    """What a snapshot says, by events: event i is the i-th entry of the device's history.

    `oom_bytes` is what the allocator was asked for and did not have, None if that did not happen.
    """

    allocations: list[Allocation]
    phases: list[Phase]
    n_events: int
    oom_bytes: int | None
    series: dict[str, np.ndarray] = field(repr=False)
    """By category, the bytes held after each event, with those before the first at index 0: n_events + 1 values."""

    @property
    def total(self) -> np.ndarray:
        """Bytes held after each event, all categories together."""
        return np.sum(list(self.series.values()), axis=0)

    def peak_event(self, phase: Phase | None = None) -> int:
        """The index into the series at which a phase, or everything, holds the most."""
        if phase is None:
            return int(self.total.argmax())
        # At index `first` of the series lies what the phase begins with.
        return phase.first + int(self.total[phase.first : phase.end + 1].argmax())

    def held_at(self, event: int) -> dict[str, int]:
        """Bytes by category at an index of the series."""
        return {category: int(values[event]) for category, values in self.series.items()}

    def phase_at(self, event: int) -> str:
        """The phase of an index of the series."""
        return _phase_of(event - 1, self.phases)

    def kept_for_backward(self) -> dict[str, int] | None:
        """Bytes by category when backward begins; None without a backward phase."""
        begins = next((phase.first for phase in self.phases if phase.name == "backward"), None)
        return None if begins is None else self.held_at(begins)

    def largest(self, n: int) -> list[LargeAllocations]:
        """The `n` largest kinds of allocations made during the recording, by the size of one."""
        made = (a for a in self.allocations if a.start >= 0)
        counts = Counter((a.size, a.line, a.phase, a.category) for a in made)
        ordered = sorted(counts.items(), key=lambda item: (-item[0][0], -item[1], item[0][1:]))
        return [LargeAllocations(size, count, *what) for (size, *what), count in ordered[:n]]


def read_timeline(snapshot: Snapshot) -> MemoryTimeline:
    """Reads a snapshot of `record_step`, or any other of `torch.cuda.memory._snapshot()`.

    One that was not recorded by this project has no marks: it is one phase, and what lives in it is "temporaries" if it
    was made in it and "other" if not.

    Raises:
        ValueError: the snapshot has no history, or its marks do not fit it.
    """
    # Of several cards, the one that the step ran on.
    trace: list[dict[str, Any]] = max(snapshot["device_traces"], key=len, default=[])
    if not trace:
        raise ValueError(
            "snapshot: has no history; call torch.cuda.memory._record_memory_history() before what is to be recorded"
        )
    extra = snapshot.get(EXTRA_KEY, {"marks": [], "held": [], "has_backward": True})
    allocations, marks = _replay(trace, snapshot["segments"])
    if len(marks) != len(extra["marks"]):
        raise ValueError(f"snapshot: must have {len(extra['marks'])} marks in its history; it has {len(marks)}")
    phases = _phases(extra["marks"], marks, len(trace))
    for allocation in allocations:
        allocation.phase = _phase_of(allocation.start, phases)
    _categorize(allocations, phases, extra, marks, len(trace))
    oom = [entry["size"] for entry in trace if entry["action"] == "oom"]
    return MemoryTimeline(allocations, phases, len(trace), oom[-1] if oom else None, _series(allocations, len(trace)))


def _replay(trace: Sequence[dict], segments: Sequence[dict]) -> tuple[list[Allocation], list[int]]:
    """All allocations, but for the marks', and at which events the marks are."""
    allocations: list[Allocation] = []
    live: dict[int, Allocation] = {}
    marks: list[int] = []
    for event, entry in enumerate(trace):
        address = entry.get("addr", 0)
        if entry["action"] == "alloc":
            frames = entry.get("frames", [])
            if any(frame["name"] == MARK_FUNCTION for frame in frames[:3]):
                marks.append(event)
            is_recomputed = any("torch/utils/checkpoint.py" in frame["filename"] for frame in frames)
            live[address] = Allocation(
                address, entry["size"], event, len(trace), _line(entry, is_recomputed), is_recomputed
            )
            allocations.append(live[address])
        elif entry["action"] in _FREES:
            if address not in live:  # made before the recording
                allocations.append(Allocation(address, entry["size"], -1, event))
            else:
                live.pop(address).end = event
    for address, size in _blocks_in_use(segments):
        if address not in live:
            allocations.append(Allocation(address, size, -1, len(trace)))
    at_a_mark = set(marks)
    return [allocation for allocation in allocations if allocation.start not in at_a_mark], marks


def _blocks_in_use(segments: Sequence[dict]) -> Iterator[tuple[int, int]]:
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                yield block.get("address", address), block.get("requested_size", block["size"])
            address += block["size"]


def _line(entry: dict, is_recomputed: bool) -> str:
    """Within backward, the node's name: there the stack is empty on a GPU, and names backward's caller on a CPU."""
    label = entry.get("user_metadata") or ""
    line = model_line(entry.get("frames", []))
    return f"{line}, run again" if is_recomputed and label else label or line


def _phases(names: Sequence[str], marks: Sequence[int], n_events: int) -> list[Phase]:
    ends = [*marks, n_events][1:]
    return [
        Phase("before forward" if name == START else name, first, end)
        for name, first, end in zip(names, marks, ends, strict=True)
        if name != END
    ]


def _phase_of(event: int, phases: Sequence[Phase]) -> str:
    if event < 0:
        return BEFORE
    index = bisect_right([phase.first for phase in phases], event) - 1
    return phases[index].name if index >= 0 and event < phases[index].end else ""


def _categorize(
    allocations: Sequence[Allocation],
    phases: Sequence[Phase],
    extra: dict[str, Any],
    marks: Sequence[int],
    n_events: int,
) -> None:
    backward = next((phase for phase in phases if phase.name == "backward"), None)
    # A step that ended before backward would have kept what was live then.
    at_the_end = n_events - 1 if extra["has_backward"] else n_events
    kept_until = at_the_end if backward is None else backward.first
    runs_end = _ends_of_runs(allocations)
    for allocation in allocations:
        if allocation.start < 0:
            continue
        if allocation.is_recomputed and allocation.phase == "backward":
            is_kept = allocation.end > runs_end[allocation.start]
        else:
            is_kept = allocation.phase in ("forward", "loss") and allocation.end > kept_until
        if END in extra["marks"] and allocation.end == n_events:
            continue  # the program keeps it beyond the step, such as the loss
        allocation.category = "activations" if is_kept else "temporaries"
    for held in extra["held"]:
        event = n_events - 1 if held["mark"] == -1 else marks[held["mark"]]
        addresses = set(held["addresses"])
        for allocation in allocations:
            if allocation.address in addresses and allocation.start <= event < allocation.end:
                allocation.category = held["category"]


def _ends_of_runs(allocations: Sequence[Allocation]) -> dict[int, int]:
    """For each recomputed allocation in backward, the last event of the repeated forward that it belongs to."""
    made = sorted((a for a in allocations if a.start >= 0 and a.phase == "backward"), key=lambda a: a.start)
    ends: dict[int, int] = {}
    last = -1
    for allocation, following in zip(reversed(made), [None, *reversed(made)], strict=False):
        if following is None or not following.is_recomputed:
            last = allocation.start
        ends[allocation.start] = last
    return ends


def _series(allocations: Sequence[Allocation], n_events: int) -> dict[str, np.ndarray]:
    changes = {category: np.zeros(n_events + 2, dtype=np.int64) for category in CATEGORIES}
    for allocation in allocations:
        changes[allocation.category][allocation.start + 1] += allocation.size
        if allocation.end < n_events:
            changes[allocation.category][allocation.end + 1] -= allocation.size
    return {category: np.cumsum(change)[:-1] for category, change in changes.items()}
