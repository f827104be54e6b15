"""The handout's questions about one profiled step (section on nsys, a to e), and what binds it, as a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cs336_systems.accounting.flops import matmul_flops_by_part, softmax_flops_forward
from cs336_systems.profiling.kernel_tables import (
    KernelRow,
    class_share,
    class_table,
    kernel_table,
    of_classes,
    total_ms,
)
from cs336_systems.profiling.step_time import StepTime, cell_of, matmul_tflops
from cs336_systems.profiling.trace import FINAL_MATMUL, SCORES, SOFTMAX, Trace

_NOTABLE = 0.05  # of forward's kernel time


@dataclass(frozen=True)
class StepRow:
    """One cell's answers. Times are of one step, in ms; None where the report does not say, or nothing was measured.

    Attributes:
        source: the report.
        size … optimizer: what ran.
        forward_benchmark_ms, step_benchmark_ms: the benchmark's means, nothing profiled.
        forward_ms, step_ms: the range's time on the host, which waits for the GPU at its end.
        slowdown: what profiling adds to the step, as a share of the benchmark's.
        forward_kernel_ms: forward's kernels added up.
        *_leader, *_leader_share, *_leader_count: the kernel with most time in forward, backward and the step, its share
            of kernel time there and how often it runs; `same_leader` whether forward's leads the step too.
        *_matmul_share: the share of kernel time in matrix products.
        forward_others: other classes that take a twentieth of forward's kernel time or more.
        softmax_ms, attention_matmul_ms: in forward, the softmax range, and the matrix products in attention's ranges.
        softmax_time_ratio, softmax_flop_ratio: the first over the second, in time and by accounting's formulas.
        binding, *_share: `StepTime` and `Verdict`; the parts' shares add up to 1.
        forward_tflops, step_tflops, matmul_peak_share: of the matrix products.
    """

    source: str
    status: str = "ok"
    reason: str = ""
    size: str | None = None
    ctx: int | None = None
    batch_size: int | None = None
    mode: str | None = None
    precision: str | None = None
    compile: str | None = None
    attention: str | None = None
    optimizer: str | None = None
    forward_benchmark_ms: float | None = None
    forward_ms: float | None = None
    forward_kernel_ms: float | None = None
    step_benchmark_ms: float | None = None
    step_ms: float | None = None
    slowdown: float | None = None
    forward_leader: str | None = None
    forward_leader_share: float | None = None
    forward_leader_count: float | None = None
    backward_leader: str | None = None
    backward_leader_share: float | None = None
    step_leader: str | None = None
    step_leader_share: float | None = None
    same_leader: bool | None = None
    forward_matmul_share: float | None = None
    step_matmul_share: float | None = None
    forward_others: str | None = None
    softmax_ms: float | None = None
    attention_matmul_ms: float | None = None
    softmax_time_ratio: float | None = None
    softmax_flop_ratio: float | None = None
    binding: str | None = None
    computing_share: float | None = None
    moving_share: float | None = None
    unknown_share: float | None = None
    communicating_share: float | None = None
    waiting_share: float | None = None
    idle_share: float | None = None
    kernels: float | None = None
    forward_tflops: float | None = None
    step_tflops: float | None = None
    matmul_peak_share: float | None = None


def answer(
    trace: Trace, time: StepTime | None, binding: str | None, benchmark: Mapping[str, Any] | None = None
) -> StepRow:
    """The row of a trace; `time` and `binding` of its verdict, None on a CPU.

    `benchmark` is the row that scripts/benchmark.py wrote for the same cell without a profiler.
    """
    cell = cell_of(trace)
    benchmark = benchmark or {}
    parameters = ("size", "ctx", "batch_size", "mode", "precision", "compile", "attention", "optimizer")
    what_ran: dict[str, Any] = {name: getattr(cell, name) for name in parameters} if cell else {}
    forward, step = trace.within("forward"), trace.within(None)
    leaders = {kind: _leader(trace, kind) for kind in ("forward", "backward", None)}
    leading, leading_back, leading_step = leaders["forward"], leaders["backward"], leaders[None]
    step_ms, step_benchmark_ms = _host_ms(trace, "step"), benchmark.get("step_mean_ms")
    parts = ("computing", "moving", "unknown", "communicating", "waiting", "idle")
    return StepRow(
        source=trace.source,
        **what_ran,
        forward_benchmark_ms=benchmark.get("forward_mean_ms"),
        forward_ms=_host_ms(trace, "forward"),
        forward_kernel_ms=total_ms(forward) / trace.n_steps if forward else None,
        step_benchmark_ms=step_benchmark_ms,
        step_ms=step_ms,
        slowdown=step_ms / step_benchmark_ms - 1 if step_ms and step_benchmark_ms else None,
        forward_leader=leading.kernel if leading else None,
        forward_leader_share=leading.share if leading else None,
        forward_leader_count=leading.count if leading else None,
        backward_leader=leading_back.kernel if leading_back else None,
        backward_leader_share=leading_back.share if leading_back else None,
        step_leader=leading_step.kernel if leading_step else None,
        step_leader_share=leading_step.share if leading_step else None,
        same_leader=leading.kernel == leading_step.kernel if leading and leading_step else None,
        forward_matmul_share=class_share(forward, ("matmul",)),
        step_matmul_share=class_share(step, ("matmul",)),
        forward_others=_others(trace) if forward else None,
        **_softmax(trace),
        binding=binding,
        **{f"{part}_share": time.share(part) if time else None for part in parts},
        kernels=len(step) / trace.n_steps,
        forward_tflops=matmul_tflops(trace, "forward") if time else None,
        step_tflops=time.matmul_tflops if time else None,
        matmul_peak_share=time.matmul_peak_share if time else None,
    )


def _leader(trace: Trace, kind: str | None) -> KernelRow | None:
    return next(iter(kernel_table(trace, kind)), None)


def _host_ms(trace: Trace, kind: str) -> float | None:
    durations = [opened.end_ns - opened.start_ns for opened in trace.ranges if opened.name == kind]
    return sum(durations) / len(durations) / 1e6 if durations else None


def _others(trace: Trace) -> str:
    rows = [row for row in class_table(trace, "forward") if row.kernel != "matmul" and row.share >= _NOTABLE]
    return ", ".join(f"{row.kernel} {row.share:.0%}" for row in rows)


def _softmax(trace: Trace) -> dict[str, float | None]:
    """Softmax against attention's two matrix products, in forward: its whole range against the products' kernels."""
    forward = trace.within("forward")
    softmax_ms = total_ms(kernel for kernel in forward if kernel.is_in(SOFTMAX)) / trace.n_steps
    in_products = [kernel for kernel in forward if kernel.is_in(SCORES) or kernel.is_in(FINAL_MATMUL)]
    matmul_ms = total_ms(of_classes(in_products, ("matmul",))) / trace.n_steps
    if not softmax_ms or not matmul_ms:
        return {}
    cell = cell_of(trace)
    flop_ratio = None
    if cell is not None:
        flops = matmul_flops_by_part(cell.model_config(), cell.batch_size, cell.ctx)
        softmax_flops = softmax_flops_forward(cell.model_config(), cell.batch_size, cell.ctx)
        flop_ratio = softmax_flops / (flops["attention_scores"] + flops["attention_values"])
    return {
        "softmax_ms": softmax_ms,
        "attention_matmul_ms": matmul_ms,
        "softmax_time_ratio": softmax_ms / matmul_ms,
        "softmax_flop_ratio": flop_ratio,
    }


# What a person reads of a StepRow, one table a question.
COLUMNS: dict[str, dict[str, str]] = {
    "Forward, and what profiling costs": {
        "forward_benchmark_ms": "forward ms, benchmark",
        "forward_ms": "forward ms, profiled",
        "forward_kernel_ms": "its kernels ms",
        "step_benchmark_ms": "step ms, benchmark",
        "step_ms": "step ms, profiled",
        "slowdown": "slower by",
    },
    "The kernel with the most time": {
        "kernels": "kernels a step",
        "forward_leader": "in forward",
        "forward_leader_share": "share",
        "forward_leader_count": "times",
        "backward_leader": "in backward",
        "backward_leader_share": "share ",
        "step_leader": "in the step",
        "step_leader_share": "share  ",
    },
    "Matrix products, and the rest": {
        "forward_matmul_share": "matmul share of forward",
        "step_matmul_share": "of the step",
        "forward_others": "other classes in forward",
    },
    "Softmax against attention's two products, in forward": {
        "softmax_ms": "softmax ms",
        "attention_matmul_ms": "products ms",
        "softmax_time_ratio": "time ratio",
        "softmax_flop_ratio": "FLOP ratio",
    },
    "What binds the step": {
        "binding": "bound by",
        "computing_share": "computing",
        "moving_share": "moving bytes",
        "communicating_share": "communicating",
        "waiting_share": "waiting for launches",
        "idle_share": "other gaps",
        "step_tflops": "products TFLOP/s",
        "matmul_peak_share": "share of peak",
    },
}
WHAT_RAN = {"size": "size", "ctx": "ctx", "mode": "mode", "precision": "precision"}
