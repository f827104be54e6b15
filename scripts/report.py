"""Write the report, the assignment item by item, from the measurements under a results folder.

    python scripts/report.py
    python scripts/report.py --results out/reproduce --out out/reproduce/REPORT.md

Tables, pictures and the numbers in its sentences come from the rows; where there are none, it names the command that
makes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cs336_systems.cli import parse, refusing_bad_input, tell


@dataclass(frozen=True)
class Arguments:
    results: Path = Path("results")
    """The measurements: the committed ones, or a folder of scripts/reproduce.py."""
    out: Path = Path("REPORT.md")
    """The file to write."""


def main() -> None:
    arguments = parse(Arguments, __doc__)
    from cs336_systems.benchmarking.report import report
    from cs336_systems.configs import check
    from cs336_systems.records import NotWritten, check_writable, write_atomically

    with refusing_bad_input():
        check(not arguments.out.is_dir(), "out", str(arguments.out), "must be a file, and is a folder")
        text = report(arguments.results, arguments.out.parent)
        check_writable(arguments.out.parent)
    try:
        write_atomically(arguments.out, text)
    except NotWritten as error:
        tell(f"error: cannot write {arguments.out}: {error.strerror}; what was there is as it was")
        raise SystemExit(1) from None
    tell(f"Wrote {arguments.out}.")


if __name__ == "__main__":
    main()
