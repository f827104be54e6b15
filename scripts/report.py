"""Write the report, the assignment item by item, from the measurements under a results folder.

    python scripts/report.py
    python scripts/report.py --results out/reproduce --out out/reproduce/REPORT.md

Tables, pictures and the numbers in its sentences come from the rows; where there are none, it names the command that
makes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cs336_systems.cli import parse, tell


@dataclass(frozen=True)
class Arguments:
    results: Path = Path("results")
    """The measurements: the committed ones, or a folder of scripts/reproduce.py."""
    out: Path = Path("REPORT.md")
    """The file to write."""


def main() -> None:
    arguments = parse(Arguments, __doc__)
    from cs336_systems.benchmarking.write_report import write_report

    tell(write_report(arguments.results, arguments.out))


if __name__ == "__main__":
    main()
