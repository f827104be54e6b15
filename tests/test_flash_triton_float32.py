"""The Triton attention kernels' float32 products in three float16 parts, against float64 arithmetic."""

import math

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")

from cs336_systems.attention import triton_launch
from cs336_systems.attention.flash_triton import flash_forward
from tests.attention_helpers import IGNORE_INTERPRETER
from tests.triton_helpers import DEVICE, ON_GPU, PLANS, check, draw, make_config, reference, run_kernels, run_public

pytestmark = IGNORE_INTERPRETER


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


@pytest.mark.parametrize(
    "plan",
    [
        "descriptors",
        "dK and dV apart",
        *(pytest.param(plan, marks=pytest.mark.slow) for plan in ("tall tiles", "one launch, descriptors")),
    ],
)
def test_float32_in_parts_with_configurations_and_dropout(in_parts, plan):
    dropout = (0.3, 1234, 7)
    q, k, v, do = draw(heads=2, kv_heads=1, n_queries=40, n_keys=32, head_dim=32)
    identity = torch.eye(32, device=DEVICE).expand(v.shape)
    keep_scale = (flash_forward(q, k, identity, False, 0.1, *dropout)[0] != 0).double() / 0.7
    expected = reference(q, k, v, do, True, 0.1, keep_scale)
    config = make_config(32, 16, use_tma="descriptors" in plan)
    check(run_kernels(q, k, v, do, True, 0.1, config, PLANS[plan], dropout), expected, torch.float32, 5e-6)


def test_float32_in_parts_in_chunks_and_wide_tiles(in_parts):
    q, k, v, do = draw(heads=2, kv_heads=1, n_queries=40, n_keys=32, head_dim=32)
    check(run_kernels(q, k, v, do, True, 0.1, make_config(16, 16), PLANS["wide tiles"], n_chunks=2),
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
