"""The README's tables of profiles and training: each from made rows of its type, and empty where there are none yet."""

import pytest

from cs336_systems.benchmarking.checkpointing import CheckpointRow
from cs336_systems.benchmarking.convergence_report import ConvergenceRow
from cs336_systems.benchmarking.precision_benchmark import PrecisionRow
from cs336_systems.benchmarking.profile_tables import PROFILE_BLOCKS
from cs336_systems.configs import named_cell
from cs336_systems.profiling.agreement import AgreementRow
from cs336_systems.profiling.memory_profile import MemoryRow
from cs336_systems.profiling.step_answers import StepRow
from cs336_systems.records import ResultsFile
from tests.example_rows import RUN

CELL = vars(named_cell("small", 256, device="cuda"))


def _write(folder, name, row_type, rows):
    results = ResultsFile(folder, name, row_type, RUN)
    for row in rows:
        results.append(row)


@pytest.mark.parametrize("name", PROFILE_BLOCKS)
def test_a_table_without_rows_is_empty(tmp_path, name):
    assert PROFILE_BLOCKS[name](tmp_path) == ""


def test_steps_under_nsys(tmp_path):
    steps = {"step_benchmark_ms": 50.0, "step_ms": 54.0, "slowdown": 0.08, "step_matmul_share": 0.6}
    fitted = StepRow("small", size="small", ctx=128, **steps, waiting_share=0.7, binding="waiting")
    failed = StepRow("2.7b", "oom", "out of memory", size="2.7b", ctx=1024)
    _write(tmp_path / "nsys", "steps", StepRow, [fitted, failed])
    table = PROFILE_BLOCKS["nsys"](tmp_path)
    assert "| small, 128 | 50 | 54 | +8.0% | – | – | – | – | 60% | – | – | 70% | waiting |" in table
    assert "| 2.7b, 1024 | OOM | – |" in table
    assert RUN.summary() in table


def test_agreement_shows_phases_and_what_is_notable(tmp_path):
    rows = [
        AgreementRow("forward", "matmul", 2.0, 2.02, 0.01, 4, 4, 0.9),
        AgreementRow("forward", "copy", 0.1, 0.2, 1.0, 1, 1, 0.04),
        AgreementRow("scores", "matmul", 1.0, 1.0, 0.0, 1, 1, 1.0),
    ]
    _write(tmp_path / "nsys", "agreement", AgreementRow, rows)
    table = PROFILE_BLOCKS["agreement"](tmp_path)
    assert "| forward, matmul | 2 | 2.02 | +1.0% |" in table
    assert "copy" not in table
    assert "scores" not in table


def test_checkpoints(tmp_path):
    rows = [
        CheckpointRow(**CELL, peak_memory_gib=4.0, peak_predicted_gib=3.9, step_median_ms=10.0),
        CheckpointRow(**{**CELL, "checkpoint_every": 2}, status="oom", reason="", peak_predicted_gib=2.0),
    ]
    _write(tmp_path / "checkpointing_model", "checkpointing", CheckpointRow, rows)
    table = PROFILE_BLOCKS["checkpointing"](tmp_path)
    assert "| small, 256, fp32, naive | none | 4 | 3.9 | – | 10 | – | – |" in table
    assert "| small, 256, fp32, naive | 2 | OOM | 2 |" in table


def test_memory_beside_its_formula(tmp_path):
    kept = {"kept_gib": 1.01, "kept_predicted_gib": 1.0, "peak_gib": 2.0, "peak_predicted_gib": 2.0}
    rows = [MemoryRow(**{**CELL, "checkpoint_every": 2}, **kept), MemoryRow(**{**CELL, "mode": "forward"})]
    _write(tmp_path / "memory_check", "memory", MemoryRow, rows)
    table = PROFILE_BLOCKS["memory-by-formula"](tmp_path)
    assert "| small, 256, fp32, naive, checkpoints every 2 | 1.01 | 1 | +1.0% | 2 | 2 | +0.0% |" in table
    assert len(table.split("\n\n")[0].splitlines()) == 3


def test_precisions_and_convergence(tmp_path):
    rows = [
        PrecisionRow(**{**CELL, "precision": precision}, step_median_ms=ms, peak_memory_gib=1.0)
        for precision, ms in (("fp32", 10.0), ("bf16", 5.0))
    ]
    _write(tmp_path / "mixed_precision", "benchmark", PrecisionRow, rows)
    assert "| small | 256 | 10 | 5 | 2.00 | 1.00 |" in PROFILE_BLOCKS["mixed-precision"](tmp_path)
    run = ConvergenceRow("fp32", 0, 1, 9, "ok", "", 2.0, 1.5)
    _write(tmp_path / "convergence", "convergence", ConvergenceRow, [run])
    assert "| fp32 | 1 | 1 of 1 | 1.5000 |" in PROFILE_BLOCKS["convergence"](tmp_path)
