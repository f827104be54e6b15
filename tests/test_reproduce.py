"""Reproducing everything: what is planned for each machine, resuming, and going on after a failure."""

import importlib.util
import json
import os
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import tyro

from cs336_systems.benchmarking import into_files, reproduce
from cs336_systems.benchmarking.report import ITEMS, report
from cs336_systems.benchmarking.reproduce import Step, plan, plan_table, read_state, run_plan
from cs336_systems.benchmarking.reproduce_steps import MACHINES, STEPS, step_named
from tests.script_helpers import run_without_torch

ONE = Step("one", "x", "rows", gpu=("--a 1",), cpu=("--a 2",), seconds={"cpu": 10, "gpu": 100, "gpus": 100})
TWO = Step("two", "y", "rows", gpu=("--b 1", "--b 2"), cpu=None, seconds={"gpu": 200, "gpus": 200})
RANKS = Step("ranks", "z", "rows", gpu=("--full",), cpu=("--tiny",), needs_ranks=True, resumes=False)


def _scripts(results, statuses=None):
    """Stands for running a script: writes its rows, remembers the command, and ends with the script's status."""
    ran = []

    def run(words):
        ran.append(" ".join(words))
        folder = results / words[words.index("--out") + 1].removeprefix(f"{results}/")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "rows.json").write_text("{}")
        return (statuses or {}).get(words[0].removeprefix("scripts/").removesuffix(".py"), 0)

    return run, ran


def test_each_machine_gets_its_arguments(tmp_path):
    assert [one.commands for one in plan("cpu", tmp_path, (ONE, TWO, RANKS))] == [
        [["scripts/x.py", "--a", "2", "--out", f"{tmp_path}/one"]],
        [],
        [["scripts/z.py", "--tiny", "--out", f"{tmp_path}/ranks"]],
    ]
    assert [one.why_not for one in plan("cpu", tmp_path, (ONE, TWO, RANKS))] == ["", "needs a GPU", ""]
    on_gpu = plan("gpu", tmp_path, (TWO, RANKS))
    assert on_gpu[0].commands[1] == ["scripts/y.py", "--b", "2", "--out", f"{tmp_path}/two", "--resume"]
    assert on_gpu[1].commands[0][1] == "--tiny"
    assert plan("gpus", tmp_path, (RANKS,))[0].commands[0][1] == "--full"


def test_a_program_that_is_missing_is_named(tmp_path):
    missing = replace(ONE, needs_program="a-program-of-no-machine")
    (planned,) = plan("gpu", tmp_path, (missing,))
    assert planned.why_not == "needs a-program-of-no-machine"


def test_the_table_tells_steps_commands_and_total(tmp_path):
    table = plan_table(plan("gpu", tmp_path, (ONE, TWO)))
    assert f"python scripts/x.py --a 1 --out {tmp_path}/one\n" in table
    assert "2 of 2 steps to run, about 5 min in all" in table
    assert "1 of 2 steps to run, about 10 s in all" in plan_table(plan("cpu", tmp_path, (ONE, TWO)))


def test_what_is_done_is_not_run_again(tmp_path):
    run, ran = _scripts(tmp_path)
    assert run_plan(plan("gpu", tmp_path, (ONE, TWO)), tmp_path, run) == []
    assert len(ran) == 3
    again = plan("gpu", tmp_path, (ONE, TWO))
    assert [one.why_not for one in again] == ["done", "done"]
    assert [one.seconds < 5 for one in again] == [True, True]  # what they took, in the guesses' place
    assert run_plan(again, tmp_path, run) == []
    assert len(ran) == 3
    moved = (tmp_path / "one").parent / "elsewhere"
    shutil.copytree(tmp_path, moved)
    assert [one.why_not for one in plan("gpu", moved, (ONE, TWO))] == ["done", "done"]
    (tmp_path / "one" / "rows.json").unlink()
    assert [one.why_not for one in plan("gpu", tmp_path, (ONE, TWO))] == ["", "done"]
    assert [one.why_not for one in plan("gpu", tmp_path, (replace(ONE, gpu=("--a 3",)), TWO))] == ["", "done"]


def test_a_failed_step_stops_no_other_and_is_run_again(tmp_path):
    run, ran = _scripts(tmp_path, {"y": 1})
    assert run_plan(plan("gpu", tmp_path, (TWO, ONE)), tmp_path, run) == ["two"]
    assert [words.split()[0] for words in ran] == ["scripts/y.py", "scripts/x.py"]  # and not y's second run
    assert {name: ended.status for name, ended in read_state(tmp_path).items()} == {"two": 1, "one": 0}
    again = plan("gpu", tmp_path, (TWO, ONE))
    assert [one.why_not for one in again] == ["", "done"]
    assert again[0].commands[0][-1] == "--resume"  # its rows so far are kept
    assert (
        plan("gpu", tmp_path, (replace(RANKS, folder="two"),))[0].commands[0][-1] != "--resume"
    )  # it has no such flag


