"""What every script does with its command line, and with a Ctrl-C or an error that nobody caught."""

import ast
import dataclasses
import importlib
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from cs336_systems import cli, resuming
from cs336_systems.cli import as_flag, command_line, parse
from cs336_systems.signals import STOPPED

ROOT = Path(__file__).resolve().parents[1]


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
        from cs336_systems.files import NotWritten

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


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("benchmark", "cs336_systems.benchmarking.into_files.run_isolated"),  # which looks at the device
        ("flash_benchmark", "cs336_systems.benchmarking.into_files.run_isolated"),
        ("convergence", "cs336_systems.benchmarking.into_files.run_isolated"),
        ("ddp_benchmark", "cs336_systems.benchmarking.into_files.run_isolated"),
        ("profile_nsys", "cs336_systems.profiling.run_nsys.find_nsys"),
        ("train", "cs336_systems.training.run_checks.check_run"),
    ],
)
@pytest.mark.parametrize("resume", [(), ("--resume",)])
def test_an_interrupt_before_the_device_is_known_names_the_command(
    name, place, resume, tmp_path, monkeypatch, run_script, capsys
):
    """As it was typed: with --resume a run that has not begun would go on from another's rows."""

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(place, interrupted)
    monkeypatch.setattr(resuming, "_has_begun", threading.Event())
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(KeyboardInterrupt) as error:
        run_script(name, "--out", tmp_path, *resume)
    with pytest.raises(SystemExit, match="130"):
        sys.excepthook(KeyboardInterrupt, error.value, None)
    shown = capsys.readouterr().err.splitlines()[-1]
    word = "To go on" if resume else "To begin"
    typed = " ".join(["python", f"scripts/{name}.py", "--out", str(tmp_path), *resume])
    assert shown == f"Interrupted before anything was measured. {word}: {typed}"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
@pytest.mark.parametrize("has_begun", [False, True])
def test_a_request_to_end_before_a_run_has_begun_has_a_line_too(has_begun, name, tmp_path, monkeypatch, run_script):
    """Later the run has one of its own."""
    monkeypatch.setattr(resuming, "_has_begun", threading.Event())
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    def ended(*_, **__):
        if has_begun:
            resuming.run_begins()
        signal.raise_signal(signal.Signals[name])

    monkeypatch.setattr("cs336_systems.benchmarking.into_files.check_without_torch", ended)
    status, _, errors = run_script("benchmark", "--out", tmp_path)
    assert status == 128 + signal.Signals[name]
    line = f"\nEnded by {name} before anything was measured. To begin: python scripts/benchmark.py --out {tmp_path}\n"
    assert (name in errors) is not has_begun
    assert errors.endswith("" if has_begun else line)


def test_a_terminal_that_closes_ends_no_script_under_nohup(monkeypatch, run_script):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run = "cs336_systems.benchmarking.run_benchmark.run_benchmark"
        monkeypatch.setattr(run, lambda *_, **__: signal.raise_signal(signal.SIGHUP))
        assert run_script("benchmark")[0] == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_early_interrupt_has_the_status_of_every_other(tmp_path):
    """Status 1, as of a failed run, would let a shell's loop go on."""
    code = f"""
        import runpy, sys
        from cs336_systems import files
        def interrupted(*_):
            raise KeyboardInterrupt
        files.check_writable = interrupted
        sys.argv = ["scripts/train.py", "--device", "cpu", "--out", {str(tmp_path)!r}]
        runpy.run_path(sys.argv[0], run_name="__main__")
    """
    words = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "Interrupted before anything was measured. To begin: " in done.stderr
    assert done.returncode == 130


def test_an_interrupt_once_rows_have_begun_goes_on_from_them(tmp_path, monkeypatch, run_script, capsys):
    """Here while the tables of a run that has ended are written."""

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(resuming, "_has_begun", threading.Event())
    monkeypatch.setattr("cs336_systems.profiling.nested_tables.plot_schemes", interrupted)
    with pytest.raises(KeyboardInterrupt) as error:
        run_script("checkpointing", "--part", "nested", "--layers", 4, "--out", tmp_path)
    with pytest.raises(SystemExit, match="130"):
        sys.excepthook(KeyboardInterrupt, error.value, None)
    shown = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(r"Interrupted\. To go on: .*python scripts/checkpointing\.py .* --resume", shown)


