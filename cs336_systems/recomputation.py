"""Selective recomputation (Korthikanti et al. 2022, section 5): backward makes again what forward did not keep for it.

A matrix product keeps its input. Where a cheap kernel made that from tensors that are kept anyway, a recipe can be kept
in its place: the product's backward then runs the kernel once more, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch
from jaxtyping import Shaped
from torch import Tensor


class _Recipe:
    """Makes a tensor again, once for all that saved it, and keeps it until the last of them has had it."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self._make = make
        self._made: Tensor | None = None
        self._n_saved = 0
        self._n_taken = 0

    def note_saved(self) -> None:
        self._n_saved += 1

    def take(self) -> Tensor:
        if self._made is None:
            with torch.no_grad():
                self._made = self._make()
        made = self._made
        self._n_taken += 1
        if self._n_taken % self._n_saved == 0:  # a graph can be run backward more than once
            self._made = None
        return made


class _Saved:
    """One tensor that was saved: the recipe's, or a view of it."""

    def __init__(self, recipe: _Recipe, tensor: Tensor) -> None:
        self._recipe = recipe
        self._layout = tensor.shape, tensor.stride(), tensor.storage_offset()
        recipe.note_saved()

    def tensor(self) -> Tensor:
        return self._recipe.take().as_strided(*self._layout)


class _Kept:
    """Any other tensor that was saved. Where there are hooks autograd does not see that it was changed since."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor, tensor._version

    def tensor(self) -> Tensor:
        tensor, now = self._tensor, self._tensor._version
        if now != self._version:
            raise RuntimeError(
                f"a tensor that backward needs, {tuple(tensor.shape)} {tensor.dtype}, has been modified by an inplace "
                f"operation: it is at version {now}, and was saved at version {self._version}"
            )
        return tensor


@contextmanager
def made_again(tensor: Shaped[Tensor, "..."], make: Callable[[], Tensor]) -> Generator[None]:
    """What autograd saves of `tensor` (or of views of it) within the context is made again by `make()` when backward
    needs it, and not kept. All else is saved as ever.

        y = torch.relu(x)
        with made_again(y, partial(torch.relu, x.detach())):
            z = y @ weight  # its backward needs y

    `make` returns the same values in the same layout of memory, and must not hold `tensor` itself. It runs in backward,
    where autocast is off. What it reads must not have changed by then: autograd does not check that. In a checkpointed
    segment, which keeps nothing, it would keep what it reads: use it outside. torch.compile does not follow it.
    """
    recipe = _Recipe(make)
    storage = tensor.untyped_storage()._cdata  # not its address, which empty and meta tensors have in common

    def save(saved: Tensor) -> _Saved | _Kept:
        is_it = saved.layout == torch.strided and saved.untyped_storage()._cdata == storage
        return _Saved(recipe, saved) if is_it else _Kept(saved)

    def load(saved: _Saved | _Kept) -> Tensor:
        return saved.tensor()

    with torch.autograd.graph.saved_tensors_hooks(save, load):
        yield
