"""The profiling scripts as a person runs them: nsys around the benchmark, reports into answers, and the way without
nsys. A small program stands in for nsys: it notes how it was called, and leaves a made report."""

from __future__ import annotations

import csv
import errno
import gzip
import importlib.util
import json
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
from cs336_systems.profiling.run_analysis import failed_rows, find_reports, read_trace_file, report_name, run_analysis
from cs336_systems.profiling.run_kernels import run_kernels
from cs336_systems.profiling.run_nsys import run_nsys
from cs336_systems.profiling.step_answers import StepRow
from cs336_systems.provenance import Provenance
from cs336_systems.records import read_results
from tests.nsys_reports import MadeReport
from tests.script_helpers import ScriptProcess

ROOT = Path(__file__).resolve().parents[1]
CELL: dict[str, Any] = {"compile": "off", "attention": "naive", "optimizer": "adamw", "warmup": 1, "steps": 1}
CELL |= {"batch_size": 4, "device": "cuda", "seed": 0}
MS = 1_000_000
NSYS = os.environ.get("NSYS", "nsys")  # a program, or a command that calls it

_STAND_IN = """
import pathlib, shutil, sys
here = pathlib.Path(__file__).parent
with (here / "calls").open("a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
words = dict(word.split("=", 1) for word in sys.argv if word.startswith("--") and "=" in word)
out = pathlib.Path(words["--output"])
if sys.argv[1] == "export":
    shutil.copy(here / "made.sqlite", out)
    if (here / "export-interrupted").exists():
        import os, signal
        out.write_bytes(out.read_bytes()[:5000])
        os.kill(os.getppid(), signal.SIGINT)
elif (here / "fails").exists():
    sys.exit(int((here / "fails").read_text()))
elif (here / "interrupted").exists():
    import os, signal
    out.write_text("part of a report")
    os.kill(os.getppid(), signal.SIGINT)
elif not (here / "silent").exists():
    out.write_text("report")
"""


@pytest.fixture
def nsys(tmp_path: Path) -> Path:
    """A folder with the stand-in; `<python> <folder>/nsys.py` calls it. It leaves the step of `_made_report`."""
    folder = tmp_path / "nsys"
    folder.mkdir()
    (folder / "nsys.py").write_text(_STAND_IN)
    _made_report(named_cell("small", 128, **CELL)).write(folder / "made.sqlite")
    return folder


def _command(folder: Path) -> str:
    return f"{sys.executable} {folder / 'nsys.py'}"


def _made_report(cell: Any) -> MadeReport:
    """A step of 100 ms: 30 ms of products, 10 ms of others, and 60 ms of waiting for launches in the optimizer."""
    report = MadeReport()
    report.range("step", 0, 100 * MS)
    report.cell(asdict(cell))
    report.range("forward", 0, 40 * MS)
    report.range("block 0", 1, 39 * MS)
    for part, start in (("scores", 2), ("softmax", 12), ("final matmul", 22)):
        report.range(part, start * MS, (start + 9) * MS)
    report.kernel("ampere_sgemm_128x64_tn", 0, 15 * MS, launch=2 * MS)
    report.kernel("void at::native::reduce_kernel<512>(T)", 15 * MS, 25 * MS, launch=13 * MS)
    report.kernel("ampere_sgemm_128x64_tn", 25 * MS, 40 * MS, launch=23 * MS)
    report.range("optimizer", 50 * MS, 100 * MS)
    report.kernel("void at::native::vectorized_elementwise_kernel<4>(T)", 99 * MS, 100 * MS, launch=98 * MS)
    return report


def _provenance() -> Provenance:
    values: dict[str, Any] = dict.fromkeys(Provenance.__dataclass_fields__, "x")
    numbers: dict[str, Any] = {"gpu_count": 1, "cpu_count": 1, "gpu_memory_gib": 80.0}
    return Provenance(**(values | numbers | {"gpu": "NVIDIA H100 80GB HBM3"}))


