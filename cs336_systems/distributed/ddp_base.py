"""What the four data-parallel wrappers share: equal replicas at the start, no_sync, and gradients that are missing.

Data parallelism: every rank holds the whole model and its own part of the batch; after backward each gradient is
replaced by its mean over the ranks, so that equal optimizers keep the replicas equal. The wrappers differ in when and
in what portions the gradients travel.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Inexact
from torch import Tensor, nn

from cs336_systems.distributed.collectives import average_, broadcast_module, check_same_module
from cs336_systems.distributed.marks import is_shard
from cs336_systems.distributed.step_checks import StepWatch, check_same_parameters, is_averaged_early


class DataParallel(nn.Module, ABC):
    """A module whose gradients are averaged over the ranks of a process group.

        model = NaiveDDP(module)
        loss_function(model(inputs), targets).backward()
        model.finish_gradient_synchronization()
        optimizer.step()

    Loss functions must take the mean over this rank's part of the batch, and the parts must be of one size: then the
    averaged gradient is the whole batch's.

    A parameter without a gradient on this rank counts as zero if another rank has one, and keeps `grad is None` if none
    has, as in one process on the whole batch. So that the ranks agree on this at no extra collective, each step's last
    all-reduce carries, behind the gradients, one element a parameter that is not zero where a rank has its gradient.

    Attributes:
        module: the wrapped module, itself and not a copy. Its state dict is the wrapper's.
        process_group: the ranks that average.

    Parameters whose `requires_grad` is False at wrapping are not averaged, nor are those that come later: unfreezing,
    replacing or adding one is refused when the next step's gradients are finished. A step of an optimizer is refused
    whose gradients came outside `no_sync` and were not. Buffers are broadcast once, at wrapping, and not in each
    forward pass.
    """

    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup | None = None) -> None:
        """Copy rank 0's parameters and buffers to all ranks.

        Raises:
            RuntimeError: there is no process group yet.
            ValueError: the ranks' modules differ in a name, shape or dtype (raised on all ranks), the module's
                trainable parameters lie on several devices, FSDP has divided them, or another wrapper's hooks average
                their gradients.
        """
        super().__init__()
        if not dist.is_initialized():
            raise RuntimeError("no process group: make one first, e.g. with cs336_systems.distributed.process_group")
        _check_is_free(module)
        self.module = module
        self.process_group: dist.ProcessGroup = process_group or _world()
        check_same_module(module, self.process_group)
        broadcast_module(module, self.process_group)
        trainable = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
        # Tied parameters appear once, under their first name.
        self._names = [name for name, _ in trainable]
        self._trainable = [parameter for _, parameter in trainable]
        self._trainable_ids = {id(parameter) for parameter in self._trainable}
        self._watch = StepWatch(self._trainable)
        devices = {str(parameter.device) for parameter in self._trainable}
        if len(devices) > 1:
            raise ValueError(
                f"module: its parameters lie on {sorted(devices)}; data parallelism needs one device a rank"
            )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward pass on this rank's part of the batch."""
        return self.module(*args, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        """Make every gradient the mean over the ranks; call it after backward and before the optimizer's step.

        Every rank must call it equally often. Inside `no_sync` it does nothing. On a GPU it queues work and does not
        wait for the device, unless a parameter has no gradient on this rank.

        Raises:
            RuntimeError: a parameter that requires a gradient was none of the module's, or was frozen, at wrapping.
        """
        if not self._is_synchronizing:
            return
        check_same_parameters(self.module, self._trainable_ids)
        if self._trainable:
            self._synchronize()
        self._watch.is_due = False

    @property
    def is_due(self) -> bool:
        """Whether gradients have come outside `no_sync` that finish_gradient_synchronization has not averaged yet."""
        return self._watch.is_due

    @property
    def _is_synchronizing(self) -> bool:
        return self._watch.is_on

    @abstractmethod
    def _synchronize(self) -> None:
        """Average all gradients, or finish doing so."""

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Gradient accumulation: backward passes inside the block add to the gradients on this rank alone. The first
        backward pass after it, with finish_gradient_synchronization, averages all that has been added up."""
        before, self._watch.is_on = self._watch.is_on, False
        try:
            yield
        finally:
            self._watch.is_on = before

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's state dict, with its own names."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Load the wrapped module's state dict; every rank must load the same."""
        return self.module.load_state_dict(state_dict, *args, **kwargs)

    # Gradients that are missing on some ranks

    def _gradient_or_zeros(self, index: int) -> Inexact[Tensor, "..."]:
        parameter = self._trainable[index]
        if parameter.grad is None:
            return torch.zeros_like(parameter)
        self._check_dense(index)
        return parameter.grad

    def _check_dense(self, index: int) -> None:
        """Raises ValueError for a sparse gradient, as nn.Embedding(sparse=True) makes them."""
        gradient = self._trainable[index].grad
        if gradient is not None and gradient.layout != torch.strided:
            raise ValueError(
                f"the gradient of parameter {self._names[index]!r} is sparse ({gradient.layout}); data parallelism "
                "averages dense gradients only: build the embedding with sparse=False"
            )

    def _has_gradient(self) -> list[bool]:
        return [parameter.grad is not None for parameter in self._trainable]

    def _flags(self, like: Inexact[Tensor, "..."]) -> Inexact[Tensor, " parameters"]:
        """One element a parameter, 1 where this rank has its gradient, in the dtype and on the device of `like`."""
        has_gradient = self._has_gradient()
        if all(has_gradient):
            return like.new_ones(len(has_gradient))  # made on the device: nothing is copied there
        return torch.tensor(has_gradient, dtype=like.dtype, device=like.device)

    def _adopt_missing(self, flags: Inexact[Tensor, " parameters"], averaged: Callable[[int], Tensor]) -> None:
        """Give each parameter without a gradient the averaged one, if the averaged flags say that any rank has it.

        Only a rank that lacks a gradient reads the flags, which makes it wait for the device."""
        missing = [index for index, has_gradient in enumerate(self._has_gradient()) if not has_gradient]
        if missing:
            exists_somewhere = (flags != 0).tolist()
            for index in missing:
                if exists_somewhere[index]:
                    self._trainable[index].grad = averaged(index)

    # One all-reduce a parameter

    def _start_average(self, index: int, with_flags: bool, async_op: bool) -> PendingAverage:
        gradient = self._gradient_or_zeros(index)
        pieces = [gradient.reshape(-1)]
        if with_flags:
            pieces.append(self._flags(gradient))
        in_place = gradient.is_contiguous() and not with_flags
        buffer = gradient if in_place else torch.cat(pieces)
        return PendingAverage(gradient, buffer, average_(buffer, self.process_group, async_op=async_op))


@dataclass
class PendingAverage:
    """One parameter's all-reduce: the gradient, and the buffer that travels (the gradient itself, or a copy of it that
    may have flags behind it)."""

    gradient: Inexact[Tensor, "..."]
    buffer: Inexact[Tensor, "..."]
    work: dist.Work | None

    def wait(self) -> Inexact[Tensor, " flags"]:
        """Wait, and bring a copy home. Returns what travelled behind the gradient."""
        if self.work is not None:
            self.work.wait()
        size = self.gradient.numel()
        if self.buffer is not self.gradient:
            self.gradient.copy_(self.buffer[:size].view_as(self.gradient))
        return self.buffer.reshape(-1)[size:]


def _check_is_free(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if is_shard(parameter):
            raise ValueError(
                f"module: its parameter {name!r} is this rank's rows of a weight that FSDP divides; FSDP averages all "
                "gradients itself, and needs no other wrapper"
            )
        if is_averaged_early(parameter):
            raise ValueError(
                f"module: the gradient of its parameter {name!r} is averaged by an earlier wrapper; call that one's "
                "remove_hooks() first, or make the model anew"
            )


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world
