"""Answer from profiler reports where the time of a step goes, and what binds it.

    python scripts/analyze_nsys.py report.nsys-rep
    python scripts/analyze_nsys.py out/nsys --out results/nsys

Takes .nsys-rep files (nsys exports them), their SQLite, traces of torch.profiler, and folders that
scripts/profile_nsys.py wrote. Leaves under --out the handout's answers (answers.md), a row a report, the kernels of
each range, and for each report its tables, its verdict and a timeline. Whether two profilers tell the same of a step:

    python scripts/analyze_nsys.py report.sqlite trace.json.gz --compare
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from cs336_systems.cli import command_line, parse, refusing_bad_input
from cs336_systems.configs import check_ignored


@dataclass(frozen=True)
class Arguments:
    reports: Positional[tuple[Path, ...]]
    """Reports, or folders of scripts/profile_nsys.py."""
    benchmark: Path | None = None
    """Rows of scripts/benchmark.py (benchmark.json) for the same cells without a profiler, to be set beside."""
    top: int = 8
    """Kernels to list for each range."""
    nsys: str = "nsys"
    """The program that exports .nsys-rep files, its path, or a command that calls it."""
    out: Path = Path("out/analysis")
    """Folder for what is written."""
    trim: Path | None = None
    """Write the report's first --steps steps to this SQLite file, small enough to keep, and do nothing else."""
    steps: int = 1
    """With --trim: how many steps to keep."""
    compare: bool = False
    """Set two reports of the same step side by side, by range and class (agreement.md), and do nothing else."""


def main() -> None:
    arguments = parse(Arguments, __doc__)
    with refusing_bad_input():
        if arguments.trim is None:
            check_ignored(arguments, {"steps"}, "goes with --trim")
        else:
            check_ignored(
                arguments, {"benchmark", "top", "out", "compare"}, "goes without --trim, which does nothing else"
            )
        if arguments.compare:
            check_ignored(arguments, {"benchmark", "top"}, "goes without --compare, which does nothing else")
    from cs336_systems.profiling.run_analysis import run_analysis

    run_analysis(command_line(), **vars(arguments))


if __name__ == "__main__":
    main()
