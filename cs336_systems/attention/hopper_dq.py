"""The dQ pass of FlashAttention-2's backward for Hopper, in Gluon: dQ = scale · dS K, dS = P ∘ (dO Vᵀ - D).

Built like `hopper_forward.py`: one warp fetches, two warp groups own 64 queries each. All three products of a tile need
the one before, so a consumer waits for its own and the other's keep the tensor cores busy:

    consumer 0    S₀ dP₀ │dS₀│ dQ₀ │ S₁ dP₁ │dS₁│ dQ₁ │ …
    consumer 1             S₀ dP₀ │dS₀│ dQ₀ │ S₁ dP₁ │dS₁│ …

dS goes from the registers of S into wgmma's left operand, so that nothing but K, V, Q and dO passes through shared
memory. (Queueing the next S behind dQ would shorten the waits, but ptxas then takes the asynchronous products apart:
it sees the registers of dS in use across the loop's edge. Nor does it help to keep the exponentials before the wait for
dP with a branch, as the forward pass does: the other consumer's products cover them, and the whole backward pass took
2.7% longer, 2.97 ms against 2.90 in alternation, at 8 heads of 128 and length 16,384.) dK and dV stay with
`flash_backward_kernel`: this scheme for them measured no faster than Triton's own pipelining of their four products.
Where one pass for all three is faster (`hopper_plan.py`), that takes the place of both.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from cs336_systems.attention.hopper_forward import ROWS, owned_queries, visible
from cs336_systems.attention.hopper_ring import fetch, make_ring, release, send, tile_of, wait_for

N_CONSUMERS = gl.constexpr(2)


@gluon.jit
def _produce(q_desc, do_desc, k_desc, v_desc, q_ring, do_ring, k_ring, v_ring, batch, head, kv_head, start_m, n_tiles):
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[2]
    for consumer in gl.static_range(N_CONSUMERS):
        fetch(q_ring, consumer, q_desc, batch, head, start_m + consumer * ROWS)
        fetch(do_ring, consumer, do_desc, batch, head, start_m + consumer * ROWS)
    for i in range(n_tiles):
        start_n = (n_tiles - 1 - i) * BLOCK_N
        fetch(k_ring, i, k_desc, batch, kv_head, start_n)
        fetch(v_ring, i, v_desc, batch, kv_head, start_n)


@gluon.jit
def _step(
    i, dq, q, do, k_ring, v_ring, lse, delta, rows, n_tiles, n_keys, scale_log2,
    MASKED: gl.constexpr, IS_CAUSAL: gl.constexpr, S_LAYOUT: gl.constexpr, DS_LAYOUT: gl.constexpr,
):  # fmt: skip
    """What tile i of K and V adds to dQ."""
    k = tile_of(k_ring, i)
    BLOCK_N: gl.constexpr = k.shape[0]
    zero = gl.zeros((ROWS, BLOCK_N), gl.float32, layout=S_LAYOUT)
    wait_for(k_ring, i, True)
    s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    wait_for(v_ring, i, True)
    dp = warpgroup_mma(do, tile_of(v_ring, i).permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s,))
    p = gl.exp2(s * scale_log2 - lse[:, None])
    if MASKED:
        start_n = (n_tiles - 1 - i) * BLOCK_N
        p = gl.where(visible(rows, start_n, n_keys, BLOCK_N, IS_CAUSAL, S_LAYOUT), p, 0.0)
    dp, p = warpgroup_mma_wait(0, deps=(dp, p))
    release(v_ring, i)
    ds = gl.convert_layout((p * (dp - delta[:, None])).to(k.dtype), DS_LAYOUT)
    dq = warpgroup_mma(ds, k, dq, is_async=True)
    dq, _ = warpgroup_mma_wait(0, deps=(dq, ds))
    release(k_ring, i)
    return dq


@gluon.jit
def _consume(
    dq_desc, rows_ptr, q_ring, do_ring, k_ring, v_ring, batch, head, batch_size, heads, start_m, n_tiles, n_masked,
    n_keys, n_rows, scale, scale_log2, CONSUMER: gl.constexpr, IS_CAUSAL: gl.constexpr,
):  # fmt: skip
    BLOCK_N: gl.constexpr = k_ring[0].shape[1]
    BLOCK_D: gl.constexpr = k_ring[0].shape[2]
    dtype: gl.constexpr = k_ring[0].dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    DS_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, DQ_LAYOUT, 2)
    rows = start_m + CONSUMER * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
    rows_ptr += (batch * heads + head).to(gl.int64) * n_rows
    lse = gl.load(rows_ptr + rows)
    delta = gl.load(rows_ptr + (batch_size * heads).to(gl.int64) * n_rows + rows)
    dq = gl.zeros((ROWS, BLOCK_D), gl.float32, layout=DQ_LAYOUT)

    wait_for(q_ring, CONSUMER, True)
    q = tile_of(q_ring, CONSUMER)
    wait_for(do_ring, CONSUMER, True)
    do = tile_of(do_ring, CONSUMER)
    for i in range(n_masked):
        dq = _step(
            i, dq, q, do, k_ring, v_ring, lse, delta, rows, n_tiles, n_keys, scale_log2,
            True, IS_CAUSAL, S_LAYOUT, DS_LAYOUT,
        )  # fmt: skip
    for i in range(n_masked, n_tiles):
        dq = _step(
            i, dq, q, do, k_ring, v_ring, lse, delta, rows, n_tiles, n_keys, scale_log2,
            False, IS_CAUSAL, S_LAYOUT, DS_LAYOUT,
        )  # fmt: skip

    send(dq_desc, batch, head, start_m + CONSUMER * ROWS, (dq * scale).to(dtype), q)  # their tile has been used
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["batch_size", "heads", "n_queries", "n_keys", "n_rows"])
def hopper_dq_kernel(
    q_desc,  # (batch, heads, n_queries, head_dim), tiles of ROWS
    do_desc,  # (batch, heads, n_queries, head_dim), tiles of ROWS
    k_desc,  # (batch, heads // GROUP, n_keys, head_dim), tiles of BLOCK_N
    v_desc,  # (batch, heads // GROUP, n_keys, head_dim), tiles of BLOCK_N
    dq_desc,  # (batch, heads, n_queries, head_dim), tiles of ROWS
    rows_ptr,  # `flash_preprocess_kernel`'s, (2, batch·heads, n_rows) float32: lse in units of log2, then D
    batch_size,
    heads,
    n_queries,
    n_keys,
    n_rows,  # n_queries padded to a multiple of 128; a padded row has lse = inf, and so P = 0
    scale,
    scale_log2,
    GROUP: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    DEPTH: gl.constexpr,  # of the rings of K and V
):
    """One program computes 128 rows of dQ of one (batch, head)."""
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[2]
    BLOCK_D: gl.constexpr = k_desc.block_type.shape[3]
    batch, head, start_m, n_tiles, n_full = owned_queries(
        heads, n_queries, n_keys, ROWS * N_CONSUMERS, BLOCK_N, IS_CAUSAL
    )
    kv_head = head // GROUP
    n_masked = n_tiles - n_full

    q_ring = make_ring(q_desc.dtype, N_CONSUMERS, ROWS, BLOCK_D, 1)
    do_ring = make_ring(q_desc.dtype, N_CONSUMERS, ROWS, BLOCK_D, 1)
    k_ring = make_ring(q_desc.dtype, DEPTH, BLOCK_N, BLOCK_D, N_CONSUMERS)
    v_ring = make_ring(q_desc.dtype, DEPTH, BLOCK_N, BLOCK_D, N_CONSUMERS)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (dq_desc, rows_ptr, q_ring, do_ring, k_ring, v_ring, batch, head, batch_size, heads, start_m,
                        n_tiles, n_masked, n_keys, n_rows, scale, scale_log2, 0, IS_CAUSAL)),
            (_consume, (dq_desc, rows_ptr, q_ring, do_ring, k_ring, v_ring, batch, head, batch_size, heads, start_m,
                        n_tiles, n_masked, n_keys, n_rows, scale, scale_log2, 1, IS_CAUSAL)),
            (_produce, (q_desc, do_desc, k_desc, v_desc, q_ring, do_ring, k_ring, v_ring, batch, head, kv_head,
                        start_m, n_tiles)),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[240, 24],
    )  # fmt: skip
