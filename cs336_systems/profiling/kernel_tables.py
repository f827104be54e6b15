"""Tables of a trace: which kernels ran in a range, how often in a step, for how long, and what they do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cs336_systems.profiling.kernel_classes import kernel_class, short_name
from cs336_systems.profiling.trace import Kernel, Trace

EVERYTHING = "(all)"


@dataclass(frozen=True)
class KernelRow:
    """A kernel (or all of a class) in a range: time and number are of one step, summed over its instances.

    `share` is of all kernel time in the range. Kernels that ran at the same time count in full, each.
    """

    range: str
    kernel: str
    kind: str
    total_ms: float
    count: float
    mean_us: float
    share: float


@dataclass(frozen=True)
class RangeRow:
    """A kind of range: how often a step opens it, its time on the host, and what it launched; all of one step.

    `host_ms` is from its opening to its end, which waits for the GPU only where the code did.
    """

    range: str
    count: float
    host_ms: float
    kernel_ms: float
    kernels: float
    matmul_share: float | None
    leading_kernel: str
    leading_share: float


def kernel_table(trace: Trace, kind: str | None = None) -> list[KernelRow]:
    """One row a kernel launched in ranges of a kind, most time first; None: in the whole step, or the whole report."""
    return _rows(trace, kind, short_name)


def class_table(trace: Trace, kind: str | None = None) -> list[KernelRow]:
    """The same by what kernels do: matmul, attention, elementwise, …"""
    return _rows(trace, kind, kernel_class)


def _rows(trace: Trace, kind: str | None, group: Callable[[str], str]) -> list[KernelRow]:
    kernels = trace.within(kind)
    durations: dict[tuple[str, str], list[int]] = defaultdict(list)
    for kernel in kernels:
        durations[group(kernel.name), kernel_class(kernel.name)].append(kernel.duration_ns)
    total = total_ms(kernels)
    rows = [
        KernelRow(
            range=kind or EVERYTHING,
            kernel=name,
            kind=does,
            total_ms=sum(times) / 1e6 / trace.n_steps,
            count=len(times) / trace.n_steps,
            mean_us=sum(times) / 1e3 / len(times),
            share=sum(times) / 1e6 / total if total else 0.0,
        )
        for (name, does), times in durations.items()
    ]
    return sorted(rows, key=lambda row: -row.total_ms)


def range_table(trace: Trace) -> list[RangeRow]:
    """One row a kind of range, in order of first appearance."""
    rows = []
    for kind in trace.kinds():
        opened = [one for one in trace.ranges if one.kind == kind]
        kernels = trace.within(kind)
        leading = kernel_table(trace, kind)[0]
        rows.append(
            RangeRow(
                range=kind,
                count=len(opened) / trace.n_steps,
                host_ms=sum(one.end_ns - one.start_ns for one in opened) / 1e6 / trace.n_steps,
                kernel_ms=total_ms(kernels) / trace.n_steps,
                kernels=len(kernels) / trace.n_steps,
                matmul_share=class_share(kernels, ("matmul",)),
                leading_kernel=leading.kernel,
                leading_share=leading.share,
            )
        )
    return rows


def total_ms(kernels: Iterable[Kernel]) -> float:
    """The kernels' durations added up, in ms."""
    return sum(kernel.duration_ns for kernel in kernels) / 1e6


def class_share(kernels: Sequence[Kernel], classes: Sequence[str]) -> float | None:
    """The share of the kernels' time that is spent in some classes; None if they take no time."""
    total = total_ms(kernels)
    return total_ms(of_classes(kernels, classes)) / total if total else None


def of_classes(kernels: Iterable[Kernel], classes: Sequence[str]) -> list[Kernel]:
    return [kernel for kernel in kernels if kernel_class(kernel.name) in classes]
