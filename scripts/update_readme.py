"""Write the README's tables anew from the measurements under results/."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cs336_systems.cli import parse, tell


@dataclass(frozen=True)
class Arguments:
    readme: Path = Path("README.md")
    """The file whose blocks are filled."""
    results: Path = Path("results")
    """The committed measurements."""


def main() -> None:
    arguments = parse(Arguments, __doc__)
    from cs336_systems.benchmarking.write_report import write_readme

    tell(write_readme(arguments.results, arguments.readme))


if __name__ == "__main__":
    main()
