"""Naive data parallelism: after backward, one all-reduce a parameter, one after another.

It pays twice: the communication starts only when the computation has ended, and each parameter pays the fixed cost of
a call, however small it is.
"""

from __future__ import annotations

import torch

from cs336_systems.distributed.ddp_base import DataParallel


class NaiveDDP(DataParallel):
    """Averages gradients with one all-reduce a parameter, all after backward."""

    @torch.no_grad()
    def _synchronize(self) -> None:
        last = len(self._trainable) - 1
        averaged = []
        for index in range(len(self._trainable)):
            average = self._start_average(index, with_flags=index == last, async_op=False)
            flags = average.wait()
            averaged.append(average.gradient)
        self._adopt_missing(flags, averaged.__getitem__)