@pytest.mark.parametrize("status", [130, -signal.SIGINT])
def test_an_interrupted_step_ends_all_and_is_not_done(tmp_path, status):
    run, ran = _scripts(tmp_path, {"y": status})
    with pytest.raises(KeyboardInterrupt):
        run_plan(plan("gpu", tmp_path, (ONE, TWO, RANKS)), tmp_path, run)
    assert len(ran) == 2
    assert list(read_state(tmp_path)) == ["one"]


def test_a_damaged_state_is_a_fresh_one(tmp_path):
    (tmp_path / reproduce.STATE).write_text("[1]")
    assert read_state(tmp_path) == {}


def test_a_script_is_run_as_a_process_of_its_own(tmp_path, monkeypatch):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "x.py").write_text("import sys; sys.exit(int(sys.argv[1]))")
    monkeypatch.setattr(reproduce, "_ROOT", tmp_path)
    assert reproduce.run_script(["scripts/x.py", "7"]) == 7


@pytest.mark.skipif(sys.platform == "win32", reason="signals as on POSIX")
def test_a_request_to_end_reaches_the_script(tmp_path, monkeypatch):
    """SIGTERM ends the program with SystemExit; the script that it waits for is asked to end too, and has ended."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "x.py").write_text(
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path(sys.argv[1]).write_text('asked'), sys.exit(0)))\n"
        f"import os; os.kill({os.getpid()}, signal.SIGUSR1)\n"
        "time.sleep(60)\n"
    )

    def end(number, frame):
        raise SystemExit(143)

    monkeypatch.setattr(reproduce, "_ROOT", tmp_path)
    before = signal.signal(signal.SIGUSR1, end)
    try:
        with pytest.raises(SystemExit):
            reproduce.run_script(["scripts/x.py", str(tmp_path / "asked")])
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (tmp_path / "asked").read_text() == "asked"


def test_steps_and_report_name_the_same_folders():
    folders = [step.folder for step in STEPS]
    assert len(folders) == len(set(folders))
    parts = [part for item in ITEMS for part in item.parts]
    assert {part.folder for part in parts} - {None} <= set(folders)
    patterns = {name.replace("/**", "") for part in parts for name in part.files}
    assert [step.path for step in STEPS if step.path not in patterns] == []


MADE_OTHERWISE = {
    "published": "what others measured, copied from where they say it",
    "ncu": "counters of a profiler that needs rights which most machines do not give: see docs/attention.md",
}


def test_every_folder_of_results_is_made_by_a_step():
    results = Path(reproduce.__file__).parents[2] / "results"
    patterns = [name for item in ITEMS for part in item.parts for name in part.files if "**" in name]  # by world size
    made = {step.folder for step in STEPS} | {
        path.parent.relative_to(results).as_posix() for pattern in patterns for path in results.glob(pattern)
    }
    there = {path.parent for path in results.rglob("*") if path.suffix in (".json", ".csv")} - {results}
    folders = {folder.relative_to(results).as_posix() for folder in there}
    assert folders >= MADE_OTHERWISE.keys()
    assert sorted(folders - made - MADE_OTHERWISE.keys()) == []


def test_the_sharded_optimizer_is_measured_in_both_precisions_beside_its_peers_in_one_run():
    (words,) = step_named("sharded_optimizer").commands("gpus", "r")
    given = " ".join(words)
    assert "--precision fp32 bf16 " in given
    assert "--implementation none sharded-optimizer torch-zero ddp torch-ddp" in given


def test_every_step_has_a_guess_where_it_runs():
    guesses = [(step, machine) for step in STEPS for machine in MACHINES if step.arguments(machine)]
    assert [(step.folder, machine) for step, machine in guesses if not step.seconds[machine]] == []


def test_a_step_resumes_where_its_script_can():
    scripts = Path(reproduce.__file__).parents[2] / "scripts"
    for step in STEPS:
        text = (scripts / f"{step.script}.py").read_text()
        assert step.resumes == ("    resume: bool" in text or "(RankArguments)" in text), step.folder


@pytest.mark.parametrize("script", sorted({step.script for step in STEPS}))
def test_a_step_has_arguments_that_its_script_takes(script, monkeypatch):
    """On each machine: a flag of another name would be seen in the middle of an hour's run only."""
    path = Path(reproduce.__file__).parents[2] / "scripts" / f"{script}.py"
    spec = importlib.util.spec_from_file_location(f"script_{script}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # a dataclass is read with its module's names
    spec.loader.exec_module(module)
    for step in STEPS:
        if step.script == script:
            for words in (words for machine in MACHINES for words in step.commands(machine, "r", resume=True)):
                assert tyro.cli(module.Arguments, args=words[1:]).out == Path("r") / step.folder


def test_an_unknown_step_is_refused(run_script):
    with pytest.raises(ValueError, match="only='x': must be one of benchmark/sizes, "):
        step_named("x")
    status, _, errors = run_script("reproduce", "--only", "x", "--dry-run")
    assert status == 2
    assert "--only x: must be one of" in errors


def test_a_dry_run_answers_at_once():
    status, shown = run_without_torch("reproduce", "--dry-run", "--results", "a-new-folder")
    assert status == 0, shown
    assert "python scripts/benchmark.py" in shown


@pytest.mark.parametrize(("gpus", "machine"), [(0, "cpu"), (1, "gpu"), (8, "gpus")])
def test_a_machine_is_known_by_its_gpus(monkeypatch, capsys, gpus, machine):
    found = ("cuda", SimpleNamespace(gpu_count=gpus))
    monkeypatch.setattr(into_files, "resolve_device", lambda device, command, is_timed: found)
    monkeypatch.setattr(reproduce, "has_nvidia_driver", lambda: True)
    assert reproduce.machine_here() == machine
    assert "Counting" in capsys.readouterr().err  # torch is imported for it, which takes seconds
    monkeypatch.setattr(reproduce, "has_nvidia_driver", lambda: False)
    assert reproduce.machine_here() == "cpu"


def test_an_interrupt_before_the_machine_is_known_says_how_to_go_on(tmp_path, monkeypatch, run_script):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(reproduce, "machine_here", interrupted)
    status, _, errors = run_script("reproduce", "--results", tmp_path)
    assert (status, errors) == (130, "\nInterrupted; the same command goes on from here.\n")


def test_a_dry_run_writes_nothing(tmp_path, run_script):
    status, shown, _ = run_script("reproduce", "--dry-run", "--machine", "gpus", "--results", tmp_path / "mine")
    assert status == 0
    assert "scripts/ddp_benchmark.py --size xl --ctx 512 --precision fp32" in shown
    assert not (tmp_path / "mine").exists()


def test_one_step_for_real_and_its_report(tmp_path, run_script):
    """The smallest step on a CPU: rows and state are there, the report tells of them, and it is done."""
    step = replace(step_named("checkpointing"), cpu=("--part nested --layers 4 8",))

    def run(words):
        return run_script(words[0].removeprefix("scripts/").removesuffix(".py"), *words[1:])[0]

    assert run_plan(plan("cpu", tmp_path, (step,)), tmp_path, run) == []
    assert json.loads((tmp_path / reproduce.STATE).read_text())["checkpointing"]["status"] == 0
    text = report(tmp_path, tmp_path)
    assert "At 8 layers the peak is" in text
    assert "(checkpointing/nested.png)" in text
    assert plan("cpu", tmp_path, (step,))[0].why_not == "done"


def test_the_script_skips_what_is_done_and_writes_the_report(tmp_path, run_script):
    run, _ = _scripts(tmp_path)
    run_plan(plan("cpu", tmp_path, (replace(step_named("checkpointing"), file="rows"),)), tmp_path, run)
    (tmp_path / "checkpointing" / "rows.json").rename(tmp_path / "checkpointing" / "nested.json")
    (tmp_path / "checkpointing" / "nested.json").write_text('{"runs": [], "rows": []}')
    status, shown, _ = run_script("reproduce", "--machine", "cpu", "--only", "checkpointing", "--results", tmp_path)
    assert status == 0
    assert "0 of 1 steps to run" in shown
    assert "Not measured yet." in (tmp_path / "REPORT.md").read_text()


@pytest.mark.parametrize(
    ("asked", "here", "why"),
    [
        ("gpu", "cpu", "this machine has no GPU; --dry-run shows the commands"),
        ("gpus", "cpu", "this machine has no GPU; --dry-run shows the commands"),
        ("gpus", "gpu", "this machine has one GPU; --dry-run shows the commands"),
        ("gpu", "gpus", ""),
        ("gpu", "gpu", ""),
        ("cpu", "gpus", ""),
    ],
)
def test_more_gpus_than_are_here_are_refused(tmp_path, monkeypatch, run_script, asked, here, why):
    monkeypatch.setattr(reproduce, "machine_here", lambda: here)
    monkeypatch.setattr(reproduce, "run_plan", lambda *_: [])
    status, _, told = run_script("reproduce", "--machine", asked, "--only", "checkpointing", "--results", tmp_path)
    assert status == (2 if why else 0)
    assert not why or told == f"error: --machine {asked}: {why}\n"
