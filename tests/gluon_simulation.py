"""Runs Hopper's Gluon kernels on a CPU, and reports what would go wrong on a card: a small simulator for the tests.

A `SimulatedKernel` runs a kernel's Python, with `gl`, `tma`, `mbarrier`, … replaced by those of this module. Partitions
of warps, programs and asynchronous units take turns as a seed has it (`gluon_machine.py`). Simulated are

    mbarriers     arrivals and bytes complete a phase; a wait sees the parity of the phase alone, as in PTX
    TMA           a load lands some time after it was issued, with zeros from outside the tensor; a store reads as late
    wgmma         float32 sums of low-precision products, whose operands are read some time before the wait
    atomics       relaxed ones reach memory late; a release waits for those that a barrier of the warps put before it

and a `Fault` is raised, in the kernel's line, where all wait for each other; where two accesses to shared memory, or
two TMA stores to global memory, are ordered by no barrier, wait or release, even if this run had them in order; where
an asynchronous unit accesses what threads wrote with no `fence_async_shared` since; where a product is used before its
wait, or a wait does not keep its operand's registers alive; where something ends with work under way; and where a
pointer leaves its tensor.

A partition runs as one thread: barriers among its warps are the compiler's business, as are layouts and registers. Not
simulated either: plain accesses to global memory that others see late or out of order, and time.
"""

import __future__

import ast
import functools
from collections.abc import Callable, Generator, Sequence
from types import CodeType
from typing import Any

import torch
from triton.experimental.gluon import language
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.language._core import GLUON_BUILTIN
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tests.gluon_language import Gl, Hopper, MBarrier, Tma
from tests.gluon_machine import Machine, Work
from tests.gluon_values import Descriptor, Pointer, Scalar

Edit = tuple[GluonJITFunction, str, str]


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
    namespace = {"__simulated__": True, _call.__name__: _call, "range": Gl.static_range}
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
        elif hasattr(value, GLUON_BUILTIN):
            namespace[used] = getattr(replaced[id(hopper)], value.__name__)
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
        replaced = {id(language): Gl(machine), id(hopper): Hopper(machine)}
        replaced |= {id(hopper.tma): Tma(machine), id(hopper.mbarrier): MBarrier(machine)}
        function = _simulated(self.kernel, replaced, tuple(self.edits))
        machine.run(function, [_argument(x) for x in args], n_programs, self.n_resident)
