"""One way into torch.distributed for every distributed script and test.

`run_ranks(function, ..., world_size=4)` runs `function(context, ...)` on every rank: on this process's own rank when
torchrun or srun started it, and otherwise on ranks that it spawns on this machine. Torch, which takes seconds to
import, is imported where it is first called, so that options can be refused at once.
"""

from __future__ import annotations

import itertools
import os
import socket
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from cs336_systems.cli import tell
from cs336_systems.cpu_cores import usable_cores
from cs336_systems.distributed.last_words import end_at_once
from cs336_systems.distributed.launcher import Placement, RanksMissingError, launched_placement, launcher
from cs336_systems.distributed.lifeline import lifeline
from cs336_systems.distributed.meeting import launched_store
from cs336_systems.distributed.spawn import spawn_processes
from cs336_systems.signals import stopped_by

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

Result = TypeVar("Result")

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
NEEDS_NCCL = "is an option of NCCL's, and so needs GPUs; on a CPU the backend is gloo"
DEFAULT_TIMEOUT_S = 600.0
LONGEST_TIMEOUT_S = 1e6  # c10d counts milliseconds in 32 bits
_groups_so_far = itertools.count()


@dataclass(frozen=True)
class GroupOptions:
    """How a group is made.

    Attributes:
        device_type: "cpu" (gloo) or "cuda" (NCCL).
        timeout_s: the limit of one collective, in seconds.
        max_ctas: NCCL's largest number of CTAs, each of which takes a multiprocessor from the kernels beside it.
        high_priority: run NCCL's kernels on a stream whose blocks the GPU schedules before other streams'.
    """

    device_type: str = "cpu"
    timeout_s: float = DEFAULT_TIMEOUT_S
    max_ctas: int | None = None
    high_priority: bool = False

    def __post_init__(self) -> None:
        if self.device_type not in BACKENDS:
            raise ValueError(f"device_type={self.device_type!r}: must be one of {', '.join(BACKENDS)}")
        if not 0 < self.timeout_s <= LONGEST_TIMEOUT_S:  # nor is "not a number" in between
            raise ValueError(f"timeout_s={self.timeout_s}: must be more than 0 and at most {LONGEST_TIMEOUT_S:.0f}")
        if self.max_ctas is not None and not 1 <= self.max_ctas <= 64:
            raise ValueError(f"max_ctas={self.max_ctas}: must be between 1 and 64")
        if self.max_ctas is not None and self.backend != "nccl":
            raise ValueError(f"max_ctas={self.max_ctas}: {NEEDS_NCCL}")
        if self.high_priority and self.backend != "nccl":
            raise ValueError(f"high_priority=True: {NEEDS_NCCL}")

    @property
    def backend(self) -> str:
        """The torch.distributed backend of this device type."""
        return BACKENDS[self.device_type]


