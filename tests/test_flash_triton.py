"""The Triton attention kernels against float64 arithmetic: through Triton's interpreter on a CPU, compiled on a GPU."""

import math
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")

from cs336_systems.attention import triton_launch, triton_tuning
from cs336_systems.attention.flash_triton import FlashAttentionTriton, flash_backward, flash_forward
from cs336_systems.attention.triton_plan import plan_backward, plan_forward
from cs336_systems.attention.triton_tuning import KernelConfig

# NumPy's, about how the interpreter reads a loop's bounds.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
NO_BFLOAT16 = pytest.mark.skipif(not ON_GPU, reason="Triton 3.6's interpreter multiplies bfloat16's raw bits in tl.dot")
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=NO_BFLOAT16)]
# Largest error allowed, as a share of the reference's largest element: a few roundings of P and dS to the dtype.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def draw(batch=1, heads=2, kv_heads=None, n_queries=40, n_keys=None, head_dim=16, dtype=torch.float32, seed=0):
    """q, k, v, do."""
    generator = torch.Generator().manual_seed(seed)
    n_keys, kv_heads = n_queries if n_keys is None else n_keys, kv_heads or heads
    shapes = [(heads, n_queries), (kv_heads, n_keys), (kv_heads, n_keys), (heads, n_queries)]
    return [torch.randn(batch, *s, head_dim, generator=generator).to(DEVICE, dtype) for s in shapes]


def reference(q, k, v, do, is_causal, scale, keep_scale=None):
    """o, lse, dq, dk, dv in float64; keep_scale multiplies the probabilities (dropout's mask over 1 - p)."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).mT * scale
    if is_causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~visible, -math.inf)
    p = scores.softmax(-1)
    if keep_scale is not None:
        p = p * keep_scale
    o = p @ v.repeat_interleave(group, 1)
    return (o.detach(), scores.logsumexp(-1).detach(), *torch.autograd.grad(o, (q, k, v), do.double()))


def poisoned_like(x: Tensor) -> Tensor:
    return torch.full_like(x, math.nan)


def run_kernels(q, k, v, do, is_causal, scale, config=None, passes=None, dropout=(0.0, 0, 0), n_chunks=1):
    """o, lse, dq, dk, dv with the kernels' configurations given, into buffers full of NaN."""
    problem = triton_launch.make_problem(q, k, is_causal, scale, dropout[0])
    o, lse = poisoned_like(q), torch.full(q.shape[:3], math.nan, device=q.device)
    strides = [x.stride() for x in (q, k, v, o)]
    triton_launch.run(plan_forward(problem, strides, True, config, n_chunks), (q, k, v, o, lse), *dropout[1:])
    tensors = (do, q, k, v, o, lse, *(torch.full(x.shape, math.nan, dtype=x.dtype, device=x.device) for x in (q, k, v)))
    strides = [x.stride() for x in tensors if x is not lse]
    triton_launch.run(plan_backward(problem, strides, True, passes=passes), tensors, *dropout[1:])
    return o, lse, *tensors[-3:]


def run_public(q, k, v, do, is_causal, scale, *dropout):
    o, lse = flash_forward(q, k, v, is_causal, scale, *dropout)
    return o, lse, *flash_backward(do, q, k, v, o, lse, is_causal, scale, *dropout)


def check(actual, expected, dtype, tolerance=None):
    for name, x, y in zip(("o", "lse", "dq", "dk", "dv"), actual, expected, strict=True):
        assert x.shape == y.shape, name
        assert x.dtype == (torch.float32 if name == "lse" else dtype), name
        assert torch.isfinite(x).all(), f"{name} is not finite everywhere"
        # Gradients are sums whose terms cancel; what the terms round by does not shrink with the sum.
        largest = max(1.0, y.abs().max().item())
        error = (x.double() - y).abs().max().item() / largest
        allowed = tolerance or TOLERANCE[dtype if name != "lse" else torch.float32]
        assert error <= allowed, f"{name}: {error:.2e} of the largest element, {allowed:.2e} allowed"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("n_queries", "n_keys", "head_dim"), [(1, 1, 1), (40, 40, 16), (33, 70, 24), (70, 33, 80), (17, 64, 64)]
)
def test_matches_float64(dtype, is_causal, n_queries, n_keys, head_dim):
    inputs = draw(n_queries=n_queries, n_keys=n_keys, head_dim=head_dim, dtype=dtype)
    scale = head_dim**-0.5
    check(run_public(*inputs, is_causal, scale), reference(*inputs, is_causal, scale), dtype)


