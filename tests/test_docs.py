"""The documentation holds: its steps make what they say, its commands parse, its links lead somewhere."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import shlex
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
import tyro

from cs336_systems.accounting.memory import best_checkpoint_every, block_saved_tensors, residual_stream_bytes
from cs336_systems.benchmarking.flash_benchmark import FlashRow
from cs336_systems.configs import MODEL_SIZES, Attention, Precision
from cs336_systems.distributed.process_group import RankContext
from cs336_systems.records import read_results
from tests.distributed_helpers import (
    CountedCollectives,
    assert_same_weights,
    finish,
    run_gloo,
    train_beside_one_process,
)
from tests.test_ddp_wrappers import _plain_step

ROOT = Path(__file__).resolve().parents[1]
DOCS = {path.name: path.read_text(encoding="utf-8") for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]}


# ---- docs/extending.md, step by step ---------------------------------------------------------------------------------

_EDIT = re.compile(
    r"^(?:New file `(?P<new>[^`]+)`|In `(?P<path>[^`]+)`, (?P<how>below|in place of) the line `(?P<line>[^`]+)`):\n\n"
    r"```python\n(?P<code>.*?)```",
    re.MULTILINE | re.DOTALL,
)


def _follow_the_steps(folder: Path) -> int:
    """Makes every new file and edit of docs/extending.md in a copy of the tree; returns their number."""
    ignored = shutil.ignore_patterns("__pycache__", "data")
    for name in ("cs336_systems", "scripts", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    edits = list(_EDIT.finditer(DOCS["extending.md"]))
    for edit in edits:
        path = folder / (edit["new"] or edit["path"])
        if edit["new"]:
            assert not path.exists()
            path.write_text(edit["code"])
            continue
        text = path.read_text()
        assert text.count(f"\n{edit['line']}\n") == 1, f"{edit['path']} has not exactly one line {edit['line']!r}"
        kept = f"{edit['line']}\n" if edit["how"] == "below" else ""
        path.write_text(text.replace(f"\n{edit['line']}\n", f"\n{kept}{edit['code']}"))
        compile(path.read_text(), path, "exec")
    return len(edits)


def _commands(text: str) -> list[str]:
    """Every `python scripts/….py …` of a text: in blocks, continued over lines too, and between backquotes."""
    blocks = re.findall(r"```[^\n]*\n(.*?)```", text, flags=re.DOTALL)
    lines = [line for block in blocks for line in re.sub(r"\\\n\s*", " ", block).splitlines()]
    spans = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    found = (re.search(r"python (scripts/\w+\.py[^#|>]*)", " ".join(one.split())) for one in [*lines, *spans])
    return list(dict.fromkeys(match[1].strip() for match in found if match))


_AFTER_THE_STEPS = """
import contextlib, runpy, shlex, sys, torch, tyro
from cs336_systems.configs import named_cell

{calls}
from tests.test_chunked import test_against_float64
for mark in test_against_float64.pytestmark:
    assert mark.name == "parametrize"
for is_causal in (True, False):
    for case in [(300, 300, 4), (128, 40, 2), (1, 200, 1)]:
        test_against_float64(is_causal, *case)

from cs336_systems.workload import Workload
losses = {{}}
for name in ("naive", "chunked"):
    work = Workload(named_cell("tiny", 200, attention=name, mode="forward-backward", batch_size=1))
    work.step(lambda phase: contextlib.nullcontext())
    losses[name] = work.loss.item()
assert abs(losses["naive"] - losses["chunked"]) < 1e-5, losses

from cs336_systems.accounting.memory import attention_saved_tensors
assert set(attention_saved_tensors(1, 1, 8, 8, 4, "chunked")) == set("qkv")

from cs336_systems.benchmarking.attention_peers import open_peer
with open_peer("chunked", torch.device("cpu")) as attention:
    assert attention(q, k, v, True).shape == q.shape

from cs336_systems.benchmarking.data_parallel import DataParallelCell, _n_collectives, wrap
from cs336_systems.distributed.ddp_coalesced import CoalescedDDP
cell = DataParallelCell(**vars(named_cell("tiny", 64)), implementation="coalesced")
wrapped = wrap(cell, torch.nn.Linear(2, 2))
assert type(wrapped) is CoalescedDDP
assert _n_collectives(cell, wrapped, 2) == 1

