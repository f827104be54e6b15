"""From a run's config to its files: check, train, draw, and say in words how it ended. scripts/train.py calls this."""

from __future__ import annotations

import errno
import signal
import sys
from contextlib import AbstractContextManager, nullcontext, suppress

import torch

from cs336_systems.cli import refusing_bad_input, show, tell
from cs336_systems.configs import check
from cs336_systems.distributed.last_words import finishing
from cs336_systems.distributed.launcher import launched_rank, launched_world_size
from cs336_systems.distributed.process_group import GroupOptions, run_ranks
from cs336_systems.distributed.spawn import RankFailedError
from cs336_systems.feasibility import (
    GIB,
    TooLittleMemory,
    may_be_killed,
    ranks_bytes,
    ranks_here,
    shortage,
    tell_if_crowded,
)
from cs336_systems.files import check_writable, lock_folder
from cs336_systems.provenance import best_device, collect_provenance, devices_here
from cs336_systems.resuming import run_begins, to_go_on
from cs336_systems.signals import STOPPED, stopped_by
from cs336_systems.training.checkpoints import Checkpoint, list_checkpoints, load_newest
from cs336_systems.training.config import FREE_ON_RESUME, TrainConfig
from cs336_systems.training.data import TokenFile, prepare_tokens
from cs336_systems.training.loop import Summary, plain_config, train_rank
from cs336_systems.training.metrics import METRICS, PLOT, plot_metrics, read_metrics
from cs336_systems.training.parallel import check_importable
from cs336_systems.workload import why_attention_not, why_kernels_not

_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


def run_training(command: str, config: TrainConfig) -> Summary:
    """Trains as `config` says and leaves metrics.jsonl, train.png and checkpoints under `config.out`.

    Bad input ends the program with status 2 before anything is built. A run that stopped itself ends it with 1, and one
    that was stopped with 130 (Ctrl-C), 143 (SIGTERM) or 129 (SIGHUP), after the files are on disk. One in which a rank
    failed ends with 1 and says how to go on. Of a launched job only rank 0 returns.
    """
    with refusing_bad_input():
        if launched_rank() in (None, 0):
            check_writable(config.out)
            lock_folder(config.out)
        device, world_size, tokens = check_run(config)
    if launched_rank() in (None, 0):
        tell_if_near(config, device, world_size)
        tell_if_crowded(device, [world_size])
    arguments = (config, tokens, device, collect_provenance(command, device))
    run_begins()
    try:
        if config.parallel == "none":
            summaries: list[Summary] | None = [train_rank(None, *arguments)]
        else:
            options = GroupOptions("cuda" if device.startswith("cuda") else "cpu")
            with _told_at_end(command, config) if launched_rank() == 0 else nullcontext():
                summaries = run_ranks(train_rank, *arguments, world_size=world_size, options=options)
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
    finally:
        if launched_world_size() is None:
            _plot(config)
    if summaries is None:
        raise SystemExit(0)
    if launched_world_size() is not None:
        _plot(config)
    return _conclude(summaries[0], config, command)


def _told_at_end(command: str, config: TrainConfig) -> AbstractContextManager[None]:
    """Inside, a launched rank that ends at once says first how to go on."""
    return finishing(lambda: tell(f"\n{to_go_on(command, _newest(config))}"))


def _newest(config: TrainConfig) -> str:
    """Where a run can go on, e.g. "from checkpoint-00000100.pt"."""
    whole = [path for path in list_checkpoints(config.out) if path.with_suffix(".json").exists()]
    return f"from {whole[-1].name}" if whole else "from the beginning, as there is no checkpoint yet"


def _plot(config: TrainConfig) -> None:
    try:
        if (config.out / METRICS).exists():
            plot_metrics(config.out / METRICS, config.out / PLOT)
    except OSError as error:  # a run that has ended well, or whose end has been told, is not spoilt by its picture
        tell(f"cannot write {config.out / PLOT}: {error.strerror}")