@pytest.mark.parametrize("head_dim", [128, 200, 256])
def test_wide_heads_match_float64(head_dim):
    inputs = draw(heads=1, n_queries=20, n_keys=37, head_dim=head_dim)
    check(run_public(*inputs, True, 0.1), reference(*inputs, True, 0.1), torch.float32)


def _config(own, step, **options):
    return KernelConfig(block_own=own, block_step=step, num_warps=4, num_stages=2, **options)


PLANS = {
    "tall tiles": [("dkdv", _config(32, 16)), ("dq", _config(32, 16))],
    "wide tiles": [("dkdv", _config(16, 32)), ("dq", _config(16, 32))],
    "descriptors": [("dkdv", _config(32, 16, use_tma=True)), ("dq", _config(16, 16, use_tma=True))],
    "dK and dV apart": [("dv", _config(32, 16)), ("dk", _config(16, 32)), ("dq", _config(32, 16))],
    "one launch": [("fused", _config(16, 32))],  # D inline
    "one launch, descriptors": [("fused", _config(32, 32, use_tma=True))],
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    ("is_causal", "n_queries", "n_keys"),
    [(False, 40, 50), (True, 40, 50), (True, 70, 33), pytest.param(True, 64, 64, marks=pytest.mark.slow)],
)
def test_every_backward_plan_matches_float64(plan, is_causal, n_queries, n_keys):
    inputs = draw(heads=2, kv_heads=1, n_queries=n_queries, n_keys=n_keys)
    config = _config(32, 16, use_tma="descriptors" in plan)
    actual = run_kernels(*inputs, is_causal, 0.25, config, PLANS[plan])
    check(actual, reference(*inputs, is_causal, 0.25), torch.float32)


@pytest.mark.parametrize("dropout", [(0.0, 0, 0), (0.3, 1234, 7)])
@pytest.mark.parametrize(("n_queries", "n_keys"), [(17, 33), (40, 20)])
def test_d_computed_where_it_is_used(monkeypatch, n_queries, n_keys, dropout):
    """A short backward pass is one launch, and gives what the preprocess and another launch give."""
    inputs = draw(heads=2, kv_heads=1, n_queries=n_queries, n_keys=n_keys, head_dim=24)

    def run(n_launches):
        problem = triton_launch.make_problem(*inputs[:2], True, 0.25, dropout[0])
        strides = [x.stride() for x in (inputs[3], *inputs[:3], inputs[0], *inputs[:3])]
        plan = plan_backward(problem, strides, True, passes=PLANS["one launch"])
        assert len(plan.steps) == n_launches
        assert (plan.scratch_bytes > 0) == (n_launches > 1)
        return run_kernels(*inputs, True, 0.25, passes=PLANS["one launch"], dropout=dropout)

    inline = run(1)
    monkeypatch.setattr(triton_tuning, "_INLINE_D_QUERIES", n_queries - 1)
    for x, y in zip(inline, run(2), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("is_causal", "n_queries", "n_keys"), [(False, 20, 70), (True, 70, 70), (True, 70, 20)])
@pytest.mark.parametrize(
    ("config", "n_chunks"), [(_config(16, 16), 2), (_config(32, 16), 3), (_config(16, 32, use_tma=True), 100)]
)
def test_keys_cut_into_chunks(config, is_causal, n_queries, n_keys, n_chunks):
    inputs = draw(heads=1, n_queries=n_queries, n_keys=n_keys)
    actual = run_kernels(*inputs, is_causal, 0.25, config, PLANS["one launch"], n_chunks=n_chunks)
    check(actual, reference(*inputs, is_causal, 0.25), torch.float32)


