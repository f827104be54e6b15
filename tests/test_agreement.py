"""Two reports of one step beside each other: by range and class, and what is said of their differences."""

from dataclasses import replace
from pathlib import Path

import pytest

from cs336_systems.profiling.agreement import agreement_note, compare
from cs336_systems.profiling.kernel_classes import kernel_class
from cs336_systems.profiling.nsys_report import read_report
from cs336_systems.profiling.run_analysis import run_analysis

REPORT = Path(__file__).parent / "data" / "small_ctx128_one_step.sqlite"


def _slower(trace, kind, share):
    """The trace with one class of kernels `share` longer."""
    kernels = [
        replace(kernel, end_ns=kernel.end_ns + round(share * kernel.duration_ns))
        if kernel_class(kernel.name) == kind
        else kernel
        for kernel in trace.kernels
    ]
    return replace(trace, kernels=kernels)


def test_a_report_agrees_with_itself():
    trace = read_report(REPORT)
    rows = compare(trace, trace)
    assert {row.difference for row in rows} == {0}
    assert {"step", "forward", "backward", "optimizer", "softmax"} <= {row.range for row in rows}
    step = [row for row in rows if row.range == "step"]
    assert sum(row.share for row in step) == pytest.approx(1)
    assert sum(row.first_count for row in step) == len(trace.within("step"))
    assert "+0.0%. All numbers of kernels are equal." in agreement_note(rows)


def test_a_class_that_takes_longer_in_one_is_named():
    trace = read_report(REPORT)
    rows = compare(trace, _slower(trace, "matmul", 0.1))
    for row in rows:
        assert row.difference == pytest.approx(0.1 if row.kind == "matmul" else 0.0, abs=1e-3)
    assert agreement_note(rows).startswith("Of classes with a twentieth of their range's time or more, matmul in ")
    assert "+10.0%" in agreement_note(rows)


def test_kernels_that_one_report_lacks_are_named():
    trace = read_report(REPORT)
    fewer = replace(trace, kernels=[kernel for kernel in trace.kernels if kernel_class(kernel.name) != "matmul"])
    assert "Only one report has matmul in " in agreement_note(compare(trace, fewer))


def test_other_cells_are_refused():
    trace = read_report(REPORT)
    assert trace.cell is not None
    with pytest.raises(ValueError, match=r"is of another cell than .*: ctx 128 and 256"):
        compare(trace, replace(trace, cell=trace.cell | {"ctx": 256}))
    assert compare(trace, replace(trace, cell=trace.cell | {"steps": 7, "device": "cuda:1"}))
    with pytest.raises(ValueError, match="has no range of a step in common"):
        compare(trace, replace(trace, ranges=[]))


def test_kernels_that_take_no_time_leave_no_class_to_judge():
    trace = read_report(REPORT)
    instant = replace(trace, kernels=[replace(kernel, end_ns=kernel.start_ns) for kernel in trace.kernels])
    rows = compare(instant, trace)
    assert {row.share for row in rows} == {0.0}
    none = "The first report has no kernel time in a range that both have. "
    assert agreement_note(rows) == none + "All numbers of kernels are equal."
    fewer = [replace(rows[0], second_count=rows[0].first_count - 1), *rows[1:]]
    assert agreement_note(fewer) == none + f"Numbers of kernels differ for {rows[0].kind} in step."
    assert agreement_note([]) == none + "All numbers of kernels are equal."


def test_the_script_compares_two_reports(tmp_path, capsys):
    common = {"benchmark": None, "top": 5, "nsys": "nsys", "compare": True, "out": tmp_path / "out"}
    run_analysis("command", reports=[REPORT, REPORT], **common)
    assert "All numbers of kernels are equal." in capsys.readouterr().out
    assert {path.name for path in common["out"].iterdir()} == {
        f"agreement.{ending}" for ending in ("json", "csv", "md", "tex")
    }
    with pytest.raises(SystemExit) as refused:
        run_analysis("command", reports=[REPORT], **common)
    assert refused.value.code == 2
    assert "--compare: takes two reports, and there are 1" in capsys.readouterr().err
