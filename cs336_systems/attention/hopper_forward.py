"""FlashAttention-2's forward pass for Hopper, in Gluon: asynchronous wgmma and TMA, and warps that specialise.

What an H100 has beyond other cards are matrix products that run beside the warps that issued them. FlashAttention-3
(Shah et al. 2024) arranges the forward pass around that, and so does this kernel. A program owns two tiles of 64
queries, at head_dim 64 three, and has nine warps, or thirteen:

    producer (1 warp)       Q₀ Q₁  K₀ V₀ K₁ V₁ K₂ V₂ …            by TMA, as the rings of K and V have room
    consumer 0 (4 warps)    S₀ │softmax₀│ S₁ ┆ P₀V₀ │softmax₁│ S₂ ┆ P₁V₁ │softmax₂│ …
    consumer 1 (4 warps)       S₀ │softmax₀│ S₁ ┆ P₀V₀ │softmax₁│ S₂ ┆ P₁V₁ │ …

Section 3.2 of the paper: a consumer issues S of the next tile and P V of the last one together, and computes the
softmax of the former while the latter still runs. Section 3.1: while one consumer computes a softmax, the other's
products keep the tensor cores busy; the paper makes them take turns, which gained nothing here.

Registers: 24 for the producer, which only computes addresses, and 240 for each of two consumers, which hold S (64
registers a thread at BLOCK_N 128), O (64 at head_dim 128), P of this tile and the last (32 each), and spill nothing.

At head_dim 64 half the time goes into the exponentials and what is around them, and a multiprocessor's four schedulers
lack warps to choose from: with two each they issue an instruction in 55% of the cycles. So there are three consumers.
Each has 160 registers and holds S (64), O (32) and one tile of P (32): it rounds P only when P V of the last tile has
read that one's registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from cs336_systems.attention.hopper_ring import fetch, make_ring, release, send, tile_of, wait_for
from cs336_systems.attention.triton_tiles import LN_2

ROWS = gl.constexpr(64)  # of queries a consumer: wgmma's smallest tile, and all that its registers hold


@gluon.jit
def owned_queries(heads, n_queries, n_keys, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, IS_CAUSAL: gl.constexpr):
    """What a program owns, in the order of `flash_forward_kernel`'s: batch, head and first query; and of its tiles of
    keys how many there are, and how many of the first of those are visible to all of its queries."""
    n_blocks = gl.cdiv(n_queries, BLOCK_M)
    start_m = (n_blocks - 1 - gl.program_id(0) % n_blocks) * BLOCK_M
    batch_head = gl.program_id(0) // n_blocks
    end = n_keys
    n_full = n_keys // BLOCK_N
    if IS_CAUSAL:
        end = gl.minimum(n_keys, start_m + BLOCK_M)
        n_full = gl.minimum(n_keys, start_m + 1) // BLOCK_N
    return batch_head // heads, batch_head % heads, start_m, gl.cdiv(end, BLOCK_N), n_full


@gluon.jit
def _produce(q_desc, k_desc, v_desc, q_ring, k_ring, v_ring, batch, head, kv_head, start_m, n_tiles):
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[2]
    N_CONSUMERS: gl.constexpr = q_ring[0].shape[0]
    for consumer in gl.static_range(N_CONSUMERS):
        fetch(q_ring, consumer, q_desc, batch, head, start_m + consumer * ROWS)
    for i in range(n_tiles):
        start_n = (n_tiles - 1 - i) * BLOCK_N
        fetch(k_ring, i, k_desc, batch, kv_head, start_n)
        fetch(v_ring, i, v_desc, batch, kv_head, start_n)


@gluon.jit
def visible(
    rows, start_n, n_keys, BLOCK_N: gl.constexpr, IS_CAUSAL: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """Which of the keys start_n … each row attends to."""
    keys = start_n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
    is_visible = (keys < n_keys)[None, :]
    if IS_CAUSAL:
        is_visible = is_visible & (keys[None, :] <= rows[:, None])
    return is_visible


@gluon.jit
def _softmax(s, row_max, row_sum, scale_log2, rows, start_n, n_keys, MASKED: gl.constexpr, IS_CAUSAL: gl.constexpr):
    """One step of the online softmax, as `triton_tiles.online_softmax_update`. Tiles come from the last keys down, so
    that the masked ones are done first, and a row may see none of a tile's keys: its maximum is still -inf then.

    Four lanes hold a row. Its maximum is wanted now, and they exchange it; of its sum each keeps what its own columns
    add up to, one in eight columns in each of `row_sum`'s (ROWS, 8), until the end."""
    LAYOUT: gl.constexpr = s.type.layout
    if MASKED:
        s = gl.where(visible(rows, start_n, n_keys, s.shape[1], IS_CAUSAL, LAYOUT), s, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(s, 1) * scale_log2)
    shift = new_max
    if MASKED:
        shift = gl.where(new_max == float("-inf"), 0.0, new_max)
    p = gl.exp2(s * scale_log2 - shift[:, None])
    correction = gl.exp2(row_max - shift)
    SUM_LAYOUT: gl.constexpr = row_sum.type.layout
    sums = gl.sum(p.reshape([ROWS, p.shape[1] // 8, 8]), 1)
    row_sum = row_sum * gl.convert_layout(correction, gl.SliceLayout(1, SUM_LAYOUT))[:, None]
    row_sum += gl.convert_layout(sums, SUM_LAYOUT, assert_trivial=True)
    return p, new_max, row_sum, correction


@gluon.jit
def _step(
    i, acc, p, row_max, row_sum, q, k_ring, v_ring, rows, n_tiles, n_keys, scale_log2,
    MASKED: gl.constexpr, IS_CAUSAL: gl.constexpr, S_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr,
    O_LAYOUT: gl.constexpr, ROUNDS_LATE: gl.constexpr,
):  # fmt: skip
    """S and the softmax of tile i, and P V of tile i - 1, which `p` belongs to. Tile i of K has arrived."""
    k = tile_of(k_ring, i)
    BLOCK_N: gl.constexpr = k.shape[0]
    s = gl.zeros((ROWS, BLOCK_N), gl.float32, layout=S_LAYOUT)
    s = warpgroup_mma(q, k.permute((1, 0)), s, use_acc=False, is_async=True)
    wait_for(v_ring, i - 1, True)
    acc = warpgroup_mma(p, tile_of(v_ring, i - 1), acc, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s,))
    release(k_ring, i)
    start_n = (n_tiles - 1 - i) * BLOCK_N
    next_p, row_max, row_sum, correction = _softmax(
        s, row_max, row_sum, scale_log2, rows, start_n, n_keys, MASKED, IS_CAUSAL
    )
    if not ROUNDS_LATE:
        next_p = gl.convert_layout(next_p.to(p.dtype), P_LAYOUT)
    # Waiting for the next keys here rather than where they are used: ptxas moves arithmetic behind the wait for P V,
    # and the overlap is gone, but never across the branch of an mbarrier's wait.
    wait_for(k_ring, i + 1, i + 1 < n_tiles)
    acc, p, next_p, correction = warpgroup_mma_wait(0, deps=(acc, p, next_p, correction))
    release(v_ring, i - 1)
    if ROUNDS_LATE:
        # The wait, for nothing, has the loop carry P as it is, two values in a register: they would be taken apart.
        next_p = warpgroup_mma_wait(0, deps=(gl.convert_layout(next_p.to(p.dtype), P_LAYOUT),))
    acc = acc * gl.convert_layout(correction, gl.SliceLayout(1, O_LAYOUT))[:, None]
    return acc, next_p, row_max, row_sum


@gluon.jit
def _consume(for_consumers, CONSUMER: gl.constexpr, IS_CAUSAL: gl.constexpr):
    (
        o_desc, lse_ptr, q_ring, k_ring, v_ring, batch, head, heads, start_m, n_tiles, n_masked, n_queries, n_keys,
        scale_log2,
    ) = for_consumers  # fmt: skip
    BLOCK_N: gl.constexpr = k_ring[0].shape[1]
    BLOCK_D: gl.constexpr = k_ring[0].shape[2]
    dtype: gl.constexpr = k_ring[0].dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)  # S's registers, read as wgmma's left operand
    ROUNDS_LATE: gl.constexpr = q_ring[0].shape[0] == 3  # consumers, which have no registers for two tiles of P
    rows = start_m + CONSUMER * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
    row_max = gl.full((ROWS,), float("-inf"), gl.float32, layout=gl.SliceLayout(1, S_LAYOUT))
    SUM_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    row_sum = gl.zeros((ROWS, 8), gl.float32, layout=SUM_LAYOUT)
    acc = gl.zeros((ROWS, BLOCK_D), gl.float32, layout=O_LAYOUT)

    wait_for(q_ring, CONSUMER, True)
    q = tile_of(q_ring, CONSUMER)
    wait_for(k_ring, 0, True)
    s = gl.zeros((ROWS, BLOCK_N), gl.float32, layout=S_LAYOUT)
    s = warpgroup_mma(q, tile_of(k_ring, 0).permute((1, 0)), s, use_acc=False)
    release(k_ring, 0)
    p, row_max, row_sum, _ = _softmax(
        s, row_max, row_sum, scale_log2, rows, (n_tiles - 1) * BLOCK_N, n_keys, True, IS_CAUSAL
    )
    p = gl.convert_layout(p.to(dtype), P_LAYOUT)
    wait_for(k_ring, 1, n_tiles > 1)
    for i in range(1, n_masked):
        acc, p, row_max, row_sum = _step(
            i, acc, p, row_max, row_sum, q, k_ring, v_ring, rows, n_tiles, n_keys, scale_log2,
            True, IS_CAUSAL, S_LAYOUT, P_LAYOUT, O_LAYOUT, ROUNDS_LATE,
        )  # fmt: skip
    for i in range(n_masked, n_tiles):
        acc, p, row_max, row_sum = _step(
            i, acc, p, row_max, row_sum, q, k_ring, v_ring, rows, n_tiles, n_keys, scale_log2,
            False, IS_CAUSAL, S_LAYOUT, P_LAYOUT, O_LAYOUT, ROUNDS_LATE,
        )  # fmt: skip
    wait_for(v_ring, n_tiles - 1, True)
    acc = warpgroup_mma(p, tile_of(v_ring, n_tiles - 1), acc)

    row_sum = gl.convert_layout(gl.sum(row_sum, 1), gl.SliceLayout(1, S_LAYOUT))
    o = acc * gl.convert_layout(1.0 / row_sum, gl.SliceLayout(1, O_LAYOUT))[:, None]
    send(o_desc, batch, head, start_m + CONSUMER * ROWS, o.to(dtype), q)  # the queries' tile has been used
    lse_ptr += (batch * heads + head).to(gl.int64) * n_queries
    gl.store(lse_ptr + rows, (row_max + gl.log2(row_sum)) * LN_2, mask=rows < n_queries)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["batch_size", "heads", "n_queries", "n_keys"])
