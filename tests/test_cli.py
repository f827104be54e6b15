"""What every script does with its command line, and with a Ctrl-C or an error that nobody caught."""

import subprocess
import sys
import textwrap

import pytest


@pytest.mark.parametrize(
    ("raised", "shown", "hidden"),
    [("KeyboardInterrupt", "Interrupted.", "Traceback"), ("RuntimeError('why')", "Traceback", "Interrupted")],
)
def test_only_an_interrupt_loses_its_traceback(raised, shown, hidden):
    code = f"""
        from dataclasses import dataclass
        from cs336_systems.cli import parse

        @dataclass(frozen=True)
        class Arguments:
            size: str = "tiny"

        assert parse(Arguments, "Says nothing.") == Arguments()
        raise {raised}
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert run.returncode != 0
    assert shown in run.stderr
    assert hidden not in run.stderr
