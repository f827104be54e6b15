"""Checkpointing's tables: measured beside formula, where memory ran out too; and how nested checkpoints grow."""

import subprocess
import sys
from pathlib import Path

import pytest

from cs336_systems.accounting.training_memory import training_memory
from cs336_systems.benchmarking import checkpointing
from cs336_systems.benchmarking.checkpointing import CheckpointRow
from cs336_systems.configs import named_cell
from cs336_systems.profiling.nested_checkpointing import measure_scheme, run_nested_sweep
from cs336_systems.profiling.nested_tables import nested_cells, write_nested
from cs336_systems.records import ResultsFile, read_results
from tests.example_rows import RUN


def _cell(every, device="cuda"):
    return named_cell("2.7b", 2048, checkpoint_every=every, device=device)


def _row(every, measured, rows=()):
    ended = {} if measured else {"status": "oom", "reason": "no room"}
    return CheckpointRow(**vars(_cell(every)), **ended, **checkpointing.complete(rows, _cell(every), measured))


def _rows():
    rows = []
    for every, measured in (
        (0, {"step_median_ms": 1000.0, "peak_memory_gib": 250.0}),
        (1, {"step_median_ms": 1300.0, "peak_memory_gib": 64.0}),
        (2, {"step_median_ms": 1290.0, "peak_memory_gib": 70.0}),
        (4, {}),
    ):
        rows.append(_row(every, measured, rows))
    return rows


def test_a_cell_that_does_not_fit_has_its_formulas():
    row = _rows()[-1]
    assert row.peak_memory_gib is row.step_over_none is None
    assert row.peak_predicted_gib == training_memory(_cell(4).model_config(), 4, 2048, checkpoint_every=4).peak / 2**30
    assert row.flops_over_none == pytest.approx(4 / 3, rel=0.02)  # forward once more, but for lm_head


def test_times_are_set_beside_those_without_checkpoints():
    assert [row.step_over_none for row in _rows()] == [None, 1.3, 1.29, None]
    assert [row.flops_over_none > 1 for row in _rows()] == [False, True, True, True]


def test_a_cpus_resident_set_is_no_peak():
    measured = {"step_median_ms": 1.0, "peak_memory_gib": 3.0}
    assert checkpointing.complete([], _cell(1, "cpu"), measured)["peak_memory_gib"] is None


def test_the_note_names_the_best_and_the_files_are_written(tmp_path):
    results = ResultsFile(tmp_path, "checkpointing", CheckpointRow, RUN)
    for row in _rows():
        results.append(row)
    text = checkpointing.write_files(results)
    assert "least memory with 1 in a segment (64.0 GiB); by formula with 1 (" in text
    assert "| oom [1] " in text
    assert "\n- [1] no room\n" in text
    assert (tmp_path / "checkpointing.png").stat().st_size > 10_000


def test_memory_without_segments_and_nested_grows_as_theory_says():
    peaks = {
        scheme: [measure_scheme(scheme, n_layers).peak_activations for n_layers in (4, 16, 64)]
        for scheme in ("none", "segments", "nested")
    }
    one, two, three = peaks["none"]
    assert two / one == pytest.approx(4, rel=0.2)
    assert three / two == pytest.approx(4, rel=0.05)
    one, two, three = peaks["segments"]  # a multiple of √L
    assert two / one == pytest.approx(2, rel=0.1)
    assert three / two == pytest.approx(2, rel=0.05)
    one, two, three = peaks["nested"]  # two doublings add the same each time
    assert two - one == pytest.approx(2, abs=0.2)
    assert three - two == pytest.approx(2, abs=0.2)


def test_what_the_schemes_cost_in_forward_passes():
    assert measure_scheme("none", 16).forwards_per_layer == 1
    assert measure_scheme("segments", 16).forwards_per_layer == 2
    nested = [measure_scheme("nested", n_layers).forwards_per_layer for n_layers in (4, 16)]
    assert nested == [2.5, 3.5]  # 1 + (log2(L) + 1) / 2


def test_a_nested_sweep_goes_on_where_it_was(tmp_path, capsys):
    cells = nested_cells([2, 4])
    results = ResultsFile(tmp_path, "nested", type(measure_scheme("none", 2)), RUN)
    run_nested_sweep(cells[:2], results)
    shown = capsys.readouterr().err
    assert "none, 4 layers: 100%" in shown
    assert "| 2/2 [" in shown
    run_nested_sweep(cells, results)
    assert "| 2/6 [" in capsys.readouterr().err
    assert [(row.scheme, row.n_layers) for row in results.rows] == cells
    assert "log2 L + 1" in write_nested(results)
    assert read_results(tmp_path / "nested.json", results.row_type)[1] == results.rows
    with pytest.raises(ValueError, match="layers=1: must be at least 2"):
        nested_cells([1])


_INTERRUPTED_IN_A_REPEATED_FORWARD = """
import runpy, sys
from cs336_systems.profiling import nested_checkpointing

class Interrupted(nested_checkpointing._Layer):
    n_left = 16 + 2 * 16 + 16 + 2  # the second forward that nested checkpoints repeat

    def forward(self, x):
        Interrupted.n_left -= 1
        if not Interrupted.n_left:
            raise KeyboardInterrupt
        return super().forward(x)

nested_checkpointing._Layer = Interrupted
sys.argv = ["scripts/checkpointing.py", "--part", "nested", "--layers", "16", "--out", sys.argv[1]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_an_interrupt_within_checkpoints_leaves_no_traceback(tmp_path):
    """PyTorch prints one for each checkpoint that backward was in."""
    words = [sys.executable, "-c", _INTERRUPTED_IN_A_REPEATED_FORWARD, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1])
    assert done.returncode == 130
    assert "\nInterrupted. To go on: " in done.stderr
    assert "2/3" in done.stderr  # of the bar
    assert "Traceback" not in done.stderr
