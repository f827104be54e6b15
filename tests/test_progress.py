"""What a person sees while something is measured."""

import io
import os
import sys
import time

from cs336_systems import progress
from cs336_systems.benchmarking.convergence import _Run, _steps_done
from cs336_systems.benchmarking.convergence_report import ConvergenceRow, run_folder
from cs336_systems.records import ResultsFile
from cs336_systems.training.checkpoints import list_checkpoints
from cs336_systems.training.loop import train_rank
from cs336_systems.training.metrics import METRICS, MetricsFile
from tests.example_rows import RUN
from tests.script_helpers import wait_until
from tests.training_helpers import make_config, tokens_of


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminals_clock_goes_on_within_a_cell(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(progress, "_TICK_S", 0.01)
    with progress.progress(2) as bar:
        bar.set_description("a long one")
        shown = len(sys.stderr.getvalue())
        wait_until(lambda: len(sys.stderr.getvalue()) > shown, "another look at the clock")


def test_a_bar_can_follow_what_others_do(monkeypatch):
    """Within what it waits for, and to its end, though nothing moves it."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(progress, "_TICK_S", 0.01)
    done = 3
    with progress.progress(9, done, unit="step", follow=lambda: (done, "fp32, seed 0")) as bar:
        done = 5
        wait_until(lambda: bar.n == 5, "a look at what is done")
        done = 9
    assert (bar.n, bar.desc) == (9, "fp32, seed 0: ")
    assert "| 9/9 [" in sys.stderr.getvalue()


def test_commands_are_counted_with_the_time_that_those_left_take(clock, capsys):
    countdown = progress.Countdown(3)
    for name, seconds in (("a", 30), ("b", 90), ("c", 1)):
        countdown.next(name)
        time.sleep(seconds)  # the test's own clock
    assert capsys.readouterr().err.splitlines() == [
        "[1 of 3] a",
        "[2 of 3] b, about 60 s left",
        "[3 of 3] c, about 60 s left",
    ]
    assert progress.duration(600) == "10 min"


def test_steps_of_runs_at_work_are_read_from_their_metrics(tmp_path):
    """Of those that have a row all count; what an earlier run left, before this one began, does not."""
    results = ResultsFile(tmp_path, "convergence", ConvergenceRow, RUN)
    runs = [_Run(variant, 0) for variant in ("fp32", "tf32", "bf16", "ddp")]
    results.asked = {run: str(run) for run in runs}
    began_s = 1000.0

    def written(run, last_step, at_s):
        path = run_folder(tmp_path, run.variant, run.seed) / METRICS
        path.parent.mkdir(parents=True)
        with MetricsFile(path) as metrics:
            for step in range(last_step + 1):
                metrics.write("train", step=step)
        with path.open("a") as file:
            file.write('{"kind": "tr')  # of a line being written
        os.utime(path, (at_s, at_s))

    assert _steps_done(results, 10, tmp_path, began_s) == (0, "")
    written(runs[0], 10, 900.0)
    assert _steps_done(results, 10, tmp_path, began_s) == (0, "")
    written(runs[2], 4, 1100.0)
    assert _steps_done(results, 10, tmp_path, began_s) == (4, "bf16, seed 0")
    written(runs[3], 2, 1100.0)
    assert _steps_done(results, 10, tmp_path, began_s) == (6, "bf16, seed 0 and 1 more")
    nothing = {name: None for name in ConvergenceRow.__dataclass_fields__}
    results.append(ConvergenceRow(**{**nothing, "variant": "tf32", "seed": 0, "status": "unsupported"}))
    assert _steps_done(results, 10, tmp_path, began_s) == (16, "bf16, seed 0 and 1 more")


def test_a_run_among_several_has_no_bar_of_its_own(tmp_path, capsys):
    """What it has to say it says."""
    config = make_config(tmp_path, steps=2, resume=True)
    config.out.mkdir()
    for has_bar in (True, False):
        train_rank(None, config, tokens_of(config), "cpu", RUN, has_bar)
        shown = capsys.readouterr().err
        assert ("| 2/2 [" in shown) == has_bar
        assert "no checkpoint under" in shown
        (config.out / METRICS).unlink()
        for path in list_checkpoints(config.out):
            path.unlink()
