"""The comparison of techniques by their losses: every run is a row, and the table and picture are made of the rows."""

import dataclasses
import errno
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from concurrent import futures

import pytest

from cs336_systems import feasibility
from cs336_systems.benchmarking import convergence, into_files
from cs336_systems.benchmarking.convergence import VARIANTS, run_convergence
from cs336_systems.benchmarking.convergence_report import ConvergenceRow, convergence_table, summarize
from cs336_systems.benchmarking.isolation import run_isolated
from cs336_systems.distributed.spawn import RankFailedError
from cs336_systems.files import NotWritten
from cs336_systems.records import read_results
from cs336_systems.training import run_checks
from cs336_systems.training.checkpoints import checkpoint_path, list_checkpoints, load_checkpoint
from cs336_systems.training.config import TrainArguments, TrainConfig
from cs336_systems.training.metrics import METRICS, read_metrics
from tests.script_helpers import ScriptProcess, wait_until
from tests.training_helpers import QUICK, write_text


def _run(folder, **changes):
    base = {name: value for name, value in QUICK.items() if name != "checkpoint_every"}
    arguments = {"variant": ("fp32", "ddp", "tf32"), "seed": (0, 1), "processes": None, "resume": False, "steps": 4}
    arguments["at_once"] = 0
    folder.mkdir(exist_ok=True)
    out = folder / "runs"
    return run_convergence("command", out=out, data=write_text(folder), **{**base, **arguments, **changes})


@pytest.mark.slow
def test_each_variant_and_seed_is_trained_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(feasibility, "usable_cores", lambda: 1)
    rows = _run(tmp_path)
    assert [(row.variant, row.seed, row.status) for row in rows] == [
        ("fp32", 0, "ok"),
        ("ddp", 0, "ok"),
        ("tf32", 0, "unsupported"),
        ("fp32", 1, "ok"),
        ("ddp", 1, "ok"),
        ("tf32", 1, "unsupported"),
    ]
    losses = {(row.variant, row.seed): row.validation_loss for row in rows}
    for seed in (0, 1):
        assert losses["ddp", seed] == pytest.approx(losses["fp32", seed], rel=1e-4)
    assert losses["fp32", 0] != losses["fp32", 1]
    shown, errors = capsys.readouterr()
    assert errors.count("2 ranks share the one core that they may use here, and take turns") == 1
    assert "| 24/24 [" in errors  # the one bar of all runs' steps
    assert "- tf32, seed 0; tf32, seed 1: unsupported. precision='tf32': is a mode of NVIDIA's tensor cores" in shown
    (run,) = read_results(tmp_path / "runs" / "convergence.json", ConvergenceRow)[0]
    assert shown.endswith(f"\n\nMeasured: {run.summary()}\n")
    assert (tmp_path / "runs" / "ddp" / "seed-1" / METRICS).exists()
    assert (tmp_path / "runs" / "convergence.png").stat().st_size > 10_000
    again = _run(tmp_path, variant=("fp32", "ddp", "tf32", "bf16"), seed=(0,), resume=True)
    assert again[:6] == rows
    assert [(row.variant, row.seed) for row in again[6:]] == [("bf16", 0)]
    assert read_results(tmp_path / "runs" / "convergence.json", ConvergenceRow)[1] == again


def test_the_cpu_is_looked_at_only_where_something_is_trained(tmp_path, monkeypatch):
    looked = []

    def look(run, is_end, **_):
        looked.append((is_end, (tmp_path / "runs" / "bf16" / "seed-0" / METRICS).exists()))
        return dataclasses.replace(run, busy_cores=1.5)

    monkeypatch.setattr(into_files, "with_cpu_load", look)
    with pytest.raises(SystemExit, match="1"):
        _run(tmp_path, variant=("tf32",), seed=(0,))
    assert looked == []
    _run(tmp_path, variant=("tf32", "bf16"), seed=(0,), resume=True)
    assert looked == [(False, False), (True, True)]
    assert read_metrics(tmp_path / "runs" / "bf16" / "seed-0" / METRICS)[0]["busy_cores"] == 1.5
    _run(tmp_path, variant=("tf32", "bf16"), seed=(0,), resume=True)
    assert len(looked) == 2  # nothing was left to measure


