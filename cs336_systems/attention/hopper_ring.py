"""A ring of tiles in shared memory that one warp fills by TMA and others empty: what Hopper's kernels are built around.

A ring is a tuple (tiles, ready, empty) of as many slots as the pipeline is deep. Two mbarriers belong to each slot, and
each has one meaning:

    ready[slot]   the tile has arrived: the producer announces its bytes, and the TMA counts them in
    empty[slot]   every consumer is done with the tile: each arrives once

The i-th tile goes through slot i mod depth. An mbarrier knows only the parity of its phase, and that of the i-th tile
is (i / depth) mod 2; a wait for the phase before the first returns at once, so that the producer finds all slots empty.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma


@gluon.jit
def make_ring(
    dtype: gl.constexpr, DEPTH: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr, N_CONSUMERS: gl.constexpr
):
    """A ring for tiles of (ROWS, COLS)."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLS], dtype)
    tiles = gl.allocate_shared_memory(dtype, [DEPTH, ROWS, COLS], layout)
    ready = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(DEPTH):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=N_CONSUMERS)
    return tiles, ready, empty


@gluon.jit
def fetch(ring, i, descriptor, batch, head, row, n_more_bytes: gl.constexpr = 0):
    """The producer's part: once slot i is empty, fetch rows `row` … of one head of a (batch, heads, length, head_dim)
    tensor into it. The TMA fills what lies outside the tensor with zeros. The tile is ready when so many bytes more
    have arrived as well."""
    tiles, ready, empty = ring
    DEPTH: gl.constexpr = tiles.shape[0]
    ROWS: gl.constexpr = tiles.shape[1]
    COLS: gl.constexpr = tiles.shape[2]
    slot = i % DEPTH
    mbarrier.wait(empty.index(slot), (i // DEPTH & 1) ^ 1)
    mbarrier.expect(ready.index(slot), descriptor.block_type.nbytes + n_more_bytes)
    tile = tiles.index(slot).reshape([1, 1, ROWS, COLS])
    tma.async_copy_global_to_shared(descriptor, [batch, head, row, 0], ready.index(slot), tile)


@gluon.jit
def fetch_with_row(ring, rows, i, descriptor, batch, head, row, rows_descriptor, n_before):
    """As `fetch`, and with the tile what belongs to each of its rows, from `row` on in row `n_before` of a matrix, into
    slot i of `rows`, (depth, 1, ROWS): both have arrived when the tile is ready."""
    fetch(ring, i, descriptor, batch, head, row, rows_descriptor.block_type.nbytes)
    slot = i % ring[0].shape[0]
    tma.async_copy_global_to_shared(rows_descriptor, [n_before, row], ring[1].index(slot), rows.index(slot))


@gluon.jit
def wait_for(ring, i, is_there):
    """A consumer's part: wait until the i-th tile has arrived, if there is such a tile."""
    DEPTH: gl.constexpr = ring[0].shape[0]
    mbarrier.wait(ring[1].index(i % DEPTH), i // DEPTH & 1, pred=is_there)


@gluon.jit
def tile_of(ring, i):
    """The i-th tile, (ROWS, COLS)."""
    DEPTH: gl.constexpr = ring[0].shape[0]
    return ring[0].index(i % DEPTH)


@gluon.jit
def release(ring, i):
    """A consumer's part: it reads the i-th tile no more."""
    DEPTH: gl.constexpr = ring[0].shape[0]
    mbarrier.arrive(ring[2].index(i % DEPTH), count=1)


@gluon.jit
def send(descriptor, batch, head, row, values, tile):
    """Write values, through a tile (rows, cols) of shared memory, to rows `row` … of one head of a tensor. What lies
    outside the tensor is left out. The caller waits (tma.store_wait(0)) before its program ends."""
    ROWS: gl.constexpr = tile.shape[0]
    COLS: gl.constexpr = tile.shape[1]
    tile.store(values)
    fence_async_shared()
    tma.async_copy_shared_to_global(descriptor, [batch, head, row, 0], tile.reshape([1, 1, ROWS, COLS]))
