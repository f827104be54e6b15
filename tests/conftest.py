"""What every test gets: shape and dtype checks on, one thread, seeded randomness, GPU tests skipped without a GPU.

This module imports no torch: nor does the process that only hands the tests to others.
"""

import importlib.util
import os
import runpy
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

# Before torch is imported: the tests share the cores with each other and with the ranks that some of them spawn.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Without a GPU the Triton kernels run in Triton's interpreter; it must be chosen before triton is imported.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Where Python is told to keep no bytecode, as in many containers, each process that the tests start would compile torch
# and matplotlib anew, which takes seconds: theirs is kept in the environment's folder, and none beside the sources.
if sys.dont_write_bytecode and sys.prefix != sys.base_prefix:
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(Path(sys.prefix) / "tests-bytecode")

import jaxtyping
from jaxtyping import install_import_hook

import tests.typecheck  # noqa: F401  found by its name below
from cs336_systems.cpu_cores import usable_cores
from cs336_systems.signals import STOPPED
from tests.interpreter_speed import search_once

_ROOT = Path(__file__).resolve().parents[1]
_HAS_GPU = os.path.exists("/dev/nvidiactl")


def _modules_to_check() -> list[str]:
    """Every module that annotates tensors, except those that define Triton kernels: the hook would wrap the kernels
    themselves, and Triton must see the bare functions."""
    modules = []
    for source_root, package in ((_ROOT, "cs336_systems"), (_ROOT / "cs336-basics", "cs336_basics")):
        for file in (source_root / package).rglob("*.py"):
            text = file.read_text(encoding="utf-8")
            if "from jaxtyping import" in text and "triton.jit" not in text:
                modules.append(".".join(file.relative_to(source_root).with_suffix("").parts))
    return modules


# A shell that starts the tests in the background has them ignore Ctrl-C, and so would what they start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Every jaxtyping annotation of the two packages is checked while the tests run.
install_import_hook(_modules_to_check(), "tests.typecheck.check")

import pytest  # noqa: E402

MAX_WORKERS = 4  # each imports torch, and so does its fork server


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads its options
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Without a GPU a folder's tests run on all cores, unless the command says otherwise (-n 0) or pytest-xdist is off.
    A single file's tests stay in this process, and so do all on a GPU, where they measure time and memory."""
    option = config.option
    asked_otherwise = hasattr(config, "workerinput") or getattr(option, "numprocesses", 0) is not None or option.usepdb
    if asked_otherwise or _HAS_GPU or not any(Path(argument).is_dir() for argument in config.args):
        return
    if usable_cores() > 1:
        option.numprocesses, option.dist = min(usable_cores(), MAX_WORKERS), "worksteal"


def pytest_unconfigure(config: pytest.Config) -> None:
    """Of files that the tests made, and of the copies that mutations.py makes, no bytecode is kept."""
    if sys.pycache_prefix and not hasattr(config, "workerinput"):
        temporary = Path(sys.pycache_prefix + tempfile.gettempdir())
        for folder in [*temporary.glob("pytest-of-*"), *temporary.glob("tmp*/copy")]:
            shutil.rmtree(folder, ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    if torch.cuda.is_available():
        return
    if importlib.util.find_spec("triton"):
        search_once()
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU, and torch.cuda.is_available() is False")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _seed() -> None:
    import torch

    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _idle_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests themselves load the machine, and what measures on a CPU tells of that."""
    monkeypatch.setattr("cs336_systems.cpu_load._STAT", Path(os.devnull))
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0), raising=False)


@pytest.fixture(autouse=True)
def _what_a_process_has_one_of() -> Generator[None]:
    """The model's attention and the precision of float32 products are a process's: a test gives them back."""
    import torch

    import cs336_basics.model

    attention, precision = cs336_basics.model.scaled_dot_product_attention, torch.get_float32_matmul_precision()
    yield
    cs336_basics.model.scaled_dot_product_attention = attention
    if torch.get_float32_matmul_precision() != precision:
        torch.set_float32_matmul_precision(precision)


@pytest.fixture
def annotations_unchecked() -> Generator[None]:
    """For tests that compile in this process: an active checker around each function breaks torch.compile's graph."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes only where a test sleeps, which takes none: what else the machine does is in no measured time."""
    now_s = [0.0]

    def sleep(seconds: float) -> None:
        now_s[0] += seconds

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "perf_counter", lambda: now_s[0])


@pytest.fixture
def device() -> str:
    """The card where there is one, else the CPU."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def run_script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Generator[Callable[..., tuple[Any, str, str]]]:
    """Runs `scripts/<name>.py` in this process, which has torch already: `run_script("benchmark", "--size", "tiny")`
    returns its exit status and what it printed to standard output and standard error."""

    def run(name: str, *arguments: Any) -> tuple[Any, str, str]:
        path = str(_ROOT / "scripts" / f"{name}.py")
        monkeypatch.setattr(sys, "argv", [path, *map(str, arguments)])
        status = 0
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as stopped:
            status = stopped.code
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    at_signals, at_an_error = {n: signal.getsignal(n) for n in STOPPED}, sys.excepthook  # scripts set their own
    yield run
    for number, handler in at_signals.items():
        signal.signal(number, handler)
    sys.excepthook = at_an_error
