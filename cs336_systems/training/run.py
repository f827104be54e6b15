"""From a run's config to its files: check, train, draw, and say in words how it ended. scripts/train.py calls this."""

from __future__ import annotations

import errno
import signal
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from cs336_systems.cli import refusing_bad_input, show, tell
from cs336_systems.distributed.last_words import finishing
from cs336_systems.distributed.launcher import launched_rank, launched_world_size
from cs336_systems.distributed.process_group import GroupOptions, run_ranks
from cs336_systems.distributed.spawn import RankFailedError
from cs336_systems.feasibility import tell_if_crowded
from cs336_systems.files import check_writable, lock_folder
from cs336_systems.provenance import check_cpu_alone, collect_provenance
from cs336_systems.resuming import run_begins, to_go_on
from cs336_systems.signals import STOPPED, stopped_by
from cs336_systems.training.config import TrainConfig
from cs336_systems.training.metrics import METRICS, PLOT, plot_metrics

if TYPE_CHECKING:
    from cs336_systems.training.loop import Summary

_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


def run_training(command: str, config: TrainConfig) -> Summary:
    """Trains as `config` says and leaves metrics.jsonl, train.png and checkpoints under `config.out`.

    Bad input ends the program with status 2 before anything is built. A run that stopped itself ends it with 1, and one
    that was stopped with 130 (Ctrl-C), 143 (SIGTERM) or 129 (SIGHUP), after the files are on disk. One in which a rank
    failed ends with 1 and says how to go on. Of a launched job only rank 0 returns; the others end with 0, or with its
    status where a signal stopped the job.
    """
    with refusing_bad_input():
        check_cpu_alone(config.device)
        if launched_rank() in (None, 0):
            check_writable(config.out)
    # Only now what imports torch, which takes seconds.
    from cs336_systems.training.loop import move_aside
    from cs336_systems.training.run_checks import check_run, tell_if_near

    with refusing_bad_input():
        if launched_rank() in (None, 0):
            lock_folder(config.out)
        device, world_size, tokens = check_run(config)
    if launched_rank() in (None, 0):
        tell_if_near(config, device, world_size)
        tell_if_crowded(device, [world_size])
    arguments = (config, tokens, device, collect_provenance(command, device))
    if launched_rank() in (None, 0) and not config.resume:
        move_aside(config.out)
    run_begins()
    summaries: list[Summary] | None = None
    try:
        summaries = _train(command, config, arguments, world_size, device)
        return _conclude(summaries[0], config, command)
    finally:  # after what is to be said: a picture takes seconds, and a launcher kills a while after its signal
        if launched_world_size() is None or summaries is not None:
            _plot(config)


def _train(
    command: str, config: TrainConfig, arguments: tuple[Any, ...], world_size: int, device: str
) -> list[Summary]:
    """Each rank's summary. Ends the program as `run_training` says, but for what summaries tell."""
    from cs336_systems.training.loop import train_rank

    own: list[Summary] = []

    def train_here(*arguments: Any) -> Summary:
        own.append(train_rank(*arguments))
        return own[0]

    summaries: list[Summary] | None
    try:
        if config.parallel == "none":
            summaries = [train_rank(None, *arguments)]
        else:
            options = GroupOptions("cuda" if device.startswith("cuda") else "cpu")
            with _told_at_end(command, config) if launched_rank() == 0 else nullcontext():
                train = train_rank if launched_rank() is None else train_here
                summaries = run_ranks(train, *arguments, world_size=world_size, options=options)
    except (KeyboardInterrupt, SystemExit) as error:
        number = stopped_by(error)
        if number is None:
            raise
        tell(f"\n{STOPPED[number]}. {to_go_on(command, _newest(config))}")
        raise SystemExit(128 + number) from None
    except (OSError, RankFailedError) as error:
        full = error if isinstance(error, OSError) else error.__cause__
        how = to_go_on(command, _newest(config))
        if isinstance(full, OSError) and full.errno in _CANNOT_WRITE:
            tell(f"\nerror: cannot write under {config.out}: {full.strerror}. Make room. {how}")
        elif isinstance(error, RankFailedError) and not error.cause_traceback:  # killed: its peers' errors say no more
            tell(f"\nerror: {str(error).splitlines()[0]}. {how}")
        else:
            error.add_note(f"\n{how}")
            raise
        raise SystemExit(1) from None
    if summaries is None:
        raise SystemExit(0 if own[0].signal is None else 128 + own[0].signal)
    return summaries


def _told_at_end(command: str, config: TrainConfig) -> AbstractContextManager[None]:
    """Inside, a launched rank that ends at once says first how to go on."""
    return finishing(lambda: tell(f"\n{to_go_on(command, _newest(config))}"))


def _newest(config: TrainConfig) -> str:
    """Where a run can go on, e.g. "from checkpoint-00000100.pt"."""
    from cs336_systems.training.checkpoints import list_checkpoints

    whole = [path for path in list_checkpoints(config.out) if path.with_suffix(".json").exists()]
    return f"from {whole[-1].name}" if whole else "from the beginning, as there is no checkpoint yet"


def _plot(config: TrainConfig) -> None:
    try:
        if (config.out / METRICS).exists():
            plot_metrics(config.out / METRICS, config.out / PLOT)
    except OSError as error:  # a run that has ended well, or whose end has been told, is not spoilt by its picture
        tell(f"cannot write {config.out / PLOT}: {error.strerror}")


def _conclude(summary: Summary, config: TrainConfig, command: str) -> Summary:
    if summary.status == "interrupted":
        how, number = to_go_on(command, "from there"), signal.Signals(summary.signal or signal.SIGINT)
        tell(f"\n{STOPPED[number]} after step {summary.step}, which is saved. {how}")
        raise SystemExit(128 + number)
    if summary.status == "stopped":
        print(f"error: {summary.reason}", file=sys.stderr)
        raise SystemExit(1)
    loss = "" if summary.validation_loss is None else f"validation loss {summary.validation_loss:.4f}; "
    skipped = f"{summary.skipped_steps} steps skipped; " if config.precision == "fp16" else ""
    show(f"{summary.step} steps: {loss}{skipped}{config.out}/{{{METRICS},{PLOT}}} and {summary.checkpoint}")
    return summary
