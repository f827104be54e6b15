"""Measure everything that this machine can, and write its report: the assignment, item by item, with your own numbers.

    python scripts/reproduce.py --dry-run    # what would run, and how long it would take
    python scripts/reproduce.py              # on a CPU small sizes, on one GPU and on several the full ones
    python scripts/reproduce.py --only benchmark/sizes all_reduce

What has run is not run again: after Ctrl-C, or a failed step, the same command goes on. A step that fails does not stop
the others; the status is then 1. The report is written whatever is missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cs336_systems.cli import parse, refusing_bad_input, show, tell


@dataclass(frozen=True)
class Arguments:
    results: Path = Path("out/reproduce")
    """Folder for rows, tables, pictures and the report; `results` updates the repository's own, and its README."""
    only: tuple[str, ...] = ()
    """Names of steps, e.g. benchmark/sizes. Default: all."""
    machine: Literal["auto", "cpu", "gpu", "gpus"] = "auto"
    """cpu, gpu (one), gpus (two or more), or auto: what is here."""
    dry_run: bool = False
    """Print the steps and their commands, and run nothing."""


def main() -> None:
    arguments = parse(Arguments, __doc__)
    from cs336_systems.benchmarking.reproduce import check_machine, machine_here, plan, plan_table, run_plan, run_script
    from cs336_systems.benchmarking.reproduce_steps import STEPS, step_named
    from cs336_systems.files import check_writable

    try:
        with refusing_bad_input():
            steps = tuple(map(step_named, arguments.only)) or STEPS
            machine = machine_here() if arguments.machine == "auto" else arguments.machine
            planned = plan(machine, arguments.results, steps)
            if not arguments.dry_run:
                if arguments.machine != "auto":
                    check_machine(machine)
                check_writable(arguments.results, "results")
        show(plan_table(planned))
        if arguments.dry_run:
            return
        try:
            failed = run_plan(planned, arguments.results, run_script)
        finally:
            from cs336_systems.benchmarking.write_report import write_documents

            tell(f"Report: {write_documents(arguments.results)}")
    except KeyboardInterrupt:
        tell("\nInterrupted; the same command goes on from here.")
        raise SystemExit(130) from None
    if failed:
        tell(f"Failed: {', '.join(failed)}. Their messages are above; the same command runs them again.")
        raise SystemExit(1)


if __name__ == "__main__":
    main()
