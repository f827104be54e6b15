"""Mixed precision: the handout's numbers, dtypes under autocast, LayerNorm's parts, and memory by kind."""

import itertools
import math

import pytest
import torch
from torch.nn import functional as F

import cs336_basics.model
from cs336_systems.accounting.memory import autocast_weight_bytes, num_matrix_parameters, saved_activation_bytes
from cs336_systems.benchmarking.layer_norm_precision import INPUTS, PARTS, layer_norm_note, layer_norm_parts
from cs336_systems.benchmarking.mixed_precision import DTYPES, accumulations, autocast_dtypes, spacing
from cs336_systems.benchmarking.precision_benchmark import (
    PrecisionRow,
    cache_note,
    measure_kept,
    precision_columns,
    speedup_table,
)
from cs336_systems.benchmarking.run_mixed_precision import run_mixed_precision
from cs336_systems.configs import named_cell
from cs336_systems.records import read_results
from cs336_systems.workload import Workload
from tests.script_helpers import assert_help_needs_no_torch

# ---- Accumulations ---------------------------------------------------------------------------------------------------


def test_the_four_accumulations_are_the_handouts():
    assert [row.result_to_4_places for row in accumulations()[:4]] == ["10.0001", "9.9531", "10.0021", "10.0021"]


def test_an_accumulations_two_errors_make_up_its_distance():
    for row in accumulations():
        assert row.result - 10 == pytest.approx(row.term_error + row.rounding_error, abs=1e-9)
    by_kind = {(row.sum_dtype, row.term_dtype, row.is_cast_first): row for row in accumulations()}
    float16 = by_kind["float16", "float16", False]
    into_float32, cast = (by_kind["float32", "float16", first] for first in (False, True))
    assert float16.rounding_error < -20 * float16.term_error
    assert into_float32.result == cast.result
    assert abs(into_float32.rounding_error) < 1e-3 * into_float32.term_error


def test_reasons_say_what_happened():
    reasons = {(row.sum_dtype, row.term_dtype): row.reason for row in accumulations() if not row.is_cast_first}
    assert "float16 has a number every 0.0078, so that an addition there adds 0.007812" in reasons["float16", "float16"]
    assert "adding it changes nothing any more" in reasons["bfloat16", "bfloat16"]
    assert "what is wrong was lost in the term" in reasons["float32", "float16"]
    for (sum_dtype, term_dtype), reason in reasons.items():
        assert ("nothing any more" in reason) == (sum_dtype == term_dtype == "bfloat16")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [0.01, 0.5, 1.0, 3.99, 4.0, 10.0])
def test_spacing_is_the_distance_to_the_next_number(dtype, value):
    number = torch.tensor(value, dtype=DTYPES[dtype])
    following = torch.nextafter(number, torch.tensor(math.inf, dtype=DTYPES[dtype]))
    assert spacing(float(number), dtype) == float(following) - float(number)


# ---- Dtypes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "layer_norm"), [("cpu", "low"), pytest.param("cuda", "float32", marks=pytest.mark.gpu)]
)
def test_dtypes_of_the_toy_model(device, layer_norm):
    rows = {row.tensor: row for row in autocast_dtypes(device)}
    assert {row.float32 for row in rows.values()} == {"float32"}
    for dtype in ("float16", "bfloat16"):
        found = {tensor: getattr(row, dtype) for tensor, row in rows.items()}
        assert found == {
            "parameters": "float32",
            "first layer's output": dtype,
            "ReLU's output": dtype,
            "LayerNorm's output": dtype if layer_norm == "low" else "float32",
            "logits": dtype,
            "loss": "float32",
            "gradient of the first layer's output": dtype,
            "gradients of the parameters": "float32",
        }
    expected = "on neither list" if layer_norm == "low" else "is on autocast's float32 list"
    assert expected in rows["LayerNorm's output"].reason


