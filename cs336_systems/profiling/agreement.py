"""Whether two reports of the same step, say nsys's and torch.profiler's, give the same table: range by range, by class.

A profiler changes when kernels start and hardly how long they run, so that both should tell the same kernel times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cs336_systems.profiling.kernel_tables import class_table
from cs336_systems.profiling.trace import Trace

NOTABLE_SHARE = 0.05  # of a range's kernel time; classes with less are told, and not judged
_RANGES = ("step", "forward", "loss", "backward", "optimizer", "scores", "softmax", "final matmul", "attention")

_SAME_WORK = ("device", "warmup", "steps", "seed")  # of a cell: what does not change the work of one step


@dataclass(frozen=True)
class AgreementRow:
    """Kernels of one class in one range, of one step: their time in either report (ms) and their number.

    `difference` is the second time over the first, less 1; None where one of the reports has no such kernels. `share`
    is of the range's kernel time in the first report.
    """

    range: str
    kind: str
    first_ms: float
    second_ms: float
    difference: float | None
    first_count: float
    second_count: float
    share: float


COLUMNS = {
    "range": "range",
    "kind": "class",
    "first_ms": "first ms",
    "second_ms": "second ms",
    "difference": "difference",
    "first_count": "first kernels",
    "second_count": "second kernels",
    "share": "share",
}


def compare(first: Trace, second: Trace) -> list[AgreementRow]:
    """A row for each range that a step has in both reports and each class of kernels there.

    Raises ValueError where the reports say that different cells ran, or share no range.
    """
    cells = [
        {name: value for name, value in (trace.cell or {}).items() if name not in _SAME_WORK}
        for trace in (first, second)
    ]
    differing = [name for name in cells[0] if name in cells[1] and cells[0][name] != cells[1][name]]
    if differing:
        told = ", ".join(f"{name} {cells[0][name]!r} and {cells[1][name]!r}" for name in differing)
        raise ValueError(f"reports={second.source!r}: is of another cell than {first.source!r}: {told}")
    kinds = [kind for kind in _RANGES if kind in first.kinds() and kind in second.kinds()]
    if not kinds:
        raise ValueError(f"reports={second.source!r}: has no range of a step in common with {first.source!r}")
    rows = []
    for kind in kinds:
        mine, others = ({row.kernel: row for row in class_table(trace, kind)} for trace in (first, second))
        for name in dict.fromkeys([*mine, *others]):
            one, other = mine.get(name), others.get(name)
            first_ms, second_ms = (row.total_ms if row else 0.0 for row in (one, other))
            rows.append(
                AgreementRow(
                    range=kind,
                    kind=name,
                    first_ms=first_ms,
                    second_ms=second_ms,
                    difference=second_ms / first_ms - 1 if first_ms and second_ms else None,
                    first_count=one.count if one else 0.0,
                    second_count=other.count if other else 0.0,
                    share=one.share if one else 0.0,
                )
            )
    return rows


def agreement_note(rows: Sequence[AgreementRow]) -> str:
    """In words: the largest difference among classes that take a twentieth of their range or more, if any does."""
    notable = [row for row in rows if row.share >= NOTABLE_SHARE]
    counts = [f"{row.kind} in {row.range}" for row in rows if row.first_count != row.second_count]
    same = f"Numbers of kernels differ for {', '.join(counts)}." if counts else "All numbers of kernels are equal."
    if not notable:
        return f"The first report has no kernel time in a range that both have. {same}"
    worst = max(notable, key=lambda row: abs(row.difference) if row.difference is not None else float("inf"))
    if worst.difference is None:
        return f"Only one report has {worst.kind} in {worst.range}. {same}"
    most = f"{worst.kind} in {worst.range} differs most: {worst.difference:+.1%}"
    return f"Of classes with a twentieth of their range's time or more, {most}. {same}"