from cs336_systems import cli
for command in {commands!r}:
    script, *words = shlex.split(command)
    cli.parse = lambda arguments, description, **options: sys.exit(not tyro.cli(arguments, args=words))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        assert not end.code, command
said = "all steps hold"
"""


def test_the_steps_of_extending_make_what_they_say(tmp_path):
    text = DOCS["extending.md"]
    assert len(re.findall(r"^\*\*\d+\. ", text, re.MULTILINE)) == 20
    assert _follow_the_steps(tmp_path) == 20
    edits = {match["code"] for match in _EDIT.finditer(text)}
    calls = "".join(code for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if code not in edits)
    assert "flash_attention(" in calls
    script = _AFTER_THE_STEPS.format(calls=calls, commands=_commands(text))
    assert run_gloo(_run_in_copy, str(tmp_path), script, world_size=1) == ["all steps hold"]


def _run_in_copy(context: RankContext, folder: str, script: str) -> str:
    """Runs `script` with the copy's modules in the place of this tree's, in a process that has imported torch."""
    operators: Any = sys.modules["cs336_systems.attention.operators"]
    operators._LIBRARY._destroy()  # the copy registers the same operators
    own = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "cs336_systems"}
    for name in own:
        del sys.modules[name]
    sys.path.insert(0, folder)
    sys.modules["tests"].__path__.append(f"{folder}/tests")
    os.chdir(folder)
    names: dict[str, Any] = {}
    try:
        exec(compile(script, "after the steps", "exec"), names)
        assert sys.modules["cs336_systems"].__file__ == f"{folder}/cs336_systems/__init__.py"
        return names["said"]
    finally:
        sys.modules.update(own)  # what the rank's report is made of


def _ten_steps(context: RankContext, path: str) -> dict[str, int]:
    spec = importlib.util.spec_from_file_location("ddp_coalesced", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    wrapped, plain = train_beside_one_process(context, module.CoalescedDDP, 10, _plain_step)
    assert_same_weights(wrapped, plain)
    with CountedCollectives() as counts:
        finish(wrapped)
    return dict(counts.by_name)


def test_the_wrapper_of_extending_averages(tmp_path):
    """On two ranks ten steps are those of one process on the whole batch, with one collective each."""
    (code,) = [edit["code"] for edit in _EDIT.finditer(DOCS["extending.md"]) if edit["new"] and "class" in edit["code"]]
    (tmp_path / "wrapper.py").write_text(code)
    assert run_gloo(_ten_steps, str(tmp_path / "wrapper.py")) == [{"allreduce_coalesced_": 1}] * 2


# ---- Commands and links ----------------------------------------------------------------------------------------------

COMMANDS = [(name, command) for name, text in DOCS.items() if name != "extending.md" for command in _commands(text)]
_PLACEHOLDER = re.compile(r"[A-Z]{3,}|…")


def test_commands_are_found():
    assert len(COMMANDS) > 60
    assert {"README.md", "REPORT.md", "measuring.md", "memory.md"} <= {name for name, _ in COMMANDS}
    assert _commands("`python scripts/x.py --a 1 # why` and\n```sh\nuv run python scripts/y.py \\\n  --b\n```") == [
        "scripts/y.py --b",
        "scripts/x.py --a 1",
    ]


def test_every_command_of_the_documentation_parses(monkeypatch):
    """By each script's own arguments, without running it; a command with a placeholder must at least have a script."""
    by_script: dict[str, list[tuple[str, list[str]]]] = {}
    for name, command in COMMANDS:
        script, *words = shlex.split(command)
        assert (ROOT / script).exists(), f"{name}: {command}"
        if words:  # else it is only named
            by_script.setdefault(script, []).append((f"{name}: {command}", words))
    wrong, parsed = [], []

    def parse(arguments, description, **options):
        words = [word for word in sys.argv[1:] if not _PLACEHOLDER.fullmatch(word)]
        parsed.append(tyro.cli(arguments, args=words))
        raise SystemExit(0)

    monkeypatch.setattr("cs336_systems.cli.parse", parse)
    for script, commands in by_script.items():
        for what, words in commands:
            monkeypatch.setattr(sys, "argv", [script, *words])
            with pytest.raises(SystemExit) as ended:
                runpy.run_path(str(ROOT / script), run_name="__main__")
            if ended.value.code:
                wrong.append(what)
    assert wrong == []
    assert len(parsed) == sum(map(len, by_script.values())) > 50


