"""Overlapped data parallelism: each gradient's all-reduce starts while backward still computes the next ones.

Li et al., PyTorch Distributed (VLDB 2020), section 3.2.3. `OverlappingDataParallel` has what the bucketed wrapper
shares: hooks that fire when a parameter's gradient is complete.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from cs336_systems.distributed.ddp_base import DataParallel, PendingAverage
from cs336_systems.distributed.launch_order import LaunchOrder


class OverlappingDataParallel(DataParallel):
    """Launches portions of the gradients from within backward.

    Several forward passes may precede one backward pass. Of several backward passes before
    finish_gradient_synchronization, all but the last must run inside `no_sync`.
    """

    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__(module, process_group)
        self._launches = LaunchOrder([])
        self._hooks = [self._add_hook(index) for index in range(len(self._trainable))]
        self._watch.is_early = True

    def _add_hook(self, index: int) -> RemovableHandle:
        # After autograd has added to .grad, so that gradients of earlier, unsynchronised passes are in it; and once a
        # backward pass for tied parameters, which are one.
        itself = ref[OverlappingDataParallel](self)
        return self._trainable[index].register_post_accumulate_grad_hook(partial(_on_gradient, itself, index))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward pass on this rank's part of the batch. In the backward pass that follows, hooks
        on gradients that were registered since wrapping run before the gradients leave, too."""
        if not torch.compiler.is_compiling():  # finish_gradient_synchronization does it for the steps that follow
            self._put_hooks_last()
        return super().forward(*args, **kwargs)

    def _put_hooks_last(self) -> None:
        for index, handle in enumerate(self._hooks):
            hooks = self._trainable[index]._post_accumulate_grad_hooks
            if hooks and handle.id in hooks and next(reversed(hooks)) != handle.id:
                handle.remove()
                self._hooks[index] = self._add_hook(index)

    def _set_portions(self, portions: Sequence[Sequence[int]]) -> None:
        self._launches = LaunchOrder(portions)
        self._last_portion = len(portions) - 1

    def remove_hooks(self) -> None:
        """Leave the module as it was before wrapping; this wrapper no longer averages its gradients early."""
        for hook in self._hooks:
            hook.remove()
        self._watch.leave()

    def _on_gradient(self, index: int) -> None:
        self._check_dense(index)
        if self._launches.is_ready(index):
            raise RuntimeError(
                f"parameter {self._names[index]!r} got a second gradient before finish_gradient_synchronization(), and "
                "the first may be on its way already: call that after each backward pass, and to add several passes up "
                "run all but the last inside no_sync(); after a pass that failed, call it on all ranks and drop the "
                "gradients"
            )
        if not self._is_synchronizing:
            return
        self._take(index)
        for portion in self._launches.mark_ready(index):
            self._launch(portion)

    @torch.no_grad()
    def _synchronize(self) -> None:
        try:
            for portion in self._launches.rest():
                self._launch(portion)
            self._finish()
        finally:
            self._launches.reset()
            self._put_hooks_last()

    def _take(self, index: int) -> None:
        """Note parameter `index`'s gradient, which is complete, before its portion is launched."""

    @abstractmethod
    def _launch(self, portion: int) -> None:
        """Start averaging a portion, of which parameters may have no gradient."""

    @abstractmethod
    def _finish(self) -> None:
        """Wait for all portions, which have been launched, and leave the averages in the parameters' `.grad`."""


def _on_gradient(wrapper: ref[OverlappingDataParallel], index: int, parameter: Tensor) -> None:
    """The hook of a wrapper that it does not keep alive: the garbage collector does not see through autograd's."""
    the_wrapper = wrapper()
    if the_wrapper is not None:
        the_wrapper._on_gradient(index)


class OverlappedDDP(OverlappingDataParallel):
    """Averages gradients with one all-reduce a parameter, each launched as soon as its gradient is ready.

    They are launched from the last parameter to the first, which is about the order in which backward makes them.
    """

    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__(module, process_group)
        self._set_portions([[index] for index in reversed(range(len(self._trainable)))])
        self._pending: dict[int, PendingAverage] = {}

    def _launch(self, portion: int) -> None:
        index = len(self._trainable) - 1 - portion
        self._pending[index] = self._start_average(index, with_flags=portion == self._last_portion, async_op=True)

    def _finish(self) -> None:
        flags = [self._pending[index].wait() for index in reversed(range(len(self._trainable)))][-1]
        self._adopt_missing(flags, lambda index: self._pending[index].gradient)
        self._pending.clear()
