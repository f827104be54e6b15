"""The benchmark's NVTX ranges, by name and nesting; that they are not there unless asked for, and change no result."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cs336_basics.model
from cs336_systems.attention.model_attention import naive_attention, sdpa_attention
from cs336_systems.benchmarking.isolation import run_isolated
from cs336_systems.benchmarking.model_benchmark import measure_cell
from cs336_systems.configs import named_cell
from cs336_systems.profiling.nsys_report import read_report
from cs336_systems.profiling.nvtx import NvtxWatcher, watch_with_nvtx
from cs336_systems.profiling.ranges import annotated_attention, marked_model
from cs336_systems.profiling.trace import CELL_MARK
from cs336_systems.records import Unsupported
from cs336_systems.workload import Workload, build_model

ROOT = Path(__file__).resolve().parents[1]
NSYS = os.environ.get("NSYS", "nsys")  # a program, or a command that calls it


class Recorder:
    """Marks that write down each opening and closing, indented by depth."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.depth = 0

    @contextmanager
    def __call__(self, name: str) -> Generator[None]:
        self.lines.append("  " * self.depth + name)
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1

    def mark(self, text: str) -> None:
        self.lines.append("  " * self.depth + "!" + text)


@pytest.fixture
def nvtx(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """What would reach NVTX."""
    recorder = Recorder()
    monkeypatch.setattr(torch.cuda.nvtx, "range", recorder)
    monkeypatch.setattr(torch.cuda.nvtx, "mark", recorder.mark)
    return recorder


_BLOCK = ["block {}", "  scores", "  softmax", "  final matmul"]


def _forward(indent: str) -> list[str]:
    blocks = [line.format(index) for index in range(2) for line in _BLOCK]
    return [f"{indent}forward", *(f"{indent}  {line}" for line in blocks)]


def _cell(**parameters: Any) -> Any:
    return named_cell("tiny", 16, **{"warmup": 1, "steps": 2, "device": "cpu", **parameters})


def test_the_benchmark_marks_steps_phases_blocks_and_attention(nvtx: Recorder) -> None:
    cell = _cell()
    result = measure_cell(cell, watch_with_nvtx)
    assert result["step_mean_ms"] >= result["forward_mean_ms"] > 0
    # Warm-up has its model's ranges too; its phases are not marked, since none of them is measured.
    warmup = ["warmup", *("  " + line.format(index) for index in range(2) for line in _BLOCK)]
    step = ["step", *_forward("  "), "  loss", "  backward", "  optimizer"]
    assert nvtx.lines == ["!cs336", *warmup, f"!{CELL_MARK}{json.dumps(asdict(cell))}", *step, *step]
    assert nvtx.depth == 0


def test_other_attentions_are_one_range_and_compiled_models_have_phases_only(
    nvtx: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_cell(_cell(attention="sdpa", mode="forward", steps=1, warmup=0), watch_with_nvtx)
    assert nvtx.lines[-6:] == ["step", "  forward", "    block 0", "      attention", "    block 1", "      attention"]
    nvtx.lines.clear()
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: None)  # what it compiles to does not matter here
    for how in ("on", "blocks"):
        measure_cell(_cell(compile=how, mode="forward", steps=1, warmup=0), watch_with_nvtx)
        assert nvtx.lines[-2:] == ["step", "  forward"]


def test_nothing_is_marked_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("NVTX was called")

    for name in ("range", "range_push", "mark"):
        monkeypatch.setattr(torch.cuda.nvtx, name, never)
    monkeypatch.setattr(torch.cuda.profiler, "start", never)
    measure_cell(_cell(steps=1))
    assert cs336_basics.model.scaled_dot_product_attention is naive_attention


def test_the_capture_is_around_the_measured_steps_and_ends_when_the_gpu_is_done(
    nvtx: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: nvtx.mark("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: nvtx.mark("stop"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: nvtx.mark("wait"))
    workload: Any = SimpleNamespace(device=torch.device("cuda"), cell=_cell())
    with NvtxWatcher(workload).capture():
        nvtx.mark("steps")
    assert [line for line in nvtx.lines if CELL_MARK not in line] == ["!start", "!steps", "!wait", "!stop"]
    nvtx.lines.clear()
    with pytest.raises(ZeroDivisionError), NvtxWatcher(workload).capture():
        raise ZeroDivisionError
    assert nvtx.lines[-1] == "!stop"  # what was recorded until then is kept


def test_a_build_without_nvtx_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: Any) -> None:
        raise RuntimeError("NVTX functions not installed. Are you sure you have a CUDA build?")

    monkeypatch.setattr(torch.cuda.nvtx, "mark", absent)
    with pytest.raises(Unsupported, match="comes with PyTorch's CUDA builds"), watch_with_nvtx(Workload(_cell())):
        pass


@pytest.mark.parametrize("masked", [True, False])
def test_annotated_attention_is_attention_to_the_bit(masked: bool) -> None:
    mask = torch.ones(8, 8, dtype=torch.bool).tril() if masked else None
    results = []
    for attention in (naive_attention, annotated_attention(Recorder())):
        q, k, v = (
            torch.randn(2, 3, 8, 4, generator=torch.Generator().manual_seed(i)).requires_grad_() for i in range(3)
        )
        o = attention(q, k, v, mask)
        o.square().sum().backward()
        results.append((o, q.grad, k.grad, v.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_marked_model_computes_the_same_and_is_as_it_was_afterwards() -> None:
    config = named_cell("tiny", 16).model_config()
    model = build_model(config, "cpu")
    tokens = torch.arange(16).unsqueeze(0)
    before = model(tokens)
    recorder = Recorder()
    with marked_model(model, recorder):
        assert torch.equal(model(tokens), before)
    assert len(recorder.lines) == 8
    assert torch.equal(model(tokens), before)
    assert len(recorder.lines) == 8
    assert cs336_basics.model.scaled_dot_product_attention is naive_attention


def test_a_block_that_raises_closes_its_range(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA out of memory")

    model = build_model(named_cell("tiny", 16).model_config(), "cpu")
    monkeypatch.setattr(model.layers[1].ffn, "forward", fail)
    recorder = Recorder()
    with marked_model(model, recorder):
        with pytest.raises(RuntimeError, match="out of memory"):
            model(torch.arange(16).unsqueeze(0))
        assert "block 1" in recorder.lines
        assert recorder.depth == 0


def test_an_attention_that_masks_by_itself_still_says_so() -> None:
    assert annotated_attention(Recorder(), sdpa_attention).is_causal is True
    assert not hasattr(annotated_attention(Recorder()), "is_causal")
    assert annotated_attention(Recorder(), lambda Q, K, V, mask=None: V).is_causal is False


def _parent() -> int:
    return os.getppid()


def test_under_nsys_the_measuring_process_is_a_program_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is forked from a server has the server for its parent, and nsys does not look into it."""
    assert run_isolated(_parent).value != os.getpid()
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")
    assert run_isolated(_parent).value == os.getpid()


@pytest.mark.gpu
@pytest.mark.skipif(
    shutil.which(shlex.split(NSYS)[0]) is None, reason="needs nsys (NSYS names a command that calls it)"
)
def test_nsys_sees_the_ranges_and_the_measured_steps_only(tmp_path: Path) -> None:
    cell = ["--size", "tiny", "--ctx", "64", "--warmup", "2", "--steps", "2"]
    script = [sys.executable, str(ROOT / "scripts" / "profile_nsys.py"), *cell, "--nsys", NSYS, "--out", str(tmp_path)]
    run = subprocess.run(script, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    trace = read_report(tmp_path / "tiny-ctx64-train-step-fp32" / "report.sqlite")
    kinds = ["step", "forward", "block", "scores", "softmax", "final matmul", "loss", "backward", "optimizer"]
    assert trace.kinds() == kinds
    assert "warmup" not in {opened.name for opened in trace.ranges}
    assert len(trace.steps) == 2
    assert trace.notes == []
    assert all(kernel.is_in("step") for kernel in trace.kernels)
    assert any(kernel.is_in("backward") for kernel in trace.kernels)
    assert "products ms" in run.stdout
