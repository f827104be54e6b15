"""What can be said of a model's cells before any work: that this machine lacks what one calls, or the memory for it.

On a GPU memory is found out by trying, in seconds; a CPU would swap for minutes, or lose the process, so that there a
formula decides.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from cs336_systems.accounting.flops import matmul_flops_forward, train_step_flops
from cs336_systems.accounting.training_memory import step_peak_bytes
from cs336_systems.cli import tell
from cs336_systems.configs import ATTENTION_NAMES, BenchmarkCell, check
from cs336_systems.provenance import machine_memory_bytes

GIB = 2**30
# With backward, a process on a CPU holds more than the formula: medium's peak was 1.26 times as much.
_CPU_EXCESS = 1.35
# What a core does at least in the models' matrix products, for a guess that is told as one.
_GFLOPS_PER_CORE = 20.0
_WORTH_TELLING_S = 60.0


def missing_here(cells: Sequence[BenchmarkCell]) -> str:
    """For the first cell whose attention or kernels cannot run on its device: the parameter, its value, why not, and
    what can run; "" where all can. Imports torch, and asks a card what it is."""
    from cs336_systems.attention.model_attention import why_not
    from cs336_systems.workload import why_kernels_not

    for cell in cells:
        if missing := why_not(cell.attention, cell.device):
            possible = [name for name in ATTENTION_NAMES if why_not(name, cell.device) is None]
            return f"attention={cell.attention!r}: {missing}. On {cell.device} these run: {', '.join(possible)}"
        if missing := why_kernels_not(cell.kernels, cell.device):
            return f"kernels={cell.kernels!r}: {missing}. On {cell.device} this runs: plain"
    return ""


def memory_shortage(cell: BenchmarkCell) -> str:
    """By formula, that a step of the cell takes more memory than a machine has on whose CPU it is to run; else ""."""
    needed, present = _peak_bytes(cell), machine_memory_bytes()
    if cell.device != "cpu" or needed <= present:
        return ""
    what = f"a {cell.mode} of batch {cell.batch_size} and context {cell.ctx}{_on_ranks(cell)}"
    return (
        f"{what} takes {needed / GIB:.1f} GiB by formula, and this machine has {present / GIB:.1f}; take a smaller "
        "--size, --ctx or --batch-size, or a GPU"
    )


def check_memory(cells: Sequence[BenchmarkCell]) -> None:
    """Tells what a run on a CPU takes, where that is minutes or most of the memory.

    Raises:
        ValueError: not one of the cells fits into the machine's memory; names the size of the smallest.
    """
    if not cells:
        return
    smallest = min(cells, key=_peak_bytes)
    shortage = memory_shortage(smallest)
    check(not shortage, "size", smallest.size, shortage)
    on_cpu = [cell for cell in cells if cell.device == "cpu" and not memory_shortage(cell)]
    seconds = sum((cell.warmup + cell.steps) * _step_flops(cell) for cell in on_cpu) / _flops_per_s()
    largest, present = max(map(_peak_bytes, on_cpu), default=0), machine_memory_bytes()
    if seconds > _WORTH_TELLING_S or largest > present / 2:
        tell(
            f"On this CPU the steps take up to {largest / GIB:.1f} of {present / GIB:.1f} GiB by formula, and about "
            f"{_in_words(seconds)} if a core does {_GFLOPS_PER_CORE:.0f} GFLOP/s. --size tiny takes seconds."
        )
    if any(cell.compile != "off" for cell in on_cpu):
        tell("torch.compile makes C++ for a CPU and compiles it: a minute or so before a cell's first step.")


def _peak_bytes(cell: BenchmarkCell) -> float:
    """Of all ranks' processes together."""
    every = cell.checkpoint_every or None
    attention = cell.attention if cell.compile == "off" else "sdpa"  # compiled code keeps fewer tensors
    shape = cell.model_config(), cell.batch_size, cell.ctx
    is_in_excess = cell.device == "cpu" and cell.mode != "forward"
    n_bytes = step_peak_bytes(*shape, cell.mode, cell.precision, attention, every)
    return n_bytes * getattr(cell, "world_size", 1) * (_CPU_EXCESS if is_in_excess else 1.0)


def _on_ranks(cell: BenchmarkCell) -> str:
    n_ranks = getattr(cell, "world_size", 1)
    return f" on each of {n_ranks} ranks" if n_ranks > 1 else ""


def _step_flops(cell: BenchmarkCell) -> int:
    count = matmul_flops_forward if cell.mode == "forward" else train_step_flops
    return count(cell.model_config(), cell.batch_size, cell.ctx)


def _flops_per_s() -> float:
    return _GFLOPS_PER_CORE * 1e9 * (os.cpu_count() or 1)


def _in_words(seconds: float) -> str:
    minutes = seconds / 60
    return f"{seconds:.0f} s" if minutes < 1.5 else f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.0f} h"