def test_layer_norm_parts_fail_where_the_note_says():
    rows = layer_norm_parts(width=1024, rows=4)
    by_part = {(row.dtype, row.part): row for row in rows}
    for dtype in ("float16", "bfloat16"):
        exact, own = by_part[dtype, "none"], by_part[dtype, f"F.layer_norm of {dtype}"]
        for name in INPUTS:
            assert getattr(exact, f"{name}_error") < 1e-4
            assert (
                getattr(own, f"{name}_error") <= 2.01 * torch.finfo(DTYPES[dtype]).eps
            )  # the output's rounding, below 4
        assert by_part[dtype, "mean"].offset_error > 1
    for part in ("squares", "variance", "inverse root"):  # infinite in float16, and well in range in bfloat16
        assert by_part["float16", part].large_error > 1
    assert by_part["bfloat16", "squares"].large_error < 0.05
    assert by_part["bfloat16", "variance"].unit_error > 10 * by_part["float16", "variance"].unit_error
    note = layer_norm_note(rows)
    assert "float16 (largest number 6.55e+04" in note
    for sentence, dtype in zip(note.split(". ")[-2:], ("float16", "bfloat16"), strict=True):
        wrong, unharmed = sentence.split("; not with ")
        for part in PARTS:
            is_wrong = any(getattr(by_part[dtype, part], f"{name}_error") > 0.05 for name in INPUTS)
            assert (f"{part} (" in wrong, part in unharmed) == (is_wrong, not is_wrong)


# ---- Memory by kind --------------------------------------------------------------------------------------------------


def _workload(**parameters):
    return Workload(named_cell("tiny", 16, **{"batch_size": 2, "vocab_size": 50, **parameters}))


