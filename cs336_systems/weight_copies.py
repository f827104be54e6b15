"""The copies of weights in low precision that autocast makes: found as they are made, and counted while they are held.

Benchmarks and profiles tell them apart from activations, which grow with the batch where these do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class WeightCopies(TorchDispatchMode):
    """While active, notes every cast of a weight; tells how many bytes of the copies are still held by anything."""

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._weights = {weight.untyped_storage().data_ptr() for weight in weights}
        self._copies: list[tuple[StorageWeakRef, int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].untyped_storage().data_ptr() in self._weights:
            storage = output.untyped_storage()
            self._copies.append((StorageWeakRef(storage), storage.data_ptr(), storage.nbytes()))
        return output

    def bytes_held(self) -> int:
        return sum(size for reference, _, size in self._copies if not reference.expired())

    def addresses(self) -> set[int]:
        """Of the copies that are still held."""
        return {address for reference, address, _ in self._copies if not reference.expired()}
