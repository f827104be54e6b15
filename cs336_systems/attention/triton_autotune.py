"""A short measurement of configurations for cards that `triton_tuning.py` has no measured row for; off by default.

With CS336_AUTOTUNE=1 in the environment the first call of a kind times every candidate on its own tensors (seconds) and
writes the winner to ~/.cache/cs336_systems/attention.json (under XDG_CACHE_HOME if that is set), where all later
processes find it. Ranks of a distributed job never measure, so that they choose alike: run one process first.
"""

import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import triton
from triton.testing import do_bench

from cs336_systems.attention.triton_tuning import KernelConfig, Pass, Passes, Problem

_TILES = (16, 32, 64, 128)
_SHAPES = ((4, 1), (4, 2), (4, 3), (8, 1), (8, 2))  # num_warps, num_stages


def is_enabled(problem: Problem) -> bool:
    return os.environ.get("CS336_AUTOTUNE") == "1" and problem.gpu.arch > 0


def cache_file() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cs336_systems" / "attention.json"


def candidates(name: Pass, problem: Problem, use_tma: bool) -> Iterator[KernelConfig]:
    """Every configuration whose tiles fit the card's shared memory and, roughly, its registers."""
    row_bytes = problem.block_d * problem.dtype.itemsize
    n_owned, n_accumulators = (1, 1) if name == "forward" else (2, 1) if name == "dq" else (2, 2)
    for own, step, (num_warps, num_stages) in itertools.product(_TILES, _TILES, _SHAPES):
        shared_bytes = (n_owned * own + 2 * num_stages * step) * row_bytes
        # Float32 accumulators and two tiles of scores; a thread has 255 registers.
        registers = own * (n_accumulators * problem.block_d + 2 * step) / (32 * num_warps)
        if shared_bytes <= problem.gpu.shared_memory_bytes and registers <= 255:
            yield KernelConfig(own, step, num_warps, num_stages, use_tma)


def _key(name: Pass, problem: Problem, use_tma: bool) -> str:
    p = problem
    parts = (
        p.gpu.name,
        triton.__version__,
        name,
        p.block_d,
        p.dtype,
        p.precision,
        p.is_causal,
        p.dropout_p > 0,
        use_tma,
    )
    return " | ".join(map(str, parts))


def _read() -> dict[str, list]:
    try:
        known = json.loads(cache_file().read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    return known if isinstance(known, dict) else {}


def _add(key: str, config: KernelConfig) -> None:
    """Read, add, and replace the file in one step: a reader sees the old file or the new one, never a part."""
    path = cache_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        json.dump({**_read(), key: list(config)}, file, indent=1)
    os.replace(file.name, path)


def tuned_config(
    name: Pass, problem: Problem, default: KernelConfig, time_ms: Callable[[KernelConfig], float]
) -> KernelConfig:
    """The configuration that the cache has for this kind of problem, or the fastest of all candidates by time_ms, or
    the default where nothing is to be measured. A candidate that does not compile or run is left out."""
    key = _key(name, problem, default.use_tma)
    known = _read().get(key)
    if known is not None:
        return KernelConfig(*known)
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        return default

    def time_or_inf(config: KernelConfig) -> float:
        try:
            return time_ms(config)
        except (triton.runtime.errors.TritonError, triton.compiler.errors.CompilationError):
            return float("inf")

    best = min([default, *candidates(name, problem, default.use_tma)], key=time_or_inf)
    _add(key, best)
    return best


def tuned_passes(problem: Problem, passes: Passes, run: Callable[[Passes], None]) -> Passes:
    """The passes with tuned configurations; run launches any passes on the call's own tensors."""

    def tuned(name: Pass, default: KernelConfig) -> KernelConfig:
        def time_ms(config: KernelConfig) -> float:
            return do_bench(lambda: run(((name, config),)), warmup=5, rep=20, return_mode="median")

        return tuned_config(name, problem, default, time_ms)

    return tuple((name, tuned(name, config)) for name, config in passes)
