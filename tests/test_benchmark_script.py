"""scripts/benchmark.py as a person runs it: the quick start, sweeps, resume, Ctrl-C, and what it refuses."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cs336_systems.benchmarking.model_benchmark import BenchmarkRow
from cs336_systems.records import read_results

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = [sys.executable, str(ROOT / "scripts" / "benchmark.py")]
QUICK = ["--size", "tiny", "--ctx", "16", "--warmup", "1", "--steps", "2", "--device", "cpu"]


def _run(*arguments, **options):
    return subprocess.run([*SCRIPT, *map(str, arguments)], capture_output=True, text=True, timeout=240, **options)


def test_help_answers_at_once_and_without_torch():
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        shown = _run("--help")
        seconds.append(time.perf_counter() - start)
        assert shown.returncode == 0
    for flag in ("--size", "--ctx", "--mode", "--precision", "--compile", "--attention", "--resume", "--out"):
        assert flag in shown.stdout
    probe = f"import runpy, sys; sys.argv[1:] = ['--help']\ntry: runpy.run_path({SCRIPT[1]!r}, run_name='__main__')\n"
    probe += "finally: assert 'torch' not in sys.modules, 'torch was imported'"
    assert subprocess.run([sys.executable, "-c", probe], stdout=subprocess.DEVNULL).returncode == 0
    assert min(seconds) < 1.5


def test_a_sweep_writes_every_kind_of_file_and_resume_skips_what_is_there(tmp_path):
    run = _run(*QUICK, "--mode", "forward", "train-step", "--out", tmp_path)
    assert run.returncode == 0, run.stderr
    assert {path.name for path in tmp_path.iterdir()} == {
        f"benchmark.{kind}" for kind in ("json", "csv", "md", "tex", "png")
    }
    runs, rows, _ = read_results(tmp_path / "benchmark.json", BenchmarkRow)
    forward, train = rows
    assert forward.backward_mean_ms is None
    assert 0 < forward.forward_min_ms <= forward.forward_median_ms
    phases = train.forward_mean_ms + train.loss_mean_ms + train.backward_mean_ms + train.optimizer_mean_ms
    assert phases <= train.step_mean_ms < 1.5 * phases + 5
    assert train.tokens_per_s == pytest.approx(4 * 16 / train.step_median_ms * 1e3)
    assert train.tflops > 0
    assert train.peak_share is None  # no card, no peak
    assert "python scripts/benchmark.py --size tiny" in runs[0].command
    assert "| train-step |" in run.stdout
    before = json.loads((tmp_path / "benchmark.json").read_text())["rows"]

    again = _run(
        *QUICK, "--mode", "forward", "train-step", "--precision", "fp32", "bf16", "--out", tmp_path, "--resume"
    )
    assert again.returncode == 0, again.stderr
    after = json.loads((tmp_path / "benchmark.json").read_text())["rows"]
    assert after[:2] == before
    assert [row["precision"] for row in after] == ["fp32", "fp32", "bf16", "bf16"]


def test_a_model_of_ones_own(tmp_path):
    shape = ["--d-model", 32, "--d-ff", 48, "--num-layers", 1, "--num-heads", 2, "--vocab-size", 99]
    run = _run(*QUICK, "--size", "custom", *shape, "--out", tmp_path)
    assert run.returncode == 0, run.stderr
    row = read_results(tmp_path / "benchmark.json", BenchmarkRow)[1][0]
    assert (row.size, row.d_model, row.d_ff, row.num_layers, row.num_heads, row.vocab_size) == (
        "custom",
        32,
        48,
        1,
        2,
        99,
    )


def test_a_value_given_twice_is_measured_once_and_a_reason_is_shown(tmp_path):
    cells = ["--ctx", 16, 16, "--attention", "naive", "flash-triton"]
    run = _run(*QUICK, *cells, "--out", tmp_path, env={**os.environ, "TRITON_INTERPRET": "0"})
    assert run.returncode == 0, run.stderr
    rows = read_results(tmp_path / "benchmark.json", BenchmarkRow)[1]
    assert [(row.attention, row.status) for row in rows] == [("naive", "ok"), ("flash-triton", "unsupported")]
    assert "Triton compiles for GPUs" in run.stdout


@pytest.mark.parametrize(("stream", "code"), [("ascii", 0), ("/dev/full", 1)])
def test_a_standard_output_that_cannot_take_the_table_loses_no_file(tmp_path, stream, code):
    if stream == "ascii":
        run = _run(*QUICK, "--out", tmp_path, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    else:
        with open(stream, "w") as full:
            arguments = [*SCRIPT, *QUICK, "--out", str(tmp_path)]
            run = subprocess.run(arguments, stdout=full, stderr=subprocess.PIPE, text=True, timeout=240)
    assert run.returncode == code
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".csv", ".md", ".tex", ".png"}


def test_ctrl_c_leaves_the_rows_so_far(tmp_path):
    sizes = ["--ctx", *map(str, range(8, 40))]
    run = subprocess.Popen(
        [*SCRIPT, *QUICK, *sizes, "--out", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    _wait_for(lambda: (tmp_path / "benchmark.json").exists())
    run.send_signal(signal.SIGINT)
    output, errors = run.communicate(timeout=120)
    assert run.returncode == 130
    rows = read_results(tmp_path / "benchmark.json", BenchmarkRow)[1]
    assert 1 <= len(rows) < 32
    assert output.count("| tiny") == len(rows)
    assert "--resume" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size", "huge"], r"--size huge: must be one of tiny, small, medium"),
        (["--size"], r"--size: needs at least one value"),
        (["--ctx", "0"], r"--ctx 0: must be between 1 and"),
        (["--warmup", "-1"], r"--warmup -1: must be 0 or more"),
        (["--steps", "0"], r"--steps 0: must be at least 1"),
        (["--batch-size", "0"], r"--batch-size 0: must be between 1 and"),
        (["--size", "custom", "--d-model", "100", "--d-ff", "8", "--num-layers", "1", "--num-heads", "3"],
         r"--num-heads 3: must divide d_model=100"),
        (["--size", "custom", "--d-model", "64"], r"--d-ff None: --size custom needs it"),
        (["--d-model", "64"], r"--d-model 64: goes with --size custom; 'tiny' has its own"),
        (["--precision", "tf32"], r"--precision tf32: .*NVIDIA.*there fp32 and bf16 run"),
        (["--precision", "fp16", "--device", "mps"], r"--precision fp16: .*there fp32 and bf16 run"),
        (["--device", "my gpu"], r"--device my gpu: must be cpu"),
        (["--device", "gpu"], r"--device gpu: must be cpu, mps, cuda or cuda:N"),
        (["--device", "cuda:99"], r"--device cuda:99: is not on this machine; it has cpu"),
        (["--out", __file__], r"--out .*: must be a folder that can be written to"),
        (["--mode", "bogus"], r"invalid choice 'bogus' for argument '--mode'.*"),
        (["--ctx", "many"], r"--ctx"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_by_name_before_anything_is_built(tmp_path, arguments, message):
    run = _run(*QUICK, "--out", tmp_path / "out", *arguments)
    assert run.returncode == 2
    assert re.search(message, " ".join(run.stderr.split()) + " ".join(run.stdout.split()))
    assert "Traceback" not in run.stderr
    assert not (tmp_path / "out" / "benchmark.json").exists()


@pytest.mark.gpu
def test_a_small_cell_after_one_that_ran_out_of_memory_is_as_if_alone(tmp_path):
    """The large cell asks for more than any card has; the small one after it is timed on a fresh card."""
    shared = ["--warmup", 3, "--steps", 10, "--mode", "forward-backward", "--device", "cuda"]
    alone = _run(*shared, "--size", "small", "--ctx", 128, "--out", tmp_path / "alone")
    assert alone.returncode == 0, alone.stderr
    custom = ["--size", "custom", "--d-model", 768, "--d-ff", 3072, "--num-layers", 12, "--num-heads", 12]
    after = _run(*shared, *custom, "--ctx", 32768, 128, "--batch-size", 4, "--out", tmp_path / "after")
    assert after.returncode == 0, after.stderr
    (small,) = read_results(tmp_path / "alone" / "benchmark.json", BenchmarkRow)[1]
    large, then = read_results(tmp_path / "after" / "benchmark.json", BenchmarkRow)[1]
    assert large.status == "oom"
    assert then.status == "ok"
    assert then.peak_memory_gib == pytest.approx(small.peak_memory_gib, rel=1e-3)
    assert then.step_median_ms == pytest.approx(small.step_median_ms, rel=0.2)


def _wait_for(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"did not happen within {seconds} s"
        time.sleep(0.02)
