"""What the scripts share: arguments from a dataclass, and errors that name the flag instead of a traceback."""

from __future__ import annotations

import io
import math
import os
import re
import sys
from collections.abc import Collection, Generator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, TypeVar

from cs336_systems.distributed.launcher import check_environment, launch_command, launched_world_size
from cs336_systems.endings import Ending

Arguments = TypeVar("Arguments")

_FLAGS = {"context_length": "ctx"}  # the scripts' names of what the package names otherwise
_without_flag: set[str] = set()  # of the script's arguments
_SETTINGS = ("OMP_NUM_THREADS", "TRITON_INTERPRET", "CS336_AUTOTUNE")


def parse(
    arguments: type[Arguments],
    description: str | None,
    may_be_infinite: Collection[str] = (),
    on_ranks: bool = False,
) -> Arguments:
    """Reads the command line into a dataclass; answers `--help` and errors of type before any heavy import. Numbers are
    finite but for arguments that `may_be_infinite`. Several processes of a launcher's are refused, but by a script that
    may be one of their ranks (`on_ranks`)."""
    # First of all, so that Ctrl-C is a line as early as can be.
    ending = Ending("resume" in vars(arguments)["__dataclass_fields__"], command_line, tell)
    ending.answer_errors()
    _open_closed_streams()
    import tyro

    from cs336_systems.help_text import explained, wide_enough, without_flag, wrapped

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without "±" shows "?" and loses nothing
    ending.answer_signals()
    try:
        try:
            with wide_enough():
                if {"-h", "--help"} & set(sys.argv[1:]):
                    print(wrapped(description or ""), end="\n\n")
                kind, defaults = explained(arguments)
                _without_flag.update(without_flag(arguments))
                options: Any = {"config": (tyro.conf.OmitSubcommandPrefixes,), "registry": _registry()}
                read = tyro.cli(kind, default=defaults, description="", **options)
            with refusing_bad_input():
                check_environment(ranks_meet=on_ranks)
            if not on_ranks:
                _check_alone()
            for name, values in read.items():
                _check_values(name, values, name in may_be_infinite)
            return arguments(**read)
        except SystemExit:
            sys.stdout.flush()  # `--help` that nobody reads to its end fails here, and not as the interpreter ends
            raise
    except OSError as error:
        _leave_standard_output(error)
        raise SystemExit(0) from None


def _check_values(name: str, values: Any, may_be_infinite: bool) -> None:
    if values == ():  # `--only $STEPS` of a variable that is not set is not all of them
        fail(f"{name}=(): needs at least one value")
    for value in values if isinstance(values, tuple) else (values,):
        if isinstance(value, float) and not (math.isfinite(value) or (may_be_infinite and value == math.inf)):
            fail(f"{name}={value}: must be a finite number{', or inf' if may_be_infinite else ''}")


def _open_closed_streams() -> None:
    """A standard stream that the shell has closed (`2>&-`) is None in Python, and its number would be that of the next
    file that is opened: both are of one that takes everything and keeps nothing."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_WRONLY)  # the lowest that is free: `number`, or standard input's
            if nowhere < number:
                nowhere = os.dup2(nowhere, number)
            os.set_inheritable(nowhere, True)
            setattr(sys, name, os.fdopen(nowhere, "w", encoding="utf-8", errors="replace"))


def _check_alone() -> None:
    if (n := launched_world_size() or 1) > 1:
        name = os.path.basename(sys.argv[0])
        fail(
            f"{name} takes one process, and the launcher started {n} (torchrun, srun or WORLD_SIZE); python starts one"
        )


def _registry() -> Any:
    """tyro's rules, but that an empty path, as of a shell's variable that is not set, is not the current folder."""
    from pathlib import Path

    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec

    def path(words: list[str]) -> Path:
        if not words[0]:
            raise ValueError("must be a path, and is empty")
        return Path(words[0])

    def rule(type_info: Any) -> PrimitiveConstructorSpec | None:
        if type_info.type is not Path:
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="PATH",
            instance_from_str=path,
            is_instance=lambda value: isinstance(value, Path),
            str_from_instance=lambda value: [str(value)],
        )

    registry = ConstructorRegistry()
    registry.primitive_rule(rule)
    return registry


@contextmanager
def refusing_bad_input() -> Generator[None]:
    """Turns a ValueError such as `ctx=0: must be at least 1` into `error: --ctx 0: must be at least 1`, exit status 2.

    Put it around checks only, so that a ValueError from real work keeps its traceback.
    """
    try:
        yield
    except ValueError as error:
        fail(str(error))


def fail(message: str) -> NoReturn:
    """Prints the message as a flag's error and exits with status 2."""
    print(f"error: {as_flag(message)}", file=sys.stderr)
    raise SystemExit(2)


def as_flag(message: str) -> str:
    """A message that names an argument, e.g. `ctx=0: must be at least 1`, as one of what is typed: `--ctx 0: must be
    at least 1`, `--no-profile: …` of `profile=False`, and without dashes where there is no flag."""
    given = re.match(r"""(\w+)=('[^']*'|"[^"]*"|\(\)|\S+): """, message)
    if not given:
        return message
    name, value = _FLAGS.get(given[1], given[1]), given[2]
    flag = name if name in _without_flag else f"--{'no-' if value == 'False' else ''}{name.replace('_', '-')}"
    value = "" if value in ("None", "True", "False") else value.strip("'\"()")
    return f"{flag}{' ' if value else ''}{value}: {message[given.end() :]}"


def show(text: str) -> None:
    """Prints a result to standard output, at once. That nobody reads it (`| head -1`) is no error; that it does not fit
    (a full disk) ends the program with status 1."""
    try:
        print(text, flush=True)
    except OSError as error:
        _leave_standard_output(error)


def _leave_standard_output(error: OSError) -> None:
    """What is left in the buffer would fail again as the interpreter ends. Ends the program unless it is just that
    nobody reads."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if not isinstance(error, BrokenPipeError):
        tell(f"error: cannot write to standard output: {error.strerror}")
        raise SystemExit(1) from None


def tell(text: str) -> None:
    """Prints to standard error for whoever reads it; that nobody does stops nothing."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def command_line() -> str:
    """What was typed, to be run again: `python scripts/benchmark.py --size small`, behind what the environment had of
    that which changes what is measured: `OMP_NUM_THREADS=1 python …`; of a rank that a launcher started, the launcher's
    command: `torchrun --nproc-per-node 2 scripts/ddp_benchmark.py`."""
    import shlex
    from pathlib import Path

    script = Path(sys.argv[0])
    root = Path(__file__).resolve().parents[1]
    resolved = script.resolve()
    shown: Any = resolved.relative_to(root) if resolved.is_relative_to(root) else script.name
    settings = [f"{name}={shlex.quote(os.environ[name])} " for name in _SETTINGS if os.environ.get(name)]
    return "".join(settings) + shlex.join([*launch_command(), str(shown), *sys.argv[1:]])
