"""Additions to global memory by Hopper's tensor memory accelerator, for which Gluon has no names yet.

A TMA store, or addition, is over for its tile in shared memory when that has been read (`tma.store_wait`), and for
others only when memory has been written: `wait_for_writes`.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin


@builtin
def add_shared_to_global(descriptor, coordinates, tile, _semantic=None):
    """As `tma.async_copy_shared_to_global`, but add to what is there (PTX: cp.reduce.async.bulk.tensor). Float32 sums
    are rounded at each addition, so their bits depend on the order of additions to an element."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, coordinates, tile.handle
    )


@gluon.jit
def wait_for_writes():
    """Wait until all TMA stores and additions of these warps have been written to memory."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r,r", [gl.program_id(0)], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def fence_async_global():
    """What these warps have seen in global memory, their TMA operations from here on see as well."""
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.u32 $0, 0;", "=r,r", [gl.program_id(0)], gl.int32, is_pure=False, pack=1
    )
