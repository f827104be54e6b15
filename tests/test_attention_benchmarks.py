"""The attention benchmarks as a person runs them: files, Ctrl-C and resume, defaults, refusals."""

import json
import re
import runpy
import signal

import pytest

from cs336_systems.benchmarking.attention_benchmark import AttentionBenchmarkRow
from cs336_systems.benchmarking.flash_benchmark import FlashRow
from cs336_systems.benchmarking.leaderboard_attention import (
    LeaderboardCell,
    LeaderboardRow,
    leaderboard_cells,
    measure_leaderboard,
)
from cs336_systems.records import read_results
from tests.distributed_helpers import ROOT
from tests.script_helpers import ScriptProcess, assert_help_needs_no_torch, wait_until

SCRIPTS = ("attention_benchmark", "flash_benchmark", "leaderboard_attention")


def _path(script):
    return str(ROOT / "scripts" / f"{script}.py")


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_answers_at_once_and_without_torch(script):
    assert_help_needs_no_torch(
        script, "--implementation", "--length", "--head-dim", "--precision", "--causal", "--device", "--resume"
    )


def test_the_flash_benchmark_survives_ctrl_c_resumes_and_writes_every_file(tmp_path, run_script):
    lengths = range(8, 18)
    arguments = ["--device", "cpu", "--implementation", "sdpa-cudnn", "naive", "--head-dim", 16, "--precision", "fp32"]
    out = tmp_path / "out"
    arguments += ["--length", *lengths, "--warmup-ms", 0, "--rep-ms", 1, "--out", out]
    run = ScriptProcess(tmp_path, "flash_benchmark", *arguments)
    wait_until((out / "flash_benchmark.json").exists)
    run.send_signal(signal.SIGINT)
    assert run.wait() == 130
    assert "--resume" in run.errors
    assert "Traceback" not in run.errors
    before = json.loads((out / "flash_benchmark.json").read_text())["rows"]
    assert 1 <= len(before) < 6 * len(lengths)

    status, output, errors = run_script("flash_benchmark", *arguments, "--resume")
    assert status == 0, errors
    assert json.loads((out / "flash_benchmark.json").read_text())["rows"][: len(before)] == before
    rows = read_results(out / "flash_benchmark.json", FlashRow)[1]
    assert {path.name for path in out.iterdir()} == {
        *(f"flash_benchmark.{kind}" for kind in ("json", "csv", "md", "tex")),
        "flash_benchmark_tflops_fp32.png",
    }
    assert {(row.implementation, row.length, row.phase) for row in rows} == {
        (name, length, phase)
        for name in ("sdpa-cudnn", "naive")
        for length in lengths
        for phase in ("forward", "backward", "both")
    }
    assert len(rows) == 6 * len(lengths)
    for row in rows:
        assert row.status == ("ok" if row.implementation == "naive" else "unsupported")
        if row.implementation == "naive":
            assert 0 < row.min_ms <= row.p20_ms <= row.median_ms <= row.p80_ms
            forward = 4 * 1 * row.length**2 * 16 / 2  # 4·H·N²·d, halved when causal
            flops = {"forward": forward, "backward": 2.5 * forward, "both": 3.5 * forward}[row.phase]
            assert row.tflops == pytest.approx(flops / (row.median_ms * 1e-3) / 1e12, rel=1e-3)
            assert row.relative_error is None if row.phase == "both" else row.relative_error < 1e-5
            assert row.peak_memory_gib is None  # PyTorch keeps no count on a CPU
    assert "**forward**" in output
    assert re.search(r"\| +17 \| +[\d.e-]+ ± [\d.]+% \([\d.e-]+\) \|", output)
    assert "- sdpa-cudnn (fp32): unsupported, sdpa-cudnn runs on NVIDIA GPUs, and the device is cpu" in output
    assert "python scripts/flash_benchmark.py --device cpu" in output


def test_the_attention_benchmark_writes_times_and_formulas(tmp_path, run_script):
    status, output, errors = run_script(
        "attention_benchmark", "--device", "cpu", "--implementation", "naive", "flash-pytorch", "--compile", "off",
        "--head-dim", 16, "--length", 32, 64, "--batch-size", 2, "--steps", 3, "--warmup", 1, "--out", tmp_path,
    )  # fmt: skip
    assert status == 0, errors
    rows = read_results(tmp_path / "attention_benchmark.json", AttentionBenchmarkRow)[1]
    assert [(row.implementation, row.length, row.status) for row in rows] == [
        ("naive", 32, "ok"),
        ("naive", 64, "ok"),
        ("flash-pytorch", 32, "ok"),
        ("flash-pytorch", 64, "ok"),
    ]
    for row in rows:
        assert 0 < row.forward_min_ms <= row.forward_median_ms
        assert 0 < row.backward_min_ms <= row.backward_median_ms
        assert row.formula_gib > row.scores_formula_gib
    assert rows[1].scores_formula_gib == (2 * 64 * 64 * (4 + 4) + 64 * 64) / 2**30
    assert rows[3].scores_formula_gib == 0
    assert {path.name for path in tmp_path.iterdir()} == {
        f"attention_benchmark.{kind}" for kind in ("json", "csv", "md", "tex", "png")
    }
    assert "In all rows: compile off, precision fp32, batch 2, causal True" in output


