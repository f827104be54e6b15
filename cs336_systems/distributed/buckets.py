"""Buckets: which parameters share one, and the two ways in which a bucket's gradients can travel as one.

A `FlatBucket` has one buffer, and the gradients are views into it. A `CoalescedBucket` has no memory: the gradients
travel from where autograd put them, as one group call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist
from jaxtyping import Inexact
from torch import Tensor, nn

from cs336_systems.distributed.collectives import average_, average_coalesced_

BYTES_PER_MB = 10**6
END_BUCKET_MB = 25.0  # the first and the last bucket's largest size, where buckets are larger than that
_ALIGNMENT_BYTES = 16  # kernels such as fused AdamW read 16 bytes at a time from addresses that are multiples of it


def assign_buckets(parameters: Sequence[Inexact[Tensor, "..."]], bucket_size_mb: float) -> list[list[int]]:
    """Put parameters into buckets, from the last to the first, which is about the order of their gradients.

    Buckets of more than `END_BUCKET_MB` are smaller at both ends. The last to be ready is launched when backward has
    ended, so that nothing hides it: at 300 GB/s a bucket of 1 GB would make the step 3 ms longer. A small one behind a
    large one is no better, since it waits for that; so sizes fall by halves, each bucket taking at most half of what is
    left. And communication can begin only when the first bucket is full. Each halving costs one call more.

    Args:
        parameters: in the module's order.
        bucket_size_mb: a bucket's largest size in MB (10**6 bytes). A larger parameter has a bucket to itself.

    Returns:
        Indices into `parameters` by bucket: each index in one bucket, each bucket of one dtype, and the buckets in the
        order in which they are expected to be full. For example, four float32 parameters of 1 MB and buckets of 2 MB:
        [[3, 2], [1, 0]]. Sixteen of 25 MB and buckets of 100 MB: buckets of 25, 100, 100, 75, 50, 25 and 25 MB.

    Raises:
        ValueError: `bucket_size_mb` is not positive.
    """
    if not bucket_size_mb > 0:
        raise ValueError(f"bucket_size_mb={bucket_size_mb}: must be more than 0")
    full: list[list[int]] = []
    open_buckets: dict[torch.dtype, list[int]] = {}
    open_bytes: dict[torch.dtype, int] = {}
    limits: dict[torch.dtype, float] = {}
    left_bytes = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    for index in reversed(range(len(parameters))):
        parameter = parameters[index]
        dtype, n_bytes = parameter.dtype, parameter.numel() * parameter.element_size()
        if open_buckets.get(dtype) and open_bytes[dtype] + n_bytes > limits[dtype]:
            full.append(open_buckets.pop(dtype))
        if dtype not in open_buckets:
            is_first = not full and not open_buckets
            at_this_place = END_BUCKET_MB * BYTES_PER_MB if is_first else left_bytes / 2
            limits[dtype] = min(bucket_size_mb, max(END_BUCKET_MB, at_this_place / BYTES_PER_MB)) * BYTES_PER_MB
            open_buckets[dtype], open_bytes[dtype] = [], 0
        open_buckets[dtype].append(index)
        open_bytes[dtype] += n_bytes
        left_bytes -= n_bytes
    buckets = full + list(open_buckets.values())
    return sorted(buckets, key=lambda bucket: -bucket[-1])  # by the parameter that each waits for longest


class Bucket(ABC):
    """Parameters of one dtype whose gradients travel as one collective, with `n_flags` elements behind them.

    Once per backward pass: `take(i)` as parameter i's gradient becomes ready, `launch`, `finish`, then read
    `averaged[i]`, which holds parameter i's average also where its `.grad` is None, and `flags`, and `release`.

    With `comm_dtype` the gradients travel in that dtype, and are summed in it.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], n_flags: int, group: dist.ProcessGroup, comm_dtype: torch.dtype | None
    ) -> None:
        self.parameters = list(parameters)
        self.averaged: list[Tensor] = []
        self.flags = parameters[0].detach().new_empty(0)
        self._group = group
        own = parameters[0].dtype
        self._dtype = comm_dtype if comm_dtype is not None and own.is_floating_point else own
        self._done: dist.Work | torch.futures.Future | None = None

    def take(self, i: int) -> None:  # noqa: B027  a bucket without memory of its own takes nothing
        """Note parameter i's gradient, which is complete."""

    @abstractmethod
    def launch(self, flags: Inexact[Tensor, " flags"] | None) -> None:
        """Start the average of the gradients, zeros where there are none, and of `flags` (None if there are none)."""

    def finish(self) -> None:
        """Wait for the average. On a GPU the current stream waits, not the host."""
        assert self._done is not None
        self._done.wait()
        self._done = None

    def release(self) -> None:  # noqa: B027
        """Hold on to no gradient until the next launch."""


