"""How the scripts read their arguments, and name those that they refuse."""

import dataclasses
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from cs336_systems import cli
from cs336_systems.cli import as_flag, parse
from cs336_systems.signals import STOPPED

ROOT = Path(__file__).resolve().parents[1]
_ON_RANKS = {
    *("all_reduce_benchmark", "ddp_benchmark", "fsdp_benchmark", "leaderboard_step", "scaling_benchmark"),
    *("sharded_optimizer_benchmark", "train"),
}


@pytest.mark.parametrize("name", sorted({path.stem for path in (ROOT / "scripts").glob("*.py")} - _ON_RANKS))
def test_several_ranks_of_a_script_for_one_process_are_refused(name, monkeypatch, run_script):
    for variable, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(variable, value)
    words = {"analyze_nsys": ["x"], "submit_sweep": ["--command", "x", "--vary", "--a 1"]}.get(name, [])
    assert run_script(name, *words) == (
        2,
        "",
        f"error: {name}.py takes one process, and the launcher started 2 (torchrun, srun or WORLD_SIZE); python starts "
        "one\n",
    )


@dataclasses.dataclass(frozen=True)
class Chosen:
    required: str
    one: Literal["d", "a", "c", "b"] | None = None
    several: tuple[Literal["d", "a", "c", "b"], ...] | None = None
    number: int | None = None
    flag: bool = False


@pytest.mark.parametrize(
    ("argument", "shown"),
    [
        ("--one e", "invalid choice 'e' for argument '--one'. Expected one of ('d', 'a', 'c', 'b')."),
        ("--several a e", "invalid choice 'e' for argument '--several'. Expected one of ('d', 'a', 'c', 'b')."),
        ("--one None", "invalid choice 'None' for argument '--one'"),
        ("--several None", "invalid choice 'None' for argument '--several'"),
        ("--number None", "Error parsing --number"),
    ],
)
def test_none_is_what_stands_for_no_flag_and_none_of_its_values(run_script, monkeypatch, capsys, argument, shown):
    monkeypatch.setattr(sys, "argv", ["x.py", "--required", "x", *argument.split()])
    with pytest.raises(SystemExit, match="2"):
        parse(Chosen, "")
    assert shown in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_arguments_that_are_not_given_keep_their_default(run_script, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x.py", "--required", "x"])
    assert parse(Chosen, "") == Chosen("x")
    given = ["--one", "c", "--several", "b", "a", "--number", "3", "--flag"]
    monkeypatch.setattr(sys, "argv", ["x.py", "--required", "x", *given])
    assert parse(Chosen, "") == Chosen("x", "c", ("b", "a"), 3, True)


@pytest.mark.parametrize(
    ("message", "typed"),
    [
        ("batch_size=0: must be at least 1", "--batch-size 0: must be at least 1"),
        ("context_length=0: must be at least 1", "--ctx 0: must be at least 1"),
        ("cold_caches=True: goes with", "--cold-caches: goes with"),
        ("loss_scaling=False: only fp16", "--no-loss-scaling: only fp16"),
        ("data=None: is not there", "--data: is not there"),
        ("""command="a 'b": has a quote""", "--command a 'b: has a quote"),
        ("reports='a b': is no report", "reports a b: is no report"),
        ("no argument: 3", "no argument: 3"),
    ],
)
def test_a_message_names_what_was_typed(monkeypatch, message, typed):
    monkeypatch.setattr(cli, "_without_flag", {"reports"})
    assert as_flag(message) == typed


@dataclass(frozen=True)
class _Lists:
    sizes: tuple[int, ...] = ()
    names: tuple[str, ...] | None = None
    ctx: tuple[int, ...] = (256,)


@pytest.mark.parametrize("name", ["sizes", "names", "ctx"])
def test_a_flag_without_values_does_not_mean_all(run_script, monkeypatch, capsys, name):
    monkeypatch.setattr(sys, "argv", ["x.py", f"--{name}"])
    with pytest.raises(SystemExit, match="2"):
        parse(_Lists, "")
    assert capsys.readouterr().err == f"error: --{name}: needs at least one value\n"
    monkeypatch.setattr(sys, "argv", ["x.py"])
    assert parse(_Lists, "") == _Lists()


@dataclass(frozen=True)
class _Paths:
    out: Path = Path("out/x")
    data: Path | None = None
    reports: tuple[Path, ...] = ()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--out", ""], "must be a path, and is empty"),
        (["--out="], "must be a path, and is empty"),
        (["--data", ""], "must be a path, and is empty"),
        (["--reports", "a", ""], "Could not find valid parse for arguments: ['a', '']"),  # as tyro has it
    ],
)
def test_an_empty_path_is_not_the_current_folder(monkeypatch, capsys, words, why):
    """Nor does `parse` lose what is a path."""
    at_signals, at_an_error = {n: signal.getsignal(n) for n in STOPPED}, sys.excepthook
    try:
        monkeypatch.setattr(sys, "argv", ["script", *words])
        with pytest.raises(SystemExit, match="2"):
            parse(_Paths, "Says nothing.")
        told = " ".join(capsys.readouterr().err.split())
        assert f"Error parsing {words[0].rstrip('=')}: " in told
        assert why in told
        monkeypatch.setattr(sys, "argv", ["script", "--out", ".", "--data", "d", "--reports", "a", "b"])
        assert parse(_Paths, "Says nothing.") == _Paths(Path(), Path("d"), (Path("a"), Path("b")))
    finally:
        for number, handler in at_signals.items():
            signal.signal(number, handler)
        sys.excepthook = at_an_error
