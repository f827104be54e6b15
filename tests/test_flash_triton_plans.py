"""The Triton attention kernels by every plan of launches: each gives what float64 gives, and the same dropout."""

import math

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")

from cs336_systems.attention import triton_launch, triton_tuning
from cs336_systems.attention.flash_triton import flash_forward
from cs336_systems.attention.triton_plan import plan_backward
from tests.attention_helpers import IGNORE_INTERPRETER
from tests.triton_helpers import DEVICE, PLANS, check, draw, make_config, reference, run_kernels

pytestmark = IGNORE_INTERPRETER


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    ("is_causal", "n_queries", "n_keys"),
    [(False, 40, 50), (True, 40, 50), (True, 70, 33), pytest.param(True, 64, 64, marks=pytest.mark.slow)],
)
def test_every_backward_plan_matches_float64(plan, is_causal, n_queries, n_keys):
    inputs = draw(heads=2, kv_heads=1, n_queries=n_queries, n_keys=n_keys)
    config = make_config(32, 16, use_tma="descriptors" in plan)
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
    ("config", "n_chunks"),
    [(make_config(16, 16), 2), (make_config(32, 16), 3), (make_config(16, 32, use_tma=True), 100)],
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
    chunk_keys = triton_tuning.chunk_size(problem, make_config(64, 64), n_blocks)
    assert -(-n_keys // chunk_keys) == n_chunks


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
    actual = run_kernels(q, k, v, do, is_causal, 0.1, make_config(16, 16), PLANS[plan], dropout)
    check(actual, reference(q, k, v, do, is_causal, 0.1, keep_scale), torch.float32)