@dataclass(frozen=True)
class RankContext:
    """What a rank's function is given: its placement and its device (already current)."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    backend: str


def check_gpus(device_type: str, local_world_size: int) -> None:
    """Raise ValueError if this node has fewer GPUs than ranks: NCCL would hang or fail with an obscure error."""
    import torch

    if device_type == "cuda" and local_world_size > torch.cuda.device_count():
        raise ValueError(
            f"world_size={local_world_size}: must be at most the number of GPUs, one a rank; this node has "
            f"{torch.cuda.device_count()} visible. Ask for fewer processes, or for the CPU (gloo)"
        )


def _nccl_options(options: GroupOptions) -> Any:
    import torch.distributed as dist

    nccl_options = dist.ProcessGroupNCCL.Options()
    nccl_options.is_high_priority_stream = options.high_priority
    nccl_options._timeout = timedelta(seconds=options.timeout_s)  # or init_process_group warns that its own wins
    if options.max_ctas is not None:
        nccl_options.config.max_ctas = options.max_ctas
    return nccl_options


def _has_gpu_of_its_own() -> bool:
    """Whether Slurm (--gpus-per-task=1) shows each task one GPU only; NCCL refuses if two tasks share one."""
    import torch

    return launcher() == "slurm" and torch.cuda.device_count() == 1


def _gpu_index(placement: Placement) -> int:
    return 0 if _has_gpu_of_its_own() else placement.local_rank


@contextmanager
def process_group(options: GroupOptions, placement: Placement, store: dist.Store) -> Generator[RankContext]:
    """Make the default process group, yield this rank's context, and destroy the group at the end.

    The device is made current before the group, so that NCCL's communicator is built on it. The ranks meet at `store`.

    Raises:
        ValueError: the node has fewer GPUs than ranks.
    """
    import torch
    import torch.distributed as dist

    if not _has_gpu_of_its_own():
        check_gpus(options.device_type, placement.local_world_size)
    device, keywords = torch.device("cpu"), {}
    if options.device_type == "cuda":
        device = torch.device("cuda", _gpu_index(placement))
        torch.cuda.set_device(device)
        keywords["device_id"] = device
        keywords["pg_options"] = _nccl_options(options)
    dist.init_process_group(
        options.backend,
        store=store,
        rank=placement.rank,
        world_size=placement.world_size,
        timeout=timedelta(seconds=options.timeout_s),
        **keywords,
    )
    context = RankContext(placement.rank, placement.world_size, placement.local_rank, device, options.backend)
    yield context
    # No rank leaves while another still needs its sockets or its store. After an exception there is neither a barrier,
    # to which the others may never come, nor an orderly end, which could wait for NCCL kernels that never finish: the
    # process is about to exit, and only then do its peers learn of it.
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(
    function: Callable[..., Result], *args: Any, world_size: int, options: GroupOptions | None = None
) -> list[Result] | None:
    """Run `function(context, *args)` on every rank, and return the ranks' results in rank order.

    Started by torchrun (one node or several) or by srun, this process is one rank: `world_size` must be the launcher's,
    rank 0 gets the list and every other rank None. Started by hand, `world_size` processes are spawned on this machine
    and the list comes back to the caller. So whoever gets a list writes the files.

    Args:
        function: a module's top-level function; it, its arguments and its result are pickled.
        world_size: number of ranks.
        options: device, timeout, NCCL options; default gloo on the CPU.

    Raises:
        ValueError: `world_size` is not positive, differs from the launcher's, or is larger than the number of GPUs.
        RankFailedError: a spawned rank raised or died; the others have been ended. Under torchrun or srun the rank
            that raises prints its number and traceback and exits with status 1, and the launcher ends the others.
    """
    options = options or GroupOptions()
    if launcher() is not None:
        return _run_this_rank(function, args, world_size, options)
    return spawn_ranks(function, *args, world_size=world_size, options=options)


def spawn_ranks(
    function: Callable[..., Result], *args: Any, world_size: int, options: GroupOptions | None = None
) -> list[Result]:
    """`run_ranks` that always spawns its ranks on this machine, whoever started this process."""
    import torch.distributed as dist

    options = options or GroupOptions()
    if world_size < 1:
        raise ValueError(f"world_size={world_size}: must be at least 1")
    check_gpus(options.device_type, world_size)
    # This process holds the store for as long as the ranks live, on a port that the system picked: nothing is guessed,
    # so no two runs on a machine can collide.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    arguments = (store.port, world_size, options, function, args)
    return spawn_processes(_spawned_rank, arguments, world_size, waits_s=options.timeout_s)


def _spawned_rank(rank: int, port: int, world_size: int, options: GroupOptions, function: Callable, args: tuple) -> Any:
    import torch
    import torch.distributed as dist

    if options.device_type == "cpu":
        torch.set_num_threads(max(1, usable_cores() // world_size))
    timeout = timedelta(seconds=options.timeout_s)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timeout)
    with process_group(options, Placement(rank, world_size, rank, world_size), store) as context:
        return function(context, *args)


def _run_this_rank(function: Callable, args: tuple, world_size: int, options: GroupOptions) -> list | None:
    import torch.distributed as dist

    placement = launched_placement()
    if world_size != placement.world_size:
        raise ValueError(
            f"world_size={world_size}: must be {placement.world_size}, as many ranks as the launcher started"
        )
    try:
        store, host = launched_store(placement, options.timeout_s)
        # One group after another must not find its predecessor's keys.
        store = dist.PrefixStore(f"group {next(_groups_so_far)}", store)
        with lifeline(store, placement.rank, world_size, host, options.timeout_s):
            with process_group(options, placement, store) as context:
                result = function(context, *args)
                results = [None] * world_size if placement.rank == 0 else None
                dist.gather_object(result, results)
            return results
    except BaseException as error:
        _report_and_exit(error, placement)
        raise


def _report_and_exit(error: BaseException, placement: Placement) -> None:
    """Print whose traceback this is and end the process at once, so that the launcher sees it and ends the others.
    Ctrl-C and a request to stop are known to whoever sent them to all ranks, and end without a traceback, as do ranks
    that did not meet."""
    if (number := stopped_by(error)) is not None:
        end_at_once(128 + number)
    try:
        where = f"rank {placement.rank} of {placement.world_size} on {socket.gethostname()}"
        long = f"{where} raised {type(error).__name__}:\n{''.join(traceback.format_exception(error))}"
        tell(f"error: {error}" if isinstance(error, RanksMissingError) else long)
        error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if error_file and isinstance(error, Exception):
            from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

            ErrorHandler().record_exception(error)  # torchrun's own summary then names the rank and its error
    finally:
        end_at_once(1)
