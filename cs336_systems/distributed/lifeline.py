"""All ranks of a launched job end when one of them does.

torchrun and srun end the other ranks of a node, but on the other nodes a rank that waits in NCCL, or computes, would
learn of it only when a collective times out. So each rank keeps a connection to rank 0; the system closes it when its
process ends, in whichever way, and rank 0 tells the others.
"""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from cs336_systems.cli import tell
from cs336_systems.distributed.last_words import end_at_once
from cs336_systems.distributed.launcher import RanksMissingError, launched_placement

if TYPE_CHECKING:
    import torch.distributed as dist

_GOODBYE = b"goodbye"
_JOIN_S = 10.0


@contextmanager
def lifeline(store: dist.Store, rank: int, world_size: int, host: str, timeout_s: float) -> Generator[None]:
    """End this process, with status 1 and a line that names the rank, if another rank ends inside the block.

    Leaving the block normally says goodbye; leaving it by an exception keeps the connection until the process ends.

    Args:
        store: through which the ranks find rank 0's port, which is a free one.
        host: this process's host as other nodes reach it (used on rank 0 only).
        timeout_s: how long rank 0 waits for the others to connect.
    """
    if world_size == 1:
        yield
        return
    watch = _watch_others(store, world_size, host, timeout_s) if rank == 0 else _watch_rank_0(store, rank)
    yield
    watch.leave()


class _Watch:
    """A thread that waits for bad news on sockets."""

    def __init__(self, rank: int, connections: dict[socket.socket, int]) -> None:
        self._rank = rank
        self._connections = connections
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lifeline", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Say goodbye; rank 0 stays until all others have."""
        self._leaving.set()
        if self._rank != 0:
            for connection in self._connections:
                with suppress(OSError):
                    connection.sendall(_GOODBYE)
        self._thread.join(_JOIN_S if self._rank == 0 else 0)
        for connection in list(self._connections):
            connection.close()

    def _run(self) -> None:
        selector = selectors.DefaultSelector()
        for connection in self._connections:
            selector.register(connection, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                try:
                    word = connection.recv(1024)
                except OSError:
                    word = b""
                if self._rank == 0 and word == _GOODBYE:
                    selector.unregister(connection)
                    continue
                if self._rank != 0 and self._leaving.is_set():
                    return
                self._end(word.decode() or f"rank {self._connections[connection]} has ended")

    def _end(self, news: str) -> None:
        try:
            for connection in self._connections:  # rank 0 tells all others; rank 0 itself knows
                with suppress(OSError):
                    connection.sendall(news.encode())
            tell(f"rank {self._rank} ends because {news}")
        finally:
            end_at_once(1)


def _watch_others(store: dist.Store, world_size: int, host: str, timeout_s: float) -> _Watch:
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    with socket.create_server(("", 0), family=family, backlog=world_size, dualstack_ipv6=dual) as server:
        server.settimeout(timeout_s)
        store.set("lifeline", f"{host} {server.getsockname()[1]}")
        connections = {}
        for _ in range(world_size - 1):
            try:
                connection, _ = server.accept()
            except TimeoutError as error:
                raise RanksMissingError(launched_placement(), timeout_s, error) from None
            connection.settimeout(None)
            _keep_alive(connection)
            connections[connection] = int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "big")
    return _Watch(0, connections)


def _watch_rank_0(store: dist.Store, rank: int) -> _Watch:
    host, port = store.get("lifeline").decode().split()
    connection = socket.create_connection((host, int(port)))
    connection.settimeout(None)
    _keep_alive(connection)
    connection.sendall(rank.to_bytes(4, "big"))
    return _Watch(rank, {connection: 0})


def _keep_alive(connection: socket.socket) -> None:
    """A node that loses power closes nothing: ask it every 5 s, and give it up after 20."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # not every system has all three
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def own_address(master_address: str, master_port: int) -> str:
    """The address under which other nodes reach this one: that of the interface towards the rendezvous, or the
    rendezvous' own name where that is this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((master_address, master_port))  # sends nothing
        except OSError:
            return master_address
        address = probe.getsockname()[0]
    return master_address if address.startswith("127.") else address