@pytest.mark.parametrize("name", [name for name in DOCS if name != "CHANGELOG.md"])
def test_links_lead_somewhere(name):
    folder = ROOT if (ROOT / name).exists() else ROOT / "docs"
    without_code = re.sub(r"```.*?```", "", DOCS[name], flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", without_code)
    missing = []
    for target in targets:
        path, _, anchor = target.partition("#")
        if path.startswith("http"):
            continue
        file = folder / path if path else folder / name
        headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.M) if anchor and file.exists() else []
        slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
        if not file.exists() or (anchor and anchor not in slugs):
            missing.append(target)
    assert missing == []


# ---- Numbers in prose ------------------------------------------------------------------------------------------------


def _beside_cudnn(implementation: str, phase: str, lengths: set[int], causal: tuple[bool, ...]) -> list[float]:
    """Speed over cuDNN's at head_dim 64, in all runs at the anchors."""
    found = []
    for path in ROOT.glob("results/flash_anchors*/flash_benchmark.json"):
        rows = [row for row in read_results(path, FlashRow)[1] if row.status == "ok" and row.precision == "bf16"]
        chosen = [row for row in rows if (row.head_dim, row.phase) == (64, phase) and row.length in lengths]
        ms = {(row.implementation, row.length, row.is_causal): row.median_ms for row in chosen}
        found += [
            ms["sdpa-cudnn", length, is_causal] / its_ms
            for (name, length, is_causal), its_ms in ms.items()
            if name == implementation and is_causal in causal
        ]
    return found


def test_speeds_of_heads_of_64_are_those_of_the_rows():
    text = " ".join(DOCS["attention.md"].split())
    said = re.search(r"Forward is now (\S+) to (\S+) of cuDNN's speed .*? \((\S+) and (\S+) at 4,096", text)
    long = _beside_cudnn("flash-hopper", "forward", {16_384, 65_536}, (True, False))
    short = [statistics.fmean(_beside_cudnn("flash-hopper", "forward", {4096}, (on,))) for on in (True, False)]
    assert [float(number) for number in said.groups()] == [round(x, 2) for x in (min(long), max(long), *short)]
    said = re.search(r"Triton's stay, at (\S+) to (\S+) of cuDNN's speed", text)
    backward = _beside_cudnn("flash-triton", "backward", {4096, 16_384, 65_536}, (True, False))
    assert [float(number) for number in said.groups()] == [round(min(backward), 2), round(max(backward), 2)]


def test_inputs_that_a_block_keeps_are_the_formulas():
    text = " ".join(DOCS["accounting.md"].split())
    said = re.search(r"from small to 8b keeps (\d+) inputs .* to (\d+) \(float32, .* one of tiny up to (\d+)", text)

    def kept(size: str, precision: Precision, attention: Attention) -> float:
        saved = block_saved_tensors(MODEL_SIZES[size], 4, 2048, precision, attention)
        return sum(saved.values()) / residual_stream_bytes(MODEL_SIZES[size], 4, 2048)

    sizes = set(MODEL_SIZES) - {"tiny"}
    least = min(kept(size, "bf16", "flash-triton") for size in sizes)
    most = max(kept(size, "fp32", "naive") for size in sizes)
    of_tiny = kept("tiny", "fp32", "naive")
    assert [int(number) for number in said.groups()] == [round(least), round(most), round(of_tiny)]
    for shape in MODEL_SIZES.values():
        for precision in ("fp32", "bf16"):
            for attention in ("naive", "flash-triton"):
                assert best_checkpoint_every(shape, 4, 2048, precision, attention) in (1, 2)
