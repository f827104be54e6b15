"""What `--help` shows of every script: the flags in the same words, their defaults, and as wide as the terminal."""

import importlib
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from cs336_systems.cli import parse

ROOT = Path(__file__).resolve().parents[1]


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
        assert len({words.split(". Default: ")[0].split(",")[0].rstrip(".") for words in said[name]}) == 1, said[name]
    for words in set().union(*said.values()):  # what stands for None is said in one way, at the end
        assert not re.search("unless given|by default", words, re.IGNORECASE), words
        assert re.fullmatch(r"(?:(?!Default: ).)*(Default: .*\.)?", words), words
    sweeps = {words for words in said["resume"] if words.startswith("Keep the rows")}
    assert len(sweeps) <= 2, sweeps  # the comparison of training runs goes on with what each has
    assert {words.split()[0] for words in said["seed"]} == {"Seed"}


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("script", sorted(path.stem for path in (ROOT / "scripts").glob("*.py")))
def test_help_fits_the_terminal(run_script, monkeypatch, script, width):
    monkeypatch.setenv("COLUMNS", str(width))
    status, shown, errors = run_script(script, "--help")
    assert (status, errors) == (0, "")
    description, _, options = shown.partition("\nusage: ")
    assert [line for line in description.splitlines() if len(line) > width and not line.startswith("    ")] == []
    assert [line for line in options.splitlines() if len(line) > width] == []
    assert "\n\n\n" not in description
    assert "None" not in options
    if " --size " in options:
        said = " ".join(options.replace("│", " ").split())
        assert "tiny (2 layers, d_model 128), small (12, 768), medium (24, 1024), large (36, 1280), xl" in said
        assert "8b (34, 4096)" in said
    assert "(default: )" not in options


@pytest.mark.parametrize("columns", ["1", "5", "39"])
def test_help_in_a_terminal_that_is_too_narrow_for_words(columns):
    """In a process of its own, which a test can end: it went on for ever."""
    script, environment = ROOT / "scripts" / "report.py", {**os.environ, "COLUMNS": columns}
    run = subprocess.run(
        [sys.executable, script, "--help"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert max(map(len, run.stdout.splitlines())) > int(columns)
    assert "--results" in run.stdout


def test_the_width_that_help_takes_is_not_left_to_others(run_script, monkeypatch):
    monkeypatch.setenv("COLUMNS", "5")
    assert run_script("report", "--help")[0] == 0
    assert os.environ["COLUMNS"] == "5"
    monkeypatch.delenv("COLUMNS")
    assert run_script("report", "--help")[0] == 0
    assert "COLUMNS" not in os.environ


def test_help_of_each_kind_of_default(run_script, monkeypatch, capsys, tmp_path):
    """Also of what a class takes from another, and of a docstring on several lines.

    `run_script` gives back what `parse` sets.
    """
    source = tmp_path / "two_classes.py"
    source.write_text('''
from dataclasses import dataclass
from typing import Literal
@dataclass(frozen=True)
class Base:
    first: tuple[int, ...] | None = None
    """Of the base,
    on two lines. Default: 1 and 2 on a GPU, 3 elsewhere."""
    second: Literal["a", "b"] | None = None
    """Has no default of its own."""
@dataclass(frozen=True)
class Arguments(Base):
    third: tuple[float, ...] = ()
    """None given. Default: all."""
    fourth: int = 7
    """A number."""
    second: Literal["a", "b"] | None = None
    """Described anew."""
''')
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    arguments = importlib.import_module("two_classes").Arguments
    monkeypatch.setattr(sys, "argv", ["x.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        parse(arguments, "Says nothing.")
    words = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for shown in (
        "--first [INT [INT ...]] Of the base, on two lines. (default: 1 and 2 on a GPU, 3 elsewhere)",
        "--second {a,b} Described anew. --third",
        "--third [FLOAT [FLOAT ...]] None given. (default: all)",
        "--fourth INT A number. (default: 7)",
    ):
        assert shown in words
    monkeypatch.setattr(sys, "argv", ["x.py", "--first", "4", "5", "--second", "b"])
    assert vars(parse(arguments, "")) == {"first": (4, 5), "second": "b", "third": (), "fourth": 7}
