"""tests/mutations.py as a person stops it: what it leaves and says. What it finds stands in docs/testing.md."""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from cs336_systems.signals import STOPPED
from tests import mutations

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def run_mutations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Generator[Callable[..., tuple[object, str, str]]]:
    """Its exit status and what it printed, of a tree with nothing but the mutated files, in a folder of temporary
    files of its own."""
    for mutation in mutations.MUTATIONS:
        path = tmp_path / "tree" / mutation.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((ROOT / mutation.file).read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(mutations, "ROOT", tmp_path / "tree")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))

    def run(*names: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["tests/mutations.py", *names])
        with pytest.raises(SystemExit) as ended:
            mutations.main()
        shown = capsys.readouterr()
        return ended.value.code, shown.out, shown.err

    before = {number: signal.getsignal(number) for number in STOPPED}
    yield run
    for number, handler in before.items():
        signal.signal(number, handler)


def test_every_mutation_can_be_made() -> None:
    for mutation in mutations.MUTATIONS:
        assert (ROOT / mutation.file).read_text(encoding="utf-8").count(mutation.old) == 1, mutation
        assert all((ROOT / "tests" / name).exists() for name in mutation.tests.split()), mutation


@pytest.mark.parametrize(
    ("raised", "status", "word"),
    [
        (KeyboardInterrupt(), 130, "Interrupted"),
        (SystemExit(143), 143, "Ended by SIGTERM"),
        (SystemExit(129), 129, "Ended by SIGHUP"),
    ],
)
def test_what_stops_it_is_told_with_what_is_left(monkeypatch, tmp_path, run_mutations, raised, status, word):
    tried: list[mutations.Mutation] = []

    def run(mutation: mutations.Mutation, copy: Path) -> str:
        assert (copy / mutation.file).exists()
        if len(tried) == 3:
            raise raised
        tried.append(mutation)
        return "" if len(tried) == 2 else "tests/test_x.py::test_y"

    monkeypatch.setattr(mutations, "run", run)
    code, shown, errors = run_mutations("attention/", "optimizer.py")
    chosen = [m for m in mutations.MUTATIONS if "attention/" in m.file or "optimizer.py" in m.file]
    assert code == status
    assert shown.count("`test_x.py::test_y`") == 2
    assert f"{word}: 3 of {len(chosen)} mutations tried, 1 of them not seen by a test; only a copy" in errors
    assert not any((tmp_path / "temporary").iterdir())
    # What it says goes on with those, and with what else is in their files.
    left = errors.partition("To go on: uv run python tests/mutations.py ")[2].split()
    again = [m for m in mutations.MUTATIONS if any(name in m.file for name in left)]
    assert set(chosen[3:]) <= set(again)
    assert {m.file for m in again} == {m.file for m in chosen[3:]}


def test_stopped_before_the_first_mutation_all_are_left(monkeypatch, run_mutations):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.copytree", interrupted)
    code, shown, errors = run_mutations("rope.py")
    assert (code, shown) == (130, "")
    assert "Interrupted: 0 of 1 mutations tried" in errors
    assert errors.endswith("To go on: uv run python tests/mutations.py cs336_systems/kernels/rope.py\n")


def test_an_interrupted_mutation_leaves_its_file_whole(monkeypatch, tmp_path):
    mutation = mutations.MUTATIONS[-1]
    path = tmp_path / mutation.file
    path.parent.mkdir(parents=True)
    whole = (ROOT / mutation.file).read_text(encoding="utf-8")
    path.write_text(whole, encoding="utf-8")

    def interrupted(*_: object, **__: object) -> None:
        assert path.read_text(encoding="utf-8") == whole.replace(mutation.old, mutation.new) != whole
        raise KeyboardInterrupt

    monkeypatch.setattr("subprocess.run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        mutations.run(mutation, tmp_path)
    assert path.read_text(encoding="utf-8") == whole


def test_a_file_that_no_mutation_is_of_is_refused(run_mutations):
    assert run_mutations("nothing.py") == (2, "", "error: nothing.py: there is no mutation of such a file\n")
