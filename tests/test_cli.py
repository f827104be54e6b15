"""What every script does with its command line, and with a Ctrl-C or an error that nobody caught."""

import subprocess
import sys
import textwrap

import pytest


@pytest.mark.parametrize(
    ("raised", "shown", "hidden"),
    [
        ("KeyboardInterrupt", "Interrupted.", "Traceback"),
        ("RuntimeError('why')", "Traceback", "Interrupted"),
        ("NotWritten(28, 'No space left', 'a.md')", "error: cannot write a.md: No space left. Make room", "Traceback"),
        ("OSError(28, 'No space left', 'a.md')", "Traceback", "Make room"),
    ],
)
def test_only_an_interrupt_and_a_full_disk_lose_their_traceback(raised, shown, hidden):
    code = f"""
        from dataclasses import dataclass
        from cs336_systems.cli import parse
        from cs336_systems.records import NotWritten

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