class FlatBucket(Bucket):
    """One buffer, into which the gradients are views.

    A gradient that autograd made anew (after zero_grad(set_to_none=True)) is copied into its view, once, which takes
    its place as `.grad`; one that autograd added up in its view (after `set_to_none=False`) is not copied at all.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        n_flags: int,
        group: dist.ProcessGroup,
        comm_dtype: torch.dtype | None,
        buffer: Inexact[Tensor, " elements"],
    ) -> None:
        """`buffer` has `buffer_size(parameters, n_flags)` elements, zeros."""
        super().__init__(parameters, n_flags, group, comm_dtype)
        self.buffer = buffer
        *offsets, end = _offsets(parameters)
        self.flags = buffer[end : end + n_flags]
        self._is_taken = [False] * len(self.parameters)
        self.averaged = [
            # With the strides that autograd gives to a gradient it makes anew.
            buffer[offset:].as_strided(parameter.shape, torch.empty_like(parameter, device="meta").stride())
            for parameter, offset in zip(parameters, offsets, strict=True)
        ]

    def zero_gradients(self) -> None:
        """Zero all gradients with one fill, and make each `.grad` its view, so that autograd adds to it in place."""
        self.buffer.zero_()
        for parameter, view in zip(self.parameters, self.averaged, strict=True):
            self._check_uncast(parameter)
            parameter.grad = view

    def _check_uncast(self, parameter: nn.Parameter) -> None:
        if parameter.dtype != self.buffer.dtype or parameter.device != self.buffer.device:
            raise RuntimeError(
                f"module: a parameter of shape {tuple(parameter.shape)} is {parameter.dtype} on {parameter.device}, "
                f"and was {self.buffer.dtype} on {self.buffer.device} when it was wrapped, as its bucket is still: "
                "wrap after casting and moving"
            )

    def take(self, i: int) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward(create_graph=True): a bucket's views have no graph; wrap with gradient_as_bucket_view=False"
            )
        # At once, not at launch: the new gradient is still in the cache, and its memory is free for the next one.
        self._is_taken[i] = True
        parameter, view = self.parameters[i], self.averaged[i]
        self._check_uncast(parameter)
        if parameter.grad is None:
            view.zero_()
        elif parameter.grad is not view:
            view.copy_(parameter.grad)
            parameter.grad = view

    def launch(self, flags: Inexact[Tensor, " flags"] | None) -> None:
        if not all(self._is_taken):
            for i in range(len(self.parameters)):
                if not self._is_taken[i]:
                    self.take(i)
        self._is_taken = [False] * len(self.parameters)
        if flags is not None:
            self.flags.copy_(flags)
        if self._dtype == self.buffer.dtype:
            self._done = average_(self.buffer, self._group, async_op=True)
            return
        travelling = self.buffer.to(self._dtype)
        work = average_(travelling, self._group, async_op=True)
        assert work is not None
        # On a GPU the copy home runs on a stream of its own, beside backward.
        self._done = work.get_future().then(lambda _: self.buffer.copy_(travelling))


def _offsets(parameters: Sequence[nn.Parameter]) -> list[int]:
    """Where each parameter's view begins in a buffer, in elements, and where the last one ends."""
    alignment = max(1, _ALIGNMENT_BYTES // parameters[0].element_size())
    offsets = [0]
    for parameter in parameters:
        offsets.append(offsets[-1] + -(-parameter.numel() // alignment) * alignment)
    return offsets


def buffer_size(parameters: Sequence[nn.Parameter], n_flags: int) -> int:
    """Elements of the buffer of a `FlatBucket`, behind which another may begin."""
    alignment = max(1, _ALIGNMENT_BYTES // parameters[0].element_size())
    return -(-(_offsets(parameters)[-1] + n_flags) // alignment) * alignment


def make_flat_buckets(
    buckets: Sequence[Sequence[nn.Parameter]],
    n_flags: Sequence[int],
    group: dist.ProcessGroup,
    comm_dtype: torch.dtype | None,
) -> list[FlatBucket]:
    """A `FlatBucket` of each list of parameters, all of one dtype in one allocation: the allocator rounds each up."""
    sizes = [buffer_size(parameters, n) for parameters, n in zip(buckets, n_flags, strict=True)]
    of_dtype: dict[torch.dtype, list[int]] = {}
    for i, parameters in enumerate(buckets):
        of_dtype.setdefault(parameters[0].dtype, []).append(i)
    made: dict[int, FlatBucket] = {}
    for members in of_dtype.values():
        memory = buckets[members[0]][0].detach().new_zeros(sum(sizes[i] for i in members))
        for i, buffer in zip(members, memory.split([sizes[i] for i in members]), strict=True):
            made[i] = FlatBucket(buckets[i], n_flags[i], group, comm_dtype, buffer)
    return [made[i] for i in range(len(buckets))]


class CoalescedBucket(Bucket):
    """No buffer: the gradients are averaged where autograd put them."""

    def launch(self, flags: Inexact[Tensor, " flags"] | None) -> None:
        self.averaged = [
            parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            for parameter in self.parameters
        ]
        home = self.averaged
        if flags is not None:
            self.flags = flags
            home = [*home, flags]
        travelling = [tensor if self._can_travel(tensor) else tensor.to(self._dtype).contiguous() for tensor in home]
        work = average_coalesced_(travelling, self._group)
        away = [i for i in range(len(home)) if travelling[i] is not home[i]]
        if not away:
            self._done = work
            return
        self._done = work.get_future().then(
            lambda _: torch._foreach_copy_([home[i] for i in away], [travelling[i] for i in away])
        )

    def _can_travel(self, tensor: Tensor) -> bool:
        return tensor.dtype == self._dtype and tensor.is_contiguous()

    def release(self) -> None:
        self.averaged = []
