"""Arithmetic on time intervals: how long a set of kernels ran, and how much of it others covered.

An interval is (start, end) with start <= end, in any unit; a set of them may overlap and be in any order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Interval = tuple[float, float]


@dataclass(frozen=True)
class StepIntervals:
    """When, in milliseconds after its start, a step computed, computed its backward pass (a part of that), and
    communicated; each set disjoint and in order."""

    computation: list[Interval]
    backward: list[Interval]
    communication: list[Interval]


def merge(intervals: Iterable[Interval], gap: float = 0.0) -> list[Interval]:
    """The same times as disjoint intervals in order; those that lie at most `gap` apart become one.

    For example merge([(4, 6), (0, 2), (1, 3)]) is [(0, 3), (4, 6)].
    """
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1] + gap:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def total_length(intervals: Iterable[Interval]) -> float:
    """The length of the intervals' union: what overlaps counts once."""
    return sum(end - start for start, end in merge(intervals))


def intersect(first: Iterable[Interval], second: Iterable[Interval]) -> list[Interval]:
    """The times that lie in both sets, as disjoint intervals in order."""
    a, b = merge(first), merge(second)
    common: list[Interval] = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            common.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return common


def covered_share(intervals: Iterable[Interval], cover: Iterable[Interval]) -> float | None:
    """The share, from 0 to 1, of `intervals`' time that lies in `cover`; None if they have no length."""
    intervals = merge(intervals)
    length = total_length(intervals)
    return total_length(intersect(intervals, cover)) / length if length > 0 else None
