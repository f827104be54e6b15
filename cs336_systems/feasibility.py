"""What can be said of a model's run before any work: that this machine lacks what it calls, or the memory for it.

On a GPU memory is found out by trying, in seconds; a CPU would swap for minutes, or lose the process, so that there a
formula decides: the cell's own where it has one, as a rank that holds a part of the model needs less than all of it.

What is refused would not have run. The formulas are of tensors: on a CPU small's and medium's steps held 1.02 to 1.3
times as much, divided ones more, and Python with torch beside, so that what is not refused may still not fit.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from cs336_systems.accounting.flops import matmul_flops_forward, num_parameters, train_step_flops
from cs336_systems.accounting.memory import FLOAT32_BYTES
from cs336_systems.accounting.training_memory import step_peak_bytes
from cs336_systems.cli import tell
from cs336_systems.configs import ATTENTION_NAMES, BenchmarkCell, ModelConfig, check
from cs336_systems.distributed import slurm

GIB = 2**30
# What a core does at least in the models' matrix products, for a guess that is told as one.
_GFLOPS_PER_CORE = 20.0
_WORTH_TELLING_S = 60.0


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
    from cs336_systems.attention.model_attention import why_not
    from cs336_systems.workload import why_kernels_not

    if missing := why_not(cell.attention, cell.device):
        possible = [name for name in ATTENTION_NAMES if why_not(name, cell.device) is None]
        return f"attention={cell.attention!r}: {missing}. On {cell.device} these run: {', '.join(possible)}"
    if missing := why_kernels_not(cell.kernels, cell.device):
        return f"kernels={cell.kernels!r}: {missing}. On {cell.device} this runs: plain"
    return ""


def machine_memory_bytes(root: Path = Path("/")) -> int:
    """The memory that this machine has, or that its container or control group may use, swap not counted.

    A group is held to the least of its own limit and those of the groups that it is in. Under `root` are proc and sys.
    """
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")] if hasattr(os, "sysconf") else []
    for file in _limit_files(root):
        with suppress(OSError, ValueError):  # none, or "max"
            limits.append(int(file.read_text()))
    return min(limits, default=2**63 - 1)


def _limit_files(root: Path) -> list[Path]:
    """Where control groups (version 2, beside version 1, and 1) say the limits of this process's group and of those
    above it. A container sees its own group's at the top, under whatever name the host knows it by."""
    try:
        # "0::/a/b" of version 2, "4:cpu,memory:/a/b" of version 1.
        lines = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    except OSError:
        lines = []
    groups = {"memory" if "memory" in names.split(",") else names: group for _, names, group in lines}
    files = []
    for mount, controller, name in (
        ("sys/fs/cgroup", "", "memory.max"),
        ("sys/fs/cgroup/unified", "", "memory.max"),
        ("sys/fs/cgroup/memory", "memory", "memory.limit_in_bytes"),
    ):
        own = Path(groups.get(controller, "/").lstrip("/"))
        files += [root / mount / group / name for group in (own, *own.parents) if ".." not in group.parts]
    return files


def memory_shortage(cell: BenchmarkCell) -> str:
    """By formula, that a step of the cell takes more memory than a machine has on whose CPU it is to run; else ""."""
    what = f"a {cell.mode} of batch {cell.batch_size} and context {cell.ctx}"
    also = cell.memory_options() if isinstance(cell, HasMemoryOptions) else ""
    return shortage(cell.device, what, _peak_bytes(cell), _ranks_here(cell), also)


def shortage(device: str, what: str, needed_bytes: float, n_ranks: int = 1, also: str = "") -> str:
    """That `what`, on `n_ranks` ranks of this machine, takes more memory in all than it has, and what would take less,
    among it `also`; "" on another device than the CPU, and where it fits."""
    present = machine_memory_bytes()
    if device != "cpu" or needed_bytes <= present:
        return ""
    gib, fewer = f"takes {needed_bytes / GIB:.1f} GiB", ""
    if n_ranks > 1:
        gib, fewer = f"on each of {n_ranks} ranks {gib} in all", ", fewer --processes"
    return (
        f"{what} {gib} by formula, and this machine has {present / GIB:.1f}; take a smaller --size, --ctx or "
        f"--batch-size{fewer}{', ' if also else ''}{also}, or a GPU"
    )


def check_memory(cells: Sequence[BenchmarkCell], for_a_look: str = "") -> None:
    """Tells what a run on a CPU takes, where that is minutes or most of the memory.

    Raises:
        ValueError: not one of the cells fits into the machine's memory; names the size of the smallest, and the options
            that are given as those that fit.
    """
    if not cells:
        return
    smallest = min(cells, key=_peak_bytes)
    problem = memory_shortage(smallest)
    check(not problem, "size", smallest.size, problem + (f". For a look: {for_a_look}" if for_a_look else ""))
    on_cpu = [cell for cell in cells if cell.device == "cpu" and not memory_shortage(cell)]
    seconds = sum((cell.warmup + cell.steps) * _step_flops(cell) for cell in on_cpu) / _flops_per_s()
    largest, present = max(map(_peak_bytes, on_cpu), default=0), machine_memory_bytes()
    if seconds > _WORTH_TELLING_S or largest > present / 2:
        tell(
            f"On this CPU the steps take up to {largest / GIB:.1f} of {present / GIB:.1f} GiB by formula, and about "
            f"{_in_words(seconds)} if a core does {_GFLOPS_PER_CORE:.0f} GFLOP/s. --size tiny takes seconds."
        )
    tell_if_compiled_on_cpu([cell for cell in on_cpu if cell.compile != "off"])


def tell_if_compiled_on_cpu(compiled: Sequence[Any]) -> None:
    """Tells what torch.compile takes, where one of the `compiled` cells runs on a CPU."""
    if any(cell.device == "cpu" for cell in compiled):
        tell("torch.compile makes C++ for a CPU and compiles it: a minute or so before a cell is measured.")


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
    return _GFLOPS_PER_CORE * 1e9 * (os.cpu_count() or 1)


def _in_words(seconds: float) -> str:
    minutes = seconds / 60
    return f"{seconds:.0f} s" if minutes < 1.5 else f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.0f} h"
