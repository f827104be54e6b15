"""The tables and sentences of whole models with fused kernels and with each attention: from made rows."""

import pytest

from cs336_systems.benchmarking.fused_tables import FUSED, FUSED_AT_256, FUSED_BLOCKS, MODEL_ATTENTION, how
from cs336_systems.benchmarking.model_benchmark import BenchmarkRow
from cs336_systems.benchmarking.report_fused import FUSED_PARTS
from cs336_systems.configs import named_shape
from cs336_systems.records import ResultsFile
from tests.example_rows import RUN

IN_MODEL, WAYS, AT_256 = FUSED_PARTS


def _rows(path, ctx, *rows):
    """Rows of (size, ms or a status, what differs from the default)."""
    results = ResultsFile(path.parent, "benchmark", BenchmarkRow, RUN)
    for size, ms, changed in rows:
        became = {"status": ms} if isinstance(ms, str) else {"step_median_ms": ms, "step_std_ms": 0.5}
        cell = {"precision": "bf16", "attention": "sdpa", "device": "cuda", "peak_memory_gib": 3.0, **changed}
        results.append(BenchmarkRow(**named_shape(size), ctx=ctx, **cell, **became))


def _said(part, results):
    return " ".join(sentence.text for sentence in part.answer(results) if sentence is not None)


@pytest.mark.parametrize("table", [*FUSED_BLOCKS.values(), *(table for part in FUSED_PARTS for table in part.tables)])
def test_a_table_without_rows_is_empty(tmp_path, table):
    assert table(tmp_path) == ""


def test_the_fastest_of_each_kind(tmp_path):
    graphs = {"cuda_graphs": "on"}
    _rows(
        tmp_path / FUSED,
        1024,
        ("large", 90.0, {"compile": "blocks"}),
        ("large", 80.0, {"compile": "on"}),
        ("large", 60.0, {"compile": "on", "optimizer": "adamw-fused"}),
        ("large", 50.0, {"compile": "blocks", "optimizer": "adamw-fused", **graphs}),
        ("large", 70.0, {"kernels": "fused"}),
        ("large", 40.0, {"kernels": "fused", **graphs}),
        ("large", 65.0, {"kernels": "loss", "compile": "blocks"}),
        ("large", 61.0, {"kernels": "fused", "compile": "blocks", "master_weights": "on"}),
        ("large", 30.0, {"kernels": "plain", "attention": "flash-triton", "compile": "on"}),
        ("2.7b", "oom", {"kernels": "fused"}),
        ("2.7b", 200.0, {"compile": "on", "optimizer": "adamw-fused"}),
    )
    table = FUSED_BLOCKS["fused-model"](tmp_path)
    lines = dict(line.strip("| ").split(" | ", 1) for line in table.splitlines() if line.startswith("|"))
    assert lines["`--compile blocks`, AdamW by a loop"] == "90 | – | 3 | – | – | –"
    assert lines["`--compile on`, PyTorch's AdamW"] == "60 | – | 3 | 200 | – | 3"  # not flash-triton's 30
    assert lines["`--compile blocks --cuda-graphs on`, PyTorch's AdamW"].startswith("50 |")
    assert lines["`--kernels fused`"] == "70 | – | 3 | – | – | –"
    assert lines["`--kernels loss --compile blocks`"].startswith("65 |")
    assert lines["`--kernels fused --master-weights on --compile blocks`"].startswith("61 |")
    assert "eager, AdamW by a loop" not in lines
    whole = WAYS.tables[1](tmp_path)
    assert "| bf16 | sdpa | all fused | 70 | 0.5 | 3 | OOM |" in whole
    said = _said(WAYS, tmp_path)
    assert "For large at context 1,024 the fastest step takes 40 ± 0.5 ms (all fused, CUDA graphs, sdpa)" in said
    assert "1.25 times as fast as PyTorch's parts, launched or replayed alike (50 ± 0.5 ms)" in said
    assert "2 times as fast as torch.compile with SDPA and AdamW by a loop, launched one by one (80 ± 0.5 ms)" in said
    assert "1.5 times as fast as torch.compile with SDPA and PyTorch's fused AdamW, launched one by one (60 ±" in said
    assert "Replayed as CUDA graphs the same step is 1.75 (all fused, sdpa) times as fast" in said
    assert "2.7b at" not in said
    assert "Of 11 cells, 1 oom" in said


def test_against_the_eager_model_in_float32(tmp_path):
    _rows(
        tmp_path / FUSED_AT_256,
        256,
        ("large", 240.0, {"precision": "fp32", "attention": "naive"}),
        ("large", 30.0, {"kernels": "loss", "compile": "blocks", "cuda_graphs": "on"}),
        ("large", 33.0, {"kernels": "fused", "cuda_graphs": "on"}),
    )
    said = _said(AT_256, tmp_path)
    assert "large at context 256: 30 ms in bf16" in said
    assert "8 times as fast as the eager model in float32 with plain attention, 240 ms" in said


def test_attention_in_the_model(tmp_path):
    _rows(
        tmp_path / MODEL_ATTENTION,
        1024,
        ("small", 9.0, {"attention": "naive"}),
        ("small", 5.0, {"attention": "sdpa"}),
        ("small", 6.0, {"attention": "flash-triton"}),
        ("small", "oom", {"attention": "naive", "compile": "blocks"}),
        ("small", 3.0, {"attention": "flash-triton", "compile": "blocks"}),
    )
    table = IN_MODEL.tables[0](tmp_path)
    assert "| small, ctx 1,024, eager | 9 | 5 | 6 | 3 | 3 | 3 |" in table
    assert "| small, ctx 1,024, compiled blocks | OOM | – | 3 |" in table
    said = _said(IN_MODEL, tmp_path)
    assert "1.5 (small, eager) times as long as with `flash-triton`" in said
    assert "`flash-triton`'s step takes 1.2 (small, eager) of that with SDPA" in said


def test_ways_have_names_of_their_own(tmp_path):
    shape = {**named_shape("tiny"), "ctx": 16, "device": "cuda"}
    rows = [
        BenchmarkRow(
            **shape,
            kernels=kernels,
            compile=compiled,
            cuda_graphs=graphs,
            optimizer=optimizer,
            precision="bf16",
            master_weights=masters,
        )
        for kernels, optimizer in (("plain", "adamw"), ("plain", "adamw-fused"), ("loss", "adamw"), ("fused", "adamw"))
        for compiled in ("off", "on", "blocks")
        for graphs in ("off", "on")
        for masters in (("off", "on") if kernels != "plain" else ("off",))
    ]
    assert len({how(row) for row in rows}) == len(rows)
