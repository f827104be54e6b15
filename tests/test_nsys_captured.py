"""The analysis of a report that nsys 2025.3 captured on an H100: small, context 128, batch 4, a train step in float32,
cut to its first step (`analyze_nsys.py --trim`). What it should say is asked of the report in SQL."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cs336_systems.profiling.analysis import Analysis, analyze, report_markdown
from cs336_systems.profiling.kernel_tables import class_table, kernel_table, range_table
from cs336_systems.profiling.nsys_report import read_report
from cs336_systems.profiling.trace import Trace
from tests.nsys_reports import RANGES_OF_A_STEP

REPORT = Path(__file__).parent / "data" / "small_ctx128_one_step.sqlite"
N_BLOCKS = 12


@pytest.fixture(scope="module")
def trace() -> Trace:
    return read_report(REPORT)


@pytest.fixture(scope="module")
def analysis(trace: Trace) -> Analysis:
    return analyze(trace)


def _ask(query: str, *values: Any) -> list[Any]:
    with closing(sqlite3.connect(f"{REPORT.as_uri()}?mode=ro&immutable=1", uri=True)) as database:
        return database.execute(query, values).fetchall()


_ON_GPU = " UNION ALL ".join(
    f"SELECT start, end, correlationId FROM CUPTI_ACTIVITY_KIND_{name}" for name in ("KERNEL", "MEMCPY", "MEMSET")
)
_LAUNCHED_DURING = f"""
    SELECT COUNT(*), SUM(k.end - k.start) FROM ({_ON_GPU}) k
    JOIN CUPTI_ACTIVITY_KIND_RUNTIME r ON r.correlationId = k.correlationId
    JOIN NVTX_EVENTS n ON r.start >= n.start AND r.start < n.end WHERE n.text = ?
"""


def test_what_the_report_holds(trace: Trace) -> None:
    assert REPORT.stat().st_size < 300_000
    assert trace.gpu == "NVIDIA H100 80GB HBM3"
    assert trace.cell is not None
    assert (trace.cell["size"], trace.cell["ctx"], trace.cell["precision"]) == ("small", 128, "fp32")
    assert trace.notes == []
    assert trace.kinds() == RANGES_OF_A_STEP
    assert all(kernel.is_in("step") for kernel in trace.kernels)


@pytest.mark.parametrize("name", ["step", "forward", "loss", "backward", "optimizer", "scores", "softmax"])
def test_each_ranges_kernels_are_those_launched_during_it(trace: Trace, name: str) -> None:
    ((count, total_ns),) = _ask(_LAUNCHED_DURING, name)
    row = next(row for row in range_table(trace) if row.range == name)
    assert row.kernels == count > 0
    assert row.kernel_ms == pytest.approx(total_ns / 1e6)


def test_backward_was_launched_by_autograds_thread_alone(trace: Trace) -> None:
    main, autograd = [
        thread
        for (thread,) in _ask(
            "SELECT globalTid FROM CUPTI_ACTIVITY_KIND_RUNTIME GROUP BY globalTid ORDER BY MIN(start)"
        )
    ]
    assert {thread for (thread,) in _ask("SELECT DISTINCT globalTid FROM NVTX_EVENTS")} == {main}
    ((n_autograd,),) = _ask("SELECT COUNT(*) FROM CUPTI_ACTIVITY_KIND_RUNTIME WHERE globalTid = ?", autograd)
    assert n_autograd > 0.9 * len(trace.within("backward"))


def test_every_kernel_has_a_class(trace: Trace) -> None:
    rows = class_table(trace)
    assert {row.kernel for row in rows} == {"matmul", "elementwise", "reduction", "copy", "indexing"}
    assert sum(row.share for row in rows) == pytest.approx(1)
    assert sum(row.count for row in rows) == len(trace.kernels)


def test_the_counts_are_the_models(trace: Trace) -> None:
    rows = {row.range: row for row in range_table(trace)}
    assert [rows[name].count for name in ("block", "scores", "softmax", "final matmul")] == [N_BLOCKS] * 4
    for part in ("scores", "final matmul"):
        counts = {row.kernel: row.count for row in class_table(trace, part)}
        assert counts["matmul"] == N_BLOCKS
    # exp, two reductions, subtraction and division; nothing else.
    assert {row.kernel: row.count for row in class_table(trace, "softmax")} == {"elementwise": 36, "reduction": 24}
    assert rows["optimizer"].matmul_share == 0


def test_the_answers(analysis: Analysis) -> None:
    row = analysis.row
    assert row.forward_leader is not None
    assert row.forward_leader.startswith("sm80_xmma_gemm_f32f32")
    assert row.forward_leader_count == 73  # of the 85 products of a forward pass outside attention
    assert row.same_leader is True
    assert row.forward_matmul_share is not None
    assert row.step_matmul_share is not None
    assert row.forward_matmul_share > row.step_matmul_share > 0.5
    assert row.softmax_time_ratio is not None
    assert row.softmax_flop_ratio == pytest.approx(5 / (4 * 64))
    assert row.softmax_time_ratio > 50 * row.softmax_flop_ratio
    assert row.forward_ms is not None
    assert row.forward_kernel_ms is not None
    assert row.forward_ms > 5 * row.forward_kernel_ms  # bound by launches


def test_the_verdict(analysis: Analysis) -> None:
    assert analysis.verdict is not None
    assert analysis.verdict.binding == "waiting"
    text = report_markdown(analysis, top=3)
    assert "**Bound by kernel launches: the GPU waits for the host.**" in text
    assert "`--optimizer adamw-fused`" in text
    assert "communication" not in text


def test_kernels_of_a_range_add_up(trace: Trace) -> None:
    for kind in trace.kinds():
        rows = kernel_table(trace, kind)
        assert sum(row.share for row in rows) == pytest.approx(1)
        assert [row.total_ms for row in rows] == sorted((row.total_ms for row in rows), reverse=True)
