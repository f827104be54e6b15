"""Flat data parallelism: after backward, one all-reduce of all gradients copied into one buffer.

It pays the fixed cost of a call once, but still starts when the computation has ended, and needs memory for a second
copy of the gradients.
"""

from __future__ import annotations

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from cs336_systems.distributed.collectives import average_
from cs336_systems.distributed.ddp_base import DataParallel


class FlatDDP(DataParallel):
    """Averages all gradients of one dtype with one all-reduce, after backward."""

    @torch.no_grad()
    def _synchronize(self) -> None:
        gradients = [self._gradient_or_zeros(index) for index in range(len(self._trainable))]
        # A buffer has one dtype. The order of the dtypes is that of the parameters, which is the same on all ranks.
        dtypes = list(dict.fromkeys(gradient.dtype for gradient in gradients))
        for dtype in dtypes:
            members = [gradient for gradient in gradients if gradient.dtype == dtype]
            if dtype == dtypes[-1]:
                flags = self._flags(members[0])
                members.append(flags)
            buffer = _flatten_dense_tensors(members)
            average_(buffer, self.process_group)
            torch._foreach_copy_(members, list(_unflatten_dense_tensors(buffer, members)))
        self._adopt_missing(flags, gradients.__getitem__)
