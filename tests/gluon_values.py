"""The values that simulated kernels compute with (`gluon_simulation.py`): numbers, tensors in registers, pointers and
descriptors of global memory, views of shared memory, and accumulators that asynchronous products are still filling."""

import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tests.gluon_machine import Barrier, Box, Fault, Machine, Memory, Work


class Scalar(int):
    """An integer of a kernel: what is computed with one is one, and has the methods of one."""

    def to(self, dtype: torch.dtype) -> "Scalar":
        return self


def _closed(method: Callable) -> Callable:
    def compute(*operands: Any) -> Any:
        result = method(*operands)
        return Scalar(result) if type(result) is int else result

    return compute


for _name in ("add", "sub", "mul", "floordiv", "mod", "and", "or", "xor"):
    for _method in (f"__{_name}__", f"__r{_name}__"):
        setattr(Scalar, _method, _closed(getattr(int, _method)))


class Registers(torch.Tensor):
    """A tensor in registers. Layouts are the compiler's business."""

    type = types.SimpleNamespace(layout=None)
    __iadd__, __isub__, __imul__ = torch.Tensor.__add__, torch.Tensor.__sub__, torch.Tensor.__mul__  # not in place


def registers(x: torch.Tensor) -> Registers:
    return x.as_subclass(Registers)


class Pointer(NamedTuple):
    memory: torch.Tensor  # one-dimensional
    offset: Any

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.memory, self.offset + offset)

    def offsets(self, mask: Any = None) -> torch.Tensor:
        """Those that are used, all of them inside the tensor."""
        offsets = torch.as_tensor(self.offset) if mask is None else torch.as_tensor(self.offset)[mask]
        if offsets.numel() and not 0 <= int(offsets.min()) <= int(offsets.max()) < len(self.memory):
            raise Fault(f"offsets up to {int(offsets.max())} of a tensor of {len(self.memory)} elements")
        return offsets


class Descriptor:
    """A tensor descriptor, as the kernel sees it."""

    def __init__(self, x: TensorDescriptor) -> None:
        self.memory = Memory(f"the tensor of shape {list(x.shape)}")
        self.tensor = x.base.detach().as_strided(tuple(x.shape), tuple(x.strides))
        self.dtype = x.base.dtype
        size = torch.Size(x.block_shape)
        self.block_type = types.SimpleNamespace(shape=list(size), nbytes=size.numel() * self.dtype.itemsize)

    def box(self, start: Sequence[int]) -> Box:
        return tuple((i, i + size) for i, size in zip(start, self.block_type.shape, strict=True))

    def overlap(self, start: Sequence[int], tile: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The part of the tensor that a tile from `start` on covers, and the part of the tile that it is."""
        tensor = self.tensor
        for dim, (first, size) in enumerate(zip(start, self.block_type.shape, strict=True)):
            if first < 0:
                raise Fault(f"a tile starts at {first} of dimension {dim}")  # TMA can do that; no kernel here wants it
            n = max(0, min(size, tensor.shape[dim] - first))
            tensor, tile = tensor.narrow(dim, min(first, tensor.shape[dim]), n), tile.narrow(dim, 0, n)
        return tensor, tile


class Product:
    """What `warpgroup_mma` returns: an accumulator that only other products and a wait may use."""

    def __init__(self, a: Any, b: "Shared", acc: Any, use_acc: bool) -> None:
        self.a, self.b, self.acc, self.use_acc = a, b, acc, use_acc
        self.result: Any = None

    def compute(self) -> None:
        a, b = (x.data if isinstance(x, Shared) else x for x in (self.a, self.b))
        self.result = registers(a.float() @ b.float())
        if self.use_acc:
            self.result = self.result + (self.acc.result if isinstance(self.acc, Product) else self.acc)


class Shared:
    """A view of shared memory."""

    def __init__(self, machine: Machine, memory: Memory, data: torch.Tensor) -> None:
        self.machine, self.memory, self.data = machine, memory, data
        self.dtype, self.shape = data.dtype, list(data.shape)

    def _view(self, data: torch.Tensor) -> "Shared":
        return Shared(self.machine, self.memory, data)

    def index(self, i: int) -> "Shared":
        if not 0 <= i < self.shape[0]:
            raise Fault(f"tile {i} of the {self.shape[0]} of {self.memory.name}")
        return self._view(self.data[i])

    def slice(self, start: int, length: int, dim: int = 0) -> "Shared":
        return self._view(self.data.narrow(dim, start, length))

    def reshape(self, shape: Sequence[int]) -> "Shared":
        return self._view(self.data.view(*shape))

    def permute(self, order: Sequence[int]) -> "Shared":
        return self._view(self.data.permute(*order))

    def access(self, is_write: bool, unit: Any = None) -> None:
        start = self.data.storage_offset()
        end = start + 1 + sum((n - 1) * stride for n, stride in zip(self.shape, self.data.stride(), strict=True))
        self.machine.access(self.memory, ((start, end),), is_write, unit)

    def load(self, layout: Any) -> Work:
        yield
        self.access(is_write=False)
        return registers(self.data.clone())

    def store(self, values: Registers) -> Work:
        yield
        self.access(is_write=True)
        if values.dtype != self.dtype or list(values.shape) != self.shape:
            raise Fault(f"{values.dtype} {tuple(values.shape)} stored to {self.dtype} {self.shape}")
        self.data.copy_(values)

    @property
    def barrier(self) -> Barrier:
        barrier = self.memory.barriers.get(self.data.storage_offset())
        if barrier is None:
            raise Fault(f"{self.memory.name} holds no mbarrier there")
        return barrier
