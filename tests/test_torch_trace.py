"""torch.profiler's trace becomes the same records as nsys's report; on a CPU, operators of which none counts twice."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from cs336_systems.configs import named_cell
from cs336_systems.profiling.kernel_tables import class_table, kernel_table, range_table
from cs336_systems.profiling.nsys_report import read_report
from cs336_systems.profiling.overlap import step_intervals
from cs336_systems.profiling.step_time import step_time
from cs336_systems.profiling.torch_trace import profile_workload, read_torch_trace
from cs336_systems.profiling.trace import Trace
from cs336_systems.workload import Workload
from tests.nsys_reports import PID, RANGES_OF_A_STEP, MadeReport

AUTOGRAD = PID + 5


def _event(name: str, category: str, start: float, end: float, tid: int = PID, **arguments: Any) -> dict[str, Any]:
    event = {"ph": "X", "name": name, "cat": category, "pid": PID, "tid": tid, "ts": start, "dur": end - start}
    return event | {"args": arguments}


def _operator(name: str, start: float, end: float, tid: int = PID) -> dict[str, Any]:
    return _event(name, "cpu_op", start, end, tid)


def _read(*events: dict[str, Any], **more: Any) -> Trace:
    return read_torch_trace({"traceEvents": list(events), **more})


def test_one_step_recorded_by_both_profilers_gives_the_same_tables(tmp_path: Path) -> None:
    """The same launches and kernels, as each tool writes them down: nsys in ns, torch.profiler in µs."""
    report, events = MadeReport(), []
    for name, start, end in (("step", 0, 900), ("forward", 10, 300), ("block 0", 20, 200), ("backward", 310, 800)):
        report.range(name, start * 1000, end * 1000)
        events.append(_event(name, "user_annotation", start, end))
    kernels = [
        (
            "void at::native::vectorized_elementwise_kernel<{cast}4, at::native::CUDAFunctor_add<float>>(int)",
            400,
            450,
            30,
        ),
        ("ampere_sgemm_128x64_tn", 450, 700, 210),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096>)", 600, 950, 320),
    ]
    for correlation, (name, start, end, launch) in enumerate(kernels, start=500):
        tid = AUTOGRAD if launch > 310 else PID
        report.kernel(name.format(cast="(int)"), start * 1000, end * 1000, launch * 1000, tid)
        category = "cuda_driver" if launch == 210 else "cuda_runtime"
        events.append(_event("cudaLaunchKernel", category, launch, launch + 1, tid, correlation=correlation))
        on_gpu = {"correlation": correlation, "stream": 7, "device": 0}
        events.append(_event(name.format(cast=""), "kernel", start, end, 7, **on_gpu))
    from_nsys = read_report(report.write(tmp_path / "report.sqlite"))
    from_torch = _read(*events, deviceProperties=[{"name": "NVIDIA H100 80GB HBM3"}])
    assert from_torch.kinds() == from_nsys.kinds() == ["step", "forward", "block", "backward"]
    for kind in from_nsys.kinds():
        assert kernel_table(from_torch, kind) == kernel_table(from_nsys, kind)
    assert range_table(from_torch) == range_table(from_nsys)
    assert step_time(from_torch) == step_time(from_nsys)
    assert step_intervals(from_torch) == step_intervals(from_nsys)
    assert from_torch.gpu == from_nsys.gpu


def test_copies_have_one_name_and_lost_launches_are_said() -> None:
    trace = _read(
        _event("forward", "user_annotation", 0, 10),
        _event("cudaMemcpyAsync", "cuda_runtime", 5, 6, correlation=1),
        _event("Memcpy DtoD (Device -> Device)", "gpu_memcpy", 20, 30, 7, correlation=1, stream=7, device=1),
        _event("Memset (Device)", "gpu_memset", 30, 31, 7, correlation=2, stream=7, device=1),
    )
    assert [row.kernel for row in kernel_table(trace)] == ["Memcpy DtoD", "Memset"]
    assert [[opened.name for opened in kernel.ranges] for kernel in trace.kernels] == [["forward"], []]
    assert trace.kernels[0].device == 1
    assert trace.notes == ["1 of 2 kernels have no launch in the trace and are in no range."]


def test_an_operator_gives_way_to_those_that_do_its_work() -> None:
    trace = _read(
        _event("forward", "user_annotation", 0, 1000),
        _event("Optimizer.step#AdamW.step", "user_annotation", 0, 1000),  # torch's own, no range of ours
        _operator("aten::matmul", 0, 100),
        _operator("aten::expand", 1, 3),
        _operator("aten::clone", 5, 30),
        _operator("aten::copy_", 6, 29),
        _operator("aten::bmm", 31, 99),
        _operator("aten::sum", 100, 200),
        _operator("aten::fill_", 110, 120),
        _operator("AddBackward0", 150, 190, tid=AUTOGRAD),  # at the same time, in another thread
        _operator("aten::mul", 200, 210),
    )
    assert trace.unit == "operator"
    assert trace.kinds() == ["forward"]
    assert [kernel.name for kernel in trace.kernels] == [
        "aten::expand",
        "aten::copy_",
        "aten::bmm",
        "aten::sum",
        "AddBackward0",
        "aten::mul",
    ]
    assert all(kernel.is_in("forward") for kernel in trace.kernels)


def test_an_operator_that_was_interrupted_counts_as_the_others_like_it_do() -> None:
    """Where the machine takes the CPU away between two products, the node around them is long by itself."""
    events = []
    for step, interrupted in enumerate((0, 500, 0)):
        start = 1000 * step
        events += [
            _operator("MmBackward0", start, start + 100 + interrupted),
            _operator("aten::mm", start + 1, start + 45),
            _operator("aten::mm", start + 50 + interrupted, start + 99 + interrupted),
        ]
    assert [kernel.name for kernel in _read(*events).kernels] == ["aten::mm"] * 6


def test_what_is_no_trace_is_refused() -> None:
    for document in ([], {}, {"traceEvents": None}):
        with pytest.raises(ValueError, match="has no traceEvents"):
            read_torch_trace(document)  # ty: ignore[invalid-argument-type]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"traceEvents": [1]}, r"has 1 as traceEvents\[0\]"),
        ({"traceEvents": [{"ph": "M"}, {"ph": "X", "name": "a", "ts": 1}]}, r"as traceEvents\[1\]"),
        ({"traceEvents": [_operator("a", 0, float("nan"))]}, r"as traceEvents\[0\]"),
        ({"traceEvents": [_operator("a", 0, 1) | {"args": 2}]}, r"as traceEvents\[0\]"),
        ({"traceEvents": [_operator("a", 0, 1) | {"tid": [3]}]}, r"as traceEvents\[0\]"),
        ({"traceEvents": [], "deviceProperties": [7]}, r"has \[7\] as deviceProperties"),
        ({"traceEvents": [], "cell": 3}, "has 3 as cell"),
    ],
)
def test_what_torch_does_not_write_is_refused(document: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_torch_trace(document)


@pytest.fixture(scope="module")
def profiled() -> Trace:
    cell = named_cell("tiny", 32, warmup=1, steps=2, device="cpu")
    return read_torch_trace(profile_workload(Workload(cell)))


def test_a_step_on_a_cpu(profiled: Trace) -> None:
    assert profiled.n_steps == 2
    assert profiled.cell is not None
    assert profiled.cell["size"] == "tiny"
    rows = {row.range: row for row in range_table(profiled)}
    assert list(rows) == RANGES_OF_A_STEP
    assert [rows[name].count for name in rows] == [1, 1, 2, 2, 2, 2, 1, 1, 1]
    # Every product of the forward pass: seven a block, two of them attention's, and the head.
    counts = {row.kernel: row.count for row in class_table(profiled, "forward")}
    assert (
        counts["matmul"]
        == 2 * (7 + 2) + 1
        == rows["forward"].kernels - sum(count for name, count in counts.items() if name != "matmul")
    )
    assert class_table(profiled, "backward")[0].count == 2 * counts["matmul"]
    assert rows["optimizer"].matmul_share == 0
    assert rows["scores"].matmul_share > 0 == rows["softmax"].matmul_share


def test_operators_do_not_overlap_and_fill_the_step(profiled: Trace) -> None:
    by_thread: dict[int, list[Any]] = {}
    for kernel in profiled.kernels:
        by_thread.setdefault(kernel.stream, []).append(kernel)
    for kernels in by_thread.values():
        assert all(before.end_ns <= after.start_ns for before, after in pairwise(kernels))
    in_operators = sum(kernel.duration_ns for kernel in profiled.within("step"))
    steps = sum(step.end_ns - step.start_ns for step in profiled.steps)
    assert 0.2 < in_operators / steps <= 1


@pytest.mark.gpu
def test_a_step_on_a_gpu() -> None:
    cell = named_cell("tiny", 64, warmup=1, steps=2, device="cuda")
    trace = read_torch_trace(profile_workload(Workload(cell)))
    assert trace.unit == "kernel"
    assert trace.gpu == torch.cuda.get_device_name()
    assert trace.notes == []
    rows = {row.range: row for row in range_table(trace)}
    assert list(rows) == RANGES_OF_A_STEP
    counts = {row.kernel: row.count for row in class_table(trace, "forward")}
    assert counts["matmul"] >= 2 * (7 + 2) + 1
    assert rows["backward"].matmul_share > 0 == rows["optimizer"].matmul_share
    assert "other" not in {row.kernel for row in class_table(trace)}
