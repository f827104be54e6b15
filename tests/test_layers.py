"""Imports point one way: scripts, benchmarking and profiling, what these measure, and then configs and accounting."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "cs336_systems"


def _imported(file: Path) -> set[str]:
    """The modules that a file imports, wherever in it; of `from package import module` both names."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def _files(part: str) -> list[Path]:
    folder = PACKAGE / part
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


@pytest.mark.parametrize(
    ("part", "unwanted"),
    [
        ("profiling", ["cs336_systems.benchmarking"]),
        ("benchmarking", ["cs336_systems.profiling"]),
        *[
            (part, ["cs336_systems.benchmarking", "cs336_systems.profiling"])
            for part in ("training", "workload", "attention", "kernels", "distributed", "records", "figures")
        ],
        ("configs", ["cs336_systems", "cs336_basics", "torch"]),
    ],
)
def test_a_part_does_not_import_what_lies_above_it(part, unwanted):
    files = _files(part)
    assert files
    for file in files:
        found = [name for name in _imported(file) if any(f"{name}.".startswith(f"{other}.") for other in unwanted)]
        assert found == [], file


def test_accounting_imports_nothing_but_itself():
    for file in _files("accounting"):
        ours = {name for name in _imported(file) if name.startswith("cs336_")}
        assert all(name.startswith("cs336_systems.accounting") for name in ours), file
        assert not any(name.split(".")[0] in ("torch", "numpy") for name in _imported(file)), file