def test_fewer_steps_than_the_rate_rises_over_by_default_are_a_run(tmp_path, run_script):
    """By default it rises over a tenth of the steps; the runs say over how many."""
    tiny = ["--steps", 10, "--ctx", 8, "--batch-size", 2, "--variant", "fp32", "--device", "cpu"]
    status, _, errors = run_script("convergence", *tiny, "--data", write_text(tmp_path), "--out", tmp_path / "runs")
    assert status == 0, errors
    (checkpoint,) = list_checkpoints(tmp_path / "runs" / "fp32" / "seed-0")
    assert load_checkpoint(checkpoint).config["warmup_steps"] == 1


def test_runs_at_the_same_time_end_as_one_by_one(tmp_path):
    first = _run(tmp_path / "first", variant=("fp32", "bf16", "ddp"), seed=(0,), at_once=1)
    second = _run(tmp_path / "second", variant=("fp32", "bf16", "ddp"), seed=(0,), at_once=3)
    losses = [
        [(row.variant, row.seed, row.validation_loss, row.train_loss) for row in rows] for rows in (first, second)
    ]
    assert losses[0] == losses[1]


def test_rows_of_another_run_are_not_kept_beside_new_ones(tmp_path, capsys):
    rows = _run(tmp_path, variant=("fp32",), seed=(0,))
    with pytest.raises(SystemExit) as refused:
        _run(tmp_path, variant=("fp32", "bf16"), seed=(0,), steps=6, resume=True)
    assert refused.value.code == 2
    assert "steps" in capsys.readouterr().err
    assert read_results(tmp_path / "runs" / "convergence.json", ConvergenceRow)[1] == rows
    assert not (tmp_path / "runs" / "bf16").exists()


@pytest.mark.slow
def test_a_rank_that_is_killed_is_a_row_and_the_others_go_on(tmp_path, monkeypatch):
    def killed(*arguments, **options):
        raise RankFailedError("rank 1 was killed by SIGKILL", 1, "", -signal.SIGKILL)

    monkeypatch.setattr("cs336_systems.benchmarking.convergence.spawn_ranks", killed)
    with pytest.raises(SystemExit, match="1"):
        _run(tmp_path, variant=("ddp", "fp32"), seed=(0,))
    rows = read_results(tmp_path / "runs" / "convergence.json", ConvergenceRow)[1]
    assert [(row.variant, row.status) for row in rows] == [("ddp", "killed"), ("fp32", "ok")]
    assert "rank 1" in rows[0].reason
    monkeypatch.undo()
    resumed = _run(tmp_path, variant=("ddp", "fp32"), seed=(0,), resume=True)  # it is tried again, the other kept
    assert [(row.variant, row.status) for row in resumed] == [("fp32", "ok"), ("ddp", "ok")]
    assert resumed[0] == rows[1]


@pytest.mark.slow
def test_a_run_for_which_memory_is_too_full_is_tried_again_and_the_others_go_on(tmp_path, monkeypatch):
    rows = _run(tmp_path, variant=("ddp",), seed=(0,))
    monkeypatch.setattr(feasibility, "machine_memory", lambda: feasibility.Memory(2**50, 10 * 2**20))
    monkeypatch.setattr(run_checks, "ranks_bytes", lambda config, peak, n_ranks: n_ranks * 8 * 2**20)
    assert _run(tmp_path, variant=("fp32", "ddp"), seed=(0,), resume=True)[0] == rows[0]  # ddp would not fit now
    with pytest.raises(SystemExit, match="1"):  # nothing was measured
        _run(tmp_path / "other", variant=("ddp",), seed=(0,))
    (row,) = read_results(tmp_path / "other" / "runs" / "convergence.json", ConvergenceRow)[1]
    assert row.status == "oom"
    assert row.reason.startswith("size='custom': a train-step of batch 2")