@pytest.mark.parametrize(
    ("n_keys", "n_blocks", "n_chunks"),
    [(1023, 8, 1), (1024, 8, 4), (2048, 33, 4), (2048, 34, 1), (4096, 131, 4), (4096, 132, 1)],
)
def test_keys_are_cut_where_the_card_would_idle(n_keys, n_blocks, n_chunks):
    q = torch.empty(1, 1, n_keys, 64, dtype=torch.float16)
    card = triton_tuning.Gpu("a card", 90, 132, 227 * 1024)
    problem = triton_launch.make_problem(q, q, True, 0.125, gpu=card)
    chunk_keys = triton_tuning.chunk_size(problem, _config(64, 64), n_blocks)
    assert -(-n_keys // chunk_keys) == n_chunks


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 1), (3, 3)])
def test_grouped_heads_match_float64(heads, kv_heads):
    inputs = draw(batch=2, heads=heads, kv_heads=kv_heads, n_queries=20, n_keys=24)
    check(run_public(*inputs, True, 0.3), reference(*inputs, True, 0.3), torch.float32)


@pytest.mark.parametrize(
    "layout", ["length first", "last dimension strided", "transposed", "every other row", "offset"]
)
def test_any_strides(layout):
    inputs = draw(batch=2, n_queries=33, n_keys=33)
    expected = reference(*inputs, True, 0.25)

    def laid_out(x):
        if layout == "length first":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "last dimension strided":
            return torch.stack([x, poisoned_like(x)], -1)[..., 0]
        if layout == "transposed":
            return x.mT.contiguous().mT
        if layout == "every other row":
            return torch.stack([x, poisoned_like(x)], 3).flatten(2, 3)[:, :, ::2]
        return torch.cat([x.new_full((1,), math.nan), x.flatten()])[1:].view(x.shape)

    check(run_public(*map(laid_out, inputs), True, 0.25), expected, torch.float32)


