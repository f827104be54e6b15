"""What can be said of a model's run before any work: that this machine lacks what it calls, or the memory for it.

On a GPU memory is found out by trying, in seconds; a CPU would swap for minutes, or lose the process, so that there a
formula decides: the cell's own where it has one, as a rank that holds a part of the model needs less than all of it.

What is refused would not have run beside what else the machine holds as the run begins. The formulas are of tensors:
on a CPU small's and medium's steps held 1.02 to 1.3 times as much, divided ones more, and Python with torch beside, so
that what is not refused may still not fit; where the formula comes near to what is free, that is told.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from cs336_systems.accounting.flops import matmul_flops_forward, num_parameters, train_step_flops
from cs336_systems.accounting.memory import FLOAT32_BYTES
from cs336_systems.accounting.training_memory import step_peak_bytes
from cs336_systems.cli import tell
from cs336_systems.configs import ATTENTION_NAMES, BenchmarkCell, ModelConfig, check
from cs336_systems.control_groups import control_groups
from cs336_systems.cpu_cores import usable_cores
from cs336_systems.distributed import slurm

GIB = 2**30
# What a core does at least in the models' matrix products, for a guess that is told as one.
_GFLOPS_PER_CORE = 20.0
_WORTH_TELLING_S = 60.0
# Of the memory that is free: a formula above that share may be of a process that does not fit.
_NEAR_SHARE = 0.6


class TooLittleMemory(ValueError):
    """What was asked for takes more memory than is free now."""


class Memory(NamedTuple):
    """Bytes that a machine has, and those of them that nothing holds now."""

    whole: int
    free: int


@runtime_checkable
class KnowsItsMemory(Protocol):
    """A cell of whose model a rank may hold a part only."""

    def rank_peak_bytes(self) -> int:
        """The most that a rank holds in a step, by formula."""
        ...


@runtime_checkable
class HasMemoryOptions(Protocol):
    """A cell with options of its own that lessen its memory."""

    def memory_options(self) -> str:
        """What to take for that, e.g. "fewer --kept-blocks"; "" where nothing of it is left."""
        ...


def missing_here(cell: BenchmarkCell) -> str:
    """For a cell whose attention or kernels cannot run on its device: the parameter, its value, why not, and what can
    run; "" for others. Imports torch, and asks a card what it is."""
    from cs336_systems.workload import why_attention_not, why_kernels_not

    if missing := why_attention_not(cell.attention, cell.device, cell.precision):
        possible = [name for name in ATTENTION_NAMES if why_attention_not(name, cell.device, cell.precision) is None]
        return f"attention={cell.attention!r}: {missing}. On {cell.device} these run: {', '.join(possible)}"
    if missing := why_kernels_not(cell.kernels, cell.device):
        return f"kernels={cell.kernels!r}: {missing}. On {cell.device} this runs: plain"
    return ""


def machine_memory(root: Path = Path("/")) -> Memory:
    """The memory that this machine has, or that its container or control group may use, swap not counted; and what is
    free of it: what the system says is available, or what the group's use leaves of its limit. All, where neither is
    told.

    A group is held to the least of its own limit and those of the groups that it is in. Under `root` are proc and sys.
    """
    whole = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")] if hasattr(os, "sysconf") else []
    free = [1024 * n for name, n in _numbers(root / "proc/meminfo").items() if name == "MemAvailable:"]
    for group, version in control_groups("memory", root):
        with suppress(OSError, ValueError):  # none, or "max"
            limit_file, use_file = _FILES[version]
            limit = int((group / limit_file).read_text())
            whole.append(limit)
            free.append(limit - int((group / use_file).read_text()) + _droppable(group))
    present = min(whole, default=2**63 - 1)
    return Memory(present, max(0, min([present, *free])))


# Files of a control group, by its version, in which its limit and its use are.
_FILES = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}


def _droppable(group: Path) -> int:
    """Of a control group's use, the bytes of files that it has read, which the system drops where they are in the way.
    Version 1 has those of the groups below under other names."""
    numbers = _numbers(group / "memory.stat")
    return sum(numbers.get(f"total_{name}", numbers.get(name, 0)) for name in ("active_file", "inactive_file"))


def _numbers(file: Path) -> dict[str, int]:
    """Of lines such as "MemAvailable:   20489912 kB" or "active_file 4096"; none where there is no such file."""
    try:
        lines = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def memory_shortage(cell: BenchmarkCell) -> str:
    """By formula, that a step of the cell takes more memory than is free on a machine on whose CPU it is to run; else
    ""."""
    what = f"a {cell.mode} of batch {cell.batch_size} and context {cell.ctx}"
    also = cell.memory_options() if isinstance(cell, HasMemoryOptions) else ""
    return shortage(cell.device, what, _peak_bytes(cell), _ranks_here(cell), also)


def shortage(device: str, what: str, needed_bytes: float, n_ranks: int = 1, also: str = "") -> str:
    """That `what`, on `n_ranks` ranks of this machine, takes more memory in all than is free, and what would take less,
    among it `also`; "" on another device than the CPU, and where it fits."""
    if device != "cpu":
        return ""
    memory = machine_memory()
    if needed_bytes <= memory.free:
        return ""
    gib, fewer = f"takes {needed_bytes / GIB:.1f} GiB", ""
    if n_ranks > 1:
        gib, fewer = f"on each of {n_ranks} ranks {gib} in all", ", fewer --processes"
    present = f"{memory.whole / GIB:.1f}"
    if memory.free < memory.whole:
        present = f"{memory.free / GIB:.1f} free of {present}"
    first = "free more, or " if needed_bytes <= memory.whole else ""
    return (
        f"{what} {gib} by formula, and this machine has {present}; {first}take a smaller --size, --ctx or "
        f"--batch-size{fewer}{', ' if also else ''}{also}, or a GPU"
    )


def may_be_killed(device: str, needed_bytes: float) -> str:
    """That what takes this much by formula on a CPU may take more than is free; "" where there is room."""
    if device != "cpu" or needed_bytes <= _NEAR_SHARE * machine_memory().free:
        return ""
    return (
        "A process has been seen to take more than the formula (small at context 256: 4.15 GiB, where it says 2.94), "
        "and may be killed."
    )


def check_memory(cells: Sequence[BenchmarkCell], for_a_look: str = "") -> None:
    """Tells what a run on a CPU takes, where that is minutes or most of the memory.

    Raises:
        ValueError: not one of the cells fits into the memory that is free; names the size of the smallest, and the
            options that are given as those that fit.
    """
    if not cells:
        return
    smallest = min(cells, key=_peak_bytes)
    problem = memory_shortage(smallest)
    check(not problem, "size", smallest.size, problem + (f". For a look: {for_a_look}" if for_a_look else ""))
    too_large = [cell for cell in cells if memory_shortage(cell)]
    on_cpu = [cell for cell in cells if cell.device == "cpu" and cell not in too_large]
    seconds = sum((cell.warmup + cell.steps) * _step_flops(cell) for cell in on_cpu) / _flops_per_s()
    largest = max(map(_peak_bytes, on_cpu), default=0)
    near = may_be_killed("cpu", largest)
    if seconds > _WORTH_TELLING_S or near:
        tell(
            f"On this CPU the steps take up to {largest / GIB:.1f} of {machine_memory().free / GIB:.1f} free GiB by "
            f"formula, and about {_in_words(seconds)} if a core does {_GFLOPS_PER_CORE:.0f} GFLOP/s. --size tiny takes "
            f"seconds.{' ' if near else ''}{near}"
        )
    if too_large:
        tell(
            f"{len(too_large)} of {len(cells)} combinations take more memory than is free, and become rows that say so."
        )
    tell_if_compiled_on_cpu([cell for cell in on_cpu if cell.compile != "off"])


def tell_if_compiled_on_cpu(compiled: Sequence[Any]) -> None:
    """Tells what torch.compile takes, where one of the `compiled` cells runs on a CPU."""
    if any(cell.device == "cpu" for cell in compiled):
        tell("torch.compile makes C++ for a CPU and compiles it: a minute or so before a cell is measured.")


def tell_if_crowded(device: str, world_sizes: Collection[int]) -> None:
    """Tells, in a line, that ranks on a CPU have less than a core each, for the largest of the numbers of ranks. Those
    that Slurm started may each be bound to cores of its own, which is not known here, and nothing is told."""
    n_ranks, n_cores = max(map(ranks_here, world_sizes), default=0), usable_cores()
    if device == "cpu" and n_ranks > n_cores and not slurm.is_task_of_several(os.environ):
        cores = "the one core" if n_cores == 1 else f"the {n_cores} cores"
        tell(f"{n_ranks} ranks share {cores} that they may use here, and take turns: their times have that in them.")


def ranks_bytes(config: ModelConfig, rank_peak_bytes: int, n_ranks: int = 1) -> int:
    """Of `n_ranks` ranks together: `rank_peak_bytes` each, or the model as it is built, whole and in float32 before
    anything is divided, whichever is more."""
    return n_ranks * max(FLOAT32_BYTES * num_parameters(config), rank_peak_bytes)


def ranks_here(world_size: int) -> int:
    """How many of `world_size` ranks are on this machine: all, but for a launched job on several nodes."""
    launched = os.environ.get("LOCAL_WORLD_SIZE")  # torchrun's
    if launched is None and slurm.is_task_of_several(os.environ):
        launched = slurm.placement(os.environ)[3]
    return world_size if launched is None else min(world_size, int(launched))


def _peak_bytes(cell: BenchmarkCell) -> int:
    """Of the processes of all ranks on this machine together."""
    if isinstance(cell, KnowsItsMemory):
        n_bytes = cell.rank_peak_bytes()
    else:
        attention = cell.attention if cell.compile == "off" else "sdpa"  # compiled code keeps fewer tensors
        shape = cell.model_config(), cell.batch_size, cell.ctx
        n_bytes = step_peak_bytes(*shape, cell.mode, cell.precision, attention, cell.checkpoint_every or None)
    return ranks_bytes(cell.model_config(), n_bytes, _ranks_here(cell))


def _ranks_here(cell: BenchmarkCell) -> int:
    return ranks_here(getattr(cell, "world_size", 1))


def _step_flops(cell: BenchmarkCell) -> int:
    count = matmul_flops_forward if cell.mode == "forward" else train_step_flops
    return count(cell.model_config(), cell.batch_size, cell.ctx)


def _flops_per_s() -> float:
    return _GFLOPS_PER_CORE * 1e9 * usable_cores()


def _in_words(seconds: float) -> str:
    minutes = seconds / 60
    return f"{seconds:.0f} s" if minutes < 1.5 else f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.0f} h"
