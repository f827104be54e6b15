"""REPORT.md says what results/ holds, its numbers come from rows, and it stands whatever is missing."""

import json
import re
from pathlib import Path

import pytest

from cs336_systems.benchmarking.report import ITEMS, report
from cs336_systems.benchmarking.report_rows import NAMES_WITH_DIGITS, Row, read_rows, say, with_spread

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
TEXT = (ROOT / "REPORT.md").read_text(encoding="utf-8")
PARTS = [part for item in ITEMS for part in item.parts]
PARAMETERS = {"bucket_size_mb", "size_mb"}  # floats that say what was run


def _copy(folder, change):
    """All results files, each row as `change(row, its number)` leaves it; None leaves it out."""
    for path in RESULTS.rglob("*.json"):
        document = json.loads(path.read_text(encoding="utf-8"))
        if "runs" not in document:
            continue
        every = 1 if len(document["rows"]) < 200 else 10  # of the long grids the first lengths of each kind will do
        changed = (change(dict(row), number) for number, row in enumerate(document["rows"][::every]))
        copy = folder / path.relative_to(RESULTS)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(json.dumps({**document, "rows": [row for row in changed if row is not None]}))
    return folder


def _measured(name, value):
    return isinstance(value, float) and name not in PARAMETERS


def _sentences(part, results):
    return [sentence for sentence in part.answer(results) if sentence is not None]


def test_it_is_what_the_script_writes():
    assert report(RESULTS, ROOT) == TEXT, "run: uv run python scripts/report.py"


def test_every_item_of_the_assignment_is_there():
    assert [int(number) for number in re.findall(r"^## (\d+)\. ", TEXT, re.MULTILINE)] == list(range(1, 16))


def test_a_number_in_prose_comes_from_rows():
    """A digit outside of code, tables, links and origins is in a sentence of the generator, and there in a value."""
    prose = re.sub(r"```.*?```|\]\([^)]*\)", "", TEXT, flags=re.DOTALL)
    kept = [line for line in prose.splitlines() if not re.match(r"[#|!]|- \d+ × |- .*commit |Rows: |More: ", line)]
    answers = {"**Answer.** " + " ".join(s.text for s in _sentences(part, RESULTS)) for part in PARTS}
    with_digits = [line for line in kept if re.search(r"\d", re.sub(NAMES_WITH_DIGITS, "", line))]
    assert len(with_digits) > 15
    assert [line for line in with_digits if line not in answers] == []
    for sentence in (s for part in PARTS for s in _sentences(part, RESULTS)):
        numbers = re.findall(r"\d[\d.,]*\b", NAMES_WITH_DIGITS.sub("", sentence.text))
        assert [number for number in numbers if not any(number in value for value in sentence.values)] == [], sentence


def test_a_digit_in_a_template_is_refused():
    with pytest.raises(ValueError, match="numbers must come from rows"):
        say("It takes 12 ms.")
    sentence = say("{a} ms in float32", a=12.3456)
    assert sentence is not None
    assert (sentence.text, sentence.values) == ("12.35 ms in float32", ("12.35",))
    assert say("{a} ms", a=None) is None


def test_one_step_has_no_spread():
    assert with_spread(Row(step_median_ms=711.43, step_std_ms=0.56), "step_median_ms") == "711.4 ± 0.56"
    assert with_spread(Row(step_median_ms=711.43, step_std_ms=None), "step_median_ms") == 711.43
    assert with_spread(Row(status="oom"), "step_median_ms") == "OOM"


def test_sentences_change_with_the_rows(tmp_path):
    """Other measurements, other sentences: no part's answer is fixed."""

    def other(name, value, number):
        if name in ("result_to_4_places", "float16"):  # measured too, and kept as words
            return value[::-1]
        return value * (1.5 + 0.37 * number + 0.01 * len(name)) if _measured(name, value) else value

    def scale(row, number):
        return {name: other(name, value, number) for name, value in row.items()}

    changed = _copy(tmp_path, scale)
    fixed = [
        part.title for part in PARTS if (before := _sentences(part, RESULTS)) and before == _sentences(part, changed)
    ]
    assert fixed == []


def test_without_results_every_part_names_its_command(tmp_path):
    text = report(tmp_path, tmp_path)
    named = [part for part in PARTS if part.folder]
    assert text.count("Not measured yet.") == len(named) > 20
    assert all(f"--only {part.folder}`" in text and f"results/{part.folder}" in text for part in named)
    assert "| " not in re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def _failed(row, number):
    measures = {name: None for name, value in row.items() if _measured(name, value)}
    return {**row, **measures, **({"status": "oom", "reason": "no room"} if "status" in row else {})}


def _only(*numbers):
    return lambda row, number: row if number in numbers else None


def _every_second_failed(row, number):
    return _failed(row, number) if number % 2 else row


def _without(name, value):
    return lambda row, number: None if row.get(name) == value else row


def _without_newer_columns(row, number):
    return {name: value for name, value in row.items() if "predicted" not in name and "share" not in name}


@pytest.mark.parametrize(
    "change",
    [
        _failed,
        _every_second_failed,
        _only(0),
        _only(1),
        _only(),
        _without("size", "small"),
        _without("precision", "fp32"),
        _without("implementation", "none"),
        _without("implementation", "sdpa-flash"),
        _without("implementation", "flash-triton"),
        _without("implementation", "fused"),
        _without_newer_columns,
        lambda row, number: {**row, "a_column_of_tomorrow": 1.0},
    ],
)
def test_it_stands_on_partial_results(tmp_path, change, monkeypatch):
    # Convergence's rows are read by their type, which refuses columns that it lacks.
    monkeypatch.setattr("cs336_systems.benchmarking.profile_tables.convergence_table", lambda rows: "")
    monkeypatch.setattr("cs336_systems.benchmarking.profile_tables.read_results", lambda path, row_type: ([], [], []))
    text = report(_copy(tmp_path, change), tmp_path)
    answers = " ".join(line for line in text.splitlines() if line.startswith("**Answer.**"))
    assert "None" not in answers
    assert "nan" not in answers


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "fsdp").mkdir()
    (tmp_path / "fsdp" / "fsdp.json").write_text('{"rows": 1}')
    with pytest.raises(ValueError, match=r"fsdp\.json: not a results file"):
        read_rows(tmp_path / "fsdp" / "fsdp.json")


def test_the_script_writes_it_elsewhere(tmp_path, run_script):
    assert run_script("report", "--results", RESULTS, "--out", tmp_path / "mine" / "REPORT.md")[0] == 0
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", (tmp_path / "mine" / "REPORT.md").read_text())
    assert pictures
    assert all((tmp_path / "mine" / picture).exists() for picture in pictures)
    status, _, errors = run_script("report", "--results", tmp_path / "nothing")
    assert status == 2
    assert f"--results {tmp_path}/nothing: must be a folder" in errors
