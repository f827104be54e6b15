"""Commands that only a GPU can run are held, without one, to what their scripts accept: those of the documentation, of
the report, and of scripts/reproduce.py."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch

from cs336_systems.benchmarking.reproduce_steps import STEPS
from tests.test_docs import _PLACEHOLDER, COMMANDS

NO_DEVICE = {"accounting", "analyze_nsys", "report", "reproduce", "submit_sweep", "update_readme"}
_SHOWN = [(name, c) for name, c in COMMANDS if "--device" not in c and not _PLACEHOLDER.search(c)]
_STEPS = [(step.folder, shlex.join(words)) for step in STEPS for words in step.commands("gpus", "results")]
_REFUSED = r"^error: (--device cuda: (is not on this machine|goes with --part model)|--nsys nsys: is no program here)"


def _by_script() -> dict[str, list[tuple[str, list[str]]]]:
    commands: dict[str, list[tuple[str, list[str]]]] = {}
    for name, command in dict.fromkeys([*_SHOWN, *_STEPS]):
        script, *words = shlex.split(command)
        if Path(script).stem not in NO_DEVICE:
            commands.setdefault(Path(script).stem, []).append((f"{name}: {command}", words))
    return commands


COMMANDS_BY_SCRIPT = _by_script()


def test_the_commands_of_all_scripts_are_found():
    assert len(COMMANDS_BY_SCRIPT) >= 17
    assert sum(map(len, COMMANDS_BY_SCRIPT.values())) > 120


@pytest.mark.skipif(torch.cuda.is_available(), reason="would run them")
@pytest.mark.parametrize("script", sorted(COMMANDS_BY_SCRIPT))
def test_nothing_is_refused_but_the_gpu(script, run_script, tmp_path, monkeypatch):
    """What parses may still not go together: `--cold-caches` where nothing is compiled ended scripts/reproduce.py's
    step, and only on a GPU."""
    monkeypatch.chdir(tmp_path)
    wrong = {}
    for what, words in COMMANDS_BY_SCRIPT[script]:
        status, _, errors = run_script(script, *words, "--device", "cuda")
        if status != 2 or not re.search(_REFUSED, errors, re.MULTILINE):
            wrong[what] = (status, errors.strip()[-300:])
    assert wrong == {}