@pytest.mark.slow
def test_the_leaderboards_timing(tmp_path, run_script):
    status, output, errors = run_script(
        "leaderboard_attention", "--device", "cpu", "--implementation", "flash-pytorch", "sdpa-efficient",
        "--heads", 2, "--length", 64, "--warmup-ms", 1, "--rep-ms", 10, "--out", tmp_path,
    )  # fmt: skip
    assert status == 0, errors
    ours, unsupported = read_results(tmp_path / "leaderboard_attention.json", LeaderboardRow)[1]
    assert (ours.status, unsupported.status) == ("ok", "unsupported")
    assert 0 < ours.min_ms <= ours.median_ms
    assert ours.tflops == pytest.approx(3.5 * 4 * 2 * 64**2 * 64 / 2 / (ours.mean_ms * 1e-3) / 1e12)
    assert (ours.precision, ours.head_dim, ours.is_causal) == ("bf16", 64, True)
    assert "| flash-pytorch" in output
    assert "torch.compile makes C++ for a CPU" in errors


def test_sdpa_peers_do_not_share_a_cached_graph(monkeypatch):
    """AOTAutograd's cache does not know SDPA's backend: with it, cuDNN's row would be FlashAttention-2's time."""
    import torch
    from torch._functorch import config

    seen = []
    monkeypatch.setattr(torch, "compile", lambda function: seen.append(config.enable_autograd_cache) or function)
    shape = {"heads": 1, "length": 8, "head_dim": 8, "precision": "fp32"}
    measure_leaderboard(LeaderboardCell(implementation="naive", rep_ms=1, warmup_ms=0, device="cpu", **shape))
    assert seen == [False]
    assert config.enable_autograd_cache


def test_the_leaderboards_rules_are_the_defaults():
    arguments = vars(runpy.run_path(_path("leaderboard_attention"))["Arguments"]())
    parameters = {name: value for name, value in arguments.items() if name not in ("device", "out", "resume")}
    cells = leaderboard_cells(device="cuda", **parameters)
    assert [cell.implementation for cell in cells] == ["flash-triton", "sdpa-flash", "sdpa-cudnn", "flex"]
    for cell in cells:
        assert (cell.heads, cell.length, cell.head_dim) == (16, 16_384, 64)
        assert (cell.precision, cell.is_causal) == ("bf16", True)
        assert (cell.warmup_ms, cell.rep_ms) == (1_000, 10_000)
    elsewhere = leaderboard_cells(device="cpu", **parameters)
    assert [cell.implementation for cell in elsewhere] == ["flash-pytorch", "sdpa-flash"]
    for cell in elsewhere:
        assert (cell.heads, cell.length, cell.warmup_ms, cell.rep_ms) == (16, 1_024, 100, 1_000)
    asked = leaderboard_cells(device="cpu", **parameters | {"length": 16_384, "rep_ms": 7})
    assert [(cell.length, cell.warmup_ms, cell.rep_ms) for cell in asked] == [(16_384, 100, 7)] * 2


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("flash_benchmark", ["--length", "0"], "--length 0: must be at least 1"),
        ("flash_benchmark", ["--length"], "--length: needs at least one value"),
        ("flash_benchmark", ["--head-dim", "257"], "--head-dim 257: must be from 1 to 256"),
        ("flash_benchmark", ["--heads", "0"], "--heads 0: must be at least 1"),
        ("flash_benchmark", ["--batch-size", "0"], "--batch-size 0: must be at least 1"),
        ("flash_benchmark", ["--rep-ms", "0"], "--rep-ms 0: must be at least 1"),
        ("flash_benchmark", ["--warmup-ms", "-1"], "--warmup-ms -1: must be 0 or more"),
        ("flash_benchmark", ["--max-call-ms", "0"], "--max-call-ms 0: must be at least 1"),
        ("flash_benchmark", ["--precision", "tf32", "--device", "cpu"], "--precision tf32: is a mode of NVIDIA's"),
        ("flash_benchmark", ["--device", "gpu"], "--device gpu: must be cpu, mps, cuda or cuda:N"),
        ("flash_benchmark", ["--device", "cuda:99"], "--device cuda:99: is not on this machine; it has cpu"),
        ("flash_benchmark", ["--seed", "-1"], "--seed -1: must be between 0"),
        ("flash_benchmark", ["--out", __file__], "must be a folder that can be written to"),
        ("flash_benchmark", ["--implementation", "fa4"], "invalid choice 'fa4'"),
        ("attention_benchmark", ["--steps", "0"], "--steps 0: must be at least 1"),
        ("attention_benchmark", ["--warmup", "-1"], "--warmup -1: must be 0 or more"),
        ("attention_benchmark", ["--compile"], "--compile: needs at least one value"),
        ("attention_benchmark", ["--implementation", "flex"], "invalid choice 'flex'"),
        (
            "attention_benchmark",
            ["--implementation", "sdpa-cudnn", "flash-hopper"],
            "--implementation sdpa-cudnn: sdpa-",
        ),
        ("flash_benchmark", ["--implementation", "flash-hopper"], "--implementation flash-hopper: its kernels are for"),
        ("leaderboard_attention", ["--implementation", "flex"], "--implementation flex: flex runs on NVIDIA GPUs, and"),
        ("leaderboard_attention", ["--heads", "0"], "--heads 0: must be at least 1"),
        ("leaderboard_attention", ["--rep-ms", "0"], "--rep-ms 0: must be at least 1"),
        ("leaderboard_attention", ["--implementation"], "--implementation: needs at least one value"),
    ],
)
def test_bad_input_is_refused_by_flag_name(script, arguments, message, tmp_path, run_script):
    status, output, errors = run_script(script, "--device", "cpu", "--out", tmp_path / "out", *arguments)
    assert status == 2
    assert message in " ".join((errors + output).replace("│", " ").split())
    assert not list(tmp_path.glob("out/*.json"))