@pytest.mark.parametrize("attention", ["naive", "sdpa", "flash-pytorch"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_copies_and_activations_are_the_formulas_bytes(precision, attention):
    workload = _workload(precision=precision, attention=attention, mode="forward-backward")
    kept = measure_kept(workload)
    config = workload.cell.model_config()
    assert kept["weight_copies"] == autocast_weight_bytes(config, precision)
    assert kept["weight_cache"] == 0  # the model hands autocast a view of each weight, which it does not cache
    assert kept["activations"] == saved_activation_bytes(config, 2, 16, precision, attention)
    _workload()  # puts naive attention back


@pytest.mark.parametrize(("mode", "by_the_graph"), [("forward", 0), ("train-step", 1)])
def test_copies_of_autocasts_cache_alone_are_told_apart(monkeypatch, mode, by_the_graph):
    """With F.linear the weights themselves are cast, and cached until the autocast region ends."""
    monkeypatch.setattr(cs336_basics.model.Linear, "forward", lambda self, x: F.linear(x, self.weight))
    workload = _workload(precision="bf16", mode=mode)
    kept = measure_kept(workload)
    all_copies = 2 * num_matrix_parameters(workload.cell.model_config())
    assert kept["weight_copies"] == by_the_graph * all_copies
    assert kept["weight_cache"] == (1 - by_the_graph) * all_copies


def test_fp32_has_no_copies():
    kept = measure_kept(_workload(mode="forward"))
    assert kept == {"weight_copies": 0, "weight_cache": 0}


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["naive", "flash-triton"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_allocator_agrees(precision, attention):
    cell = named_cell("small", 512, precision=precision, attention=attention, device="cuda")
    kept = measure_kept(Workload(cell))
    asked = kept["weight_copies"] + kept["activations"]
    assert kept["requested"] == pytest.approx(asked, rel=0.005)
    assert kept["allocated"] == pytest.approx(asked, rel=0.05)  # unsplit tails: up to 1 MiB beside each 3 MiB tensor
    assert kept["activations"] == pytest.approx(
        saved_activation_bytes(cell.model_config(), 4, 512, precision, attention), rel=0.05
    )


# ---- Tables ----------------------------------------------------------------------------------------------------------


def _row(precision, step_ms, memory, size="small", **parameters):
    cell = vars(named_cell(size, 256, precision=precision, device="cuda"))
    return PrecisionRow(**{**cell, "step_median_ms": step_ms, "peak_memory_gib": memory, **parameters})


def test_speedups_are_over_the_same_cell_in_float32():
    rows = [
        _row("fp32", 100.0, 4.0),
        _row("bf16", 40.0, 3.0),
        _row("fp16", None, None, status="oom"),
        _row("fp32", 300.0, 8.0, size="large"),
        _row("bf16", 100.0, 10.0, size="large"),
    ]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in speedup_table(rows).splitlines()]
    assert table[0][:6] == ["size", "ctx", "fp32 step ms", "bf16 step ms", "times as fast", "times the memory"]
    assert table[2] == ["small", "256", "100", "40", "2.50", "0.75", "oom", "–", "–"]
    assert table[3] == ["large", "256", "300", "100", "3.00", "1.25", "–", "–", "–"]
    assert speedup_table(rows[:1]) == ""
    modes = [*rows[:2], _row("fp32", 10.0, 1.0, mode="forward"), _row("bf16", 20.0, 1.0, mode="forward")]
    assert "| small | 256 | forward | 10 | 20 | 0.50 | 1.00 |" in speedup_table(modes)


def test_the_note_tells_what_the_cache_held():
    assert cache_note([_row("fp32", 1.0, 1.0, weight_cache_gib=0.0)]) == ""
    assert "hands it a view" in cache_note([_row("bf16", 1.0, 1.0, weight_cache_gib=0.0)])
    assert "go when its region ends" in cache_note([_row("bf16", 1.0, 1.0, weight_cache_gib=0.5)])


def test_columns_without_a_value_are_left_out():
    shown = precision_columns([_row("bf16", 1.0, 1.0, weight_copies_gib=0.1)], {"size": "size"})
    assert list(shown) == ["size", "weight_copies_gib"]


# ---- The script ------------------------------------------------------------------------------------------------------


def _run(folder, **changes):
    """What the script calls, in this process."""
    arguments = {
        "part": ("accumulation", "dtypes", "layer-norm", "benchmark"),
        "size": None,
        "ctx": (8,),
        "mode": ("train-step",),
        "precision": ("fp32", "bf16"),
        "compile": ("off",),
        "attention": ("naive",),
        "optimizer": ("adamw",),
        "warmup": 0,
        "steps": 1,
        "batch_size": 4,
        "device": "cpu",
        "seed": 0,
        "resume": False,
    }
    run_mixed_precision("python scripts/mixed_precision.py", out=folder, **{**arguments, **changes})


def test_rows_and_tables_of_every_part_are_left(tmp_path, capsys):
    _run(tmp_path)
    printed = capsys.readouterr().out
    names = ("accumulation", "dtypes", "layer_norm", "benchmark")
    expected = {f"{name}.{kind}" for name, kind in itertools.product(names, ("json", "csv", "md", "tex"))}
    assert {path.name for path in tmp_path.iterdir()} == expected | {"benchmark.png"}
    for value in ("10.0001", "9.9531", "10.0021", "LayerNorm's output", "inverse root"):
        assert value in printed
    assert "times as fast" in (tmp_path / "benchmark.md").read_text()
    rows = read_results(tmp_path / "benchmark.json", PrecisionRow)[1]
    assert [(row.size, row.precision) for row in rows] == [("tiny", "fp32"), ("tiny", "bf16")]
    for row in rows:
        assert row.samples_per_s == pytest.approx(4e3 / row.step_median_ms)
        assert row.tokens_per_s == pytest.approx(8 * row.samples_per_s)
        assert row.activations_gib == row.activations_predicted_gib > 0
        assert row.weight_copies_gib == row.weight_copies_predicted_gib
        assert row.peak_predicted_gib > row.activations_gib


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": ("huge",)}, "error: --size huge: must be one of tiny, small"),
        ({"precision": ()}, "error: --precision: needs at least one value"),
        ({"ctx": (0,)}, "error: --ctx 0: must be between 1 and"),
        ({"precision": ("tf32",)}, "error: --precision tf32: is a mode of NVIDIA's"),
    ],
)
def test_bad_input_is_refused_by_name(tmp_path, capsys, changes, message):
    with pytest.raises(SystemExit) as refused:
        _run(tmp_path / "out", **changes)
    assert refused.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_help_answers_at_once_and_without_torch():
    assert_help_needs_no_torch("mixed_precision", "--part")