def _benchmark_rows(folder: Path, *rows: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    document = {"runs": [asdict(_provenance())], "rows": list(rows)}
    (folder / "benchmark.json").write_text(json.dumps(document))


def _run_nsys(folder: Path, out: Path, **changed: Any) -> None:
    options: dict[str, Any] = {
        "size": ("small",),
        "ctx": (128,),
        "mode": ("train-step",),
        "precision": ("fp32",),
        "top": 4,
    }
    flags = {"resume": False, "dry_run": False, "unprofiled": False}
    options |= flags | CELL | {"nsys": _command(folder)} | changed
    run_nsys("python scripts/profile_nsys.py", out=out, **options)


def test_nsys_is_called_around_the_benchmark_and_its_report_answered(
    nsys: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "out"
    _benchmark_rows(
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
    _benchmark_rows(out / "2.7b-ctx128-train-step-fp32", row)
    _run_nsys(nsys, out, size=("small", "2.7b"), resume=True)
    shown = capsys.readouterr()
    assert "2.7b-ctx128-train-step-fp32 left no report: CUDA out of memory" in shown.err
    assert "2.7b-ctx128-train-step-fp32: oom (CUDA out of memory)" in shown.out
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
    assert "--resume goes on from here" in capsys.readouterr().err
    assert report.read_bytes() == before
    assert not list(out.glob("*256*/report*"))  # none of less than was asked for


@pytest.mark.parametrize("where", ["small-ctx128-train-step-fp32", "unprofiled"])
@pytest.mark.parametrize(("name", "value"), [("steps", 2), ("warmup", 0), ("seed", 1), ("batch_size", 2)])
def test_resuming_another_workload_is_refused(
    nsys: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch, where: str, name: str, value: int
) -> None:
    monkeypatch.setattr("cs336_systems.profiling.run_nsys.run_analysis", lambda *_, **__: None)
    out = tmp_path / "out"
    _benchmark_rows(out / where, asdict(named_cell("small", 128, **CELL)) | {"step_mean_ms": 96.0, "status": "ok"})
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
    program, report = find_nsys(_command(nsys)), tmp_path / "report.nsys-rep"
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


def _analyze(*reports: Path, out: Path, **options: Any) -> None:
    run_analysis(
        "python scripts/analyze_nsys.py",
        reports=reports,
        out=out,
        **({"benchmark": None, "top": 4, "nsys": "nsys"} | options),
    )


def test_a_report_of_another_program_is_answered_too(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    report = MadeReport()
    report.kernel("void my_kernel<float>(float*)", 10 * MS, 20 * MS, launch=1)
    report.kernel("ampere_sgemm_128x64_tn", 20 * MS, 50 * MS, launch=2)
    _analyze(report.write(tmp_path / "theirs.v2.sqlite"), out=tmp_path / "out")
    assert "theirs.v2" in capsys.readouterr().out
    text = (tmp_path / "out" / "theirs.v2.md").read_text()
    assert "no NVTX ranges" in text
    assert "## The whole report" in text
    assert "my_kernel<float>" in text
    assert "**Bound by matrix products.**" in text


def test_reports_are_found_exported_and_named(nsys: Path, tmp_path: Path) -> None:
    exported = tmp_path / "cells" / "small-ctx128" / "report.nsys-rep"
    exported.parent.mkdir(parents=True)
    exported.touch()
    (tmp_path / "cells" / "unprofiled").mkdir()
    assert find_reports([tmp_path / "cells"]) == ([exported], [tmp_path / "cells"])
    assert (report_name(exported), report_name(tmp_path / "2.7b.json.gz")) == ("small-ctx128", "2.7b")
    _analyze(tmp_path / "cells", out=tmp_path / "out", nsys=_command(nsys))
    assert (tmp_path / "out" / "small-ctx128.md").exists()
    assert exported.with_suffix(".sqlite").exists()


def test_a_report_that_cannot_be_read_among_others_is_named_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    for name in ("small-ctx128", "small-ctx256"):
        report = tmp_path / "cells" / name / "report.sqlite"
        report.parent.mkdir(parents=True)
        _made_report(named_cell("small", 128, **CELL)).write(report)
    report.write_bytes(report.read_bytes()[:5000])
    with pytest.raises(SystemExit) as stopped:
        _analyze(tmp_path / "cells", out=tmp_path / "out")
    assert stopped.value.code == 1
    assert f"error: left out: {report}" in capsys.readouterr().err
    assert len(read_results(tmp_path / "out" / "steps.json", StepRow)[1]) == 1


def test_a_full_disk_leaves_the_reports_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    report = _made_report(named_cell("small", 128, **CELL)).write(tmp_path / "full.sqlite")
    before = report.read_bytes()
    monkeypatch.setattr("cs336_systems.profiling.analysis.write_atomically", full)
    with pytest.raises(SystemExit) as stopped:
        _analyze(report, out=tmp_path / "out")
    assert stopped.value.code == 1
    assert "out: No space left on device; the reports are whole" in capsys.readouterr().err
    assert report.read_bytes() == before


def test_trimming_by_the_script(tmp_path: Path) -> None:
    report = _made_report(named_cell("small", 128, **CELL)).write(tmp_path / "full.sqlite")
    script = [sys.executable, str(ROOT / "scripts" / "analyze_nsys.py"), str(report)]
    run = subprocess.run(
        [*script, "--trim", str(tmp_path / "small.sqlite")], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr.startswith(f"{tmp_path / 'small.sqlite'}: ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (b"text", "notes.txt", "notes.txt: must be a .nsys-rep file, or SQLite"),
        (b"{}", "trace.json", "trace.json: is no trace of torch.profiler (trace: must be "),
        (b"[1,2]", "list.json", "list.json: is no trace of torch.profiler (trace: must be "),
        (b"3", "three.json", "three.json: is no trace of torch.profiler (trace: must be "),
        (b'{"runs": [], "rows": []}', "steps.json", "steps.json: is no trace of torch.profiler (trace: must be "),
        (b'{"traceEvents": null}', "null.json", "null.json: is no trace of torch.profiler (trace: must be "),
        (b'{"traceEvents": [1]}', "one.json", "one.json: is no trace of torch.profiler (trace: must be "),
        (b"{", "cut.json", "cut.json: is no trace of torch.profiler (Expecting"),
        (b'{"\xff', "bytes.json", "bytes.json: is no trace of torch.profiler ('utf-8' codec"),
        (
            gzip.compress(b'{"traceEvents": []}', mtime=0)[:-12],  # the time would be in the test's name
            "cut.json.gz",
            "cut.json.gz: is no trace of torch.profiler (Compr",
        ),
        (
            gzip.compress(b"{}", mtime=0)[:10] + b"\xff" * 9,
            "bad.json.gz",
            "bad.json.gz: is no trace of torch.profiler (Error -3",
        ),
        (b"text", "text.json.gz", "text.json.gz: is no trace of torch.profiler (Not a gzipped file"),
        (None, "missing.sqlite", "missing.sqlite: there is no such file or folder"),
    ],
)
def test_what_is_no_report_ends_with_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture, content: bytes | None, name: str, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(SystemExit) as stopped:
        _analyze(tmp_path / name, out=tmp_path / "out")
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "Expecting property name"),
        ("[]", "list indices must be"),
        ('{"rows": 5}', "it has no 'runs'"),
        ('{"runs": [], "rows": []}', "it has no runs"),
        ('{"runs": [{"command": "x"}], "rows": []}', "missing 12 required positional arguments"),
        (json.dumps({"runs": [asdict(_provenance())], "rows": 5}), "its rows must be a list of objects"),
        (json.dumps({"runs": [asdict(_provenance())], "rows": [{}]}), "its rows must be a list of objects"),
    ],
)
@pytest.mark.parametrize("is_compared", [False, True])
def test_a_bad_benchmark_beside_a_report_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture, content: str, told: str, is_compared: bool
) -> None:
    report = _made_report(named_cell("small", 128, **CELL)).write(tmp_path / "report.sqlite")
    beside = tmp_path / "benchmark.json"
    beside.write_text(content)
    with pytest.raises(SystemExit) as stopped:
        _analyze(*[report] * (1 + is_compared), out=tmp_path / "out", compare=is_compared)
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {beside}: is no file of scripts/benchmark.py (")
    assert told in line


def test_a_benchmark_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    report = _made_report(named_cell("small", 128, **CELL)).write(tmp_path / "report.sqlite")
    with pytest.raises(SystemExit) as stopped:
        _analyze(report, out=tmp_path / "out", benchmark=tmp_path / "none.json")
    assert stopped.value.code == 2
    assert f"error: --benchmark {tmp_path / 'none.json'}: must be a file" in capsys.readouterr().err


def test_a_failed_row_without_its_cell_is_named(tmp_path: Path) -> None:
    _benchmark_rows(tmp_path, {"status": "oom", "reason": "CUDA out of memory"})
    with pytest.raises(ValueError, match=r"benchmark\.json: is no file of scripts/benchmark\.py \(a row has no 'size'"):
        failed_rows(tmp_path)


def test_the_same_tables_without_nsys(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A CPU's operators, from a step to files, and again from the trace that was kept."""
    what: dict[str, Any] = CELL | {"device": "cpu", "mode": "train-step", "precision": "fp32", "checkpoint_every": 0}
    made = run_kernels(
        "python scripts/profile_kernels.py", size="tiny", ctx=16, benchmark=None, top=5, out=tmp_path / "out", **what
    )
    assert made.verdict is None
    assert made.row.forward_leader == "aten::mm"
    name = "tiny-ctx16-train-step-fp32"
    written = {path.name for path in (tmp_path / "out").iterdir()}
    tables = {"answers.md", "kernels.csv", *(f"steps.{ending}" for ending in ("json", "csv", "md", "tex"))}
    assert written == tables | {f"{name}{ending}" for ending in (".md", ".png", ".json.gz")}
    text = (tmp_path / "out" / f"{name}.md").read_text()
    assert "| operator" in text
    assert "Bound by" not in text  # nothing is launched on a CPU
    _analyze(tmp_path / "out" / f"{name}.json.gz", out=tmp_path / "again", top=5)
    assert (tmp_path / "again" / f"{name}.md").read_text() == text
    assert capsys.readouterr().out.count("aten::mm") == 6


def test_kernels_of_a_cell_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    what: dict[str, Any] = CELL | {"mode": "train-step", "precision": "fp32", "checkpoint_every": 0}
    for changed, message in (
        ({"ctx": 0}, "--ctx 0"),
        ({"device": "cuda:77"}, "--device cuda:77: is not on this machine"),
    ):
        arguments = {"size": "tiny", "ctx": 16, "benchmark": None, "top": 5, "out": tmp_path, **what, **changed}
        with pytest.raises(SystemExit) as stopped:
            run_kernels("python scripts/profile_kernels.py", **arguments)
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err


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


def test_a_cpu_is_not_asked_for_its_gpus_aloud(tmp_path):
    """The profiler's library would write an error where there is no driver."""
    quick = ["--device", "cpu", "--size", "tiny", "--ctx", 16, "--warmup", 0, "--steps", 1]
    run = ScriptProcess(tmp_path, "profile_kernels", *quick, "--out", tmp_path / "out")
    assert run.wait() == 0, run.errors
    assert run.errors.splitlines() == [f"Answers, rows, kernels, trace, tables and picture: {tmp_path}/out/"]
