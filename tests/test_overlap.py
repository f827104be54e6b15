"""Interval arithmetic, and the kernels' intervals of a profiled step."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cs336_systems.intervals import covered_share, intersect, merge, total_length
from cs336_systems.profiling.overlap import profile_step, read_trace

intervals = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 8)).map(lambda pair: (pair[0], sum(pair))), max_size=8
)


def _seconds(some: list) -> set[int]:
    """The unit slots that intervals of integers cover."""
    return {slot for start, end in some for slot in range(int(start), int(end))}


@given(intervals, intervals)
def test_intervals_are_sets_of_times(first: list, second: list) -> None:
    for result, expected in (
        (merge(first), _seconds(first)),
        (intersect(first, second), _seconds(first) & _seconds(second)),
    ):
        assert _seconds(result) == expected
        assert result == sorted(result)
        assert all(a[1] < b[0] or a[1] == b[0] for a, b in pairwise(result))
    assert total_length(first) == len(_seconds(first))
    share = covered_share(first, second)
    if _seconds(first):
        assert share == pytest.approx(len(_seconds(first) & _seconds(second)) / len(_seconds(first)))
    else:
        assert share is None


def test_merge_closes_gaps_up_to_a_length() -> None:
    assert merge([(4, 6), (0, 2), (1, 3)]) == [(0, 3), (4, 6)]
    assert merge([(4, 6), (0, 3)], gap=1) == [(0, 6)]
    assert merge([(0, 10), (2, 3)]) == [(0, 10)]


def _event(name: str, category: str, start: float, end: float, correlation: int | None = None) -> dict[str, Any]:
    arguments = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "name": name, "cat": category, "ts": start, "dur": end - start, "args": arguments}


def test_a_gpu_trace() -> None:
    """The host runs ahead: backward's kernels run after its phase on the host, beside the collective and after it."""
    events = [
        _event("forward", "user_annotation", 1000, 1100),
        _event("backward", "user_annotation", 1100, 1300),
        _event("optimizer", "user_annotation", 1300, 1400),
        _event("nccl:all_reduce", "user_annotation", 1200, 1210),  # the call on the host, not the kernel
        _event("cudaLaunchKernel", "cuda_runtime", 1050, 1051, 1),
        _event("cudaLaunchKernel", "cuda_runtime", 1150, 1151, 2),
        _event("cuLaunchKernelEx", "cuda_driver", 1250, 1251, 3),
        _event("cudaLaunchKernel", "cuda_runtime", 1260, 1261, 4),
        _event("cudaLaunchKernel", "cuda_runtime", 1350, 1351, 5),
        _event("gemm_forward", "kernel", 2000, 3000, 1),
        _event("gemm_backward", "kernel", 3000, 5000, 2),
        _event("triton_backward", "kernel", 5000, 6000, 3),
        _event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "kernel", 4000, 8000, 4),
        _event("adam", "kernel", 8000, 9000, 5),
        {"ph": "M", "name": "process_name"},
    ]
    step = read_trace({"traceEvents": events})
    assert step.computation == [(1.0, 5.0), (7.0, 8.0)]
    assert step.backward == [(2.0, 5.0)]
    assert step.communication == [(3.0, 7.0)]
    assert covered_share(step.communication, step.backward) == 0.5


def test_a_cpu_trace() -> None:
    events = [
        _event("forward", "user_annotation", 0, 1000),
        _event("backward", "user_annotation", 1000, 3000),
        _event("gloo:all_reduce", "user_annotation", 2500, 3500),
        _event("optimizer", "user_annotation", 3500, 4000),
        _event("aten::mm", "cpu_op", 10, 20),
    ]
    step = read_trace({"traceEvents": events})
    assert step.computation == [(0.0, 3.0), (3.5, 4.0)]
    assert step.backward == [(1.0, 3.0)]
    assert step.communication == [(2.5, 3.5)]


def test_a_trace_without_a_backward_pass_is_refused() -> None:
    with pytest.raises(ValueError, match="trace: must have a phase 'backward'"):
        read_trace({"traceEvents": [_event("forward", "user_annotation", 0, 1)]})


def test_one_step_is_profiled(device: str) -> None:
    weight = torch.randn(64, 64, device=device, requires_grad=True)
    n_steps = 0

    def step(phase: Any) -> None:
        nonlocal n_steps
        n_steps += 1
        with phase("forward"):
            loss = (weight @ weight).sum()
        with phase("backward"):
            loss.backward()

    profiled = profile_step(step, device)
    assert n_steps == 2  # the first carries the profiler's start
    assert total_length(profiled.computation) > total_length(profiled.backward) > 0
    assert total_length(intersect(profiled.computation, profiled.backward)) == pytest.approx(
        total_length(profiled.backward)
    )
    assert profiled.communication == []