def test_expanded_gradient_and_shared_inputs():
    """o.sum().backward() hands over a gradient of stride 0; keys may be values; one key may serve every batch."""
    q, k, _, _ = draw(batch=2, n_queries=33, n_keys=20)
    do = q.new_ones(()).expand(q.shape)
    k = k[:1].expand(2, -1, -1, -1)
    check(run_public(q, k, k, do, True, 0.25), reference(q, k, k, do, True, 0.25), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_extreme_scores(dtype, is_causal):
    """Scores of ±1e4 and rows that are all equal: softmax is one-hot or uniform, and nothing overflows."""
    q, k, v, do = draw(heads=1, n_queries=40, n_keys=40, dtype=dtype)
    k = k.sign()
    q = torch.cat([k[:, :, :20] * 25, torch.zeros_like(q[:, :, 20:])], 2)  # scores up to 25·16·25 = 1e4; then all 0
    expected = reference(q, k, v, do, is_causal, 25.0)
    assert expected[1].max() >= 9e3
    # A float32 lse near 1e4 is exact to 5e-4, and so is P = exp(S - lse); dQ and dK multiply what it is off by.
    for name, actual, x in zip(
        ("o", "lse", "dq", "dk", "dv"), run_public(q, k, v, do, is_causal, 25.0), expected, strict=True
    ):
        error = (actual.double() - x).abs().max().item() / max(1.0, x.abs().max().item())
        allowed = 2e-3 + 20 * TOLERANCE[dtype] if name in ("dq", "dk", "dv") else 2 * TOLERANCE[dtype]
        assert error <= allowed, f"{name}: {error:.2e}"


# On a GPU float32 is multiplied in parts anyway; the interpreter multiplies it as it is, unless told so.
@pytest.fixture
def in_parts(monkeypatch):
    monkeypatch.setattr(triton_launch, "_dot_precision", lambda *_: "fp16x3")
    monkeypatch.setattr(triton_launch, "_plans", {})


SHAPES_IN_PARTS = (
    {"n_queries": 40, "n_keys": 50},
    {"heads": 2, "kv_heads": 1, "n_queries": 40, "n_keys": 33, "head_dim": 24},
    {"batch": 2, "n_queries": 1, "n_keys": 9},
)
SIZES_IN_PARTS = ((1e-9, 1e3), (1e20, 1e-20), (1.0, 0.0))


# Each shape once and each size once; the slow checks, and a GPU, run all pairs.
@pytest.mark.parametrize(
    ("shape", "size_of_v", "size_of_do"),
    [
        pytest.param(shape, *sizes, marks=pytest.mark.slow if i != j and not ON_GPU else ())
        for i, shape in enumerate(SHAPES_IN_PARTS)
        for j, sizes in enumerate(SIZES_IN_PARTS)
    ],
)
def test_float32_in_parts_at_any_magnitude(in_parts, shape, size_of_v, size_of_do):
    q, k, v, do = draw(**shape)
    v, do = v * size_of_v, do * size_of_do
    actual, expected = run_public(q, k, v, do, True, 0.25), reference(q, k, v, do, True, 0.25)
    # What the largest element of each is made of: gradients of q and k are sums of products of v and do.
    sizes = (size_of_v, 1.0, size_of_v * size_of_do, size_of_v * size_of_do, size_of_do)
    for name, x, y, size in zip(("o", "lse", "dq", "dk", "dv"), actual, expected, sizes, strict=True):
        error = (x.double() - y).abs().max().item()
        assert error <= 5e-6 * size * max(1.0, (y / max(size, 1e-300)).abs().max().item()), f"{name}: {error:.2e}"


def test_float32_in_parts_with_configurations_and_dropout(in_parts):
    dropout = (0.3, 1234, 7)
    q, k, v, do = draw(heads=2, kv_heads=1, n_queries=40, n_keys=32, head_dim=32)
    identity = torch.eye(32, device=DEVICE).expand(v.shape)
    keep_scale = (flash_forward(q, k, identity, False, 0.1, *dropout)[0] != 0).double() / 0.7
    expected = reference(q, k, v, do, True, 0.1, keep_scale)
    for plan in ("tall tiles", "descriptors", "dK and dV apart", "one launch, descriptors"):
        config = _config(32, 16, use_tma="descriptors" in plan)
        actual = run_kernels(q, k, v, do, True, 0.1, config, PLANS[plan], dropout)
        check(actual, expected, torch.float32, 5e-6)
    check(run_kernels(q, k, v, do, True, 0.1, _config(16, 16), PLANS["wide tiles"], n_chunks=2),
          reference(q, k, v, do, True, 0.1), torch.float32, 5e-6)  # fmt: skip


def test_float32_in_parts_measures_long_heads_block_by_block(in_parts, monkeypatch):
    """More tiles of rows than blocks: each block of a head is measured in several steps, the last one short."""
    from cs336_systems.attention import triton_plan

    monkeypatch.setattr(triton_plan, "MAX_BLOCKS", 2)
    q, k, v, do = draw(heads=1, n_queries=700, n_keys=17, head_dim=16)
    q[:, :, 690] *= 1e4
    o, lse = flash_forward(q, k, v, False, 1e-3)
    expected = reference(q, k, v, do, False, 1e-3)
    assert (o.double() - expected[0]).abs().max() < 1e-5
    assert (lse.double() - expected[1]).abs().max() < 1e-4


def test_float32_in_parts_keeps_what_is_not_finite_to_its_row(in_parts):
    q, k, v, do = draw(heads=1, n_queries=200, n_keys=200)
    q[:, :, 3], v[:, :, 199] = math.nan, math.inf
    o, _ = flash_forward(q, k, v, True, 0.25)
    seen = torch.ones(200, dtype=torch.bool, device=DEVICE)
    seen[[3, 199]] = False
    expected = reference(q[:, :, seen], k[:, :, seen], v[:, :, seen], do[:, :, seen], True, 0.25)[0]
    rows = torch.arange(200, device=DEVICE) < 3
    assert (o[:, :, rows].double() - expected[:, :, :3]).abs().max() < 1e-5
    # Keys of one tile are multiplied together, and 0·inf is NaN: those rows are, here and in any tiled kernel.
    assert torch.isnan(o[:, :, 3]).all()


def test_large_negative_scores_only():
    q, k, v, do = draw(n_queries=20, n_keys=20)
    q, k = q.abs() * 100, -k.abs() * 100
    o, lse, *grads = run_public(q, k, v, do, True, 1.0)
    expected = reference(q, k, v, do, True, 1.0)
    assert all(torch.isfinite(x).all() for x in (o, lse, *grads))
    torch.testing.assert_close(lse.double(), expected[1], rtol=1e-6, atol=1e-6)


def test_no_keys_gives_zeros_and_minus_infinity():
    q, k, v, do = draw(n_queries=5, n_keys=0)
    o, lse, dq, dk, dv = run_public(q, k, v, do, False, 0.25)
    assert (o == 0).all()
    assert (dq == 0).all()
    assert (lse == -math.inf).all()
    assert dk.shape == dv.shape == k.shape


@pytest.mark.parametrize("kwargs", [{"batch": 0}, {"n_queries": 0, "n_keys": 4}])
def test_empty_inputs(kwargs):
    inputs = draw(**kwargs)
    o, lse, dq, dk, dv = run_public(*inputs, True, 0.25)
    assert o.shape == dq.shape == inputs[0].shape
    assert lse.shape == o.shape[:3]
    assert (dk == 0).all()
    assert (dv == 0).all()


@pytest.mark.parametrize("scale", [-0.4, 0.0, 3.0])
def test_any_scale(scale):
    inputs = draw(n_queries=20, n_keys=33)
    check(run_public(*inputs, True, scale), reference(*inputs, True, scale), torch.float32)


@pytest.mark.parametrize("is_causal", [False, True])
def test_every_element_is_written(monkeypatch, is_causal):
    """With NaN in all memory that torch.empty hands out, whatever the kernels leave unwritten would show."""

    def poisoned(allocate):
        def poison(*args, **kwargs):
            x = allocate(*args, **kwargs)
            return x.fill_(math.nan) if x.is_floating_point() else x

        return poison

    inputs = draw(batch=2, heads=2, kv_heads=1, n_queries=35, n_keys=21, head_dim=24)
    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    check(run_public(*inputs, is_causal, 0.2), reference(*inputs, is_causal, 0.2), torch.float32)


@pytest.mark.parametrize("plan", ["tall tiles", "dK and dV apart", "one launch"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_dropout_draws_one_mask_for_forward_and_backward(plan, is_causal):
    head_dim = n_keys = 32
    dropout = (0.3, 1234, 7)
    q, k, v, do = draw(heads=2, n_queries=40, n_keys=n_keys, head_dim=head_dim)
    # Values that are the identity matrix make o the dropped probabilities themselves.
    identity = torch.eye(n_keys, device=DEVICE).expand(v.shape)
    kept, _ = flash_forward(q, k, identity, False, 0.1, *dropout)
    keep_scale = (kept != 0).double() / (1 - dropout[0])
    rate = 1 - (kept != 0).double().mean().item()
    assert abs(rate - 0.3) < 4 * math.sqrt(0.3 * 0.7 / kept.numel())
    # Tile sizes of the two passes differ, and so do those of forward and backward: the mask must not depend on them.
    actual = run_kernels(q, k, v, do, is_causal, 0.1, _config(16, 16), PLANS[plan], dropout)
    check(actual, reference(q, k, v, do, is_causal, 0.1, keep_scale), torch.float32)


def test_dropout_depends_on_seed_offset_and_nothing_else():
    q, k, v, _ = draw(n_queries=20)
    first = flash_forward(q, k, v, False, 0.25, 0.5, 1, 0)[0]
    assert torch.equal(first, flash_forward(q, k, v, False, 0.25, 0.5, 1, 0)[0])
    assert not torch.equal(first, flash_forward(q, k, v, False, 0.25, 0.5, 2, 0)[0])
    assert not torch.equal(first, flash_forward(q, k, v, False, 0.25, 0.5, 1, 1 << 40)[0])
    assert (flash_forward(q, k, v, False, 0.25, 1.0, 1, 0)[0] == 0).all()


@pytest.mark.parametrize(
    "needs", [(True, False, False), (False, True, False), (False, False, True), (True, False, True)]
)
def test_only_the_gradients_that_are_needed(needs):
    q, k, v, do = draw(n_queries=20)
    o, lse = flash_forward(q, k, v, True, 0.25)
    every = flash_backward(do, q, k, v, o, lse, True, 0.25)
    some = flash_backward(do, q, k, v, o, lse, True, 0.25, needs=needs)
    for needed, grad, expected in zip(needs, some, every, strict=True):
        assert (grad is not None) == needed
        assert grad is None or torch.equal(grad, expected)


def test_results_are_deterministic():
    inputs = draw(batch=2 if ON_GPU else 1, heads=4 if ON_GPU else 2, kv_heads=1, n_queries=1000 if ON_GPU else 33)
    first = run_public(*inputs, True, 0.25)
    for _ in range(10 if ON_GPU else 1):
        again = run_public(*inputs, True, 0.25)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@pytest.mark.parametrize("n_dims", [3, 4])
def test_autograd_function(n_dims):
    q, k, v, do = draw(n_queries=20, n_keys=24)
    if n_dims == 3:
        q, k, v, do = (x[:, 0] for x in (q, k, v, do))
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    o = FlashAttentionTriton.apply(q, k, v, True)
    saved = [x for x in o.grad_fn.saved_tensors if x.shape == q.shape[:-1]]
    assert len(saved) == 1
    o.backward(do)
    with_heads = [x if n_dims == 4 else x.unsqueeze(1) for x in (q, k, v, do)]
    expected = reference(*with_heads, True, q.shape[-1] ** -0.5)
    if n_dims == 3:
        expected = [x.squeeze(1) for x in expected]
    check((o, saved[0], q.grad, k.grad, v.grad), expected, torch.float32)


def test_autograd_function_output_can_be_modified_in_place():
    q, k, v, _ = (x[:, 0].requires_grad_() for x in draw(n_queries=8))
    o = FlashAttentionTriton.apply(q, k, v, False)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # backward needs o: it is saved
        o.add_(1).sum().backward()


def test_double_backward_is_an_error():
    q, k, v, do = (x.requires_grad_() for x in draw(n_queries=8))
    (dq,) = torch.autograd.grad(FlashAttentionTriton.apply(q, k, v, False), q, do, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


def test_frozen_inputs_get_no_gradient():
    q, k, v, do = draw(n_queries=8)
    q.requires_grad_()
    FlashAttentionTriton.apply(q, k, v, False).backward(do)
    assert q.grad is not None
    assert k.grad is None


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float64, 16), (torch.float32, 257)])
def test_what_the_kernels_cannot_take(dtype, head_dim):
    q = torch.zeros(1, 1, 4, head_dim, dtype=dtype, device=DEVICE)
    with pytest.raises(ValueError, match=str(head_dim)):
        flash_forward(q, q, q, False, 1.0)


def test_wrong_number_of_dimensions():
    q = torch.zeros(2, 3, device=DEVICE)
    with pytest.raises(ValueError, match=r"\(2, 3\)"):
        FlashAttentionTriton.apply(q, q, q, False)


def _in_fresh_python(code: str, **environment: str) -> str:
    environment = {**os.environ, **environment}
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True, check=True
    )
    return run.stdout