@pytest.mark.parametrize(
    ("rank", "told"), [("0", " torchrun --nproc-per-node 2 scripts/benchmark.py\n"), ("1", "\nInterrupted.\n")]
)
def test_of_a_launched_jobs_ranks_the_first_says_how_to_go_on(rank, told, monkeypatch, run_script, capsys):
    monkeypatch.setattr(resuming, "_has_begun", threading.Event())
    monkeypatch.setattr("cs336_systems.benchmarking.run_benchmark.run_benchmark", lambda *_, **__: None)
    run_script("benchmark")
    for name, value in {"RANK": rank, "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="130"):
        sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert told in capsys.readouterr().err


_FLAG = re.compile(r'^    (\w+): [^\n]*\n(?:[ ]{8}[^\n]*\n|    \)\n)*    """(.*?)"""', re.MULTILINE | re.DOTALL)


_ON_RANKS = {
    *("all_reduce_benchmark", "ddp_benchmark", "fsdp_benchmark", "leaderboard_step", "scaling_benchmark"),
    *("sharded_optimizer_benchmark", "train"),
}


@pytest.mark.parametrize("name", sorted({path.stem for path in (ROOT / "scripts").glob("*.py")} - _ON_RANKS))
def test_several_ranks_of_a_script_for_one_process_are_refused(name, monkeypatch, run_script):
    for variable, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(variable, value)
    words = {"analyze_nsys": ["x"], "submit_sweep": ["--command", "x", "--vary", "--a 1"]}.get(name, [])
    assert run_script(name, *words) == (
        2,
        "",
        f"error: {name}.py takes one process, and the launcher started 2 (torchrun, srun or WORLD_SIZE); python starts "
        "one\n",
    )


def test_flags_are_described_and_those_that_mean_the_same_in_the_same_words():
    said: dict[str, set[str]] = {}
    for path in [*(ROOT / "scripts").glob("*.py"), ROOT / "cs336_systems/benchmarking/rank_arguments.py"]:
        for name, text in _FLAG.findall(path.read_text()):
            words = " ".join(text.split())
            assert len(words.split()) >= 2, f"{path.name} --{name}: {words}"
            said.setdefault(name, set()).add(words)
    assert len(said) > 60
    assert said["optimizer"] == {"The project's AdamW, or PyTorch's fused one."}
    for name in ("high_priority", "timeout_s", "rep_ms"):
        assert len({words.split(". Default: ")[0].split(",")[0].rstrip(".") for words in said[name]}) == 1, said[name]
    for words in set().union(*said.values()):  # what stands for None is said in one way, at the end
        assert not re.search("unless given|by default", words, re.IGNORECASE), words
        assert re.fullmatch(r"(?:(?!Default: ).)*(Default: .*\.)?", words), words
    sweeps = {words for words in said["resume"] if words.startswith("Keep the rows")}
    assert len(sweeps) <= 2, sweeps  # the comparison of training runs goes on with what each has
    assert {words.split()[0] for words in said["seed"]} == {"Seed"}


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


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("script", sorted(path.stem for path in (ROOT / "scripts").glob("*.py")))
def test_help_fits_the_terminal(run_script, monkeypatch, script, width):
    monkeypatch.setenv("COLUMNS", str(width))
    status, shown, errors = run_script(script, "--help")
    assert (status, errors) == (0, "")
    description, _, options = shown.partition("\nusage: ")
    assert [line for line in description.splitlines() if len(line) > width and not line.startswith("    ")] == []
    assert [line for line in options.splitlines() if len(line) > width] == []
    assert "\n\n\n" not in description
    assert "None" not in options
    if " --size " in options:
        said = " ".join(options.replace("│", " ").split())
        assert "tiny (2 layers, d_model 128), small (12, 768), medium (24, 1024), large (36, 1280), xl" in said
        assert "8b (34, 4096)" in said
    assert "(default: )" not in options


@pytest.mark.parametrize("columns", ["1", "5", "39"])
def test_help_in_a_terminal_that_is_too_narrow_for_words(columns):
    """In a process of its own, which a test can end: it went on for ever."""
    script, environment = ROOT / "scripts" / "report.py", {**os.environ, "COLUMNS": columns}
    run = subprocess.run(
        [sys.executable, script, "--help"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert max(map(len, run.stdout.splitlines())) > int(columns)
    assert "--results" in run.stdout


def test_the_width_that_help_takes_is_not_left_to_others(run_script, monkeypatch):
    monkeypatch.setenv("COLUMNS", "5")
    assert run_script("report", "--help")[0] == 0
    assert os.environ["COLUMNS"] == "5"
    monkeypatch.delenv("COLUMNS")
    assert run_script("report", "--help")[0] == 0
    assert "COLUMNS" not in os.environ


def test_help_of_each_kind_of_default(run_script, monkeypatch, capsys, tmp_path):
    """Also of what a class takes from another, and of a docstring on several lines.

    `run_script` gives back what `parse` sets.
    """
    source = tmp_path / "two_classes.py"
    source.write_text('''
from dataclasses import dataclass
from typing import Literal
@dataclass(frozen=True)
class Base:
    first: tuple[int, ...] | None = None
    """Of the base,
    on two lines. Default: 1 and 2 on a GPU, 3 elsewhere."""
    second: Literal["a", "b"] | None = None
    """Has no default of its own."""
@dataclass(frozen=True)
class Arguments(Base):
    third: tuple[float, ...] = ()
    """None given. Default: all."""
    fourth: int = 7
    """A number."""
    second: Literal["a", "b"] | None = None
    """Described anew."""
''')
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    arguments = importlib.import_module("two_classes").Arguments
    monkeypatch.setattr(sys, "argv", ["x.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        parse(arguments, "Says nothing.")
    words = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for shown in (
        "--first [INT [INT ...]] Of the base, on two lines. (default: 1 and 2 on a GPU, 3 elsewhere)",
        "--second {a,b} Described anew. --third",
        "--third [FLOAT [FLOAT ...]] None given. (default: all)",
        "--fourth INT A number. (default: 7)",
    ):
        assert shown in words
    monkeypatch.setattr(sys, "argv", ["x.py", "--first", "4", "5", "--second", "b"])
    assert vars(parse(arguments, "")) == {"first": (4, 5), "second": "b", "third": (), "fourth": 7}


@dataclasses.dataclass(frozen=True)
class Chosen:
    required: str
    one: Literal["d", "a", "c", "b"] | None = None
    several: tuple[Literal["d", "a", "c", "b"], ...] | None = None
    number: int | None = None
    flag: bool = False


@pytest.mark.parametrize(
    ("argument", "shown"),
    [
        ("--one e", "invalid choice 'e' for argument '--one'. Expected one of ('d', 'a', 'c', 'b')."),
        ("--several a e", "invalid choice 'e' for argument '--several'. Expected one of ('d', 'a', 'c', 'b')."),
        ("--one None", "invalid choice 'None' for argument '--one'"),
        ("--several None", "invalid choice 'None' for argument '--several'"),
        ("--number None", "Error parsing --number"),
    ],
)
def test_none_is_what_stands_for_no_flag_and_none_of_its_values(run_script, monkeypatch, capsys, argument, shown):
    monkeypatch.setattr(sys, "argv", ["x.py", "--required", "x", *argument.split()])
    with pytest.raises(SystemExit, match="2"):
        parse(Chosen, "")
    assert shown in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_arguments_that_are_not_given_keep_their_default(run_script, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x.py", "--required", "x"])
    assert parse(Chosen, "") == Chosen("x")
    given = ["--one", "c", "--several", "b", "a", "--number", "3", "--flag"]
    monkeypatch.setattr(sys, "argv", ["x.py", "--required", "x", *given])
    assert parse(Chosen, "") == Chosen("x", "c", ("b", "a"), 3, True)


@pytest.mark.parametrize(
    ("message", "typed"),
    [
        ("batch_size=0: must be at least 1", "--batch-size 0: must be at least 1"),
        ("context_length=0: must be at least 1", "--ctx 0: must be at least 1"),
        ("cold_caches=True: goes with", "--cold-caches: goes with"),
        ("loss_scaling=False: only fp16", "--no-loss-scaling: only fp16"),
        ("data=None: is not there", "--data: is not there"),
        ("""command="a 'b": has a quote""", "--command a 'b: has a quote"),
        ("reports='a b': is no report", "reports a b: is no report"),
        ("no argument: 3", "no argument: 3"),
    ],
)
def test_a_message_names_what_was_typed(monkeypatch, message, typed):
    monkeypatch.setattr(cli, "_without_flag", {"reports"})
    assert as_flag(message) == typed


@dataclass(frozen=True)
class _Lists:
    sizes: tuple[int, ...] = ()
    names: tuple[str, ...] | None = None
    ctx: tuple[int, ...] = (256,)


@pytest.mark.parametrize("name", ["sizes", "names", "ctx"])
def test_a_flag_without_values_does_not_mean_all(run_script, monkeypatch, capsys, name):
    monkeypatch.setattr(sys, "argv", ["x.py", f"--{name}"])
    with pytest.raises(SystemExit, match="2"):
        parse(_Lists, "")
    assert capsys.readouterr().err == f"error: --{name}: needs at least one value\n"
    monkeypatch.setattr(sys, "argv", ["x.py"])
    assert parse(_Lists, "") == _Lists()


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("has_begun", [False, True])
def test_signals_in_an_import_that_swallows_them_end_the_program(tmp_path, has_begun, name):
    """At once before the run, and after the import then. Libraries do that which try what they can import."""
    (tmp_path / "greedy.py").write_text(
        "import os, signal, time\n"
        "try:\n"
        f"    os.kill(os.getpid(), signal.{name})\n"
        "    time.sleep(0.2)\n"
        "except BaseException:\n"
        "    pass\n"
        "print('whole')\n"
    )
    script = (
        "import atexit, time\n"
        "from dataclasses import make_dataclass\n"
        "from cs336_systems.cli import parse\n"
        "from cs336_systems.resuming import run_begins\n"
        "atexit.register(print, 'at the end')\n"
        "parse(make_dataclass('Arguments', []), '')\n"
        f"{'run_begins()' if has_begun else ''}\n"
        "import greedy\n"
        "time.sleep(30)\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=25)
    # A run says itself what has ended it; Ctrl-C that it does not catch is a line all the same.
    line = {"SIGINT": "\nInterrupted.\n", "SIGTERM": "" if has_begun else "\nEnded by SIGTERM.\n"}[name]
    whole = "whole\n" if has_begun else ""
    assert (run.returncode, run.stdout, run.stderr) == (128 + signal.Signals[name], f"{whole}at the end\n", line)


def test_the_command_has_what_the_environment_changes(monkeypatch):
    for name in ("OMP_NUM_THREADS", "TRITON_INTERPRET", "CS336_AUTOTUNE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", [str(ROOT / "scripts" / "benchmark.py"), "--out", "a b"])
    assert command_line() == "python scripts/benchmark.py --out 'a b'"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert command_line() == "OMP_NUM_THREADS=1 TRITON_INTERPRET=1 python scripts/benchmark.py --out 'a b'"


_TORCHRUN = {"RANK": "0", "TORCHELASTIC_RUN_ID": "none"}
_STEP = {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2"}


@pytest.mark.parametrize(
    ("environment", "launched"),
    [
        ({**_TORCHRUN, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1"},
         "torchrun --nproc-per-node 2"),
        ({**_TORCHRUN, "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"},
         "torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:PORT"),
        ({"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
         "RANK=0 WORLD_SIZE=3 MASTER_ADDR=a MASTER_PORT=1 python"),  # set by hand
        (_STEP, "srun --nodes 2 --ntasks 8 python"),
        ({**_STEP, "SLURM_CPUS_PER_TASK": "4", "SLURM_GPUS_PER_TASK": "1"},
         "srun --nodes 2 --ntasks 8 --cpus-per-task 4 --gpus-per-task 1 python"),
        ({**_STEP, "SLURM_STEP_NUM_TASKS": "1"}, "python"),  # a lone task spawns its own ranks
    ],
)  # fmt: skip
def test_the_command_has_the_launcher(monkeypatch, environment, launched):
    for name in ("OMP_NUM_THREADS", "TRITON_INTERPRET", "CS336_AUTOTUNE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", [str(ROOT / "scripts" / "ddp_benchmark.py"), "--out", "a b"])
    assert command_line() == f"{launched} scripts/ddp_benchmark.py --out 'a b'"


@pytest.mark.skipif(sys.platform != "linux", reason="reads another process's command line under /proc")
def test_the_command_has_torchrun_s_options_as_they_were_typed(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for name, value in {**_TORCHRUN, "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    script = str(ROOT / "scripts" / "ddp_benchmark.py")
    monkeypatch.setattr(sys, "argv", [script, "--out", "a"])
    typed = ["bin/torchrun", "--nproc_per_node=2", "--master-port", "29711", *sys.argv]
    code = "input(print('ready', flush=True) or '')"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code, *typed], **pipes) as parent:
        assert parent.stdout.readline() == b"ready\n"
        monkeypatch.setattr(os, "getppid", lambda: parent.pid)
        command = command_line()
        parent.communicate(b"\n")
    assert command == "torchrun --nproc_per_node=2 --master-port 29711 scripts/ddp_benchmark.py --out a"


@dataclass(frozen=True)
class _Paths:
    out: Path = Path("out/x")
    data: Path | None = None
    reports: tuple[Path, ...] = ()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--out", ""], "must be a path, and is empty"),
        (["--out="], "must be a path, and is empty"),
        (["--data", ""], "must be a path, and is empty"),
        (["--reports", "a", ""], "Could not find valid parse for arguments: ['a', '']"),  # as tyro has it
    ],
)
def test_an_empty_path_is_not_the_current_folder(monkeypatch, capsys, words, why):
    """Nor does `parse` lose what is a path."""
    at_signals, at_an_error = {n: signal.getsignal(n) for n in STOPPED}, sys.excepthook
    try:
        monkeypatch.setattr(sys, "argv", ["script", *words])
        with pytest.raises(SystemExit, match="2"):
            parse(_Paths, "Says nothing.")
        told = " ".join(capsys.readouterr().err.split())
        assert f"Error parsing {words[0].rstrip('=')}: " in told
        assert why in told
        monkeypatch.setattr(sys, "argv", ["script", "--out", ".", "--data", "d", "--reports", "a", "b"])
        assert parse(_Paths, "Says nothing.") == _Paths(Path(), Path("d"), (Path("a"), Path("b")))
    finally:
        for number, handler in at_signals.items():
            signal.signal(number, handler)
        sys.excepthook = at_an_error