def hopper_forward_kernel(
    q_desc,  # (batch, heads, n_queries, head_dim), tiles of ROWS
    k_desc,  # (batch, heads // GROUP, n_keys, head_dim), tiles of BLOCK_N
    v_desc,  # (batch, heads // GROUP, n_keys, head_dim), tiles of BLOCK_N
    o_desc,  # (batch, heads, n_queries, head_dim), tiles of ROWS
    lse_ptr,  # (batch, heads, n_queries) float32, contiguous
    batch_size,
    heads,
    n_queries,
    n_keys,
    scale_log2,
    GROUP: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    N_CONSUMERS: gl.constexpr,
    DEPTH: gl.constexpr,  # of the rings of K and V
):
    """One program computes 64 · N_CONSUMERS rows of o and lse of one (batch, head)."""
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[2]
    BLOCK_D: gl.constexpr = k_desc.block_type.shape[3]
    batch, head, start_m, n_tiles, n_full = owned_queries(
        heads, n_queries, n_keys, ROWS * N_CONSUMERS, BLOCK_N, IS_CAUSAL
    )
    n_masked = gl.maximum(n_tiles - n_full, 1)

    q_ring = make_ring(q_desc.dtype, N_CONSUMERS, ROWS, BLOCK_D, 1)
    k_ring = make_ring(q_desc.dtype, DEPTH, BLOCK_N, BLOCK_D, N_CONSUMERS)
    v_ring = make_ring(q_desc.dtype, DEPTH, BLOCK_N, BLOCK_D, N_CONSUMERS)
    fence_async_shared()
    for_producer = (
        q_desc, k_desc, v_desc, q_ring, k_ring, v_ring, batch, head, head // GROUP, start_m, n_tiles,
    )  # fmt: skip
    for_consumers = (
        o_desc, lse_ptr, q_ring, k_ring, v_ring, batch, head, heads, start_m, n_tiles, n_masked, n_queries, n_keys,
        scale_log2,
    )  # fmt: skip
    if N_CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (for_consumers, 0, IS_CAUSAL)),
                (_consume, (for_consumers, 1, IS_CAUSAL)),
                (_produce, for_producer),
            ],
            worker_num_warps=[4, 1],
            worker_num_regs=[240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (for_consumers, 0, IS_CAUSAL)),
                (_consume, (for_consumers, 1, IS_CAUSAL)),
                (_consume, (for_consumers, 2, IS_CAUSAL)),
                (_produce, for_producer),
            ],
            worker_num_warps=[4, 4, 1],
            worker_num_regs=[160, 160, 24],
        )