def test_cpu_tensors_without_the_interpreter():
    output = _in_fresh_python(
        """
        import sys, torch
        from cs336_systems.attention.flash_triton import flash_forward
        assert "triton" not in sys.modules
        q = torch.zeros(1, 1, 4, 16)
        try:
            flash_forward(q, q, q, False, 1.0)
        except RuntimeError as error:
            print(error)
        """,
        TRITON_INTERPRET="0",
    )
    assert "CUDA device" in output
    assert "TRITON_INTERPRET=1" in output


# Every head_dim, dtype and group is another compilation: lengths and batches are what is drawn freely.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128] if ON_GPU else [pytest.param(16, marks=pytest.mark.slow), 24])
@settings(max_examples=30 if ON_GPU else 4, deadline=None, derandomize=True)
@given(
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 2),
    n_queries=st.integers(1, 300 if ON_GPU else 40),
    n_keys=st.integers(1, 300 if ON_GPU else 40),
    is_causal=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_drawn_shapes_match_float64(dtype, head_dim, batch, kv_heads, group, n_queries, n_keys, is_causal, seed):
    inputs = draw(batch, kv_heads * group, kv_heads, n_queries, n_keys, head_dim, dtype, seed)
    scale = head_dim**-0.5
    check(run_public(*inputs, is_causal, scale), reference(*inputs, is_causal, scale), dtype)