def check_run(config: TrainConfig) -> tuple[str, int, TokenFile]:
    """The device, the number of ranks and the data that the config stands for on this machine.

    Raises:
        ValueError: something that the config asks for is not here, or does not fit the rest (naming it).
        TooLittleMemory: it takes more memory than is free.
    """
    device = _resolve_device(config.device)
    check(
        config.precision != "tf32" or device.startswith("cuda"),
        "precision",
        config.precision,
        f"is a mode of NVIDIA's tensor cores, and device={device!r}",
    )
    check_importable(config)
    world_size = _world_size(config, device)
    config.check_world_size(world_size)
    missing = why_attention_not(config.attention, device, config.precision)
    check(missing is None, "attention", config.attention, str(missing))
    missing = why_kernels_not(config.kernels, device)
    check(missing is None, "kernels", config.kernels, str(missing))
    what, needed_bytes, n_ranks = _memory(config, world_size)
    if problem := shortage(device, what, needed_bytes, n_ranks):
        raise TooLittleMemory(f"size={config.size!r}: {problem}")
    check_writable(config.out)
    vocab_size = config.model_config().vocab_size
    tokens = prepare_tokens(config.data, config.token_dtype, vocab_size, config.ctx, config.validation_share)
    if config.resume:
        check_same_run(config, tokens)
    return device, world_size, tokens


def _resolve_device(device: str) -> str:
    available = devices_here()
    if device == "auto":
        return best_device(available)
    check(device in available, "device", device, f"is not on this machine; it has {', '.join(available)}")
    return device


def _world_size(config: TrainConfig, device: str) -> int:
    launched = launched_world_size()
    if config.parallel == "none":
        check(launched in (None, 1), "parallel", "none", f"is for one process, and the launcher started {launched}")
        return 1
    check(device != "mps", "device", device, "has no process groups; there --device cpu runs")
    if launched is not None:
        check(
            config.processes in (None, launched),
            "processes",
            config.processes,
            f"the launcher started {launched} ranks",
        )
        return launched
    n_gpus = torch.cuda.device_count() if device == "cuda" else 0
    world_size = config.processes or (n_gpus if device == "cuda" else 2)
    check(
        device != "cuda" or world_size <= n_gpus,
        "processes",
        world_size,
        f"must be at most {n_gpus}, this machine's GPUs, one a process",
    )
    return world_size


def _memory(config: TrainConfig, world_size: int) -> tuple[str, int, int]:
    """What takes the most memory of a step and the checkpoint at the end, how many bytes of it, and on how many ranks
    of this machine."""
    n_ranks, memory = ranks_here(world_size), config.rank_memory(world_size)
    step = ranks_bytes(config.model_config(), memory.peak, n_ranks)
    lasting = n_ranks * (memory.parameters + memory.gradients + memory.optimizer_state)
    saving = lasting + config.gathered_bytes() if n_ranks == world_size else 0  # of several nodes, one has rank 0
    what = f"a train-step of batch {config.batch_size // world_size} and context {config.ctx}"
    return what if step >= saving else f"saving after {what}", max(step, saving), n_ranks


def tell_if_near(config: TrainConfig, device: str, world_size: int) -> None:
    """Tells of a run on a CPU that it may take more memory than is free."""
    what, needed_bytes, _ = _memory(config, world_size)
    if near := may_be_killed(device, needed_bytes):
        tell(f"{what[0].upper()}{what[1:]} takes {needed_bytes / GIB:.1f} GiB in all by formula. {near}")


def check_same_run(config: TrainConfig, tokens: TokenFile) -> None:
    """Raises ValueError where what there is under `config.out` is damaged, or of another run."""
    checkpoint = load_newest(config.out)[0]
    if checkpoint is not None:
        _check_same(checkpoint, config, tokens)
    if (config.out / METRICS).exists():
        read_metrics(config.out / METRICS)  # a damaged line is named now, and not when the run has ended


def _check_same(checkpoint: Checkpoint, config: TrainConfig, tokens: TokenFile) -> None:
    begun, now = checkpoint.config, plain_config(config)
    for name in now:
        if name not in FREE_ON_RESUME and begun.get(name) != now[name]:
            message = f"the run under {str(config.out)!r} was begun with {begun.get(name)!r}"
            if name == "steps":
                message += ", on which its learning rate depends from the first step"
            raise ValueError(f"{name}={now[name]!r}: {message}; {_both_ways(config)}")
    check(
        checkpoint.data_sha256 == tokens.sha256,
        "data",
        str(tokens.path),
        f"is not the data that the run under {str(config.out)!r} was begun with (its SHA-256 differs); "
        f"{_both_ways(config)}",
    )


def _both_ways(config: TrainConfig) -> str:
    """How to go on with the run under `config.out`, and what to do for another."""
    commands = []
    with suppress(OSError, ValueError):
        commands = [line["command"] for line in read_metrics(config.out / METRICS) if line["kind"] == "run"]
    how = f". {to_go_on(commands[-1])}" if commands else ""
    return f"go on with that, or name another --out for a new run{how}"


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