def test_a_run_that_had_ended_without_its_row_gets_it(tmp_path, capsys):
    rows = _run(tmp_path, variant=("fp32",), seed=(0,))
    for path in (tmp_path / "runs").glob("convergence*"):
        path.unlink()
    again = _run(tmp_path, variant=("fp32",), seed=(0,), resume=True)
    assert [dataclasses.replace(row, tokens_per_s=None) for row in again] == [
        dataclasses.replace(row, tokens_per_s=None) for row in rows
    ]
    assert "Nothing is left to measure" not in capsys.readouterr().err
    assert _run(tmp_path, variant=("fp32",), seed=(0,), resume=True) == again
    assert "Nothing is left to measure" in capsys.readouterr().err


def test_a_full_disk_is_a_line_whichever_process_met_it(tmp_path, monkeypatch, capsys):
    rows = _run(tmp_path, variant=("fp32",), seed=(0,))
    for module, error in (
        ("run_isolated", NotWritten(errno.ENOSPC, "No space left", "a")),
        ("spawn_ranks", RankFailedError("rank 1 raised NotWritten", 1, "", 1)),
    ):

        def fail(*arguments, error=error, **options):
            error.__cause__ = NotWritten(errno.ENOSPC, "No space left", "b")
            raise error

        monkeypatch.setattr(convergence, module, fail)
    for variant in ("bf16", "ddp"):
        with pytest.raises(SystemExit) as stopped:
            _run(tmp_path, variant=(variant,), seed=(0,), resume=True)
        assert stopped.value.code == 1
        assert "No space left; the 1 row before remains in convergence.json. Make room" in capsys.readouterr().err
    assert read_results(tmp_path / "runs" / "convergence.json", ConvergenceRow)[1] == rows


def test_ctrl_c_ends_every_run(tmp_path, monkeypatch, capsys):
    """Those on ranks at once: they save nothing then."""
    told = threading.Event()

    def tell(text):
        told.set()
        print(text, file=sys.stderr)

    def train(base, run, *rest):
        if run.variant == "fp32":
            if run.seed == 0:
                wait_until(multiprocessing.active_children)  # the other's
            else:
                told.wait()  # begun in the moment before the rest was dropped
            raise KeyboardInterrupt
        ended.append(run_isolated(time.sleep, 1000).status)

    ended = []
    monkeypatch.setattr(convergence, "_train", train)
    monkeypatch.setattr(convergence, "tell", tell)
    with pytest.raises(SystemExit) as stopped:
        _run(tmp_path, variant=("fp32", "ddp"), seed=(0, 1), at_once=2)
    assert stopped.value.code == 130
    assert ended == ["killed"]
    shown = capsys.readouterr().err
    assert "ddp, seed 0: ended now; --resume begins at the last checkpoint (--checkpoint-every), if any." in shown
    assert "0 of 4 cells have their rows. Left: fp32, seed 0; ddp, seed 0; fp32, seed 1; ddp, seed 1." in shown


@pytest.mark.parametrize(
    ("ending", "code", "told"),
    [
        (NotWritten(errno.ENOSPC, "No space left", "a"), 1, "No space left; no row was there yet"),
        (ConvergenceRow("fp32", 0, 1, 4, "killed", "SIGKILL"), 130, "fp32, seed 0: SIGKILL; --resume begins at its"),
    ],
)
def test_a_step_that_ctrl_c_could_not_save_is_told(tmp_path, monkeypatch, capsys, ending, code, told):
    saving = threading.Event()

    def train(base, run, *rest):
        os.kill(os.getpid(), signal.SIGINT)
        assert saving.wait(60)
        if isinstance(ending, Exception):
            raise ending
        return ending

    def wait(*arguments, **options):
        saving.set()
        return futures.wait(*arguments, **options)

    monkeypatch.setattr(convergence, "_train", train)
    monkeypatch.setattr(convergence, "wait", wait)
    with pytest.raises(SystemExit) as stopped:
        _run(tmp_path, variant=("fp32",), seed=(0,))
    assert stopped.value.code == code
    assert told in capsys.readouterr().err


