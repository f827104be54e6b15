"""The profiling scripts as a person runs them: nsys around the benchmark, and that on a card both profilers agree."""

from __future__ import annotations

import csv
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import tyro

from cs336_systems.configs import named_cell
from cs336_systems.profiling.kernel_tables import class_table
from cs336_systems.profiling.nsys import NsysFailed, benchmark_command, capture, export_sqlite, find_nsys
from cs336_systems.profiling.run_analysis import read_trace_file
from cs336_systems.profiling.run_nsys import run_nsys
from cs336_systems.profiling.step_answers import StepRow
from cs336_systems.records import read_results
from tests.profile_helpers import CELL, nsys_command, stand_in_nsys, write_benchmark_rows

ROOT = Path(__file__).resolve().parents[1]
NSYS = os.environ.get("NSYS", "nsys")  # a program, or a command that calls it


@pytest.fixture
def nsys(tmp_path: Path) -> Path:
    return stand_in_nsys(tmp_path)


def _run_nsys(folder: Path, out: Path, **changed: Any) -> None:
    options: dict[str, Any] = {
        "size": ("small",),
        "ctx": (128,),
        "mode": ("train-step",),
        "precision": ("fp32",),
        "top": 4,
    }
    flags = {"resume": False, "dry_run": False, "unprofiled": False}
    options |= flags | CELL | {"nsys": nsys_command(folder)} | changed
    run_nsys("python scripts/profile_nsys.py", out=out, **options)


