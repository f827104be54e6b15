"""Writes the report and the README's tables anew from the rows of a results folder."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from cs336_systems.benchmarking.readme_tables import fill_blocks
from cs336_systems.benchmarking.report import report
from cs336_systems.cli import refusing_bad_input, tell
from cs336_systems.configs import check
from cs336_systems.files import NotWritten, check_writable, write_atomically

_ROOT = Path(__file__).resolve().parents[2]


def write_report(results: Path, out: Path, may_be_empty: bool = False) -> str:
    """The report into the file `out`; returns a line that says whether that changed it. Bad input, a folder without any
    rows unless it `may_be_empty`, ends the program with status 2, and what cannot be written with 1."""
    with refusing_bad_input():
        if not may_be_empty:
            _check_has_rows(results)
        check(not out.is_dir(), "out", str(out), "must be a file, and is a folder")
        text = report(results, out.parent)
        check_writable(out.parent)
    return _write(out, text, results)


def write_readme(results: Path, readme: Path) -> str:
    """The tables into the blocks of the file `readme`; returns a line, and ends, as `write_report`."""
    with refusing_bad_input():
        _check_has_rows(results)
        check(readme.is_file(), "readme", str(readme), "must be a file")
        text = fill_blocks(readme.read_text(encoding="utf-8"), results)
    return _write(readme, text, results)


def write_documents(results: Path) -> Path:
    """The report into its folder of results; of the repository's own into the repository's, and its README's tables
    too. Returns the report's path."""
    is_own = results.resolve() == _ROOT / "results"
    path = (_ROOT if is_own else results) / "REPORT.md"
    write_report(results, path, may_be_empty=True)
    if is_own:
        write_readme(results, _ROOT / "README.md")
    return path


def _check_has_rows(results: Path) -> None:
    """Raises ValueError where there is nothing to write tables of: empty ones would take the place of what is there."""
    check(results.is_dir(), "results", str(results), "must be a folder")
    has_rows = any(_has_rows(path) for path in sorted(results.rglob("*.json")))
    check(has_rows, "results", str(results), "has no measurements in it; scripts/reproduce.py makes them")


def _has_rows(path: Path) -> bool:
    with suppress(OSError, ValueError):
        content = json.loads(path.read_bytes())
        return isinstance(content, dict) and bool(content.get("rows"))
    return False


def _write(path: Path, text: str, results: Path) -> str:
    with suppress(OSError):
        if path.read_bytes() == text.encode("utf-8", "backslashreplace"):
            return f"Nothing changed: {path} says what is in {results}."
    try:
        write_atomically(path, text)
    except NotWritten as error:
        tell(f"error: cannot write {path}: {error.strerror}; what was there is as it was")
        raise SystemExit(1) from None
    return f"Wrote {path} from {results}."
