"""Runs Hopper's Gluon kernels on a CPU, and reports what would go wrong on a card: a small simulator for the tests.

A `SimulatedKernel` runs a kernel's Python, with `gl`, `tma`, `mbarrier`, … replaced by those of this module. Partitions
of warps, programs and asynchronous units take turns as a seed has it (`gluon_machine.py`). Simulated are

    mbarriers     arrivals and bytes complete a phase; a wait sees the parity of the phase alone, as in PTX
    TMA           a load lands some time after it was issued, with zeros from outside the tensor; a store reads as late
    wgmma         float32 sums of low-precision products, whose operands are read some time before the wait
    atomics       relaxed ones reach memory late; a release waits for those that a barrier of the warps put before it

and a `Fault` is raised, in the kernel's line, where all wait for each other; where two accesses to shared memory, one
of them a write, are ordered by no barrier or wait, even if this run had them in order; where an asynchronous unit
accesses what threads wrote with no `fence_async_shared` since; where a product is used before its wait, or a wait does
not keep its operand's registers alive; where something ends with work under way; and where a pointer leaves its tensor.

A partition runs as one thread: barriers among its warps are the compiler's business, as are layouts and registers. Not
simulated either: plain loads and stores of global memory that others see late or out of order, and time.
"""

import __future__

import ast
import functools
import math
from collections.abc import Callable, Generator, Sequence
from types import CodeType
from typing import Any

import torch
from triton.experimental.gluon import language
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tests.gluon_machine import Barrier, Clocks, Fault, Machine, Memory, Task, Work
from tests.gluon_values import Descriptor, Pointer, Product, Registers, Scalar, Shared, registers

Edit = tuple[GluonJITFunction, str, str]

# ---- The language ----------------------------------------------------------------------------------------------------


class _Layout:
    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    @staticmethod
    def get_default_for(*args: Any) -> "_Layout":
        return _Layout()


