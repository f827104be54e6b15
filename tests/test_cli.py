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


def test_help_that_nobody_reads_is_no_error():
    code = """
        import os, sys
        from dataclasses import dataclass
        from cs336_systems.cli import parse

        @dataclass(frozen=True)
        class Arguments:
            size: str = "tiny"

        reader, writer = os.pipe()
        os.dup2(writer, 1)
        os.close(writer)
        os.close(reader)
        sys.argv = ["script", "--help"]
        parse(Arguments, "Says nothing.")
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
