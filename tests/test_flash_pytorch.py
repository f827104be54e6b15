"""Tiled PyTorch FlashAttention-2 against float64 arithmetic, and what it promises about memory and time."""

import math
import time

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from cs336_systems.attention.flash_pytorch import (
    FlashAttentionPyTorch,
    flash_backward_pytorch,
    flash_forward_pytorch,
)
from cs336_systems.attention.reference import attention_reference
from tests.attention_helpers import PeakMemory, largest_error, make_inputs, oracle, output_and_gradients


def run(q, k, v, do, is_causal=False, scale=None, tiles=(16, 16)):
    """o, dq, dk, dv, lse, through the autograd Function, with tiles small enough for several of them."""
    o = FlashAttentionPyTorch.apply(q, k, v, is_causal, scale, *tiles)
    lse = o.grad_fn.saved_tensors[-1]
    return o.detach(), *torch.autograd.grad(o, (q, k, v), do), lse


def with_strides(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same numbers in another layout of memory."""
    x = x.detach()
    if layout == "transposed":
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "strided":
        x = torch.stack([x, torch.full_like(x, math.nan)], dim=-1)[..., 0]
    return x.requires_grad_()


@settings(deadline=None, max_examples=60)
@example(
    batch=1, kv_heads=1, group_size=3, n_queries=68, n_keys=1, head_dim=1, is_causal=False, scale=None, tiles=(32, 8),
    layout="contiguous", dtype=torch.float32, seed=0,
)  # fmt: skip
@given(
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 2),
    group_size=st.integers(1, 3),
    n_queries=st.integers(1, 70),
    n_keys=st.integers(0, 70),
    head_dim=st.integers(1, 40),
    is_causal=st.booleans(),
    scale=st.sampled_from([None, 1.0, 0.3, -0.5]),
    tiles=st.tuples(st.sampled_from([8, 16, 32, 128]), st.sampled_from([8, 16, 32, 128])),
    layout=st.sampled_from(["contiguous", "transposed", "strided"]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]),
    seed=st.integers(0, 2**16),
)
def test_any_shape_against_float64(
    batch, kv_heads, group_size, n_queries, n_keys, head_dim, is_causal, scale, tiles, layout, dtype, seed
):
    torch.manual_seed(seed)
    shape = (batch, kv_heads * group_size, n_queries, head_dim)
    inputs = make_inputs(*shape, kv_heads=kv_heads, n_keys=n_keys, dtype=dtype)
    q, k, v = (with_strides(x, layout) for x in inputs)
    do = torch.randn(shape, dtype=torch.float64).to(dtype)

    actual = run(q, k, v, do, is_causal, scale, tiles)
    expected = oracle(q, k, v, do, is_causal, scale)
    assert [x.dtype for x in actual[:4]] == [dtype] * 4
    torch.testing.assert_close(actual[4].double(), expected[4], rtol=1e-5, atol=1e-5)
    for name, x, y in zip(("o", "dq", "dk", "dv"), actual[:4], expected[:4], strict=True):
        # All sums are float32, so o and dv in low precision are off by their own rounding alone; dq and dk also by that
        # of o in D = rowsum(o ∘ do), which does not shrink where their terms cancel. Observed in 2,500 draws, in units
        # of epsilon: 0.5 and 7.5 in low precision, 13 and 210 in float32 and float64. A dv that is a sum of hundreds of
        # terms, which cancel, is off by the roundings of sums as large as the root of their number.
        units = {("o", True): 0.6, ("dv", True): 0.6, ("o", False): 30.0, ("dv", False): 15.0}
        allowed = units.get((name, dtype.itemsize == 2), 15.0 if dtype.itemsize == 2 else 500.0)
        n_terms = n_queries * group_size if (name, dtype.itemsize == 2) == ("dv", False) else 1
        size = max(n_terms**0.5, y.abs().max().item()) if y.numel() else 1.0
        assert largest_error(x, y) <= allowed * torch.finfo(dtype).eps * size, name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_low_precision_is_no_worse_than_pytorch(dtype, is_causal):
    q, k, v = make_inputs(2, 2, 200, 32, dtype=dtype)
    do = torch.randn(2, 2, 200, 32).to(dtype)
    ours = run(q, k, v, do, is_causal, None, (64, 32))[:4]
    theirs = output_and_gradients(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=is_causal), q, k, v, do
    )
    for x, other, exact in zip(ours, theirs, oracle(q, k, v, do, is_causal)[:4], strict=True):
        assert largest_error(x, exact) <= 1.5 * largest_error(other, exact)


def test_three_dimensions_save_a_logsumexp_of_two():
    q, k, v = make_inputs(2, 40, 8, n_keys=50)
    do = torch.randn(2, 40, 8)
    *actual, lse = run(q, k, v, do, is_causal=True)
    assert lse.shape == (2, 40)
    for x, y in zip((*actual, lse), oracle(q, k, v, do, is_causal=True), strict=True):
        assert largest_error(x, y) < 1e-5


def test_gradcheck():
    q, k, v = make_inputs(1, 2, 7, 3, kv_heads=1, n_keys=6, dtype=torch.float64)
    for is_causal in (False, True):
        assert torch.autograd.gradcheck(
            lambda *x, c=is_causal: FlashAttentionPyTorch.apply(*x, c, 0.7, 4, 3), (q, k, v)
        )


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("size", [1e4, -1e4])
def test_huge_scores(is_causal, size):
    q, k, v = make_inputs(1, 1, 40, 8)
    with torch.no_grad():  # scores between -1e4 and 1e4, and in the first tile of keys only the lowest
        q.fill_(1.0)
        k.copy_(torch.linspace(-size, size, 40)[:, None] / 8)
    do = torch.randn(1, 1, 40, 8)
    # One rounding of a score or logsumexp of 1e4 in float32, 1e-3, is an error of 1e-3 in a probability.
    for x, y in zip(run(q, k, v, do, is_causal, 1.0), oracle(q, k, v, do, is_causal, 1.0), strict=True):
        assert largest_error(x, y) <= 5e-3 * max(1.0, y.abs().max().item())


def test_equal_scores_average_the_values():
    q, k, v = make_inputs(1, 2, 40, 8)
    k.data.fill_(1.0)
    o, *_, lse = run(q, k, v, torch.ones(1, 2, 40, 8))
    torch.testing.assert_close(o, v.mean(dim=2, keepdim=True).expand_as(o), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, q.sum(-1) / math.sqrt(8) + math.log(40), rtol=1e-5, atol=1e-5)


def test_a_single_key_gets_all_the_attention():
    q, k, v = make_inputs(1, 2, 40, 8, n_keys=1)
    o, dq, dk, dv, _ = run(q, k, v, torch.ones(1, 2, 40, 8), is_causal=True)
    assert torch.equal(o, v.expand_as(o))
    torch.testing.assert_close((dq, dk, dv), (0 * q, 0 * k, torch.full_like(v, 40.0)), rtol=0, atol=1e-4)


def test_scores_of_minus_infinity_in_a_whole_tile():
    q, k, v = make_inputs(1, 1, 4, 8, n_keys=40)
    with torch.no_grad():
        q.fill_(1.0)
        k[:, :, :16] = -math.inf  # the first tile of keys
    o, lse = flash_forward_pytorch(q, k, v, False, 1.0, query_tile_size=16, key_tile_size=16)
    expected, expected_lse = attention_reference(q, k[:, :, 16:], v[:, :, 16:], scale=1.0)
    torch.testing.assert_close(o, expected)
    torch.testing.assert_close(lse, expected_lse)


def test_scores_of_minus_infinity_in_a_whole_row():
    q, k, v = make_inputs(1, 1, 20, 8)
    with torch.no_grad():
        q.fill_(1e30)
        k.fill_(-1e30)  # finite, but their products are not
    o, dq, dk, dv, lse = run(q, k, v, torch.ones(1, 1, 20, 8))
    assert (lse == -math.inf).all()
    for x in (o, dq, dk, dv):
        assert (x == 0).all()


@pytest.mark.parametrize("shape", [(1, 2, 5, 8), (0, 2, 5, 8), (1, 2, 0, 8)])
def test_nothing_to_attend_or_nothing_that_attends(shape):
    q, k, v = make_inputs(*shape, n_keys=0 if shape[2] and shape[0] else 6)
    o, dq, dk, dv, lse = run(q, k, v, torch.ones(shape), is_causal=True)
    assert (o == 0).all()
    assert (lse == -math.inf).all()
    for gradient in (dq, dk, dv):
        assert (gradient == 0).all()


def test_an_expanded_gradient():
    q, k, v = make_inputs(1, 2, 40, 8)
    expected = oracle(q, k, v, torch.ones(1, 2, 40, 8), is_causal=False)
    FlashAttentionPyTorch.apply(q, k, v, False, None, 16, 16).sum().backward()  # its gradient has strides of 0
    for x, y in zip((q, k, v), expected[1:4], strict=True):
        assert largest_error(x.grad, y) < 1e-5


def test_only_wanted_gradients_are_computed():
    q, k, v = make_inputs(1, 2, 32, 8)
    with torch.no_grad():
        o, lse = flash_forward_pytorch(q, k, v, False, 0.5)
    arguments = (torch.ones_like(o), q, k, v, o, lse, False, 0.5)
    every = flash_backward_pytorch(*arguments)
    one_product = 2 * 2 * 32 * 32 * 8
    for needs, products in [((True, False, False), 3), ((False, True, False), 3), ((False, False, True), 2),
                            ((True, True, True), 5), ((False, False, False), 1)]:  # fmt: skip
        with FlopCounterMode(display=False) as counter:
            some = flash_backward_pytorch(*arguments, needs=needs)
        assert counter.get_total_flops() == products * one_product
        for x, y, needed in zip(some, every, needs, strict=True):
            assert torch.equal(x, y) if needed else x is None


def test_tiles_above_the_diagonal_are_skipped():
    q, k, v = make_inputs(1, 1, 128, 8)

    def flops(is_causal: bool) -> int:
        with FlopCounterMode(display=False) as counter:
            FlashAttentionPyTorch.apply(q, k, v, is_causal, None, 16, 16).sum().backward()
        return counter.get_total_flops()

    assert flops(is_causal=True) * 64 == flops(is_causal=False) * 36  # 8 · 9 / 2 of 8 · 8 tiles


@pytest.mark.parametrize("is_causal", [False, True])
def test_memory_grows_with_the_length_not_its_square(is_causal):
    def peak_bytes(length: int) -> int:
        q, k, v = make_inputs(1, length, 16)
        with PeakMemory() as memory:
            o = FlashAttentionPyTorch.apply(q, k, v, is_causal)
            o.backward(torch.ones_like(o))
        return memory.peak_bytes

    short, long = peak_bytes(1024), peak_bytes(4096)
    assert long < 4 * short
    assert long < 4096**2 * 4 / 8, "a fraction of one score matrix"
    q, k, v = make_inputs(1, 1024, 16)
    with PeakMemory() as memory:
        attention_reference(q, k, v, is_causal)
    assert memory.peak_bytes > 1024**2 * 4, "the plain version's matrix must be seen, or the test sees nothing"


@pytest.mark.parametrize("is_causal", [False, True])
def test_speed_beside_plain_attention(is_causal):
    """Forward and backward at length 1,024 on a CPU take at most 3 times as long as plain attention's."""
    q, k, v = make_inputs(4, 1024, 64)
    do = torch.randn(4, 1024, 64)

    def best_seconds(attention) -> float:
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            attention(q, k, v).backward(do)
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    ratios = []
    for _ in range(4):  # another process may take the cores from either of the two
        plain = best_seconds(lambda q, k, v: attention_reference(q, k, v, is_causal)[0])
        ratios.append(best_seconds(lambda q, k, v: FlashAttentionPyTorch.apply(q, k, v, is_causal)) / plain)
        if ratios[-1] <= 3:
            return
    pytest.fail(f"took {ratios} times as long as plain attention")


def dropout_mask(p: float, seed: int, offset: int, shape=(2, 3, 40), n_keys=40, tiles=(16, 16)) -> torch.Tensor:
    """Which probabilities are kept: with unit vectors for values, the output is the probabilities."""
    q = torch.zeros(*shape, 4)
    k = torch.zeros(*shape[:2], n_keys, 4)
    eye = torch.eye(n_keys).expand(*shape[:2], n_keys, n_keys)[..., :n_keys]
    k = F.pad(k, (0, n_keys - 4))
    q = F.pad(q, (0, n_keys - 4))
    o, _ = flash_forward_pytorch(q, k, eye, False, 1.0, p, seed, offset, *tiles)
    assert torch.all((o == 0) | torch.isclose(o, torch.tensor(1 / n_keys / (1 - p))))
    return o != 0


@pytest.mark.parametrize("is_causal", [False, True])
def test_dropout_uses_one_mask_in_forward_and_backward(is_causal):
    keep = dropout_mask(0.3, seed=5, offset=7)
    q, k, v = make_inputs(2, 3, 40, 8)
    do = torch.randn(2, 3, 40, 8)
    settings = (is_causal, 0.4, 0.3, 5, 7)
    o, lse = flash_forward_pytorch(q, k, v, *settings, 16, 16)
    grads = flash_backward_pytorch(do, q, k, v, o, lse, *settings, query_tile_size=16, key_tile_size=16)
    expected = oracle(q, k, v, do, is_causal, 0.4, dropout_p=0.3, keep=keep)
    for x, y in zip((o, *grads, lse), expected, strict=True):
        assert largest_error(x, y) < 1e-5


def test_dropout_masks_are_random():
    keep = dropout_mask(0.3, seed=0, offset=0)
    n = keep.numel()
    assert abs(keep.float().mean().item() - 0.7) < 4 * math.sqrt(0.21 / n)
    assert torch.equal(keep, dropout_mask(0.3, seed=0, offset=0))
    # Two independent masks agree in 0.7² + 0.3² of their places; so must other seeds, other offsets, other tiles.
    others = [dropout_mask(0.3, 1, 0), dropout_mask(0.3, 0, 1), dropout_mask(0.3, 2**40, 0), keep.roll(16, -1)]
    for other in (*others, keep.roll(16, -2), keep.roll(1, 1), keep.roll(1, 0)):
        assert abs((keep == other).float().mean().item() - 0.58) < 5 * math.sqrt(0.25 / n)


def test_bad_input():
    q, k, v = make_inputs(2, 4, 8)
    with pytest.raises(ValueError, match=r"same head_dim.*\(2, 4, 8\).*\(2, 4, 7\)"):
        FlashAttentionPyTorch.apply(q, k[..., :7], v[..., :7], False)
    with pytest.raises(ValueError, match="key_tile_size 0: both must be positive"):
        FlashAttentionPyTorch.apply(q, k, v, False, None, 16, 0)


def test_autocast_does_not_reach_the_accumulators():
    q, k, v = make_inputs(1, 2, 40, 8)
    do = torch.randn(1, 2, 40, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = run(q, k, v, do)
    for x, y in zip(actual, run(q, k, v, do), strict=True):
        assert torch.equal(x, y)


def test_second_derivative_is_an_error():
    q, k, v = make_inputs(1, 8, 4)
    (dq,) = torch.autograd.grad(FlashAttentionPyTorch.apply(q, k, v, False).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        dq.sum().backward()


def test_two_runs_are_equal_bit_for_bit():
    q, k, v = make_inputs(2, 2, 100, 16)
    do = torch.randn(2, 2, 100, 16)
    for x, y in zip(run(q, k, v, do, True), run(q, k, v, do, True), strict=True):
        assert torch.equal(x, y)
