"""The attention benchmarks as a person runs them, and their parts: peers, grouped sweeps, timing, errors, tables."""

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import pytest
import torch

from cs336_systems.attention.reference import attention_reference
from cs336_systems.benchmarking import flash_benchmark
from cs336_systems.benchmarking.attention_benchmark import (
    AttentionBenchmarkCell,
    AttentionBenchmarkRow,
    formulas,
    measure_attention,
    memory_formula_bytes,
)
from cs336_systems.benchmarking.attention_cells import EagerPeerName, PeerName, make_inputs
from cs336_systems.benchmarking.attention_peers import PEERS, open_peer
from cs336_systems.benchmarking.attention_plots import plot_attention, plot_flash
from cs336_systems.benchmarking.attention_tables import pivot_markdown, value_or_status, why_unsupported
from cs336_systems.benchmarking.call_timing import time_calls
from cs336_systems.benchmarking.flash_benchmark import FlashCell, FlashMeasure, FlashRow, flash_cells
from cs336_systems.benchmarking.grouped_sweep import Skipped, run_grouped_sweep
from cs336_systems.benchmarking.leaderboard_attention import LeaderboardRow
from cs336_systems.records import ResultsFile, Unsupported, read_results
from tests.example_rows import RUN

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ("attention_benchmark", "flash_benchmark", "leaderboard_attention")
CPU = torch.device("cpu")


def _path(script):
    return str(ROOT / "scripts" / f"{script}.py")


@pytest.fixture
def run_script(monkeypatch, capsys):
    """Runs a script in this process, which has torch already; returns its exit status and what it printed."""

    def run(script, *arguments):
        monkeypatch.setattr(sys, "argv", [_path(script), *map(str, arguments)])
        status = 0
        try:
            runpy.run_path(_path(script), run_name="__main__")
        except SystemExit as stopped:
            status = stopped.code
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return run


# ---- The scripts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_answers_at_once_and_without_torch(script):
    probe = (
        f"import runpy, sys; sys.argv[1:] = ['--help']\ntry: runpy.run_path({_path(script)!r}, run_name='__main__')\n"
    )
    probe += "finally: assert 'torch' not in sys.modules, 'torch was imported'"
    seconds = []
    while len(seconds) < 3 and min(seconds, default=9) >= 1.5:  # again only where the machine was busy
        start = time.perf_counter()
        shown = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
        seconds.append(time.perf_counter() - start)
        assert shown.returncode == 0, shown.stderr
    for flag in ("--implementation", "--length", "--head-dim", "--precision", "--causal", "--device", "--resume"):
        assert flag in shown.stdout
    assert min(seconds) < 1.5