def test_ctrl_c_loses_no_step_of_a_run_in_one_process(tmp_path):
    """Stopped twice in a run that would take hours: every step is there once, and the second time begins at the first
    one's last."""
    words = ["--variant", "fp32", "--size", "tiny", "--ctx", 8, "--batch-size", 1, "--device", "cpu"]
    words += ["--steps", 1_000_000, "--checkpoint-every", 1_000_000, "--validate-every", 1_000_000]
    words += ["--data", write_text(tmp_path), "--out", tmp_path / "runs"]
    folder = tmp_path / "runs" / "fp32" / "seed-0"
    begun = []
    for more in ([], ["--resume"]):
        script = ScriptProcess(tmp_path, "convergence", *words, *more)
        n_before = len(_steps(folder))
        wait_until(lambda n_before=n_before: len(_steps(folder)) > n_before + 3, "a step")
        script.send_signal(signal.SIGINT)
        assert script.wait() == 130
        steps = _steps(folder)
        assert steps == list(range(1, len(steps) + 1))
        assert [path.name for path in list_checkpoints(folder)][-1] == checkpoint_path(folder, len(steps)).name
        assert "fp32, seed 0: this step is finished and saved first. Once more ends at once" in script.errors
        assert script.errors.count(" --resume\n") == 1
        begun.append(len(steps))
    starts = [line["step"] for line in read_metrics(folder / METRICS) if line["kind"] == "run"]
    assert starts == [0, begun[0]]


def _steps(folder):
    """The steps whose lines are whole."""
    path = folder / METRICS
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [line["step"] for line in map(json.loads, lines) if line["kind"] == "train"]


def _row(variant, seed, loss, **changes):
    row = {"processes": 1, "steps": 9, "status": "ok", "reason": "", "train_loss": 2.0, "tokens_per_s": 100.0}
    return ConvergenceRow(variant, seed, **{**row, "validation_loss": loss, "skipped_steps": 1, **changes})


def test_the_table_by_hand():
    rows = [
        _row("fp32", 0, 1.0),
        _row("fp32", 1, 2.0),
        _row("fp16", 0, 1.5, zero_gradient_share=0.25),
        _row("fp16", 1, None, status="stopped", reason="the loss is nan", train_loss=None),
    ]
    first, second = summarize(rows)
    assert (first.runs, first.validation_loss, first.least, first.largest, first.difference) == ("2 of 2", 1.5, 1, 2, 0)
    assert first.std == pytest.approx(0.5**0.5)
    assert (second.runs, second.validation_loss, second.std, second.difference) == ("1 of 2", 1.5, None, 0.5)
    assert (second.skipped_steps, second.zero_gradient_share) == (2, 0.25)
    table = convergence_table(rows)
    assert "| fp16 | 1 | 1 of 2 | 1.5000 | – | 1.5000 | 1.5000 | +0.5000 | 2.0000 | 2 | 0.25 | 100 |" in table
    assert "fp16, seed 1: stopped. the loss is nan" in table


def test_variants_are_runs_that_can_be():
    names = {field.name for field in dataclasses.fields(TrainArguments)}
    for changes in VARIANTS.values():
        assert set(changes) <= names
        TrainConfig(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"variant": ("fp8",)}, "error: --variant fp8: must be one of fp32, tf32"),
        ({"variant": ()}, "error: --variant: needs at least one value"),
        ({"seed": ()}, "error: --seed: needs at least one value"),
        ({"variant": ("fp32", "fp32")}, "error: --variant fp32 fp32: must name each once"),
        ({"seed": (1, 0, 1)}, "error: --seed 1 0 1: must name each once"),
        ({"seed": (0, -1)}, "error: --seed -1: must be 0 or more"),
        ({"processes": 0}, "error: --processes 0: must be at least 1"),
        ({"at_once": -1}, "error: --at-once -1: must be 0 or more"),
        ({"ctx": 0}, "error: --ctx 0: must be at least 1"),
    ],
)
def test_bad_input_is_refused_by_name(tmp_path, capsys, changes, message):
    with pytest.raises(SystemExit) as refused:
        _run(tmp_path, **changes)
    assert refused.value.code == 2
    assert message in capsys.readouterr().err
