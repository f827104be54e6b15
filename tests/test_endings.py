"""How a script that is stopped, or fails, ends: its line and status, and the command that goes on."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from cs336_systems import resuming

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("raised", "shown", "hidden"),
    [
        ("KeyboardInterrupt", "Interrupted.", "Traceback"),
        ("RuntimeError('why')", "Traceback", "Interrupted"),
        ("NotWritten(28, 'No space left', 'a.md')", "error: cannot write a.md: No space left. Make room", "Traceback"),
        ("OSError(28, 'No space left', 'a.md')", "Traceback", "Make room"),
    ],
)
def test_only_an_interrupt_and_a_full_disk_lose_their_traceback(raised, shown, hidden):
    code = f"""
        from dataclasses import dataclass
        from cs336_systems.cli import parse
        from cs336_systems.files import NotWritten

        @dataclass(frozen=True)
        class Arguments:
            size: str = "tiny"

        assert parse(Arguments, "Says nothing.") == Arguments()
        raise {raised}
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert run.returncode != 0
    assert shown in run.stderr
    assert hidden not in run.stderr


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("benchmark", "cs336_systems.benchmarking.into_files.run_isolated"),  # which looks at the device
        ("flash_benchmark", "cs336_systems.benchmarking.into_files.run_isolated"),
        ("convergence", "cs336_systems.benchmarking.into_files.run_isolated"),
        ("ddp_benchmark", "cs336_systems.benchmarking.into_files.run_isolated"),
        ("profile_nsys", "cs336_systems.profiling.run_nsys.find_nsys"),
        ("train", "cs336_systems.training.run_checks.check_run"),
    ],
)
@pytest.mark.parametrize("resume", [(), ("--resume",)])
def test_an_interrupt_before_the_device_is_known_names_the_command(
    name, place, resume, tmp_path, monkeypatch, run_script, capsys
):
    """As it was typed: with --resume a run that has not begun would go on from another's rows."""

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(place, interrupted)
    monkeypatch.setattr(resuming, "_has_begun", threading.Event())
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(KeyboardInterrupt) as error:
        run_script(name, "--out", tmp_path, *resume)
    with pytest.raises(SystemExit, match="130"):
        sys.excepthook(KeyboardInterrupt, error.value, None)
    shown = capsys.readouterr().err.splitlines()[-1]
    word = "To go on" if resume else "To begin"
    typed = " ".join(["python", f"scripts/{name}.py", "--out", str(tmp_path), *resume])
    assert shown == f"Interrupted before anything was measured. {word}: {typed}"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
@pytest.mark.parametrize("has_begun", [False, True])
def test_a_request_to_end_before_a_run_has_begun_has_a_line_too(has_begun, name, tmp_path, monkeypatch, run_script):
    """Later the run has one of its own."""
    monkeypatch.setattr(resuming, "_has_begun", threading.Event())
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    def ended(*_, **__):
        if has_begun:
            resuming.run_begins()
        signal.raise_signal(signal.Signals[name])

    monkeypatch.setattr("cs336_systems.benchmarking.into_files.check_without_torch", ended)
    status, _, errors = run_script("benchmark", "--out", tmp_path)
    assert status == 128 + signal.Signals[name]
    line = f"\nEnded by {name} before anything was measured. To begin: python scripts/benchmark.py --out {tmp_path}\n"
    assert (name in errors) is not has_begun
    assert errors.endswith("" if has_begun else line)


def test_a_terminal_that_closes_ends_no_script_under_nohup(monkeypatch, run_script):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run = "cs336_systems.benchmarking.run_benchmark.run_benchmark"
        monkeypatch.setattr(run, lambda *_, **__: signal.raise_signal(signal.SIGHUP))
        assert run_script("benchmark")[0] == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_early_interrupt_has_the_status_of_every_other(tmp_path):
    """Status 1, as of a failed run, would let a shell's loop go on."""
    code = f"""
        import runpy, sys
        from cs336_systems import files
        def interrupted(*_):
            raise KeyboardInterrupt
        files.check_writable = interrupted
        sys.argv = ["scripts/train.py", "--device", "cpu", "--out", {str(tmp_path)!r}]
        runpy.run_path(sys.argv[0], run_name="__main__")
    """
    words = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "Interrupted before anything was measured. To begin: " in done.stderr
    assert done.returncode == 130


def test_an_interrupt_once_rows_have_begun_goes_on_from_them(tmp_path, monkeypatch, run_script, capsys):
    """Here while the tables of a run that has ended are written."""

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(resuming, "_has_begun", threading.Event())
    monkeypatch.setattr("cs336_systems.profiling.nested_tables.plot_schemes", interrupted)
    with pytest.raises(KeyboardInterrupt) as error:
        run_script("checkpointing", "--part", "nested", "--layers", 4, "--out", tmp_path)
    with pytest.raises(SystemExit, match="130"):
        sys.excepthook(KeyboardInterrupt, error.value, None)
    shown = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(r"Interrupted\. To go on: .*python scripts/checkpointing\.py .* --resume", shown)


@pytest.mark.parametrize(
    ("rank", "told"), [("0", " torchrun --nproc-per-node 2 scripts/benchmark.py\n"), ("1", "\nInterrupted.\n")]
)
def test_of_a_launched_jobs_ranks_the_first_says_how_to_go_on(rank, told, monkeypatch, run_script, capsys):
    monkeypatch.setattr(resuming, "_has_begun", threading.Event())
    monkeypatch.setattr("cs336_systems.benchmarking.run_benchmark.run_benchmark", lambda *_, **__: None)
    run_script("benchmark")
    for name, value in {"RANK": rank, "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="130"):
        sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("has_begun", [False, True])
def test_signals_in_an_import_that_swallows_them_end_the_program(tmp_path, has_begun, name):
    """At once before the run, and after the import then. Libraries do that which try what they can import."""
    (tmp_path / "greedy.py").write_text(
        "import os, signal, time\n"
        "try:\n"
        f"    os.kill(os.getpid(), signal.{name})\n"
        "    time.sleep(0.2)\n"
        "except BaseException:\n"
        "    pass\n"
        "print('whole')\n"
    )
    script = (
        "import atexit, time\n"
        "from dataclasses import make_dataclass\n"
        "from cs336_systems.cli import parse\n"
        "from cs336_systems.resuming import run_begins\n"
        "atexit.register(print, 'at the end')\n"
        "parse(make_dataclass('Arguments', []), '')\n"
        f"{'run_begins()' if has_begun else ''}\n"
        "import greedy\n"
        "time.sleep(30)\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=25)
    # A run says itself what has ended it; Ctrl-C that it does not catch is a line all the same.
    line = {"SIGINT": "\nInterrupted.\n", "SIGTERM": "" if has_begun else "\nEnded by SIGTERM.\n"}[name]
    whole = "whole\n" if has_begun else ""
    assert (run.returncode, run.stdout, run.stderr) == (128 + signal.Signals[name], f"{whole}at the end\n", line)
