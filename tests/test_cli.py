"""What every script does with its command line, and with a Ctrl-C or an error that nobody caught."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from cs336_systems.cli import command_line

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
        from cs336_systems.records import NotWritten

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


def test_help_that_nobody_reads_is_no_error():
    code = """
        import os, sys
        from dataclasses import dataclass
        from cs336_systems.cli import parse

        @dataclass(frozen=True)
        class Arguments:
            size: str = "tiny"

        reader, writer = os.pipe()
        os.dup2(writer, 1)
        os.close(writer)
        os.close(reader)
        sys.argv = ["script", "--help"]
        parse(Arguments, "Says nothing.")
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")


_FLAG = re.compile(r'^    (\w+): [^\n]*\n(?:[ ]{8}[^\n]*\n|    \)\n)*    """(.*?)"""', re.MULTILINE | re.DOTALL)


def test_flags_are_described_and_those_that_mean_the_same_in_the_same_words():
    said: dict[str, set[str]] = {}
    for path in [*(ROOT / "scripts").glob("*.py"), ROOT / "cs336_systems/benchmarking/rank_arguments.py"]:
        for name, text in _FLAG.findall(path.read_text()):
            words = " ".join(text.split())
            assert len(words.split()) >= 2, f"{path.name} --{name}: {words}"
            said.setdefault(name, set()).add(words)
    assert len(said) > 60
    assert said["optimizer"] == {"The project's AdamW, or PyTorch's fused one."}
    for name in ("high_priority", "timeout_s", "rep_ms"):
        assert len({words.split(",")[0].rstrip(".") for words in said[name]}) == 1, said[name]
    sweeps = {words for words in said["resume"] if words.startswith("Keep the rows")}
    assert len(sweeps) <= 2, sweeps  # the comparison of training runs goes on with what each has
    assert {words.split()[0] for words in said["seed"]} == {"Seed"}


def test_sigterm_in_an_import_that_swallows_it_ends_the_program_after_it(tmp_path):
    """As libraries do that try what they can import."""
    (tmp_path / "greedy.py").write_text(
        "import os, signal, time\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(0.2)\n"
        "except BaseException:\n"
        "    pass\n"
        "print('whole')\n"
    )
    script = (
        "import time\n"
        "from dataclasses import make_dataclass\n"
        "from cs336_systems.cli import parse\n"
        "parse(make_dataclass('Arguments', []), '')\n"
        "import greedy\n"
        "time.sleep(30)\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=25)
    assert (run.returncode, run.stdout, run.stderr) == (143, "whole\n", "")


def test_the_command_has_what_the_environment_changes(monkeypatch):
    for name in ("OMP_NUM_THREADS", "TRITON_INTERPRET", "CS336_AUTOTUNE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", [str(ROOT / "scripts" / "benchmark.py"), "--out", "a b"])
    assert command_line() == "python scripts/benchmark.py --out 'a b'"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert command_line() == "OMP_NUM_THREADS=1 TRITON_INTERPRET=1 python scripts/benchmark.py --out 'a b'"
