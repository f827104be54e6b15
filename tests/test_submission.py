"""Sweeps as jobs: with submitit's local executor, which runs them as processes here."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from cs336_systems.distributed import submission
from cs336_systems.distributed.submission import run_command, submit_commands, wait_for


def test_a_sweep_runs_as_local_jobs(tmp_path: Path) -> None:
    pytest.importorskip("submitit", reason="needs submitit, the optional extra 'slurm'")
    commands = [["-c", f"print('cell', {cell})"] for cell in (1, 2)] + [["-c", "raise SystemExit('no such cell')"]]
    jobs = submit_commands(commands, tmp_path, cluster="local", timeout_min=5)
    assert [job.result() for job in jobs[:2]] == ["cell 1\n", "cell 2\n"]
    with pytest.raises(Exception, match="ended with status 1:\nno such cell"):
        jobs[2].result()
    assert wait_for(jobs) == [f"{jobs[2].job_id} failed: no such cell  (log: {jobs[2].paths.stdout})"]
    assert "cell 1" in jobs[0].stdout()


@pytest.mark.slow
def test_a_benchmark_runs_as_a_local_job(tmp_path: Path) -> None:
    pytest.importorskip("submitit", reason="needs submitit, the optional extra 'slurm'")
    command = "scripts/all_reduce_benchmark.py --device cpu --processes 2 --sizes-mb 0.01 --repeats 2 --out"
    (job,) = submit_commands([[*command.split(), str(tmp_path / "out")]], tmp_path / "jobs", cluster="local")
    assert "| gloo" in job.result()
    assert (tmp_path / "out" / "all_reduce.json").exists()


def test_what_a_slurm_job_is_given(tmp_path: Path, monkeypatch) -> None:
    """Without a cluster: submitit is replaced by a recorder."""
    monkeypatch.setattr(submission.shutil, "which", lambda name: f"/usr/bin/{name}")
    submitit = mock.MagicMock()
    with mock.patch.dict(sys.modules, {"submitit": submitit}):
        submit_commands(
            [["a.py"], ["b.py", "--x"]],
            tmp_path,
            cluster="slurm",
            nodes=2,
            tasks_per_node=8,
            gpus_per_node=8,
            partition="gpu",
        )
    submitit.AutoExecutor.assert_called_once_with(folder=tmp_path, cluster="slurm")
    executor = submitit.AutoExecutor.return_value
    parameters = executor.update_parameters.call_args.kwargs
    expected: dict[str, Any] = {"nodes": 2, "tasks_per_node": 8, "gpus_per_node": 8, "slurm_partition": "gpu"}
    assert expected.items() <= parameters.items()
    assert "--kill-on-bad-exit=1" in parameters["slurm_srun_args"]
    assert [call.args[1] for call in executor.submit.call_args_list] == [["a.py"], ["b.py", "--x"]]


def test_a_command_that_fails_raises_with_its_last_lines(tmp_path: Path) -> None:
    assert run_command(["-c", "import os; print(os.getcwd())"], str(tmp_path)) == f"{tmp_path}\n"
    program = "print('\\n'.join(map(str, range(100)))); raise SystemExit(3)"
    with pytest.raises(RuntimeError, match="ended with status 3") as failure:
        run_command(["-c", program], str(tmp_path))
    assert str(failure.value).splitlines()[1:] == [str(n) for n in range(70, 100)]


def test_bad_submissions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="commands='': must be at least one"):
        submit_commands([], tmp_path)
    with pytest.raises(ValueError, match="nodes=0: must be at least 1"):
        submit_commands([["a.py"]], tmp_path, nodes=0)
    with mock.patch.dict(sys.modules, {"submitit": None}), pytest.raises(ModuleNotFoundError, match="--extra slurm"):
        submit_commands([["a.py"]], tmp_path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--cluster", "slurm"], "--cluster slurm: needs Slurm, whose srun is not on the PATH"),
        (["--nodes", "2"], "--nodes 2: is of Slurm; jobs on this machine have one node"),
        (["--partition", "a"], "--partition a: is of Slurm; jobs on this machine have none"),
        (["--cpus-per-task", "0"], "--cpus-per-task 0: must be at least 1"),
        (["--folder", __file__], f"--folder {__file__}: must be a folder that can be written to (it is a file)"),
        (["--vary", "--out 'a b"], "--vary --out 'a b: cannot be read as a shell's words (No closing quotation)"),
        (["--command", ""], "--command: must be a script and its arguments"),
        (["--command", "  "], "--command: must be a script and its arguments"),
    ],
)
def test_what_cannot_be_submitted_here_is_a_line(monkeypatch, run_script, words, said):
    pytest.importorskip("submitit", reason="needs submitit, the optional extra 'slurm'")
    monkeypatch.setattr(submission.shutil, "which", lambda name: None)
    assert run_script("submit_sweep", "--command", "a.py", *words) == (2, "", f"error: {said}\n")


def test_every_job_that_failed_is_told_of(monkeypatch, run_script, clock):
    def job(number: int, error: Exception | None) -> mock.MagicMock:
        made = mock.MagicMock(job_id=f"{number}")
        made.paths.stdout = f"{number}.log"
        made.result.side_effect = error
        return made

    submitits = (
        "Job (task=0) failed during processing with trace:\n----\nTraceback (most recent call last):\n"
        "RuntimeError: a.py ended with status 2:\nerror: --ctx 0: must be at least 1\n\n----\n"
        "You can check full logs with 'job.stderr(0)'or at paths:\n  - 0.err\n  - 0.log"
    )
    boxed = (
        "RuntimeError: a.py ended with status 2:\n╭─ Unrecognized options ─────╮\n│ Unrecognized: --ctxx, 32 │\n"
        "╰──────────────────────────╯\n\n----\nYou can check full logs with 'job.stderr(0)'"
    )
    errors = [RuntimeError(submitits), None, ValueError(), RuntimeError(boxed)]
    jobs = [job(number, error) for number, error in enumerate(errors)]
    monkeypatch.setattr(submission, "submit_commands", lambda *_, **__: jobs)
    status, _, told = run_script("submit_sweep", "--wait", "--command", "a.py", "--vary", "1", "2", "3", "4")
    assert status == 1
    assert told.splitlines()[-3:] == [
        "error: 0 failed: error: --ctx 0: must be at least 1  (log: 0.log)",
        "error: 2 failed: ValueError  (log: 2.log)",
        "error: 3 failed: Unrecognized: --ctxx, 32  (log: 3.log)",
    ]


def test_the_scripts_own_example_is_understood(monkeypatch, run_script):
    asked = []

    def submit(commands, folder, **options):
        asked.append((commands, options["gpus_per_node"], options["partition"]))
        return [mock.MagicMock(job_id="7") for _ in commands]

    monkeypatch.setattr("cs336_systems.distributed.submission.submit_commands", submit)
    example = (Path(__file__).resolve().parents[1] / "scripts" / "submit_sweep.py").read_text(encoding="utf-8")
    typed = re.search(r"python scripts/submit_sweep\.py (.*?)\n    python ", example, re.DOTALL)[1]
    words = shlex.split(typed.replace("\\\\", ""))
    status, shown, errors = run_script("submit_sweep", *words)
    assert (status, errors) == (0, "")
    assert shown.startswith("7: scripts/ddp_benchmark.py --size xl --precision fp32  (log: ")
    shared = ["scripts/ddp_benchmark.py", "--size", "xl"]
    assert asked == [([[*shared, "--precision", "fp32"], [*shared, "--precision", "bf16"]], 2, "gpu")]


_README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
_IN_README = shlex.split(
    re.search(r"python scripts/submit_sweep\.py (.*?)```", _README, re.DOTALL)[1].replace("\\\n", "")
)


def test_what_the_readme_submits_are_commands_of_the_benchmark(monkeypatch, run_script, capsys):
    """Each job's words go to the script itself, up to its work; the wait for them counts."""
    submitted = []

    def submit(commands, folder, **options):
        submitted.extend(commands)
        return [mock.MagicMock(job_id=str(number)) for number, _ in enumerate(commands)]

    monkeypatch.setattr("cs336_systems.distributed.submission.submit_commands", submit)
    status, shown, errors = run_script("submit_sweep", *_IN_README)
    assert status == 0
    assert "| 2/2 [" in errors
    assert "0: scripts/benchmark.py --size tiny --ctx 64 --out out/ctx64  (log: " in shown
    asked = []
    monkeypatch.setattr(
        "cs336_systems.benchmarking.run_benchmark.run_benchmark", lambda *_, **given: asked.append(given)
    )
    for script, *words in submitted:
        assert run_script(Path(script).stem, *words)[0] == 0
    assert [(given["size"], given["ctx"], str(given["out"])) for given in asked] == [
        (("tiny",), (64,), "out/ctx64"),
        (("tiny",), (128,), "out/ctx128"),
    ]


@pytest.mark.slow
def test_what_the_readme_submits_runs_here(tmp_path, monkeypatch, run_script):
    pytest.importorskip("submitit", reason="needs submitit, the optional extra 'slurm'")
    (tmp_path / "scripts").symlink_to(Path(__file__).resolve().parents[1] / "scripts")
    monkeypatch.chdir(tmp_path)
    status, shown, errors = run_script("submit_sweep", *_IN_README)
    assert status == 0, errors
    assert shown.count("(log: ") == 2
    assert all((tmp_path / "out" / folder / "benchmark.json").exists() for folder in ("ctx64", "ctx128"))


def test_waiting_ends_with_the_last_job(monkeypatch, clock):
    ended = {"a": iter([False, True]), "b": iter([True]), "c": iter([False, False, True])}
    jobs = [mock.MagicMock(done=lambda looks=looks: next(looks)) for looks in ended.values()]
    assert wait_for(jobs) == []
    assert [list(looks) for looks in ended.values()] == [[], [], []]
