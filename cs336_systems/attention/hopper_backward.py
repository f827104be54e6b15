"""FlashAttention-2's backward pass for Hopper in one pass over the scores, in Gluon: dQ is added up across programs.

Two passes (`triton_backward.py`, `hopper_dq.py`) make seven matrix products of every pair of tiles; whoever holds P and
dS can make all three gradients of them with five. A program owns 128 keys and steps through the queries. dK and dV
stay in its registers; its part of dQ is added in float32 to memory by TMA, in the order of the keys, so that equal
inputs give equal bits. It has eleven warps:

    producer (1 warp)       K V   Q₀ dO₀ Q₁ dO₁ …     by TMA, with each tile of Q its lse and with dO its D
    consumer 0 (4 warps)    Sᵀ dPᵀ │P│ dV ┆ dSᵀ ┆ ⇄ │ dQ dK │ Sᵀ dPᵀ │ …      keys 0 … 63, columns of dQ's first half
    consumer 1 (4 warps)       Sᵀ dPᵀ │P│ dV ┆ dSᵀ ┆ ⇄ │ dQ dK │ …            keys 64 … 127, columns of the second
    adders (1 warp each)    dQ₀ dQ₁ …                 each adds one consumer's half, when it is the program's turn

Scores are made transposed, a row for each key, so that P and dS go from registers into dV = Pᵀ dO and dK = dSᵀ Q as
wgmma's left operand. Only dQ = dS K sums over keys: for it the consumers exchange (⇄) dS through shared memory.
Barriers beside the rings' (`hopper_ring.py`):

    exchanged[slot]   both consumers have written their keys' rows of dS; slots alternate, and a consumer that has
                      passed the barrier of a step has seen the other end its products of the step before
    dq_ring           filled by a consumer with its half of dQ, emptied by its adder

Of other orders, with dK before the exchange, or the scores of the next step before the end of this one, none was
faster (547 TFLOP/s as it is, 535 and 529; 8 heads of 128, length 16,384, causal).

Turns. A tile of dQ is written by key tile 0, and key tile n adds after n - 1 has: turns[tile] counts those that have.
Programs start in the order of their numbers, key tiles ascending, so that none waits for one that cannot start; and, of
a few heads at once, heads fastest, so that those that take turns at one head are few and the tiles that they share are
still in the L2 cache. Each begins with the last queries: it is then one step behind the one before it, also under a
causal mask, where programs grow shorter, and stays there.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from cs336_systems.attention.hopper_bulk import add_shared_to_global, fence_async_global, wait_for_writes
from cs336_systems.attention.hopper_dq import N_CONSUMERS
from cs336_systems.attention.hopper_forward import ROWS
from cs336_systems.attention.hopper_ring import (
    fetch,
    fetch_with_row,
    make_ring,
    release,
    send,
    tile_of,
    wait_for,
)


@gluon.jit
def _owned_keys(batch_heads, heads_at_once, n_queries, n_keys, IS_CAUSAL: gl.constexpr):
    """What a program owns: (batch, key/value head) as one number, the tile of keys, and of the tiles of queries, from
    the last down, how many see its keys and how many of those see all of them and no others that are not there."""
    KEYS: gl.constexpr = ROWS * N_CONSUMERS
    in_band = heads_at_once * gl.cdiv(n_keys, KEYS)
    first_head = gl.program_id(0) // in_band * heads_at_once
    n_heads = gl.minimum(heads_at_once, batch_heads - first_head)
    batch_head = first_head + gl.program_id(0) % in_band % n_heads
    key_tile = gl.program_id(0) % in_band // n_heads
    start_n = key_tile * KEYS
    n_blocks = gl.cdiv(n_queries, ROWS)
    n_tiles = n_blocks
    n_full = n_blocks
    if IS_CAUSAL:
        n_tiles = gl.maximum(n_blocks - start_n // ROWS, 0)
        n_full = gl.maximum(n_blocks - (start_n + KEYS) // ROWS, 0)
    n_full = gl.where(start_n + KEYS <= n_keys, n_full, 0)
    return batch_head, key_tile, n_tiles, n_full


@gluon.jit
def _produce(
    q_desc, do_desc, k_desc, v_desc, rows_desc, q_ring, do_ring, k_ring, v_ring, lse_rows, delta_rows, batch, kv_head,
    key_tile, batch_size, heads, n_queries, n_tiles, GROUP: gl.constexpr,
):  # fmt: skip
    for consumer in gl.static_range(N_CONSUMERS):
        start_n = (key_tile * N_CONSUMERS + consumer) * ROWS
        fetch(k_ring, consumer, k_desc, batch, kv_head, start_n)
        fetch(v_ring, consumer, v_desc, batch, kv_head, start_n)
    last = gl.cdiv(n_queries, ROWS) - 1
    for in_group in range(GROUP):
        head = kv_head * GROUP + in_group
        batch_head = batch * heads + head
        for j in range(n_tiles):
            i = in_group * n_tiles + j
            row = (last - j) * ROWS
            fetch_with_row(q_ring, lse_rows, i, q_desc, batch, head, row, rows_desc, batch_head)
            fetch_with_row(
                do_ring, delta_rows, i, do_desc, batch, head, row, rows_desc, batch_size * heads + batch_head
            )  # fmt: skip


@gluon.jit
def _add(
    dq_desc, turns_ptr, dq_ring, batch, kv_head, key_tile, heads, n_queries, n_rows, n_tiles,
    HALF: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Add one half of dQ's columns, tile by tile, each when the tiles of keys before this program's have."""
    COLS: gl.constexpr = dq_ring[0].shape[2]
    last = gl.cdiv(n_queries, ROWS) - 1
    for in_group in range(GROUP):
        head = kv_head * GROUP + in_group
        head_ptr = turns_ptr + (batch * heads + head).to(gl.int64) * n_rows + HALF
        for j in range(n_tiles):
            i = in_group * n_tiles + j
            row = (last - j) * ROWS
            turn_ptr = head_ptr + row
            while gl.atomic_add(turn_ptr, 0.0, sem="acquire", scope="gpu") < key_tile:
                pass
            fence_async_global()
            wait_for(dq_ring, i, True)
            tile = tile_of(dq_ring, i).reshape([1, 1, ROWS, COLS])
            if key_tile == 0:
                tma.async_copy_shared_to_global(dq_desc, [batch, head, row, HALF * COLS], tile)
            else:
                add_shared_to_global(dq_desc, [batch, head, row, HALF * COLS], tile)
            tma.store_wait(0)
            release(dq_ring, i)
            wait_for_writes()
            gl.atomic_add(turn_ptr, 1.0, sem="release", scope="gpu")


