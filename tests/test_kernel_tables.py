"""The tables and sentences of kernels alone and of the leaderboard's step: from made rows, and without some of them."""

import json

import pytest

from cs336_systems.benchmarking.kernel_benchmark import KernelRow
from cs336_systems.benchmarking.kernel_tables import (
    CALLS,
    KERNEL_BLOCKS,
    KERNEL_TABLES,
    KERNELS,
    by_pass,
    over_best_other,
)
from cs336_systems.benchmarking.leaderboard_cells import LeaderboardRow
from cs336_systems.benchmarking.report_kernels import ITEMS
from cs336_systems.benchmarking.report_rows import Row
from cs336_systems.configs import named_shape
from cs336_systems.records import ResultsFile
from tests.example_rows import RUN

CALLED, ALONE, STEP = (part for item in ITEMS for part in item.parts)
SHAPE = {name: value for name, value in named_shape("8b").items() if name != "num_layers"}
ENTRY = {"origin": "published", "name": "the best", "gpu": "NVIDIA B200", "size": "8b", "ctx": 32768}
ENTRY |= {"batch_size": 1, "world_size": 2, "precision": "bf16", "step_ms": 3000}


def _kernel_rows(folder, *rows):
    """Rows of (kernel, pass, implementation, ms or a status)."""
    results = ResultsFile(folder, "kernel_benchmark", KernelRow, RUN)
    for kernel, phase, implementation, ms in rows:
        cell = {"kernel": kernel, "phase": phase, "implementation": implementation, "precision": "bf16"}
        became = {"status": ms} if isinstance(ms, str) else {"median_ms": ms, "gb_per_s": 1000 / ms}
        results.append(KernelRow(**cell, **SHAPE, num_layers=4, tokens=64, **became))


def _step_rows(folder, *rows):
    results = ResultsFile(folder / "leaderboard_step", "leaderboard_step", LeaderboardRow, RUN)
    for row in rows:
        cell = {**named_shape("8b"), "ctx": 32768, "precision": "bf16", "batch_size": 1}
        results.append(LeaderboardRow(**cell, **row))


def _published(folder, *entries):
    (folder / "published").mkdir()
    (folder / "published" / "leaderboard_2026.json").write_text(json.dumps({"source": "", "rows": entries}))


def _said(part, results):
    return [sentence.text for sentence in part.answer(results) if sentence is not None]


@pytest.mark.parametrize("table", [*KERNEL_BLOCKS.values(), *KERNEL_TABLES.values()])
def test_a_table_without_rows_is_empty(tmp_path, table):
    _published(tmp_path, ENTRY)
    assert table(tmp_path) == ""


def test_a_kernel_is_compared_with_the_fastest_of_the_others():
    def cells(**times):
        rows = [Row(implementation=name, median_ms=ms) for name, ms in times.items()]
        return by_pass(rows)[None, None, None, None]

    assert over_best_other(cells(fused=3.0, eager=6.0, compiled=2.0, torch=4.0)) == 1.5
    assert over_best_other(cells(fused=3.0, eager=6.0, compiled=None)) == 0.5
    assert over_best_other(cells(fused=None, eager=6.0)) is None
    assert over_best_other(cells(fused=3.0)) is None
    assert over_best_other(cells(eager=6.0, compiled=2.0)) is None


def test_kernels_as_called(tmp_path):
    _kernel_rows(
        (tmp_path / CALLS).parent,
        ("rms-norm", "forward", "fused", 2.0),
        ("rms-norm", "forward", "eager", 6.0),
        ("rms-norm", "forward", "compiled", 1.6),
        ("rms-norm", "both", "fused", 4.0),
        ("rms-norm", "both", "eager", "oom"),
        ("adamw", "step", "eager", 9.0),
        ("adamw", "step", "fused", 4.5),
    )
    table = KERNEL_TABLES[CALLS](tmp_path)
    assert (
        "| 8b, 64 tokens, bf16: kernel, pass | fused ms | eager ms | compiled ms | fused over the best other |" in table
    )
    assert "| rms-norm, forward | 2 | 6 | 1.6 | 1.25 | 500 |\n" in table  # nor a column of TFLOP/s: there are none
    assert "| rms-norm, both | 4 | OOM | – | – | 250 |\n" in table
    assert RUN.summary() in table
    short = KERNEL_BLOCKS["kernel-benchmark"](tmp_path)
    assert "| 8b, bf16, adamw | 4.5 | 9 | 0.50 |" in short  # no column of an implementation that has no row in it
    assert "| 8b, bf16, rms-norm | 4 | OOM | – |" in short
    said = _said(CALLED, tmp_path)
    assert said[0].startswith(
        "`fused` is 2 (adamw step, 8b) to 3 (rms-norm forward, 8b) times as fast as eager PyTorch"
    )
    assert said[0].endswith(" for 8b, and faster in 2 of 2 passes.")
    assert "Of the 3 passes 1 were timed compiled too, and 0 with what PyTorch ships fused." in said
    assert "Slower than the fastest other: rms-norm forward, 8b (1.25 times its time)." in said
    assert "At best, 500 GB/s are moved (rms-norm forward, 8b)." in said
    assert "Of 7 cells, 1 oom." in said


