"""The README shows what results/ holds, and its commands exist."""

import re
from pathlib import Path

import pytest

from cs336_systems.benchmarking.readme_tables import fill_blocks

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_tables_are_those_of_the_committed_rows():
    assert "<!-- begin " in README
    assert fill_blocks(README, ROOT / "results") == README, "run: uv run python scripts/update_readme.py"


def test_a_changed_number_would_be_seen():
    number = re.search(r"<!-- begin [\w-]+ -->.*?\| (\d+\.\d+) \|", README, flags=re.DOTALL)
    changed = README[: number.start(1)] + "0.123" + README[number.end(1) :]
    assert fill_blocks(changed, ROOT / "results") == README


def test_no_measured_number_stands_outside_of_the_tables():
    """A number with a unit of measurement in prose would not change with the rows: those are in tables and the report.
    The one exception was measured by others, and is compared with."""
    prose = re.sub(r"<!-- begin ([\w-]+) -->.*?<!-- end \1 -->|```.*?```|`[^`]*`", "", README, flags=re.DOTALL)
    found = re.findall(r"\d[\d.,]*\s*(?:ms|µs|GiB|MiB|GB/s|TFLOP/s|tokens/s|%|times|×)(?!\w)", prose)
    assert found == ["5.364 ms"]


def test_an_unknown_block_is_named():
    with pytest.raises(ValueError, match="block='nothing'"):
        fill_blocks("<!-- begin nothing -->\n<!-- end nothing -->", ROOT / "results")


def test_what_cannot_be_is_refused_and_the_readme_stays(tmp_path, run_script):
    readme = tmp_path / "README.md"
    readme.write_text(README)
    for flag, path in (("results", tmp_path / "nowhere"), ("results", readme), ("readme", tmp_path)):
        options = {"readme": readme, "results": ROOT / "results", flag: path}
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        status, _, errors = run_script("update_readme", *words)
        assert (status, errors.count("\n")) == (2, 1)
        assert errors.startswith(f"error: --{flag} {path}: must be a f")
    assert readme.read_text() == README


def test_it_says_in_a_line_what_was_written(tmp_path, run_script):
    """The README's tables, and the report, alike; a file that says it already is not written again."""
    results = ROOT / "results"
    readme = tmp_path / "README.md"
    readme.write_text("<!-- begin kernel-benchmark -->\n<!-- end kernel-benchmark -->\n")
    for name, flag, path in (("update_readme", "--readme", readme), ("report", "--out", tmp_path / "REPORT.md")):
        words = (name, "--results", results, flag, path)
        assert run_script(*words) == (0, "", f"Wrote {path} from {results}.\n")
        written = path.stat().st_ino
        assert run_script(*words) == (0, "", f"Nothing changed: {path} says what is in {results}.\n")
        assert path.stat().st_ino == written


@pytest.mark.parametrize("script", ["update_readme", "report"])
@pytest.mark.parametrize("content", [None, "{}", "[1", '{"rows": []}'])
def test_results_without_rows_take_no_tables_place(script, content, tmp_path, run_script, monkeypatch):
    results = tmp_path / "results" / "benchmark"
    results.mkdir(parents=True)
    if content is not None:
        (results / "benchmark.json").write_text(content)
    documents = {name: (ROOT / name).read_text() for name in ("README.md", "REPORT.md")}
    for name, text in documents.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    status, _, errors = run_script(script)
    assert (status, errors) == (
        2,
        "error: --results results: has no measurements in it; scripts/reproduce.py makes them\n",
    )
    assert {name: (tmp_path / name).read_text() for name in documents} == documents


def test_linked_files_and_scripts_exist():
    targets = re.findall(r"\]\(([^)#]+)\)|python (scripts/\w+\.py)", README)
    files = {link or script for link, script in targets if not (link or script).startswith("http")}
    assert files
    assert [name for name in files if not (ROOT / name).exists()] == []


def test_every_script_is_named():
    assert [path.name for path in (ROOT / "scripts").glob("*.py") if f"scripts/{path.name}" not in README] == []


def test_the_parts_are_used_as_shown(tmp_path, monkeypatch):
    import torch
    from torch import distributed

    from cs336_basics.model import BasicsTransformerLM
    from cs336_basics.nn_utils import cross_entropy

    start = distributed.init_process_group
    store = f"file://{tmp_path / 'store'}"
    monkeypatch.setattr(
        distributed, "init_process_group", lambda: start("gloo", init_method=store, rank=0, world_size=1)
    )
    tokens = torch.randint(11, (2, 9))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    q, k, v = torch.randn(3, 2, 1, 8, 4)
    names = {"torch": torch, "cross_entropy": cross_entropy, "q": q, "k": k, "v": v, "tokens": inputs}
    names |= {"inputs": inputs, "targets": targets, "batches": [(inputs, targets)] * 2}
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) == 3
    try:
        for block in blocks:
            names["model"] = model = BasicsTransformerLM(11, 8, 8, 1, 2, 16)
            before = model.lm_head.weight.detach().clone()
            exec(block, names)
            if "optimizer" in block:
                assert not torch.equal(model.lm_head.weight, before)
    finally:
        distributed.destroy_process_group()
    assert names["o"].shape == q.shape
    assert names["weights"].keys() == model.state_dict().keys()
