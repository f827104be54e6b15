"""Who owns which parameters: a division by bytes, computed alike on every rank, with no communication.

Pure arithmetic on shapes. `divide` assigns parameters (or blocks of their rows) to ranks; `fill_buckets` cuts each
rank's list into the portions in which they travel.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

MAX_IMBALANCE = 1.01
# Nobody misses balance in less than this, and small parameters stay whole.
SMALLEST_MOVE_BYTES = 64 * 2**10


@dataclass(frozen=True, order=True)
class Slice:
    """Rows `start` to `stop` (exclusive) of parameter `parameter`, `n_bytes` in all.

    For example, of a (100, 8) float32 parameter 3, rows 60 to the end: Slice(3, 60, 100, 1280). A parameter without
    dimensions has one row.
    """

    parameter: int
    start: int
    stop: int
    n_bytes: int

    @property
    def n_rows(self) -> int:
        return self.stop - self.start


def whole(parameter: int, shape: Sequence[int], item_bytes: int) -> Slice:
    """A parameter's shape, as one slice of all its rows."""
    n_bytes = item_bytes
    for size in shape:
        n_bytes *= size
    return Slice(parameter, 0, shape[0] if shape else 1, n_bytes)


def divide(parameters: Sequence[Slice], loads_bytes: Sequence[int], can_cut: bool) -> list[list[Slice]]:
    """Assign parameters to ranks so that the ranks' bytes are as equal as can be.

    Greedily: the largest parameter first, each to the rank that has least (Graham 1969, "longest processing time"). If
    the largest load is then more than 1.01 times the mean, and parameters may be cut, the fullest rank hands rows of
    its largest parameter to the emptiest, until that holds: fewer than `world_size` cuts.

    Args:
        parameters: whole parameters.
        loads_bytes: what each rank has already, e.g. of parameter groups divided before; its length is the world size.
        can_cut: whether rows of one parameter may go to different ranks.

    Returns:
        Each rank's slices, the largest first; empty for a rank that gets nothing.

    Raises:
        ValueError: `loads_bytes` is empty.
    """
    if not loads_bytes:
        raise ValueError("loads_bytes=[]: must have one entry a rank")
    owned: list[list[Slice]] = [[] for _ in loads_bytes]
    loads = list(loads_bytes)
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    for parameter in sorted(parameters, key=lambda piece: (-piece.n_bytes, piece.parameter)):
        load, rank = heapq.heappop(heap)
        owned[rank].append(parameter)
        loads[rank] = load + parameter.n_bytes
        heapq.heappush(heap, (loads[rank], rank))
    if can_cut:
        while _move_rows(owned, loads):
            pass
    return [sorted(slices, key=lambda piece: (-piece.n_bytes, piece)) for slices in owned]


def _move_rows(owned: list[list[Slice]], loads: list[int]) -> bool:
    """Move rows from the fullest rank to the emptiest, so that one of them has the mean; False if all is well or no
    parameter can be cut so."""
    mean = sum(loads) / len(loads)
    fullest = max(range(len(loads)), key=lambda rank: loads[rank])
    emptiest = min(range(len(loads)), key=lambda rank: loads[rank])
    excess = min(loads[fullest] - mean, mean - loads[emptiest])
    if loads[fullest] <= MAX_IMBALANCE * mean or excess < SMALLEST_MOVE_BYTES or not owned[fullest]:
        return False
    largest = max(owned[fullest], key=lambda piece: piece.n_bytes)
    if largest.n_rows < 2:
        return False
    row_bytes = largest.n_bytes // largest.n_rows
    n_moved = min(int(excess) // row_bytes, largest.n_rows - 1)
    if n_moved < 1:
        return False
    middle = largest.stop - n_moved
    owned[fullest].remove(largest)
    owned[fullest].append(replace(largest, stop=middle, n_bytes=largest.n_bytes - n_moved * row_bytes))
    owned[emptiest].append(replace(largest, start=middle, n_bytes=n_moved * row_bytes))
    loads[fullest] -= n_moved * row_bytes
    loads[emptiest] += n_moved * row_bytes
    return True


def fill_buckets(owned: Sequence[Sequence[Slice]], bucket_bytes: float) -> list[list[list[Slice]]]:
    """Cut each rank's list into portions of at most `bucket_bytes` (a larger slice has one to itself).

    Returns:
        By bucket, each rank's slices in it; a rank that has run out has none. For example, with slices a, b of rank 0
        and c of rank 1, each as large as a portion: [[[a], [c]], [[b], []]].
    """
    by_rank: list[list[list[Slice]]] = []
    for slices in owned:
        portions: list[list[Slice]] = []
        filled = 0
        for piece in slices:
            if not portions or filled + piece.n_bytes > bucket_bytes:
                portions.append([])
                filled = 0
            portions[-1].append(piece)
            filled += piece.n_bytes
        by_rank.append(portions)
    n_buckets = max((len(portions) for portions in by_rank), default=0)
    return [[portions[i] if i < len(portions) else [] for portions in by_rank] for i in range(n_buckets)]
