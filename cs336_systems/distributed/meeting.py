"""How launched ranks meet: the store that they share, made once a process, while signals are answered."""

from __future__ import annotations

import functools
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, TypeVar, cast

from cs336_systems.cli import tell
from cs336_systems.distributed import slurm
from cs336_systems.distributed.launcher import Placement, RanksMissingError, launched_placement, launcher
from cs336_systems.distributed.lifeline import own_address

if TYPE_CHECKING:
    import torch.distributed as dist

Result = TypeVar("Result")
_words_so_far = count()


def from_rank_0(value: Result | None, timeout_s: float) -> Result:
    """Rank 0's `value` on every rank of a launched job, whatever the others give; without one, `value` itself.

    It takes no process group. The value is pickled; others wait for it for `timeout_s` seconds at most.

    Raises:
        RanksMissingError: the ranks did not meet.
    """
    if launcher() is None:
        return cast(Result, value)
    placement = launched_placement()
    key = f"word {next(_words_so_far)}"
    store, _ = launched_store(placement, timeout_s)
    if placement.rank == 0:
        store.set(key, pickle.dumps(value).hex())
    return pickle.loads(bytes.fromhex(waiting_for_ranks(lambda: store.get(key), placement, timeout_s).decode()))


@functools.cache
def launched_store(placement: Placement, timeout_s: float) -> tuple[dist.Store, str]:
    """The launched ranks' common store, and the name under which other nodes reach this one; once a process.

    Raises:
        RanksMissingError: the ranks did not meet.
    """
    if launcher() == "slurm" and "MASTER_PORT" not in os.environ:
        store = waiting_for_ranks(lambda: slurm.rendezvous(os.environ, placement.rank, timeout_s), placement, timeout_s)
        return store, slurm.own_host(os.environ)
    from torch.distributed.rendezvous import rendezvous

    timeout = timedelta(seconds=timeout_s)
    meet = rendezvous("env://", placement.rank, placement.world_size, timeout=timeout)

    def find_and_meet() -> dist.Store:
        _wait_until_known(os.environ["MASTER_ADDR"], timeout_s)
        return next(meet)[0]

    store = waiting_for_ranks(find_and_meet, placement, timeout_s)
    return store, own_address(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))


def _wait_until_known(host: str, timeout_s: float) -> None:
    """A host's name may become known as it starts, or is a wrong one, of which torch would tell in traces of C++.

    Raises:
        TimeoutError: nobody knows it after `timeout_s` seconds.
    """
    last = time.monotonic() + timeout_s
    for attempt in count():
        try:
            socket.getaddrinfo(host, None)
            return
        except (OSError, UnicodeError) as error:  # no name that could be looked up, e.g. a..b
            reason = getattr(error, "strerror", None) or error
            why = f"MASTER_ADDR={host!r} in the environment is no host known here ({reason})"
        if time.monotonic() > last:
            raise TimeoutError(why)
        if attempt == 0:
            tell(f"{why}; trying for {timeout_s:g} s.")
        time.sleep(0.5)


def waiting_for_ranks(wait: Callable[[], Result], placement: Placement, timeout_s: float) -> Result:
    """What `wait()` returns, which waits for other ranks in a library that lets no Python handler run: it does so in a
    thread, so that Ctrl-C and SIGTERM are answered in this one.

    Raises:
        RanksMissingError: it took longer than `timeout_s`, or went wrong otherwise.
    """
    import torch.distributed as dist

    done: Future[Result] = Future()

    def run() -> None:
        try:
            done.set_result(wait())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="meeting", daemon=True).start()
    try:
        return done.result()
    except (dist.DistError, TimeoutError) as error:
        raise RanksMissingError(placement, timeout_s, error) from None
