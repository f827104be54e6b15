"""Reading nsys's reports: to which range a kernel belongs in every hard case, and what is said of reports that lack
something."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cs336_systems.profiling.kernel_tables import class_table, kernel_table, range_table
from cs336_systems.profiling.nsys_report import read_report
from cs336_systems.profiling.nsys_trim import trim_report
from cs336_systems.profiling.trace import Kernel, OpenRanges, Range, Trace
from tests.nsys_reports import GPU_NAME, GRAPH, KERNEL, MEMCPY, MEMSET, NVTX, PID, RUNTIME, MadeReport

AUTOGRAD = PID + 17


def _read(report: MadeReport, tmp_path: Path, without: tuple[str, ...] = ()) -> Trace:
    return read_report(report.write(tmp_path / "report.sqlite", without))


def _ranges(kernel: Kernel) -> list[str]:
    return [opened.name for opened in kernel.ranges]


def test_a_kernel_belongs_to_the_ranges_open_at_its_launch_and_not_when_it_ran(tmp_path: Path) -> None:
    report = MadeReport()
    report.range("step", 0, 1000)
    report.range("forward", 10, 100)
    report.range("block 0", 20, 60)
    report.range("backward", 110, 300)
    report.kernel("void gemm<float>(float*)", 500, 600, launch=30)
    report.kernel("softmax", 600, 610, launch=70)
    report.kernel("late", 700, 705, launch=1000)  # the step's end is not in the step
    kernels = _read(report, tmp_path).kernels
    assert [kernel.name for kernel in kernels] == ["void gemm<float>(float*)", "softmax", "late"]
    assert [_ranges(kernel) for kernel in kernels] == [["step", "forward", "block 0"], ["step", "forward"], []]
    assert (kernels[0].start_ns, kernels[0].end_ns, kernels[0].launch_ns, kernels[0].stream) == (500, 600, 30, 7)


def test_what_autograds_thread_launches_belongs_to_what_the_main_thread_has_open(tmp_path: Path) -> None:
    report = MadeReport()
    report.range("step", 0, 1000)
    report.range("forward", 10, 100)
    report.range("backward", 110, 300)
    report.range("block 1", 150, 200, tid=AUTOGRAD)  # a checkpoint's recomputation
    report.kernel("outside", 400, 410, launch=120, tid=AUTOGRAD)
    report.kernel("recomputed", 410, 420, launch=160, tid=AUTOGRAD)
    report.kernel("idle thread", 420, 430, launch=350, tid=AUTOGRAD + 1)
    assert [_ranges(kernel) for kernel in _read(report, tmp_path).kernels] == [
        ["step", "backward"],
        ["step", "backward", "block 1"],
        ["step"],
    ]


def test_the_thread_with_the_longest_ranges_stands_in_for_a_main_thread_without_any(tmp_path: Path) -> None:
    report = MadeReport()
    report.range("step", 0, 1000, tid=PID + 1)
    report.range("loader", 100, 200, tid=PID + 2)
    report.kernel("from a third", 400, 410, launch=150, tid=AUTOGRAD)
    report.kernel("the loader's own", 410, 420, launch=160, tid=PID + 2)
    kernels = _read(report, tmp_path).kernels
    assert [_ranges(kernel) for kernel in kernels] == [["step"], ["step", "loader"]]


def test_processes_have_correlation_ids_and_ranges_of_their_own(tmp_path: Path) -> None:
    report = MadeReport()
    for pid, name in ((PID, "forward"), (PID + 100, "backward")):
        report.range(name, 0, 100, tid=pid, pid=pid)
        report.launch(50, tid=pid, pid=pid, correlation=1)
        report.one_of_a_launch(f"kernel of {name}", 200, 300 if pid == PID else 301, 1, pid, deviceId=pid - PID)
    kernels = _read(report, tmp_path).kernels
    assert [(kernel.name, _ranges(kernel)) for kernel in kernels] == [
        ("kernel of forward", ["forward"]),
        ("kernel of backward", ["backward"]),
    ]
    assert kernels[0].process != kernels[1].process


def test_of_calls_within_each_other_the_outermost_launched(tmp_path: Path) -> None:
    report = MadeReport()
    report.range("forward", 0, 100)
    report.range("backward", 100, 200)
    report.launch(105, correlation=3)  # the driver's call within the runtime's
    report.launch(99, correlation=3)
    report.one_of_a_launch("kernel", 300, 310, 3)
    assert _ranges(_read(report, tmp_path).kernels[0]) == ["forward"]


def test_a_cuda_graphs_kernels_share_its_launch(tmp_path: Path) -> None:
    report = MadeReport()
    report.range("forward", 0, 100)
    correlation = report.launch(50)
    for index in range(3):
        report.one_of_a_launch(f"node {index}", 200 + index, 201 + index, correlation, graphNodeId=index)
    trace = _read(report, tmp_path, without=(GRAPH,))
    assert [_ranges(kernel) for kernel in trace.kernels] == [["forward"]] * 3
    assert not any("graph" in note for note in trace.notes)


def test_a_cuda_graph_recorded_whole_is_one_entry_and_said(tmp_path: Path) -> None:
    report = MadeReport()
    report.range("forward", 0, 100)
    report.ran(GRAPH, 200, 900, report.launch(50), graphId=12)
    trace = _read(report, tmp_path, without=(KERNEL,))
    assert [(kernel.name, kernel.duration_ns) for kernel in trace.kernels] == [("CUDA graph 12", 700)]
    assert any("--cuda-graph-trace=node" in note for note in trace.notes)


def test_ranges_that_cross_each_other_and_threads(tmp_path: Path) -> None:
    report = MadeReport()
    report.range("epoch", 0, 500, tid=AUTOGRAD, push=False)  # started in one thread, for the process
    report.range("step", 10, 300)
    report.range("overhanging", 250, 400, push=False)
    for launch in (5, 100, 270, 350, 450):
        report.kernel("kernel", 1000 + launch, 1001 + launch, launch=launch)
    assert [_ranges(kernel) for kernel in _read(report, tmp_path).kernels] == [
        ["epoch"],
        ["epoch", "step"],
        ["epoch", "step", "overhanging"],
        ["epoch", "overhanging"],
        ["epoch"],
    ]


def test_kernels_whose_launch_was_not_recorded_are_kept_and_counted(tmp_path: Path) -> None:
    report = MadeReport()
    report.range("step", 0, 100)
    report.kernel("launched before the report began", 20, 30, launch=None)
    report.kernel("launched in it", 30, 40, launch=10)
    trace = _read(report, tmp_path)
    assert [_ranges(kernel) for kernel in trace.kernels] == [[], ["step"]]
    assert trace.kernels[0].launch_ns is None
    assert trace.notes[0].startswith("1 of 2 kernels have no launch")


@pytest.mark.parametrize("without", [(), (NVTX,)])
def test_a_report_with_no_ranges_is_one_table(tmp_path: Path, without: tuple[str, ...]) -> None:
    report = MadeReport()
    report.kernel("ampere_sgemm_128x64_tn", 20, 50, launch=10)
    report.kernel("ampere_sgemm_128x64_tn", 50, 60, launch=11)
    trace = _read(report, tmp_path, without)
    assert "no NVTX ranges" in trace.notes[0]
    assert "benchmark.py --nvtx" in trace.notes[0]
    assert range_table(trace) == []
    (row,) = kernel_table(trace)
    assert (row.count, row.total_ms, row.share) == (2, pytest.approx(40e-6), 1.0)


def test_a_range_that_never_closed_ends_with_the_report(tmp_path: Path) -> None:
    report = MadeReport()
    report.range("step", 0, None)
    report.kernel("kernel", 900, 950, launch=800)
    trace = _read(report, tmp_path)
    assert _ranges(trace.kernels[0]) == ["step"]
    assert trace.steps[0].end_ns == 805


def test_copies_and_fills_are_kernels_too(tmp_path: Path) -> None:
    report = MadeReport()
    report.range("step", 0, 100)
    report.ran(MEMCPY, 20, 30, report.launch(1), bytes=8, copyKind=1)
    report.ran(MEMCPY, 30, 40, report.launch(2), bytes=8, copyKind=8)
    report.ran(MEMSET, 40, 50, report.launch(3), bytes=8)
    trace = _read(report, tmp_path, without=(GRAPH,))
    # The table of kernels is there, and empty.
    assert [kernel.name for kernel in trace.kernels] == ["Memcpy HtoD", "Memcpy DtoD", "Memset"]
    assert [row.kernel for row in class_table(trace)] == ["copy"]


def test_the_report_says_what_ran_and_on_what(tmp_path: Path) -> None:
    report = MadeReport()
    report.cell({"size": "small", "ctx": 128})
    report.kernel("kernel", 900, 950, launch=800)
    trace = _read(report, tmp_path)
    assert trace.cell == {"size": "small", "ctx": 128}
    assert trace.gpu == GPU_NAME


def test_exports_without_registered_strings_are_read(tmp_path: Path) -> None:
    report = MadeReport()
    report.string("padding, so that the next range has its text in its own column")
    report.add("META_DATA_EXPORT", name="EXPORT_VERSION", value="1")
    report.range("step", 0, 100)
    report.kernel("kernel", 20, 30, launch=10)
    path = report.write(tmp_path / "report.sqlite")
    import sqlite3

    with sqlite3.connect(path) as database:
        database.execute("ALTER TABLE NVTX_EVENTS DROP COLUMN textId")
    assert _ranges(read_report(path).kernels[0]) == ["step"]


@pytest.mark.parametrize(
    ("without", "missing"),
    [
        ((KERNEL, GRAPH), r"has no kernels \(no table CUPTI_ACTIVITY_KIND_KERNEL\).*--trace=cuda,nvtx"),
        ((RUNTIME,), r"has kernels but no launches.*--trace=cuda,nvtx"),
        (("StringIds",), r"is no report of nsys"),
    ],
)
def test_a_report_that_lacks_a_table_says_how_to_capture_it(
    tmp_path: Path, without: tuple[str, ...], missing: str
) -> None:
    report = MadeReport()
    report.kernel("kernel", 20, 30, launch=10)
    with pytest.raises(ValueError, match=missing):
        _read(report, tmp_path, without)


def test_files_that_are_no_reports_are_refused(tmp_path: Path) -> None:
    text = tmp_path / "notes.sqlite"
    text.write_text("no database")
    with pytest.raises(ValueError, match=r"notes\.sqlite: must be a \.nsys-rep file, or SQLite that `nsys export"):
        read_report(text)
    with pytest.raises(ValueError, match="there is no such file"):
        read_report(tmp_path / "missing.sqlite")
    report = MadeReport()
    report.kernel("kernel", 20, 30, launch=10)
    whole = report.write(tmp_path / "whole.sqlite").read_bytes()
    (tmp_path / "cut.sqlite").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"cut\.sqlite: cannot be read .*export it again"):
        read_report(tmp_path / "cut.sqlite")
    import sqlite3

    with sqlite3.connect(tmp_path / "whole.sqlite") as database:
        database.execute(f"ALTER TABLE {KERNEL} DROP COLUMN globalPid")
    with pytest.raises(ValueError, match="has no column globalPid"):
        read_report(tmp_path / "whole.sqlite")


_spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12), st.integers(0, 2)), max_size=8)


@given(_spans, st.integers(-1, 45), st.integers(0, 3))
@settings(max_examples=300)
def test_open_ranges_by_definition(spans: list[tuple[int, int, int]], time: int, thread: int) -> None:
    """Thread 0 is the main one (its number is the process's), thread 2 stands for the whole process."""
    ranges = [Range(str(i), start, start + n, 0, None if t == 2 else t) for i, (start, n, t) in enumerate(spans)]
    opened = OpenRanges(ranges).at(0, thread, time)
    main = 0 if any(r.thread == 0 for r in ranges) else 1
    expected = {r for r in ranges if r.start_ns <= time < r.end_ns and r.thread in (None, main, thread)}
    assert set(opened) == expected
    assert len(opened) == len(expected)
    assert list(opened) == sorted(opened, key=lambda r: (r.start_ns, -r.end_ns))


def _two_steps() -> MadeReport:
    report = MadeReport()
    report.cell({"size": "small", "ctx": 128}, start=90_000)
    for index, start in enumerate((100_000, 200_000)):
        report.range("step", start, start + 90_000)
        report.range("forward", start + 10, start + 40_000)
        report.range("backward", start + 40_010, start + 80_000)
        report.kernel("ampere_sgemm_128x64_tn", start + 50, start + 20_000, launch=start + 20)
        report.kernel(f"reduce_kernel_{index}", start + 50_000, start + 70_000, launch=start + 45_000, tid=AUTOGRAD)
        report.ran(MEMCPY, start + 80_000, start + 81_000, report.launch(start + 79_000), bytes=8, copyKind=8)
        report.launch(start + 85_000)  # a call that launched nothing
    return report


def test_trimming_keeps_the_first_steps_as_they_were(tmp_path: Path) -> None:
    report = _two_steps().write(tmp_path / "report of two steps #1.sqlite")  # what an address would take for more
    small = tmp_path / "small.sqlite"
    assert trim_report(report, small) == small.stat().st_size < report.stat().st_size
    full, cut = read_report(report), read_report(small)
    assert len(full.steps) == 2
    assert len(cut.steps) == 1
    assert cut.steps[0].start_ns == 0
    assert [(k.name, k.duration_ns, _ranges(k)) for k in cut.kernels] == [
        (k.name, k.duration_ns, _ranges(k)) for k in full.kernels[:3]
    ]
    assert [k.start_ns - k.launch_ns for k in cut.kernels] == [k.start_ns - k.launch_ns for k in full.kernels[:3]]
    assert (cut.cell, cut.gpu) == (full.cell, full.gpu)
    assert b"reduce_kernel_1" not in small.read_bytes()
    trim_report(report, small, steps=5)
    again = read_report(small)
    assert [kernel_table(again, kind) for kind in again.kinds()] == [kernel_table(full, kind) for kind in full.kinds()]


def test_what_cannot_be_trimmed(tmp_path: Path) -> None:
    report = MadeReport()
    report.kernel("kernel", 20, 30, launch=10)
    path = report.write(tmp_path / "report.sqlite")
    with pytest.raises(ValueError, match="has no range 'step' to cut at"):
        trim_report(path, tmp_path / "small.sqlite")
    with pytest.raises(ValueError, match="must be another file"):
        trim_report(path, path)
    with pytest.raises(ValueError, match="steps=0: must be at least 1"):
        trim_report(path, tmp_path / "small.sqlite", steps=0)
