"""One piece of the exchange of updated parameters: every rank's part of it travels in a single all-gather."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from cs336_systems.distributed.partition import Slice

_ALIGNMENT_BYTES = 16  # so that a part of the buffer can be viewed in any dtype


class UpdatedBucket:
    """Slices of parameters, some of each rank, that become the same on all ranks.

    Once a step: the owner updates its slices; `launch` copies them into the gather buffer and starts the all-gather;
    `finish` copies the other ranks' slices home and lets the buffer go. All dtypes travel together, as bytes.
    """

    def __init__(
        self, slices: Sequence[Sequence[Slice]], rows: Callable[[Slice], Tensor], group: dist.ProcessGroup
    ) -> None:
        """`slices[rank]` are owned by `rank`, at most as many bytes as fit the largest rank's part; `rows(slice)` is
        the slice of the parameter itself."""
        self.slices = [list(owned) for owned in slices]
        self._rows = rows
        self._group = group
        self._rank = dist.get_rank(group)
        self._offsets: dict[Slice, int] = {}
        self._part_bytes = 0
        for owned in self.slices:
            end = 0
            for piece in owned:
                self._offsets[piece] = end
                end += -(-piece.n_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            self._part_bytes = max(self._part_bytes, end)
        self._buffer: Tensor | None = None
        self._work: dist.Work | None = None

    def launch(self) -> None:
        """Start sending this rank's slices, which have been updated, and receiving the others'."""
        device = self._rows(next(iter(self._offsets))).device
        self._buffer = torch.empty(len(self.slices) * self._part_bytes, dtype=torch.uint8, device=device)
        sources = [self._rows(piece) for piece in self.slices[self._rank]]
        if sources:
            torch._foreach_copy_(self._places(self._rank, sources), sources)
        mine = self._buffer.narrow(0, self._rank * self._part_bytes, self._part_bytes)
        self._work = dist.all_gather_into_tensor(self._buffer, mine, group=self._group, async_op=True)

    def finish(self) -> None:
        """Wait for the others' slices (on a GPU the current stream waits) and put them into the parameters."""
        assert self._work is not None
        self._work.wait()
        targets, sources = [], []
        for rank, owned in enumerate(self.slices):
            if rank != self._rank:
                rows = [self._rows(piece) for piece in owned]
                targets += rows
                sources += self._places(rank, rows)
        if targets:
            torch._foreach_copy_(targets, sources)
        self._buffer, self._work = None, None

    def _places(self, rank: int, rows: Sequence[Tensor]) -> list[Tensor]:
        """Where a rank's slices lie in the buffer, as tensors shaped like `rows`."""
        assert self._buffer is not None
        places = []
        for piece, like in zip(self.slices[rank], rows, strict=True):
            start = rank * self._part_bytes + self._offsets[piece]
            flat = self._buffer[start : start + piece.n_bytes].view(like.dtype)
            places.append(flat.view(like.shape))
        return places
