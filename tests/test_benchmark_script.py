"""scripts/benchmark.py as a person runs it: the quick start, sweeps, resume, Ctrl-C, and what it refuses."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from cs336_systems.benchmarking.model_benchmark import BenchmarkRow
from cs336_systems.records import read_results
from tests.distributed_helpers import ROOT
from tests.script_helpers import ScriptProcess, assert_help_needs_no_torch, forked_processes, wait_until

QUICK = ["--size", "tiny", "--ctx", 16, "--warmup", 1, "--steps", 2, "--device", "cpu"]
KINDS = ("json", "csv", "md", "tex", "png")


def test_help_answers_at_once_and_without_torch():
    assert_help_needs_no_torch(
        "benchmark", "--size", "--ctx", "--mode", "--precision", "--compile", "--attention", "--resume", "--out"
    )


def test_a_sweep_writes_every_kind_of_file_and_resume_skips_what_is_there(tmp_path, run_script):
    """Started as a person does, in a fresh Python, the first time. A value given twice is measured once."""
    cells = ["--ctx", 16, 16, "--mode", "forward", "train-step"]
    run = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "benchmark.py"), *map(str, [*QUICK, *cells, "--out", tmp_path])],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr
    assert {path.name for path in tmp_path.iterdir()} == {f"benchmark.{kind}" for kind in KINDS}
    runs, rows, _ = read_results(tmp_path / "benchmark.json", BenchmarkRow)
    assert [(row.mode, row.status) for row in rows] == [("forward", "ok"), ("train-step", "ok")]
    forward, train = rows
    assert forward.backward_mean_ms is None
    assert 0 < forward.forward_min_ms <= forward.forward_median_ms
    phases = train.forward_mean_ms + train.loss_mean_ms + train.backward_mean_ms + train.optimizer_mean_ms
    assert phases <= train.step_mean_ms < 2 * phases + 1000  # other processes can come between them
    assert train.tokens_per_s == pytest.approx(4 * 16 / train.step_median_ms * 1e3)
    assert train.tflops > 0
    assert train.peak_share is None  # no card, no peak
    assert "python scripts/benchmark.py --size tiny" in runs[0].command
    assert "| train-step |" in run.stdout
    assert "it has the loss too (loss_* in the CSV), and drops the last step's gradients." in run.stdout
    assert "Without a GPU, peak GiB is what the whole process had in memory" in run.stdout
    before = json.loads((tmp_path / "benchmark.json").read_text())["rows"]

    more = ["--mode", "forward", "train-step", "--attention", "naive", "sdpa"]
    status, _, errors = run_script("benchmark", *QUICK, *more, "--out", tmp_path, "--resume")
    assert status == 0, errors
    after = json.loads((tmp_path / "benchmark.json").read_text())["rows"]
    assert after[:2] == before
    assert [(row["attention"], row["mode"]) for row in after[2:]] == [("sdpa", "forward"), ("sdpa", "train-step")]


def test_a_model_of_ones_own(tmp_path, run_script):
    shape = ["--d-model", 32, "--d-ff", 48, "--num-layers", 1, "--num-heads", 2, "--vocab-size", 99]
    status, _, errors = run_script("benchmark", *QUICK, "--size", "custom", *shape, "--out", tmp_path)
    assert status == 0, errors
    row = read_results(tmp_path / "benchmark.json", BenchmarkRow)[1][0]
    assert (row.size, row.d_model, row.d_ff, row.num_layers, row.num_heads, row.vocab_size) == (
        "custom",
        32,
        48,
        1,
        2,
        99,
    )


@pytest.mark.parametrize(("stdout", "encoding", "status"), [(None, "ascii", 0), ("/dev/full", "utf-8", 1)])
def test_a_standard_output_that_cannot_take_the_table_loses_no_file(tmp_path, stdout, encoding, status):
    out, environment = tmp_path / "out", {"PYTHONIOENCODING": encoding}
    run = ScriptProcess(tmp_path, "benchmark", *QUICK, "--out", out, environment=environment, stdout=stdout)
    assert run.wait() == status
    assert {path.name for path in out.iterdir()} == {f"benchmark.{kind}" for kind in KINDS}


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_a_signal_leaves_the_rows_so_far_and_no_process(tmp_path, number, status, run_script):
    arguments = [*QUICK, "--mode", "forward", "--out", tmp_path / "out"]
    out = tmp_path / "out"
    run = ScriptProcess(tmp_path, "benchmark", *arguments, "--ctx", *range(8, 40))
    wait_until((out / "benchmark.json").exists)
    if number == signal.SIGKILL:
        run.kill()
    else:
        run.send_signal(number)
    assert run.wait() == status
    wait_until(lambda: not forked_processes(), "the end of the measuring process")
    rows = read_results(out / "benchmark.json", BenchmarkRow)[1]
    assert 1 <= len(rows) < 32
    assert "Traceback" not in run.errors
    if number != signal.SIGKILL:
        assert run.output.count("| tiny") == len(rows)
        assert re.search(r"To go on: .*python scripts/benchmark.py .* 39 --resume\n", run.errors)
        assert f"{len(rows)} of 32 cells have their rows. Left: tiny" in run.errors
        assert {path.name for path in out.iterdir()} == {f"benchmark.{kind}" for kind in KINDS}
    if number in (signal.SIGTERM, signal.SIGHUP):  # which leave what Ctrl-C does
        return
    more = range(8, 8 + len(rows) + 1)
    resumed, _, errors = run_script("benchmark", *arguments, "--ctx", *more, "--resume")
    assert resumed == 0, errors
    after = read_results(out / "benchmark.json", BenchmarkRow)[1]
    assert after[: len(rows)] == rows
    assert [row.ctx for row in after] == list(more)
    assert {path.name for path in out.iterdir()} == {f"benchmark.{kind}" for kind in KINDS}


@pytest.mark.skipif(sys.platform != "linux", reason="names a pipe by its path under /proc")
def test_a_reader_that_has_gone_costs_no_file(tmp_path):
    """As in `python scripts/benchmark.py … | true`."""
    reader, writer = os.pipe()
    stdout = f"/proc/{os.getpid()}/fd/{writer}"
    run = ScriptProcess(tmp_path, "benchmark", *QUICK, "--out", tmp_path / "out", stdout=stdout)
    wait_until((tmp_path / "out" / "benchmark.json").exists)
    os.close(reader)
    os.close(writer)
    assert run.wait() == 0, run.errors
    assert {path.name for path in (tmp_path / "out").iterdir()} == {f"benchmark.{kind}" for kind in KINDS}


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
        (["--size", "custom", "--d-model", "64"], r"--d-ff: --size custom needs it"),
        (["--d-model", "64"], r"--d-model 64: goes with --size custom; 'tiny' has its own"),
        (["--precision", "tf32"], r"--precision tf32: .*NVIDIA.*there fp32 and bf16 run"),
        (["--precision", "fp16", "--device", "mps"], r"--precision fp16: .*there fp32 and bf16 run"),
        (["--device", "my gpu"], r"--device my gpu: must be cpu"),
        (["--device", "gpu"], r"--device gpu: must be cpu, mps, cuda or cuda:N"),
        (["--device", "cuda:99"], r"--device cuda:99: is not on this machine; it has cpu"),
        (["--attention", "flash-hopper"],
         r"--attention flash-hopper: its kernels are for .* On cpu these run: naive, sdpa, flash-pytorch"),
        (["--size", "10b", "--batch-size", "100000"],
         r"--size 10b: a train-step of batch 100000 and context 16 takes \d+.\d GiB by formula, and this machine has "),
        (["--out", __file__], r"--out .*: must be a folder that can be written to"),
        (["--mode", "bogus"], r"invalid choice 'bogus' for argument '--mode'.*"),
        (["--ctx", "many"], r"--ctx"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_by_name_before_anything_is_built(tmp_path, arguments, message, run_script):
    status, output, errors = run_script("benchmark", *QUICK, "--out", tmp_path / "out", *arguments)
    assert status == 2
    assert re.search(message, " ".join((errors + output).replace("│", " ").split()))
    assert not (tmp_path / "out" / "benchmark.json").exists()


def test_what_cannot_run_here_is_a_row_beside_what_can(tmp_path, run_script):
    """A value that the device lacks, values that do not go together, and an attention that it cannot run."""
    varied = ["--precision", "fp32", "tf32", "--checkpoint-every", 0, 3, "--attention", "naive", "flash-hopper"]
    status, shown, errors = run_script("benchmark", *QUICK, "--mode", "forward", *varied, "--out", tmp_path)
    assert status == 0, errors
    rows = read_results(tmp_path / "benchmark.json", BenchmarkRow)[1]
    assert len(rows) == 8
    assert {row.reason.partition("=")[0] for row in rows if row.status == "unsupported"} == {
        "precision", "checkpoint_every", "attention",
    }  # fmt: skip
    measured = [(row.precision, row.checkpoint_every, row.attention) for row in rows if row.status == "ok"]
    assert measured == [("fp32", 0, "naive")]
    told = "7 of 8 combinations cannot be measured, and become rows that say why: "
    assert errors.count(told) == 1
    assert "--checkpoint-every 3: must be between 1 and 2" in errors
    assert "its kernels are for GPUs of compute capability 9.0" in shown
    assert (tmp_path / "benchmark.png").exists()


@pytest.mark.gpu
def test_a_small_cell_after_one_that_ran_out_of_memory_is_as_if_alone(tmp_path, run_script):
    """The large cell asks for more than any card has; the small one after it is timed on a fresh card. At this context
    kernels fill the step, so that the host's moods do not count."""
    shared = ["--warmup", 3, "--steps", 10, "--mode", "forward-backward", "--device", "cuda"]
    status, _, errors = run_script("benchmark", *shared, "--size", "small", "--ctx", 1024, "--out", tmp_path / "alone")
    assert status == 0, errors
    custom = ["--size", "custom", "--d-model", 768, "--d-ff", 3072, "--num-layers", 12, "--num-heads", 12]
    status, _, errors = run_script(
        "benchmark", *shared, *custom, "--ctx", 32768, 1024, "--batch-size", 4, "--out", tmp_path / "after"
    )
    assert status == 0, errors
    (small,) = read_results(tmp_path / "alone" / "benchmark.json", BenchmarkRow)[1]
    large, then = read_results(tmp_path / "after" / "benchmark.json", BenchmarkRow)[1]
    assert large.status == "oom"
    assert then.status == "ok"
    assert then.peak_memory_gib == pytest.approx(small.peak_memory_gib, rel=1e-3)
    assert then.step_median_ms == pytest.approx(small.step_median_ms, rel=0.1)