@gluon.jit
def _step(
    i, row, dk, dv, k, v, k_ring, ds_tiles, exchanged, q_ring, do_ring, dq_ring, lse_rows, delta_rows, keys, n_keys,
    scale_log2, CONSUMER: gl.constexpr, MASKED: gl.constexpr, IS_CAUSAL: gl.constexpr, S_LAYOUT: gl.constexpr,
    P_LAYOUT: gl.constexpr, DQ_LAYOUT: gl.constexpr,
):  # fmt: skip
    """What queries row … add to dK and dV, and this consumer's half of what the program's keys add to their dQ."""
    DEPTH: gl.constexpr = q_ring[0].shape[0]
    COLS: gl.constexpr = dq_ring[0].shape[2]
    q = tile_of(q_ring, i)
    do = tile_of(do_ring, i)
    zero = gl.zeros((ROWS, ROWS), gl.float32, layout=S_LAYOUT)
    wait_for(q_ring, i, True)
    s = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    wait_for(do_ring, i, True)
    dp = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
    lse = lse_rows.index(i % DEPTH).load(S_LAYOUT)
    s = warpgroup_mma_wait(1, deps=(s,))
    p = gl.exp2(s * scale_log2 - lse)
    if MASKED:
        is_visible = (keys < n_keys)[:, None]
        if IS_CAUSAL:
            queries = row + gl.arange(0, ROWS, layout=gl.SliceLayout(0, S_LAYOUT))
            is_visible = is_visible & (keys[:, None] <= queries[None, :])
        p = gl.where(is_visible, p, 0.0)
    delta = delta_rows.index(i % DEPTH).load(S_LAYOUT)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    p_operand = gl.convert_layout(p.to(k.dtype), P_LAYOUT)
    dv = warpgroup_mma(p_operand, do, dv, is_async=True)
    ds = (p * (dp - delta)).to(k.dtype)
    slot = i % 2
    mine = ds_tiles.index(slot * N_CONSUMERS + CONSUMER)
    mine.store(ds)
    fence_async_shared()
    mbarrier.arrive(exchanged.index(slot), count=1)
    ds_operand = gl.convert_layout(ds, P_LAYOUT)
    dq = gl.zeros((ROWS, COLS), gl.float32, layout=DQ_LAYOUT)
    my_keys = tile_of(k_ring, CONSUMER).slice(CONSUMER * COLS, COLS, dim=1)
    dq = warpgroup_mma(mine.permute((1, 0)), my_keys, dq, use_acc=False, is_async=True)
    mbarrier.wait(exchanged.index(slot), i // 2 & 1)
    theirs = ds_tiles.index(slot * N_CONSUMERS + 1 - CONSUMER)
    their_keys = tile_of(k_ring, 1 - CONSUMER).slice(CONSUMER * COLS, COLS, dim=1)
    dq = warpgroup_mma(theirs.permute((1, 0)), their_keys, dq, is_async=True)
    dk = warpgroup_mma(ds_operand, q, dk, is_async=True)
    dv, dq, _ = warpgroup_mma_wait(1, deps=(dv, dq, p_operand))
    release(do_ring, i)
    mbarrier.wait(dq_ring[2].index(0), (i & 1) ^ 1)
    dq_ring[0].index(0).store(dq)
    fence_async_shared()
    mbarrier.arrive(dq_ring[1].index(0), count=1)
    dk, _ = warpgroup_mma_wait(0, deps=(dk, ds_operand))
    release(q_ring, i)
    return dk, dv


@gluon.jit
def _consume(
    dk_desc, dv_desc, k_ring, v_ring, q_ring, do_ring, dq_ring, ds_tiles, exchanged, lse_rows, delta_rows, batch,
    kv_head, key_tile, n_queries, n_keys, n_tiles, n_full, scale, scale_log2,
    CONSUMER: gl.constexpr, GROUP: gl.constexpr, IS_CAUSAL: gl.constexpr,
):  # fmt: skip
    BLOCK_D: gl.constexpr = k_ring[0].shape[2]
    COLS: gl.constexpr = dq_ring[0].shape[2]
    dtype: gl.constexpr = k_ring[0].dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    DK_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, DK_LAYOUT, 2)
    start_n = (key_tile * N_CONSUMERS + CONSUMER) * ROWS
    keys = start_n + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
    dk = gl.zeros((ROWS, BLOCK_D), gl.float32, layout=DK_LAYOUT)
    dv = gl.zeros((ROWS, BLOCK_D), gl.float32, layout=DK_LAYOUT)
    last = gl.cdiv(n_queries, ROWS) - 1

    for consumer in gl.static_range(N_CONSUMERS):
        wait_for(k_ring, consumer, True)
    wait_for(v_ring, CONSUMER, True)
    k = tile_of(k_ring, CONSUMER)
    v = tile_of(v_ring, CONSUMER)
    for in_group in range(GROUP):
        for j in range(n_full):
            dk, dv = _step(
                in_group * n_tiles + j, (last - j) * ROWS, dk, dv, k, v, k_ring, ds_tiles, exchanged, q_ring, do_ring,
                dq_ring, lse_rows, delta_rows, keys, n_keys, scale_log2, CONSUMER, False, IS_CAUSAL, S_LAYOUT,
                P_LAYOUT, DQ_LAYOUT,
            )  # fmt: skip
        for j in range(n_full, n_tiles):
            dk, dv = _step(
                in_group * n_tiles + j, (last - j) * ROWS, dk, dv, k, v, k_ring, ds_tiles, exchanged, q_ring, do_ring,
                dq_ring, lse_rows, delta_rows, keys, n_keys, scale_log2, CONSUMER, True, IS_CAUSAL, S_LAYOUT,
                P_LAYOUT, DQ_LAYOUT,
            )  # fmt: skip

    # The other consumer may still read these keys' K, but only this one has read their V.
    send(dv_desc, batch, kv_head, start_n, dv.to(dtype), v)
    tma.store_wait(0)
    send(dk_desc, batch, kv_head, start_n, (dk * scale).to(dtype), v)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["batch_size", "heads", "heads_at_once", "n_queries", "n_keys", "n_rows"])
