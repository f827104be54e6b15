"""What a data-parallel step must not leave out, noticed before the ranks' weights drift apart: that gradients were
averaged before an optimizer uses them, and that all parameters that are trained are among those averaged."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from cs336_systems.distributed.optimizer_checks import check_takes_rows


class StepWatch:
    """Refuses an optimizer's step with gradients that finish_gradient_synchronization() has not averaged.

    That is when it matters: until then gradients may be added up over several passes, or dropped.

    Attributes:
        is_on: whether gradients that come now are to be averaged; they are not noted otherwise.
        is_due: whether one has come since, so that finish_gradient_synchronization() is to be called.
        is_early: whether the wrapper sends gradients from within backward, so that no other may take its place.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        """Watch parameters that another has watched until now, or nobody."""
        self.is_on, self.is_due, self.is_early = True, False, False
        self._ids = {id(parameter) for parameter in parameters}  # which their wrapper keeps alive, and this
        for other in [watch for watch in _watches if not watch._ids.isdisjoint(self._ids)]:
            other.leave()
        # Weakly: autograd's hooks are no business of the garbage collector, which would never free a cycle.
        note = functools.partial(_note, weakref.ref[StepWatch](self))
        self._hooks: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(note) for parameter in parameters
        ]
        _look_at_steps()
        _watches.add(self)

    def leave(self) -> None:
        """Watch no longer."""
        _watches.discard(self)
        for hook in self._hooks:
            hook.remove()

    def check_step(self, optimizer: Any) -> None:
        """Raises RuntimeError if `optimizer` would use a gradient that is to be averaged first, or has, in its closure.
        Zeros are none, but what has been sent early comes back in their place."""
        used = (parameter for group in optimizer.param_groups for parameter in group["params"])
        mine = (parameter.grad for parameter in used if id(parameter) in self._ids and parameter.grad is not None)
        if self.is_due and any(self.is_early or gradient.any() for gradient in mine):
            raise RuntimeError(
                f"{type(optimizer).__name__}.step(): these gradients are this rank's alone; call "
                "finish_gradient_synchronization() of the data-parallel model after backward and before the step"
            )


_watches: weakref.WeakSet[StepWatch] = weakref.WeakSet()


def _note(watch: weakref.ref[StepWatch], parameter: Tensor) -> None:
    the_watch = watch()
    if the_watch is not None and the_watch.is_on:
        the_watch.is_due = True


@functools.cache
def _look_at_steps() -> None:
    for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):  # after a closure too
        register(lambda optimizer, args, kwargs: _check_step(optimizer))


def _check_step(optimizer: Any) -> None:
    check_takes_rows(optimizer)
    for watch in [watch for watch in _watches if watch.is_due]:
        watch.check_step(optimizer)


def is_averaged_early(parameter: nn.Parameter) -> bool:
    """Whether a wrapper that is still there sends the gradient of `parameter` from within backward."""
    return any(watch.is_early and id(parameter) in watch._ids for watch in _watches)


def check_same_parameters(module: nn.Module, averaged: Collection[int]) -> None:
    """Raises RuntimeError if a parameter that requires a gradient is none of those with the ids `averaged`."""
    if any(parameter.requires_grad and id(parameter) not in averaged for parameter in _parameters(module)):
        names = [n for n, p in module.named_parameters() if p.requires_grad and id(p) not in averaged]
        raise RuntimeError(
            f"module: its parameter {names[0]!r} was replaced, added or unfrozen after wrapping, and would never be "
            "averaged over the ranks; change the model first and wrap it then"
        )


def _parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """All of them, tied ones several times; `module.parameters()`, which makes names, takes five times as long."""
    stack = [module]
    while stack:
        layer = stack.pop()
        for parameter in layer._parameters.values():
            if parameter is not None:
                yield parameter
        stack += [child for child in layer._modules.values() if child is not None]
