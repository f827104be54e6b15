"""A script's standard output and error that nobody reads, that are closed, or that are full."""

import ast
import os
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_a_result_that_nobody_reads_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    script = ROOT / "scripts" / "accounting.py"
    run = subprocess.run([sys.executable, script], stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "closed", "status", "shown"),
    [
        ("", "2>&-", 0, "### Parameters"),
        ("--ctx 0", "2>&-", 2, ""),
        ("--help", "2>&-", 0, "usage: "),
        ("", ">&-", 0, ""),
        ("--help", ">&-", 0, ""),
        pytest.param(
            "--help",
            ">/dev/full",
            1,
            "error: cannot write to standard output: No space left on device\n",
            marks=pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full"),
        ),
        ("--ctx 0", ">&-", 2, "error: --ctx 0: must be"),
    ],
)
def test_a_stream_that_is_closed_or_full_has_no_traceback(words, closed, status, shown):
    command = f"{shlex.quote(sys.executable)} scripts/accounting.py {words} {closed}"
    run = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == status
    assert shown in run.stdout + run.stderr
    assert "Traceback" not in run.stderr


def test_the_number_of_a_closed_stream_is_not_that_of_a_file_of_ours(tmp_path):
    """Into which libraries and children would write their messages."""
    code = """
        import os, sys
        from dataclasses import make_dataclass
        from cs336_systems.cli import parse
        file = sys.argv.pop()
        parse(make_dataclass("Arguments", []), "")
        kept = open(file, "w")
        os.write(2, b"a message")
        print(sys.stderr.isatty(), os.get_inheritable(2))
    """
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(textwrap.dedent(code))} {tmp_path}/rows 2>&-"
    run = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout == "False True\n"
    assert (tmp_path / "rows").read_text() == ""


def test_results_are_printed_by_show():
    """Which a reader that has gone, or a full disk, does not end with a traceback."""
    for path in [*(ROOT / "scripts").glob("*.py"), *(ROOT / "cs336_systems").rglob("*.py")]:
        if path.name not in ("cli.py", "submission.py"):  # the second's lines are a job's log
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "print":
                    assert "file" in {keyword.arg for keyword in node.keywords}, f"{path.name}, line {node.lineno}"