def hopper_backward_kernel(
    q_desc,  # (batch, heads, n_queries, head_dim), tiles of ROWS
    do_desc,  # (batch, heads, n_queries, head_dim), tiles of ROWS
    k_desc,  # (batch, heads // GROUP, n_keys, head_dim), tiles of ROWS
    v_desc,  # (batch, heads // GROUP, n_keys, head_dim), tiles of ROWS
    rows_desc,  # `flash_preprocess_kernel`'s, (3·batch·heads, n_rows) float32, tiles of ROWS: lse in log2 units, then D
    dq_desc,  # (batch, heads, n_queries, head_dim) float32, tiles of ROWS by half of the columns
    dk_desc,  # (batch, heads // GROUP, n_keys, head_dim), tiles of ROWS
    dv_desc,  # (batch, heads // GROUP, n_keys, head_dim), tiles of ROWS
    rows_ptr,  # the same; then zeros: at a tile's first two rows the turns at the halves of its columns
    batch_size,
    heads,
    heads_at_once,  # key/value heads of all batches that are worked at before the next ones
    n_queries,
    n_keys,
    n_rows,  # n_queries padded to a multiple of 128; a padded row has lse = inf, and so P = 0
    scale,
    scale_log2,
    GROUP: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    DEPTH: gl.constexpr,  # of the rings of Q and dO
):
    """One program computes dK and dV of 128 keys of one (batch, key/value head), and what these add to dQ / scale."""
    BLOCK_D: gl.constexpr = k_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    turns_ptr = rows_ptr + 2 * (batch_size * heads).to(gl.int64) * n_rows
    kv_heads = heads // GROUP
    batch_head, key_tile, n_tiles, n_full = _owned_keys(
        batch_size * kv_heads, heads_at_once, n_queries, n_keys, IS_CAUSAL
    )  # fmt: skip
    batch = batch_head // kv_heads
    kv_head = batch_head % kv_heads

    k_ring = make_ring(dtype, N_CONSUMERS, ROWS, BLOCK_D, N_CONSUMERS)
    v_ring = make_ring(dtype, N_CONSUMERS, ROWS, BLOCK_D, 1)
    q_ring = make_ring(dtype, DEPTH, ROWS, BLOCK_D, N_CONSUMERS)
    do_ring = make_ring(dtype, DEPTH, ROWS, BLOCK_D, N_CONSUMERS)
    dq_ring_0 = make_ring(gl.float32, 1, ROWS, BLOCK_D // N_CONSUMERS, 1)
    dq_ring_1 = make_ring(gl.float32, 1, ROWS, BLOCK_D // N_CONSUMERS, 1)
    ROW_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(0, 32, rank=2)
    lse_rows = gl.allocate_shared_memory(gl.float32, [DEPTH, 1, ROWS], ROW_LAYOUT)
    delta_rows = gl.allocate_shared_memory(gl.float32, [DEPTH, 1, ROWS], ROW_LAYOUT)
    S_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, ROWS], dtype)
    ds_tiles = gl.allocate_shared_memory(dtype, [2 * N_CONSUMERS, ROWS, ROWS], S_LAYOUT)
    exchanged = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2):
        mbarrier.init(exchanged.index(slot), count=N_CONSUMERS)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (dk_desc, dv_desc, k_ring, v_ring, q_ring, do_ring, dq_ring_0, ds_tiles, exchanged, lse_rows,
                        delta_rows, batch, kv_head, key_tile, n_queries, n_keys, n_tiles, n_full, scale, scale_log2,
                        0, GROUP, IS_CAUSAL)),
            (_consume, (dk_desc, dv_desc, k_ring, v_ring, q_ring, do_ring, dq_ring_1, ds_tiles, exchanged, lse_rows,
                        delta_rows, batch, kv_head, key_tile, n_queries, n_keys, n_tiles, n_full, scale, scale_log2,
                        1, GROUP, IS_CAUSAL)),
            (_produce, (q_desc, do_desc, k_desc, v_desc, rows_desc, q_ring, do_ring, k_ring, v_ring, lse_rows,
                        delta_rows, batch, kv_head, key_tile, batch_size, heads, n_queries, n_tiles, GROUP)),
            (_add, (dq_desc, turns_ptr, dq_ring_0, batch, kv_head, key_tile, heads, n_queries, n_rows, n_tiles, 0,
                    GROUP)),
            (_add, (dq_desc, turns_ptr, dq_ring_1, batch, kv_head, key_tile, heads, n_queries, n_rows, n_tiles, 1,
                    GROUP)),
        ],
        worker_num_warps=[4, 1, 1, 1],
        worker_num_regs=[240, 24, 24, 24],
    )  # fmt: skip
