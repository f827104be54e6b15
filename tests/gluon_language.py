"""The language of simulated kernels (`gluon_simulation.py`): what `gl`, `tma`, `mbarrier` and the other names that
Hopper's kernels use do on a `Machine`. What others could notice is a generator, which lets them go first.

Poisoned values (NaN) stand in tiles that a load is on its way to, and in shared memory that nobody has written.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from tests.gluon_machine import Barrier, Clocks, Fault, Machine, Memory, Task, Work, join
from tests.gluon_values import Descriptor, Pointer, Product, Registers, Scalar, Shared, registers


class Layout:
    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    @staticmethod
    def get_default_for(*args: Any) -> "Layout":
        return Layout()


class Language:
    """What all names of the simulated language have in common."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def __getattr__(self, name: str) -> Any:
        if name.endswith("Layout"):
            return Layout
        raise NotImplementedError(f"{name} is not simulated: tests/gluon_language.py would have to learn it")


class Gl(Language):
    """`triton.experimental.gluon.language`, as far as Hopper's kernels use it."""

    float16, bfloat16, float32, int32, int64 = torch.float16, torch.bfloat16, torch.float32, torch.int32, torch.int64
    exp2, log2 = staticmethod(torch.exp2), staticmethod(torch.log2)
    max, sum = staticmethod(torch.amax), staticmethod(torch.sum)
    cdiv = staticmethod(lambda a, b: Scalar(-(-a // b)))
    static_range = staticmethod(lambda *bounds: map(Scalar, range(*bounds)))
    convert_layout = staticmethod(lambda x, layout, assert_trivial=False: x.clone())  # other registers

    def program_id(self, axis: int) -> Scalar:
        return Scalar(self.machine.current.program.pid if axis == 0 else 0)

    def minimum(self, a: Any, b: Any) -> Any:
        return self.where(a < b, a, b)

    def maximum(self, a: Any, b: Any) -> Any:
        return self.where(a > b, a, b)

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        if not isinstance(condition, bool):
            return torch.where(condition, x, y)
        chosen = x if condition else y
        return Scalar(chosen) if isinstance(chosen, int) else chosen

    def arange(self, start: int, end: int, layout: Any) -> Registers:
        return registers(torch.arange(start, end, dtype=torch.int32))

    def full(self, shape: Sequence[int], value: float, dtype: torch.dtype, layout: Any) -> Registers:
        return registers(torch.full(tuple(shape), value, dtype=dtype))

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, layout: Any) -> Registers:
        return self.full(shape, 0, dtype, layout)

    def load(self, pointer: Pointer) -> Work:
        yield
        return registers(pointer.memory[pointer.offsets()])

    def store(self, pointer: Pointer, values: Registers, mask: Any = None) -> Work:
        yield
        pointer.memory[pointer.offsets(mask)] = values if mask is None else values[mask]

    def atomic_add(self, pointer: Pointer, value: Any, sem: str = "acq_rel", scope: str = "gpu") -> Work:
        """To a tensor: some time later (relaxed). To a scalar: at once; who polls it sleeps until it changes."""
        yield
        task, memory, offsets = self.machine.current, pointer.memory, pointer.offsets()
        if offsets.ndim:
            if sem != "relaxed":
                raise NotImplementedError(f"atomics of tensors are simulated with sem='relaxed' only, not {sem!r}")
            task.atomics.queue.append(lambda: memory.index_add_(0, offsets.flatten(), value.flatten()))
            return None
        while sem in ("release", "acq_rel") and task.atomics.n_before_barrier > 0:
            task.atomics.work()
        seen = (memory.data_ptr(), int(offsets)), int(memory[offsets])
        if value == 0 and task.polled == seen:
            yield lambda: int(memory[offsets]) != seen[1], lambda: f"memory that holds {seen[1]} to change"
        old = int(memory[offsets])
        task.polled = (seen[0], old) if value == 0 else None
        memory[offsets] += value
        published = self.machine.published.setdefault(seen[0], {})
        if sem in ("release", "acq_rel"):
            join(published, {unit: time for unit, time in task.clocks.seen.items() if unit.is_global})
        if sem in ("acquire", "acq_rel"):
            join(task.clocks.seen, published)
        return Scalar(old)

    def inline_asm_elementwise(
        self, asm: str, constraints: str, args: Sequence, dtype: Any, is_pure: bool, pack: int
    ) -> Work:
        task = self.machine.current
        for instruction in filter(None, map(str.strip, asm.split(";"))):
            if instruction == "cp.async.bulk.wait_group 0":
                yield lambda: not (task.stores.queue or task.writes.queue), lambda: f"{task.writes.name} to be over"
                task.told(task.stores, 0)
                task.told(task.writes, 0)
            elif instruction not in ("fence.proxy.async.global", "mov.u32 $0, 0"):
                raise NotImplementedError(f"{instruction} is not simulated")
        return Scalar(0)

    def thread_barrier(self) -> Work:
        yield
        atomics = self.machine.current.atomics
        atomics.n_before_barrier = len(atomics.queue)

    def allocate_shared_memory(self, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Shared:
        program = self.machine.current.program
        program.n_tensors += 1
        name = f"shared tensor {program.n_tensors} {list(shape)} of program {program.pid}"
        data = torch.full(tuple(shape), math.nan if dtype.is_floating_point else 0, dtype=dtype)
        return Shared(self.machine, Memory(name), data)

    def warp_specialize(self, partitions: Sequence, worker_num_warps: Sequence, worker_num_regs: Sequence) -> Work:
        machine, parent = self.machine, self.machine.current
        children = [Task(machine, parent.program, function, args, parent) for function, args in partitions]
        yield lambda: not any(child in machine.tasks for child in children), lambda: "its partitions to end"
        for child in children:
            parent.clocks.join(child.clocks)


class MBarrier(Language):
    """`mbarrier`: to expect bytes is to arrive too, as in PTX's mbarrier.arrive.expect_tx."""

    def init(self, barrier: Shared, count: int) -> None:
        barrier.access(is_write=True)
        offset = barrier.data.storage_offset()
        name = f"mbarrier {offset} of {barrier.memory.name}"
        barrier.memory.barriers[offset] = Barrier(self.machine, self.machine.current.program, name, count)

    def expect(self, barrier: Shared, n_bytes: int) -> Work:
        yield
        barrier.barrier.arrive(self.machine.current.clocks, 1, n_bytes)

    def arrive(self, barrier: Shared, *, count: int = 1, pred: bool = True) -> Work:
        yield
        if pred:
            barrier.barrier.arrive(self.machine.current.clocks, count)

    def wait(self, barrier: Shared, phase: int, pred: bool = True) -> Work:
        if pred:
            b = barrier.barrier
            yield lambda: b.phase & 1 != phase, lambda: f"the end of a phase of parity {phase} of {b}"
            self.machine.current.clocks.join(b.completed)


class Tma(Language):
    """`tma`. A store reads its tile at one time, and writes it to memory at a later one."""

    def async_copy_global_to_shared(self, descriptor: Descriptor, start: list, barrier: Shared, tile: Shared) -> Work:
        yield
        b = barrier.barrier
        barrier.access(is_write=False, unit=b.loads)
        tile.access(is_write=True, unit=b.loads)
        tile.data.fill_(math.nan)
        time = b.loads.time

        def land() -> None:
            source, destination = descriptor.overlap(start, tile.data.zero_())
            destination.copy_(source)
            b.arriving.seen[b.loads] = time
            b.arrive(Clocks(), 0, -descriptor.block_type.nbytes)

        b.loads.queue.append(land)

    def async_copy_shared_to_global(
        self, descriptor: Descriptor, start: list, tile: Shared, is_added: bool = False
    ) -> Work:
        yield
        task = self.machine.current
        tile.access(is_write=False, unit=task.stores)
        self.machine.access(descriptor.memory, descriptor.box(start), True, task.writes)
        task.writes.unwaited.append((task.writes.time, None))

        def read() -> None:
            destination, source = descriptor.overlap(start, tile.data.clone())
            task.writes.queue.append(lambda: destination.copy_(destination + source if is_added else source))

        task.stores.issue(read)

    def store_wait(self, pendings: int) -> Work:
        stores = self.machine.current.stores
        yield lambda: len(stores.queue) <= pendings, lambda: f"{stores.name} to read its tile"
        self.machine.current.told(stores, pendings)


class Hopper(Language):
    """What kernels import by its own name, from Gluon or (add_shared_to_global) from a module that adds to it."""

    def add_shared_to_global(self, descriptor: Descriptor, start: list, tile: Shared) -> Work:
        return Tma(self.machine).async_copy_shared_to_global(descriptor, start, tile, is_added=True)

    def fence_async_shared(self) -> Work:
        yield
        clocks = self.machine.current.clocks
        clocks.fenced = dict(clocks.seen)

    def warpgroup_mma(self, a: Any, b: Shared, acc: Any, *, use_acc: bool = True, is_async: bool = False) -> Work:
        yield
        products = self.machine.current.products
        for operand in (a, b):
            if isinstance(operand, Shared):
                operand.access(is_write=False, unit=products)
        product = Product(a, b, acc, use_acc)
        products.issue(product.compute, product)
        if is_async:
            return product
        result, _ = yield from self.warpgroup_mma_wait(0, deps=(product, a))
        return result

    def warpgroup_mma_wait(self, num_outstanding: int, deps: Sequence) -> Work:
        yield
        task = self.machine.current
        while len(task.products.queue) > num_outstanding:
            task.products.work()
        for product in task.told(task.products, num_outstanding):
            if not isinstance(product.a, Shared) and not any(product.a is x for x in deps):
                raise Fault("a product's left operand is in registers, and its wait does not keep them alive (deps)")
        unfinished = [product for _, product in task.products.unwaited]
        if any(x is product for x in deps for product in unfinished):
            raise Fault(f"an accumulator is used of one of the last {num_outstanding} products, not waited for")
        results = tuple(x.result if isinstance(x, Product) else x for x in deps)
        return results[0] if len(results) == 1 else results