class _Language:
    """What the simulated `gl`, `tma`, `mbarrier` and `hopper` have in common."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def __getattr__(self, name: str) -> Any:
        if name.endswith("Layout"):
            return _Layout
        raise NotImplementedError(f"{name} is not simulated: tests/gluon_simulation.py would have to learn it")


class _Gl(_Language):
    float16, bfloat16, float32, int32, int64 = torch.float16, torch.bfloat16, torch.float32, torch.int32, torch.int64
    exp2, log2, where = staticmethod(torch.exp2), staticmethod(torch.log2), staticmethod(torch.where)
    max, sum = staticmethod(torch.amax), staticmethod(torch.sum)
    cdiv = staticmethod(lambda a, b: Scalar(-(-a // b)))
    static_range = staticmethod(lambda *bounds: map(Scalar, range(*bounds)))
    convert_layout = staticmethod(lambda x, layout: x)

    def program_id(self, axis: int) -> Scalar:
        return Scalar(self.machine.current.program.pid if axis == 0 else 0)

    def minimum(self, a: Any, b: Any) -> Any:
        are_scalars = isinstance(a, int) and isinstance(b, int)
        return Scalar(a if a < b else b) if are_scalars else torch.minimum(torch.as_tensor(a), torch.as_tensor(b))

    def maximum(self, a: Any, b: Any) -> Any:
        are_scalars = isinstance(a, int) and isinstance(b, int)
        return Scalar(a if a > b else b) if are_scalars else torch.maximum(torch.as_tensor(a), torch.as_tensor(b))

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
        """Of a tensor: relaxed, without its result. Of a scalar: at once. Whoever polls waits for another value."""
        yield
        task, memory, offsets = self.machine.current, pointer.memory, pointer.offsets()
        if offsets.ndim:
            if sem != "relaxed":
                raise NotImplementedError(f"atomics of tensors are simulated with sem='relaxed' only, not {sem!r}")
            task.atomics.queue.append(lambda: memory.index_add_(0, offsets.flatten(), value.flatten()))
            return None
        while sem in ("release", "acq_rel") and task.atomics.n_before_barrier > 0:
            task.atomics.work()
        seen = int(offsets), int(memory[offsets])
        if value == 0 and task.polled == seen:
            yield lambda: int(memory[offsets]) != seen[1], lambda: f"memory that holds {seen[1]} to change"
        old = int(memory[offsets])
        task.polled = (seen[0], old) if value == 0 else None
        memory[offsets] += value
        return Scalar(old)

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


class _MBarrier(_Language):
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


class _Tma(_Language):
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

    def async_copy_shared_to_global(self, descriptor: Descriptor, start: list, tile: Shared) -> Work:
        yield
        stores = self.machine.current.stores
        tile.access(is_write=False, unit=stores)

        def write() -> None:
            destination, source = descriptor.overlap(start, tile.data)
            destination.copy_(source)

        stores.issue(write)

    def store_wait(self, pendings: int) -> Work:
        stores = self.machine.current.stores
        yield lambda: len(stores.queue) <= pendings, lambda: f"{stores.name} to read its tile"
        self.machine.current.told(stores, pendings)


class _Hopper(_Language):
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


# ---- Kernels ---------------------------------------------------------------------------------------------------------


class _CallsThatYield(ast.NodeTransformer):
    """Makes a kernel a generator that yields wherever what it calls does: f(x) becomes (yield from call(f, x))."""

    def visit_Call(self, node: ast.Call) -> ast.YieldFrom:
        self.generic_visit(node)
        return ast.YieldFrom(ast.Call(ast.Name(_call.__name__, ast.Load()), [node.func, *node.args], node.keywords))


def _call(function: Callable, *args: Any, **options: Any) -> Work:
    result = function(*args, **options)
    return (yield from result) if isinstance(result, Generator) else result


@functools.cache
def _code(function: GluonJITFunction, edits: tuple[Edit, ...]) -> CodeType:
    raw, source = function.fn, function.src
    for edited, old, new in edits:
        if edited is function:
            if source.count(old) != 1:
                raise ValueError(f"{old!r} stands {source.count(old)} times in {raw.__name__}, not once")
            source = source.replace(old, new)
    tree = ast.fix_missing_locations(_CallsThatYield().visit(ast.parse(source)))
    n_decorator_lines = len(function.raw_src) - function.src.count("\n")
    ast.increment_lineno(tree, raw.__code__.co_firstlineno + n_decorator_lines - 1)
    flags = __future__.annotations.compiler_flag  # they name what is not simulated
    return compile(tree, raw.__code__.co_filename, "exec", flags, dont_inherit=True)


def _simulated(function: GluonJITFunction, replaced: dict[int, Any], edits: tuple[Edit, ...]) -> Callable[..., Work]:
    """A kernel in which all that it names is replaced; `replaced` is what is known of that, by id."""
    name, names = function.fn.__name__, function.fn.__globals__
    namespace = {"__simulated__": True, _call.__name__: _call, "range": _Gl.static_range}
    exec(_code(function, edits), namespace)
    simulated = replaced[id(function)] = namespace[name]
    for used in simulated.__code__.co_names:
        value = names.get(used)
        if isinstance(value, GluonJITFunction) and id(value) not in replaced:
            _simulated(value, replaced, edits)
        if isinstance(value, language.constexpr):
            namespace[used] = value.value
        elif id(value) in replaced:
            namespace[used] = replaced[id(value)]
        elif value is not None:
            raise NotImplementedError(f"{used}, which {name} uses, is not simulated")
    return simulated


def _argument(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return Pointer(x.detach().view(-1), Scalar(0))
    if isinstance(x, TensorDescriptor):
        return Descriptor(x)
    return Scalar(x) if type(x) is int else x


class SimulatedKernel:
    """Stands in a kernel's place: `SimulatedKernel(kernel)[(n_programs,)](*args)` runs it on CPU tensors (contiguous
    ones), descriptors of such, and numbers. Raises Fault.

    `seed` decides who works when. At most `n_resident` programs run at a time, which start in order. `edits` put
    `new` in the place of `old` in the source of the kernel, or of a function that it calls: (function, old, new).
    """

    def __init__(
        self, kernel: GluonJITFunction, seed: int = 0, n_resident: int = 2, edits: Sequence[Edit] = ()
    ) -> None:
        self.kernel, self.seed, self.n_resident, self.edits = kernel, seed, n_resident, edits

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._run, grid[0])

    def _run(self, n_programs: int, *args: Any, **options: Any) -> None:
        machine = Machine(self.seed)
        replaced = {id(language): _Gl(machine), id(hopper.tma): _Tma(machine), id(hopper.mbarrier): _MBarrier(machine)}
        for name in ("fence_async_shared", "warpgroup_mma", "warpgroup_mma_wait"):
            replaced[id(getattr(hopper, name))] = getattr(_Hopper(machine), name)
        function = _simulated(self.kernel, replaced, tuple(self.edits))
        machine.run(function, [_argument(x) for x in args], n_programs, self.n_resident)