def test_nsys_is_called_around_the_benchmark_and_its_report_answered(
    nsys: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "out"
    write_benchmark_rows(
        out / "unprofiled",
        asdict(named_cell("small", 128, **CELL)) | {"forward_mean_ms": 38.0, "step_mean_ms": 96.0, "status": "ok"},
    )
    _run_nsys(nsys, out)
    profile, export = (nsys / "calls").read_text().splitlines()
    for flag in ("--trace=cuda,nvtx", "--capture-range=cudaProfilerApi", "--capture-range-end=stop"):
        assert flag in profile
    script = f"{sys.executable} {ROOT / 'scripts' / 'benchmark.py'} --size small --ctx 128 --mode train-step"
    assert script in profile
    assert profile.endswith(f"--nvtx --out {out / 'small-ctx128-train-step-fp32'}")
    assert export.startswith("export --type=sqlite")
    shown = capsys.readouterr()
    assert "profile --trace=cuda,nvtx --sample=none" in shown.err  # printed, to be run by hand
    assert "[1 of 1] small-ctx128-train-step-fp32\n" in shown.err
    assert "| small  |   128 | train-step | fp32        | waiting    |" in shown.out
    assert "0.75" in shown.out  # the share of products in forward
    (row,) = read_results(out / "steps.json", StepRow)[1]
    assert (row.size, row.ctx, row.forward_leader, row.forward_leader_count) == (
        "small",
        128,
        "ampere_sgemm_128x64_tn",
        2,
    )
    assert (row.forward_benchmark_ms, row.forward_ms) == (38, 40)
    assert row.slowdown == pytest.approx(100 / 96 - 1)
    assert row.softmax_time_ratio == pytest.approx(10 / 30)
    assert row.waiting_share == pytest.approx((59 - 4) / 96)  # less what profiling adds to the benchmark's 96 ms
    text = (out / "small-ctx128-train-step-fp32.md").read_text()
    assert "**Bound by kernel launches: the GPU waits for the host.**" in text
    assert "`--optimizer adamw-fused`" in text
    assert "reduce_kernel<512>" in text
    assert (out / "small-ctx128-train-step-fp32.png").stat().st_size > 10_000
    kernels = list(csv.DictReader((out / "kernels.csv").open()))
    assert {row["range"] for row in kernels} == {
        "(all)",
        "forward",
        "block",
        "scores",
        "softmax",
        "final matmul",
        "optimizer",
    }


@pytest.mark.parametrize("resume", [True, False])
def test_resuming_keeps_what_was_measured_without_nsys(nsys: Path, tmp_path: Path, monkeypatch, resume: bool) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr("cs336_systems.profiling.run_nsys.run", ran.append)
    _run_nsys(nsys, tmp_path, resume=resume, unprofiled=True)
    (benchmark,) = ran
    assert ("--resume" in benchmark) == resume
    assert "--resume" not in (nsys / "calls").read_text()  # a cell's own rows are made with its report


def test_a_dry_run_prints_what_a_person_can_run(nsys: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    _run_nsys(nsys, tmp_path / "out", dry_run=True, unprofiled=True, ctx=(128, 256))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 2 * 2
    assert "--ctx 128 256" in lines[0]
    assert "--nvtx" not in lines[0]
    assert [("--nvtx" in line, " export " in line) for line in lines[1:]] == [(True, False), (False, True)] * 2
    assert not (tmp_path / "out").exists()
    assert not (nsys / "calls").exists()


def test_a_cell_that_cannot_run_is_a_row(nsys: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Out of memory leaves the benchmark's row and no report; the other cells' reports are answered."""
    out = tmp_path / "out"
    _run_nsys(nsys, out)
    (nsys / "silent").touch()
    row = asdict(named_cell("2.7b", 128, **CELL)) | {"status": "oom", "reason": "CUDA out of memory"}
    write_benchmark_rows(out / "2.7b-ctx128-train-step-fp32", row)
    _run_nsys(nsys, out, size=("small", "2.7b"), resume=True)
    shown = capsys.readouterr()
    assert "2.7b-ctx128-train-step-fp32 left no report: CUDA out of memory" in shown.err
    assert "2.7b-ctx128-train-step-fp32: oom (CUDA out of memory)" in shown.out
    table = (out / "steps.md").read_text()
    assert [line.split()[1] for line in table.splitlines() if " oom [1] " in line] == ["2.7b-ctx128-train-step-fp32"]
    assert "\n- [1] CUDA out of memory\n" in table
    rows = read_results(out / "steps.json", StepRow)[1]
    assert [(row.size, row.status) for row in rows] == [("small", "ok"), ("2.7b", "oom")]
    assert len((nsys / "calls").read_text().splitlines()) == 3  # the first cell was not captured again


def test_what_nsys_recorded_before_an_interruption_is_kept(
    nsys: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "out"
    _run_nsys(nsys, out)
    report = out / "small-ctx128-train-step-fp32" / "report.sqlite"
    before = report.read_bytes()
    (nsys / "interrupted").touch()
    with pytest.raises(SystemExit) as stopped:
        _run_nsys(nsys, out, ctx=(128, 256), resume=True)
    assert stopped.value.code == 130
    assert "Interrupted. To go on: " in capsys.readouterr().err
    assert report.read_bytes() == before
    assert not list(out.glob("*256*/report*"))  # none of less than was asked for


@pytest.mark.parametrize("where", ["small-ctx128-train-step-fp32", "unprofiled"])
@pytest.mark.parametrize(("name", "value"), [("steps", 2), ("warmup", 0), ("seed", 1), ("batch_size", 2)])
def test_resuming_another_workload_is_refused(
    nsys: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch, where: str, name: str, value: int
) -> None:
    monkeypatch.setattr("cs336_systems.profiling.run_nsys.run_analysis", lambda *_, **__: None)
    out = tmp_path / "out"
    write_benchmark_rows(out / where, asdict(named_cell("small", 128, **CELL)) | {"step_mean_ms": 96.0, "status": "ok"})
    _run_nsys(nsys, out)
    calls = (nsys / "calls").read_text()
    _run_nsys(nsys, out, resume=True)
    capsys.readouterr()
    if (where, name) == ("unprofiled", "batch_size"):  # rows of several lie side by side there
        _run_nsys(nsys, out, resume=True, **{name: value})
    else:
        with pytest.raises(SystemExit) as stopped:
            _run_nsys(nsys, out, ctx=(256, 128), resume=True, **{name: value})
        assert stopped.value.code == 2
        what = f"what is there of small-ctx128-train-step-fp32 has {name} {CELL[name]}, and this run {value}"
        assert capsys.readouterr().err == f"error: --resume {out / where}: {what}; name another --out\n"
    assert (nsys / "calls").read_text() == calls


def test_an_export_that_was_interrupted_is_not_taken_for_whole(nsys: Path, tmp_path: Path) -> None:
    (nsys / "export-interrupted").touch()
    with pytest.raises(SystemExit) as stopped:
        _run_nsys(nsys, tmp_path / "out")
    assert stopped.value.code == 130
    folder = tmp_path / "out" / "small-ctx128-train-step-fp32"
    assert [path.name for path in folder.iterdir()] == ["report.nsys-rep"]
    (nsys / "export-interrupted").unlink()
    _run_nsys(nsys, tmp_path / "out", resume=True)
    assert (folder / "report.sqlite").read_bytes() == (nsys / "made.sqlite").read_bytes()


def test_resuming_takes_the_sqlite_of_a_report_that_is_gone(nsys: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    _run_nsys(nsys, out)
    (out / "small-ctx128-train-step-fp32" / "report.nsys-rep").unlink()
    calls = (nsys / "calls").read_text()
    _run_nsys(nsys, out, resume=True)
    assert (nsys / "calls").read_text() == calls
    assert [row.status for row in read_results(out / "steps.json", StepRow)[1]] == ["ok"]


def test_resuming_makes_the_sqlite_of_a_younger_report_anew_and_captures_nothing(nsys: Path, tmp_path: Path) -> None:
    _run_nsys(nsys, tmp_path / "out")
    report = tmp_path / "out" / "small-ctx128-train-step-fp32" / "report.nsys-rep"
    (sqlite := report.with_suffix(".sqlite")).write_bytes(b"of an earlier report")
    os.utime(sqlite, (0, 0))
    (nsys / "calls").unlink()
    _run_nsys(nsys, tmp_path / "out", resume=True)
    (call,) = (nsys / "calls").read_text().splitlines()
    assert call.startswith("export --type=sqlite")
    assert sqlite.read_bytes() == (nsys / "made.sqlite").read_bytes()


def test_an_earlier_reports_sqlite_does_not_outlive_it(nsys: Path, tmp_path: Path) -> None:
    """Or `--resume` would take it for the report that was asked for last."""
    _run_nsys(nsys, tmp_path / "out")
    (nsys / "interrupted").touch()
    with pytest.raises(SystemExit):
        _run_nsys(nsys, tmp_path / "out")
    assert not list(tmp_path.glob("out/small-*/report*"))


def test_a_capture_that_fails_otherwise_ends_the_run(nsys: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (nsys / "fails").write_text("3")
    with pytest.raises(SystemExit) as stopped:
        _run_nsys(nsys, tmp_path / "out", ctx=(128, 256))
    assert stopped.value.code == 1
    assert "ended with status 3" in capsys.readouterr().err
    assert len((nsys / "calls").read_text().splitlines()) == 1


def test_failures_of_nsys_say_what_to_do(nsys: Path, tmp_path: Path) -> None:
    program, report = find_nsys(nsys_command(nsys)), tmp_path / "report.nsys-rep"
    (nsys / "silent").touch()
    with pytest.raises(NsysFailed, match="nothing called cudaProfilerStart"):
        capture(program, report, ["true"])
    (tmp_path / "report.qdstrm").touch()
    with pytest.raises(NsysFailed, match=r"report\.qdstrm is what it left.*libdw1 and libelf1"):
        capture(program, report, ["true"])
    (nsys / "fails").write_text("3")
    with pytest.raises(NsysFailed, match="ended with status 3"):
        capture(program, report, ["true"])
    (nsys / "made.sqlite").unlink()
    report.touch()
    with pytest.raises(NsysFailed, match=r"nsys export of .* ended with status 1"):
        export_sqlite(report, program)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"size": ("tiny", "gigantic")}, "error: --size gigantic: must be one of tiny, small"),
        ({"ctx": (0,)}, "error: --ctx 0: must be between 1 and"),
        ({"mode": ()}, "error: --mode: needs at least one value"),
        ({"nsys": "no-such-nsys --flag"}, "error: --nsys no-such-nsys --flag: is no program here.*profile_kernels.py"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(
    nsys: Path, tmp_path: Path, capsys: pytest.CaptureFixture, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        _run_nsys(nsys, tmp_path / "out", **changed)
    assert stopped.value.code == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (nsys / "calls").exists()


def _arguments_of(script: Path) -> Any:
    spec = importlib.util.spec_from_file_location("a_script", script)
    module = sys.modules["a_script"] = importlib.util.module_from_spec(spec)  # where its annotations are looked up
    spec.loader.exec_module(module)
    return module.Arguments


def test_the_benchmarks_command_is_one_that_it_takes(tmp_path: Path) -> None:
    cells = [named_cell("tiny", ctx, **CELL, precision="bf16") for ctx in (16, 32)]
    _, script, *words = benchmark_command(cells, tmp_path, nvtx=True, resume=True)
    arguments = tyro.cli(_arguments_of(Path(script)), args=words)
    assert arguments.resume
    assert (arguments.size, arguments.ctx, arguments.precision) == (("tiny",), (16, 32), ("bf16",))
    assert (arguments.steps, arguments.device, arguments.nvtx, arguments.out) == (1, "cuda", True, tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(
    shutil.which(shlex.split(NSYS)[0]) is None, reason="needs nsys (NSYS names a command that calls it)"
)
def test_both_profilers_agree_on_a_card(tmp_path: Path) -> None:
    """Kernels, and their time in each phase within 3%, of the same step, which is large enough to keep a card busy."""
    cell = ["--size", "small", "--ctx", "512", "--steps", "5"]
    for script, arguments in (("profile_nsys", ["--nsys", NSYS, "--no-unprofiled"]), ("profile_kernels", [])):
        command = [sys.executable, str(ROOT / "scripts" / f"{script}.py"), *cell, *arguments]
        run = subprocess.run([*command, "--out", str(tmp_path / script)], capture_output=True, text=True, timeout=240)
        assert run.returncode == 0, run.stderr
    name = "small-ctx512-train-step-fp32"
    from_nsys = read_trace_file(tmp_path / "profile_nsys" / name / "report.sqlite")
    from_torch = read_trace_file(tmp_path / "profile_kernels" / f"{name}.json.gz")
    for kind in ("step", "forward", "backward", "optimizer"):
        first = {row.kernel: row for row in class_table(from_nsys, kind)}
        second = {row.kernel: row for row in class_table(from_torch, kind)}
        assert {label: row.count for label, row in first.items()} == {label: row.count for label, row in second.items()}
        for label, row in first.items():
            if row.share > 0.05:
                assert row.total_ms == pytest.approx(second[label].total_ms, rel=0.03)