def test_the_flash_benchmark_survives_ctrl_c_resumes_and_writes_every_file(tmp_path, run_script):
    lengths = range(8, 28)
    arguments = ["--device", "cpu", "--implementation", "sdpa-cudnn", "naive", "--head-dim", 16, "--precision", "fp32"]
    arguments += ["--length", *lengths, "--warmup-ms", 0, "--rep-ms", 1, "--out", tmp_path]
    run = subprocess.Popen(
        [sys.executable, _path("flash_benchmark"), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + 120
    while not (tmp_path / "flash_benchmark.json").exists():
        assert time.monotonic() < end
        time.sleep(0.02)
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate(timeout=120)
    assert run.returncode == 130
    assert "--resume" in errors
    assert "Traceback" not in errors
    before = json.loads((tmp_path / "flash_benchmark.json").read_text())["rows"]
    assert 1 <= len(before) < 6 * len(lengths)

    status, output, errors = run_script("flash_benchmark", *arguments, "--resume")
    assert status == 0, errors
    assert json.loads((tmp_path / "flash_benchmark.json").read_text())["rows"][: len(before)] == before
    rows = read_results(tmp_path / "flash_benchmark.json", FlashRow)[1]
    assert {path.name for path in tmp_path.iterdir()} == {
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
    assert re.search(r"\| +27 \| +[\d.e-]+ \([\d.e-]+\) \|", output)
    assert "- sdpa-cudnn (fp32) is unsupported: sdpa-cudnn runs on NVIDIA GPUs, and the device is cpu" in output
    assert "`python scripts/flash_benchmark.py --device cpu" in output


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


def test_the_leaderboards_rules_are_the_defaults():
    arguments = runpy.run_path(_path("leaderboard_attention"))["Arguments"]()
    assert (arguments.heads, arguments.length, arguments.head_dim) == (16, 16_384, 64)
    assert (arguments.precision, arguments.causal) == ("bf16", True)
    assert (arguments.warmup_ms, arguments.rep_ms) == (1_000, 10_000)


def test_the_handouts_grids_are_the_defaults():
    flash = runpy.run_path(_path("flash_benchmark"))["Arguments"]()
    assert flash.length == (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
    assert flash.head_dim == (16, 32, 64, 128)
    assert (flash.precision, flash.causal, flash.batch_size) == (("bf16", "fp32"), True, 1)
    assert set(flash.implementation) == set(PEERS)
    alone = runpy.run_path(_path("attention_benchmark"))["Arguments"]()
    assert (alone.batch_size, alone.steps, alone.compile) == (8, 100, ("off", "on"))
    assert alone.length == (256, 1024, 4096, 8192, 16384)
    assert alone.head_dim == (16, 32, 64, 128)


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("flash_benchmark", ["--length", "0"], "--length 0: must be at least 1"),
        ("flash_benchmark", ["--length"], "--length : needs at least one value"),
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
        ("attention_benchmark", ["--compile"], "--compile : needs at least one value"),
        ("attention_benchmark", ["--implementation", "flex"], "invalid choice 'flex'"),
        ("leaderboard_attention", ["--heads", "0"], "--heads 0: must be at least 1"),
        ("leaderboard_attention", ["--rep-ms", "0"], "--rep-ms 0: must be at least 1"),
        ("leaderboard_attention", ["--implementation"], "--implementation : needs at least one value"),
    ],
)
def test_bad_input_is_refused_by_flag_name(script, arguments, message, tmp_path, run_script):
    status, output, errors = run_script(script, "--device", "cpu", "--out", tmp_path / "out", *arguments)
    assert status == 2
    assert message in " ".join((errors + output).replace("│", " ").split())
    assert not list(tmp_path.glob("out/*.json"))


# ---- Peers -----------------------------------------------------------------------------------------------------------


def test_every_name_is_a_peer():
    assert set(PEERS) == set(get_args(PeerName))
    assert set(get_args(EagerPeerName)) == {name for name, peer in PEERS.items() if not peer.is_compiled}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shape", [(2, 20, 16), (1, 2, 20, 16)])
@pytest.mark.parametrize("name", ["naive", "naive-compiled", "sdpa-flash", "flash-pytorch", "flash-triton"])
def test_peers_agree_with_the_reference(name, shape, is_causal):
    """Uncompiled, and on a CPU with Triton's interpreter."""
    inputs = torch.randn(3, *shape, requires_grad=True)
    do = torch.randn(shape)
    expected = attention_reference(*inputs, is_causal)[0]
    (expected_gradient,) = torch.autograd.grad(expected, inputs, do)
    try:
        with open_peer(name, CPU, compiler=lambda function: function) as attention:
            o = attention(*inputs, is_causal)
            (gradient,) = torch.autograd.grad(o, inputs, do)
    except Unsupported as reason:
        assert name == "flash-triton"
        pytest.skip(str(reason))
    torch.testing.assert_close(o, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-5)


def test_sdpa_uses_the_peers_backend_and_no_other():
    q = torch.randn(1, 1, 32, 16, requires_grad=True)
    with open_peer("sdpa-flash", CPU) as attention:
        assert "FlashAttention" in type(attention(q, q, q, True).grad_fn).__name__
        assert not torch.backends.cuda.math_sdp_enabled()
    assert torch.backends.cuda.math_sdp_enabled()


def test_a_peer_that_cannot_run_says_why_and_other_errors_pass():
    q = torch.randn(1, 1, 32, 16)
    for name in ("sdpa-cudnn", "sdpa-efficient", "flex"):
        with pytest.raises(Unsupported, match=f"{name} runs on NVIDIA GPUs"), open_peer(name, CPU):
            pass
    with pytest.raises(Unsupported, match=r"head_dim|head dim|last dim"), open_peer("sdpa-flash", CPU) as attention:
        attention(q, q, q[..., :8], False)  # a value head_dim of its own
    with pytest.raises(ZeroDivisionError), open_peer("naive", CPU):
        raise ZeroDivisionError
    with pytest.raises(RuntimeError, match="CUDA error"), open_peer("naive", CPU):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(torch.OutOfMemoryError), open_peer("flex", torch.device("cuda")):
        raise torch.OutOfMemoryError("CUDA out of memory")


# ---- Measuring -------------------------------------------------------------------------------------------------------


def test_calls_are_timed_for_the_time_asked_and_gradients_dropped_before_each():
    x = torch.ones(3, requires_grad=True)
    seen = []

    def call():
        (2 * x).sum().backward()
        seen.append(x.grad[0].item())
        time.sleep(0.002)

    times = time_calls(call, warmup_ms=4, rep_ms=40, device=CPU, grad_to_none=[x])
    assert 3 <= len(times) <= 20
    assert min(times) >= 2
    assert seen[-len(times) :] == [2.0] * len(times)
    for name, value in (("warmup_ms", -1), ("rep_ms", 0)):
        with pytest.raises(ValueError, match=f"{name}={value}"):
            time_calls(call, **{"warmup_ms": 1, "rep_ms": 1, name: value}, device=CPU)


def test_an_error_is_seen_in_the_output_and_in_each_gradient():
    cell = FlashCell("naive", "fp32", head_dim=8, length=33, heads=2)

    def slightly_wrong(q, k, v, is_causal):
        return attention_reference(q, k * 1.01, v, is_causal)[0]

    def wrong_backward_only(q, k, v, is_causal):
        o = attention_reference(q, k, v, is_causal)[0]
        return o + 0.1 * (k - k.detach()) * v.detach()

    def error(attention, **changes):
        return flash_benchmark._relative_error(replace(cell, **changes), attention)

    def right(q, k, v, is_causal):
        return attention_reference(q, k, v, is_causal)[0]

    assert error(right, phase="forward") < 1e-6
    assert error(right, phase="backward") < 1e-6
    assert error(right, phase="forward", precision="bf16") > 1e-4
    assert error(slightly_wrong, phase="forward") > 1e-4
    assert error(wrong_backward_only, phase="forward") < 1e-6
    assert error(wrong_backward_only, phase="backward") > 1e-2
    assert error(right, phase="both") is None
    assert error(right, phase="forward", length=4097, heads=1) is None


def test_what_took_too_long_is_skipped_at_longer_lengths_only_for_that_pass(monkeypatch):
    cells = flash_cells(
        implementation="naive", precision="fp32", head_dim=8, length=(16, 32), phase=("forward", "both"), rep_ms=1,
        max_call_ms=20,
    )  # fmt: skip
    measured = []

    def slow_forward(cell):
        measured.append((cell.length, cell.phase))

        def attention(q, k, v, is_causal):
            time.sleep(0.03 if cell.phase == "both" else 0)
            return attention_reference(q, k, v, is_causal)[0]

        return attention

    class Peer:
        is_compiled, needs_cuda, backend = False, False, None

    measure = FlashMeasure()
    statuses = []
    for cell in cells:
        peer = Peer()
        peer.build = lambda compiler, cell=cell: slow_forward(cell)
        monkeypatch.setitem(PEERS, "naive", peer)
        try:
            statuses.append((cell.length, cell.phase, measure(cell)["repetitions"] >= 1))
        except Skipped as reason:
            statuses.append((cell.length, cell.phase, str(reason)))
    assert [(length, phase) for length, phase, _ in statuses] == [
        (16, "forward"), (16, "both"), (32, "forward"), (32, "both"),
    ]  # fmt: skip
    assert statuses[0][2] is True
    assert statuses[2][2] is True
    assert re.fullmatch(r"one call took \d+ ms, more than 20", statuses[1][2])
    assert statuses[3][2] == f"at length 16, {statuses[1][2]}"
    assert (32, "both") not in measured


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", ["naive", "flash-pytorch", "sdpa-flash"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_memory_formula_is_what_autograd_keeps(name, precision, is_causal):
    cell = AttentionBenchmarkCell(name, precision, head_dim=16, length=48, is_causal=is_causal, batch_size=2)
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor  # keeps it alive, so that no address comes twice
        return tensor

    *inputs, do = make_inputs(cell, cell.batch_size)
    with (
        open_peer(name, CPU) as attention,
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        o = attention(*inputs, is_causal)
    for tensor in (*inputs, do, o):
        keep(tensor)
    kept_bytes = sum(tensor.untyped_storage().nbytes() for tensor in kept.values() if tensor.device.type == "cpu")
    scalars = 64 if name.startswith("sdpa") else 8  # SDPA keeps seeds, plain attention the scale
    assert sum(memory_formula_bytes(cell).values()) == pytest.approx(kept_bytes, abs=scalars)
    assert formulas(cell)["formula_gib"] * 2**30 == pytest.approx(kept_bytes, abs=scalars)


# ---- Grouped sweeps --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Cell:
    group: str
    name: str


@dataclass(frozen=True)
class _Row(_Cell):
    status: str = "ok"
    reason: str = ""
    process: int | None = None
    length: int | None = None


class _Measure:
    def __init__(self):
        self.process = os.getpid()

    def __call__(self, cell):
        if cell.name == "large":
            raise torch.OutOfMemoryError("CUDA out of memory")
        if cell.name == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if cell.name == "unsupported":
            raise Unsupported("not on this machine")
        if cell.name == "slow":
            raise Skipped("takes too long")
        if cell.name == "mistake":
            raise ZeroDivisionError("a mistake")
        return {"process": self.process}


def _sweep(tmp_path, names, resume=False, **changes):
    results = ResultsFile(tmp_path, "bench", _Row, RUN, resume=resume)
    for name, value in changes.items():
        setattr(results, name, value)
    cells = [_Cell(*name.split()) for name in names]
    run_grouped_sweep(cells, lambda cell: cell.group, _Measure, results, known=lambda cell: {"length": len(cell.name)})
    return results.rows


def test_a_group_shares_a_process_and_goes_on_after_each_kind_of_failure(tmp_path):
    names = ["x a", "y a", "x large", "x b", "x killed", "x killed", "x unsupported", "x slow", "x c"]
    rows = _sweep(tmp_path, names)
    assert [(row.group, row.name, row.status) for row in rows] == [
        ("x", "a", "ok"), ("x", "large", "oom"), ("x", "b", "ok"), ("x", "killed", "killed"),
        ("x", "killed", "killed"), ("x", "unsupported", "unsupported"), ("x", "slow", "skipped"), ("x", "c", "ok"),
        ("y", "a", "ok"),
    ]  # fmt: skip
    a, b, c, y = (row.process for row in rows if row.status == "ok")
    assert a == b
    assert len({a, c, y, os.getpid()}) == 4
    assert [row.length for row in rows] == [len(row.name) for row in rows]
    assert rows[5].reason == "not on this machine"
    assert read_results(tmp_path / "bench.json", _Row)[1] == rows

    resumed = _sweep(tmp_path, [*names, "x d"], resume=True)
    assert resumed[:-1] == rows
    assert (resumed[-1].name, resumed[-1].status) == ("d", "ok")


def test_a_mistake_ends_the_sweep_after_the_rows_before_it_are_on_disk(tmp_path):
    with pytest.raises(RuntimeError, match="ZeroDivisionError: a mistake"):
        _sweep(tmp_path, ["x a", "x mistake", "x b"])
    assert [row.name for row in read_results(tmp_path / "bench.json", _Row)[1]] == ["a"]


def test_a_row_that_cannot_be_written_ends_the_sweep(tmp_path):
    def full_disk(row):
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space left"):
        _sweep(tmp_path, ["x a", "x b"], append=full_disk)


# ---- Tables and plots ------------------------------------------------------------------------------------------------


def _flash_row(implementation, length, median_ms=None, status="ok", **changes):
    parameters = {"precision": "bf16", "head_dim": 64, "phase": "both"} | changes
    tflops = None if median_ms is None else 100.0
    return FlashRow(implementation, length=length, median_ms=median_ms, tflops=tflops, status=status, **parameters)


def test_tables_have_lengths_down_and_implementations_across():
    rows = [
        _flash_row("naive", 1024, 2.0),
        _flash_row("naive", 65536, status="oom"),
        _flash_row("flash-triton", 1024, 0.5),
        _flash_row("flash-triton", 128, 0.25),
        _flash_row("sdpa-cudnn", 128, status="unsupported", reason="no GPU"),
        _flash_row("sdpa-cudnn", 128, status="unsupported", reason="no GPU", precision="fp32"),
        _flash_row("naive", 128, 1.0, phase="forward"),
    ]
    tables = pivot_markdown(
        rows, {"head_dim": "head_dim", "phase": ""}, "length", "implementation",
        lambda row: value_or_status(row, "median_ms", "tflops"),
    )  # fmt: skip
    cells = [re.findall(r"[^|\s][^|]*[^|\s]|[^|\s]", line) for line in tables.splitlines() if "---" not in line]
    assert cells == [
        ["**both**"],
        [],
        ["length", "naive", "flash-triton"],
        ["128", "–", "0.25 (100)"],
        ["1024", "2 (100)", "0.5 (100)"],
        ["65536", "oom", "–"],
        [],
        ["**forward**"],
        [],
        ["length", "naive"],
        ["128", "1 (100)"],
    ]
    assert why_unsupported(rows, "precision") == "- sdpa-cudnn (bf16, fp32) is unsupported: no GPU"


def test_plots_of_rows_with_gaps(tmp_path):
    rows = [
        replace(_flash_row("naive", 1024, 2.0), peak_memory_gib=0.1),
        replace(_flash_row("flash-triton", 1024, 0.5), peak_memory_gib=0.01),
        _flash_row("naive", 65536, status="oom"),
        _flash_row("naive", 1024, 2.0, heads=16, precision="fp32"),
    ]
    paths = plot_flash(rows, tmp_path)
    assert [path.name for path in paths] == [
        "flash_benchmark_tflops_bf16.png", "flash_benchmark_tflops_fp32.png", "flash_benchmark_memory.png",
    ]  # fmt: skip
    assert all(path.stat().st_size > 5000 for path in paths)
    assert plot_flash([rows[2]], tmp_path) == []

    cell = AttentionBenchmarkCell("naive", "fp32", head_dim=16, length=256)
    measured = {"forward_mean_ms": 1.0, "backward_mean_ms": 2.0, "memory_before_backward_gib": 0.01}
    alone = [
        AttentionBenchmarkRow(**vars(cell), **measured, **formulas(cell)),
        AttentionBenchmarkRow(
            **vars(replace(cell, length=16384)), status="oom", **formulas(replace(cell, length=16384))
        ),
    ]
    plot_attention(alone, tmp_path / "alone.png")
    assert (tmp_path / "alone.png").stat().st_size > 5000


# ---- With a compiler, and with a GPU ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_compiled_peer_is_compiled_once_for_all_lengths():
    measure = FlashMeasure()
    cells = flash_cells(
        implementation="naive-compiled", precision="fp32", head_dim=16, length=(32, 64, 96), rep_ms=1, warmup_ms=0,
        phase=("forward", "backward", "both"),
    )  # fmt: skip
    for cell in cells:
        assert (measure(cell)["relative_error"] or 0) < 1e-5
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    measure(replace(cells[0], compiled_shapes="static"))
    measure(replace(cells[3], compiled_shapes="static"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", get_args(PeerName))
def test_each_peer_on_a_gpu_is_right_and_needs_little_more_than_its_tensors(name):
    measure = FlashMeasure()
    cell = FlashCell(name, "bf16", head_dim=64, length=1024, heads=2, device="cuda", rep_ms=5, warmup_ms=1)
    for phase in ("forward", "backward"):
        assert measure(replace(cell, phase=phase))["relative_error"] < 0.03
    results = measure(cell)
    tensor_gib = 2 * 1024 * 64 * 2 / 2**30
    assert results["tflops"] > 0
    # q, k, v, dO, O and three gradients; float32 partial sums, or all scores, beside them
    assert 8 * tensor_gib <= results["peak_memory_gib"] < (100 if "naive" in name else 20) * tensor_gib


@pytest.mark.gpu
def test_the_memory_before_backward_on_a_gpu_is_the_formulas():
    cell = AttentionBenchmarkCell("naive", "fp32", head_dim=64, length=1024, device="cuda", steps=3)
    measured = measure_attention(cell)["memory_before_backward_gib"]
    assert measured == pytest.approx(formulas(cell)["formula_gib"], rel=1e-3)


@pytest.mark.gpu
def test_sdpa_says_why_a_backend_refuses():
    with pytest.raises(Unsupported, match=r"[Hh]alf|[Ff]loat|dtype"):
        FlashMeasure()(FlashCell("sdpa-flash", "fp32", head_dim=64, length=128, device="cuda"))
