"""What a training run's config stands for on this machine, and what is refused before anything is built."""

from __future__ import annotations

from contextlib import suppress

import torch

from cs336_systems.cli import tell
from cs336_systems.configs import check
from cs336_systems.distributed.launcher import launched_world_size
from cs336_systems.feasibility import (
    GIB,
    TooLittleMemory,
    may_be_killed,
    ranks_bytes,
    ranks_here,
    shortage,
)
from cs336_systems.files import check_writable
from cs336_systems.provenance import best_device, devices_here
from cs336_systems.resuming import to_go_on
from cs336_systems.training.checkpoints import Checkpoint, load_newest
from cs336_systems.training.config import FREE_ON_RESUME, TrainConfig
from cs336_systems.training.data import TokenFile, prepare_tokens
from cs336_systems.training.loop import plain_config
from cs336_systems.training.metrics import METRICS, read_metrics
from cs336_systems.training.parallel import check_importable
from cs336_systems.workload import why_attention_not, why_kernels_not


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
