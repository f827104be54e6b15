"""What the tests of the profiling scripts share: a program that stands in for nsys (it notes how it was called,
and leaves a made report), and the benchmark's rows beside a report."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cs336_systems.configs import named_cell
from cs336_systems.profiling.run_analysis import run_analysis
from cs336_systems.provenance import Provenance
from tests.nsys_reports import MadeReport

CELL: dict[str, Any] = {"compile": "off", "attention": "naive", "optimizer": "adamw", "warmup": 1, "steps": 1}
CELL |= {"batch_size": 4, "device": "cuda", "seed": 0}
MS = 1_000_000

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


def stand_in_nsys(tmp_path: Path) -> Path:
    """A folder with the stand-in; `<python> <folder>/nsys.py` calls it. It leaves the step of `made_report`."""
    folder = tmp_path / "nsys"
    folder.mkdir()
    (folder / "nsys.py").write_text(_STAND_IN)
    made_report(named_cell("small", 128, **CELL)).write(folder / "made.sqlite")
    return folder


def nsys_command(folder: Path) -> str:
    return f"{sys.executable} {folder / 'nsys.py'}"


def made_report(cell: Any) -> MadeReport:
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


def make_provenance() -> Provenance:
    values: dict[str, Any] = dict.fromkeys(Provenance.__dataclass_fields__, "x")
    numbers: dict[str, Any] = {"gpu_count": 1, "cpu_count": 1, "gpu_memory_gib": 80.0}
    return Provenance(**(values | numbers | {"gpu": "NVIDIA H100 80GB HBM3"}))


def write_benchmark_rows(folder: Path, *rows: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    document = {"runs": [asdict(make_provenance())], "rows": list(rows)}
    (folder / "benchmark.json").write_text(json.dumps(document))


def analyze(*reports: Path, out: Path, **options: Any) -> None:
    run_analysis(
        "python scripts/analyze_nsys.py",
        reports=reports,
        out=out,
        **({"benchmark": None, "top": 4, "nsys": "nsys"} | options),
    )
