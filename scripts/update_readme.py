"""Write the README's tables anew from the measurements under results/."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cs336_systems.cli import parse, refusing_bad_input, tell


@dataclass(frozen=True)
class Arguments:
    readme: Path = Path("README.md")
    """The file whose blocks are filled."""
    results: Path = Path("results")
    """The committed measurements."""


def main() -> None:
    arguments = parse(Arguments, __doc__)
    from cs336_systems.benchmarking.readme_tables import fill_blocks
    from cs336_systems.configs import check
    from cs336_systems.records import NotWritten, write_atomically

    with refusing_bad_input():
        check(arguments.results.is_dir(), "results", str(arguments.results), "must be a folder")
        check(arguments.readme.is_file(), "readme", str(arguments.readme), "must be a file")
        text = fill_blocks(arguments.readme.read_text(encoding="utf-8"), arguments.results)
    try:
        write_atomically(arguments.readme, text)
    except NotWritten as error:
        tell(f"error: cannot write {arguments.readme}: {error.strerror}; it is as it was")
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