def test_kernels_alone_are_set_beside_their_calls(tmp_path):
    _kernel_rows((tmp_path / CALLS).parent, ("swiglu", "both", "fused", 4.0), ("rope", "both", "fused", 3.0))
    _kernel_rows((tmp_path / KERNELS).parent, ("swiglu", "both", "fused", 0.5), ("rope", "both", "fused", 3.0))
    says = "For 8b a call of `fused` takes 1 (rope both) to 8 (swiglu both) times as long as its kernels."
    assert says in _said(ALONE, tmp_path)
    assert says not in _said(CALLED, tmp_path)
    (tmp_path / CALLS).unlink()
    assert [text for text in _said(ALONE, tmp_path) if "a call of" in text] == []


def test_the_step_beside_what_others_took_of_the_same(tmp_path):
    ours = {"implementation": "fused", "attention": "flash-hopper", "kernels": "fused", "kept_blocks": 4}
    _step_rows(
        tmp_path,
        {**ours, "step_median_ms": 4000.0, "step_std_ms": 5.0, "peak_share": 0.46, "forward_ms": 1000.0,
         "backward_ms": 2900.0, "optimizer_ms": 20.0, "tokens_per_s": 16384.0, "peak_memory_gib": 40.5,
         "predicted_gib": 41.0, "tflops": 450.0},
        {"implementation": "torch", "status": "oom"},
    )  # fmt: skip
    kept = {"kept_blocks": 17, "num_layers": 34, "peak_memory_gib": 99.5, "gpu": "NVIDIA H200"}
    _published(tmp_path, ENTRY, {**ENTRY, **kept}, {**ENTRY, "ctx": 512, "step_ms": 1})
    table = KERNEL_BLOCKS["leaderboard-step"](tmp_path)
    assert "| fused | 2 | flash-hopper | 4 of 34 | 4000 ± 5 | 1000 | 2900 | 20 | 16384 | 46% | 40.5 | 41 |" in table
    assert "| torch | 2 | naive | 0 of 34 | OOM | – |" in table
    # 4.74e15 FLOPs in 3 s on two cards of 2.25e15 FLOP/s.
    assert "| the best, 2 × B200 (published) | 2 | – | – | 3000 | – | – | – | – | 35% | – | – |" in table
    assert table.count("(published)") == 2  # not the one at another context
    said = _said(STEP, tmp_path)
    assert said[0].startswith("With this project's parts a step of 8b at context 32,768 takes 4000 ± 5 ms on 2 ranks")
    assert "in which 30 of 34 blocks run forward again" in " ".join(said)
    assert (
        "The best (published), on 2 × NVIDIA B200, took 3,000 ms: 0.75 times this step's time, and 35% of " in said[-3]
    )
    assert "on 2 × NVIDIA H200, with 17 of 34 blocks kept whole, took 3,000 ms and 99.5 GiB" in said[-2]
    assert said[-1] == "Of 2 cells, 1 oom."


def test_a_step_of_other_tokens_is_beside_nothing(tmp_path):
    row = {"implementation": "torch", "step_median_ms": 7.0, "step_std_ms": 1.0, "peak_memory_gib": 2.0}
    results = ResultsFile(tmp_path / "leaderboard_step", "leaderboard_step", LeaderboardRow, RUN)
    results.append(LeaderboardRow(**named_shape("tiny"), ctx=16, **row))
    _published(tmp_path, ENTRY)
    assert "B200" not in KERNEL_BLOCKS["leaderboard-step"](tmp_path)
    assert _said(STEP, tmp_path) == ["PyTorch's parts take 7 ms and 2 GiB."]
