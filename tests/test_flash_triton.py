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

pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")

from cs336_systems.attention.flash_triton import FlashAttentionTriton, flash_backward, flash_forward
from tests.attention_helpers import IGNORE_INTERPRETER
from tests.triton_helpers import DEVICE, DTYPES, ON_GPU, TOLERANCE, check, draw, poisoned_like, reference, run_public

pytestmark = IGNORE_INTERPRETER


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
