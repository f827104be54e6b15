"""Hopper's own attention kernels: which problems they take, and (on such a card) that they are right."""

import importlib.metadata
import math
import os
import subprocess
import sys
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")

from cs336_systems.attention import flash_attention, hopper_plan, implementations, triton_launch, triton_plan
from cs336_systems.attention.flash_hopper import hopper_backward, hopper_forward
from cs336_systems.attention.flash_triton import flash_backward, flash_forward
from cs336_systems.attention.hopper_backward import hopper_backward_kernel
from cs336_systems.attention.hopper_dq import hopper_dq_kernel
from cs336_systems.attention.hopper_forward import hopper_forward_kernel
from cs336_systems.attention.hopper_plan import with_hopper_backward, with_hopper_forward
from cs336_systems.attention.triton_tuning import Gpu
from tests.attention_helpers import two_passes
from tests.gpu_attention import (
    SHAPES,
    assert_no_worse_than_sdpa,
    draw,
    draw_shape,
    exact,
    output_and_gradients,
)

H100 = Gpu("H100", 90, 132, 232448)
A100 = Gpu("A100", 80, 108, 166912)
ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def _kernels(
    gpu=H100, head_dim=128, length=16384, heads=8, dtype=torch.bfloat16, dropout_p=0.0, stride=None,
    n_keys=None, needs_dq=True, needs_dkdv=True,
):  # fmt: skip
    """Those of both plans that are Hopper's, for tensors without memory."""
    q = torch.empty(1, heads, length, stride or head_dim, dtype=dtype, device="meta")[..., :head_dim]
    k = q if n_keys is None else torch.empty(1, heads, n_keys, head_dim, dtype=dtype, device="meta")
    problem = triton_launch.make_problem(q, k, True, 0.1, dropout_p, gpu)
    strides = [x.stride() for x in (q, q, k, k, q, q, k, k)]
    forward = with_hopper_forward(triton_plan.plan_forward(problem, strides[:4], True), problem, strides[:4])
    portable = triton_plan.plan_backward(problem, strides, True, needs_dq, needs_dkdv)
    backward = with_hopper_backward(portable, problem, strides, needs_dq, needs_dkdv)
    known = (hopper_forward_kernel, hopper_backward_kernel, hopper_dq_kernel)
    return [step.kernel for plan in (forward, backward) for step in plan.steps if step.kernel in known]


@pytest.mark.parametrize("settings", [{}, {"head_dim": 80}, {"dtype": torch.float16}, {"head_dim": 100, "stride": 104}])
def test_large_problems_of_wide_heads_are_taken(settings):
    assert _kernels(**settings) == [hopper_forward_kernel, hopper_backward_kernel]
    assert _kernels(**settings, needs_dkdv=False) == [hopper_forward_kernel, hopper_dq_kernel]
    assert _kernels(**settings, needs_dq=False) == [hopper_forward_kernel]


def test_of_narrow_heads_the_long_forward_pass_is_taken():
    for head_dim in (40, 64):
        assert _kernels(head_dim=head_dim, n_keys=4096) == [hopper_forward_kernel]
        assert _kernels(head_dim=head_dim, n_keys=4095) == []
    # 132 multiprocessors; of 192 queries 17 tiles a head and 16
    assert _kernels(head_dim=64, length=3073, n_keys=4096) == [hopper_forward_kernel]
    assert _kernels(head_dim=64, length=3072, n_keys=4096) == []


def test_few_programs_and_those_that_would_wait_for_their_turns_make_two_passes():
    assert _kernels(length=65536, heads=1) == [hopper_forward_kernel, hopper_backward_kernel]
    assert _kernels(length=8192, n_keys=2048, heads=9) == [hopper_forward_kernel, hopper_backward_kernel]
    assert _kernels(length=8192, n_keys=2048, heads=8) == [hopper_forward_kernel, hopper_dq_kernel]
    assert _kernels(length=3264, n_keys=65536, heads=8) == [hopper_forward_kernel, hopper_backward_kernel]
    assert _kernels(length=3200, n_keys=65536, heads=8) == [hopper_forward_kernel, hopper_dq_kernel]
    assert _kernels(length=4096, heads=8) == [hopper_forward_kernel, hopper_backward_kernel]


@pytest.mark.parametrize(
    ("heads", "length", "at_once"),
    [
        (32, 32768, 4),  # of 512 steps, 33 programs that take turns
        (32, 4096, 8),  # of 64 steps, 17; of four heads all 32 of them
        (80, 1024, 32),  # of 16 steps, 5
        (3, 16384, 3),
        (14, 2048, 14),  # of 32 steps, 10; of eight heads all 16 of them
        (13, 2048, None),
        (33, 512, None),
    ],
)
def test_backward_works_at_the_fewest_heads_that_take_few_turns(heads, length, at_once):
    q = torch.empty(1, heads, length, 128, dtype=torch.bfloat16, device="meta")
    problem = triton_launch.make_problem(q, q, True, 0.1, 0.0, H100)
    assert hopper_plan._heads_at_once(problem, hopper_plan._ONE_PASS[128]) == at_once


@pytest.mark.parametrize(
    "settings",
    [
        {"gpu": A100}, {"head_dim": 32}, {"head_dim": 256}, {"length": 1024}, {"dtype": torch.float32},
        {"dropout_p": 0.1}, {"head_dim": 100, "stride": 101},
    ],
)  # fmt: skip
def test_others_keep_the_portable_kernels(settings):
    assert _kernels(**settings) == []


def test_without_such_a_card_the_error_says_what_is_missing():
    if ON_HOPPER:
        pytest.skip("this is such a card")
    q = torch.zeros(1, 1, 4, 128)
    with pytest.raises(RuntimeError, match=r"compute capability 9\.0.*Triton 3\.6.*on cpu"):
        flash_attention(q, q, q, implementation="hopper")


def test_another_triton_gets_the_portable_kernels(monkeypatch):
    monkeypatch.setattr(implementations, "_capability", lambda device: (9, 0))
    assert implementations._is_hopper(torch.device("cuda")) == implementations.HAS_KNOWN_TRITON
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "3.7.0")
    assert not implementations._has_known_triton()
    monkeypatch.setattr(implementations, "HAS_KNOWN_TRITON", False)
    assert not implementations._is_hopper(torch.device("cuda"))


def test_the_choice_can_be_compiled():
    def which(x):
        return x + (1 if implementations._is_hopper(x.device) else 2)

    x = torch.zeros(3)
    assert torch.equal(torch.compile(which, fullgraph=True, backend="eager")(x), which(x))


# ---- On a card -------------------------------------------------------------------------------------------------------


class Way(NamedTuple):
    head_dim: int
    kernels: tuple  # Hopper's, that run


WAYS = {
    "one-pass": Way(128, (hopper_forward_kernel, hopper_backward_kernel)),
    "two-passes": Way(128, (hopper_forward_kernel, hopper_dq_kernel)),
    "three-consumers": Way(64, (hopper_forward_kernel,)),
}


@pytest.fixture(params=WAYS.values(), ids=WAYS)
def on_hopper(monkeypatch, request):
    """Hopper's kernels for short problems too, whose tiles are ragged in every way."""
    if not ON_HOPPER:
        pytest.skip("needs a GPU of compute capability 9.0")
    monkeypatch.setattr(triton_plan, "wants_tma", lambda problem, is_backward: True)
    monkeypatch.setitem(hopper_plan._MIN_KEYS, 64, 1)
    monkeypatch.setattr(triton_plan, "choose_backward", two_passes)
    heads_at_once = 2 if hopper_backward_kernel in request.param.kernels else None
    monkeypatch.setattr(hopper_plan, "_heads_at_once", lambda *args: heads_at_once)
    gpu = triton_launch._gpu_of(torch.device("cuda", torch.cuda.current_device()))
    monkeypatch.setattr(triton_launch, "_gpu_of", lambda device: gpu._replace(n_sm=1))
    triton_launch._plans.clear()
    yield request.param
    triton_launch._plans.clear()


def _ran(kernels) -> bool:
    ran = [step.kernel for plan in triton_launch._plans.values() for step in plan.steps]
    return all(kernel in ran for kernel in kernels)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("share", [1, 0.625], ids=["whole-tiles", "narrower"])
@settings(
    max_examples=60, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(shape=SHAPES, is_causal=st.booleans())
def test_the_error_is_at_most_one_and_a_half_times_sdpas(on_hopper, dtype, share, shape, is_causal):
    inputs = draw_shape(**shape, head_dim=int(share * on_hopper.head_dim), dtype=dtype)
    assert_no_worse_than_sdpa("hopper", *inputs, is_causal)
    assert _ran(on_hopper.kernels)


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True])
def test_long_sequences(on_hopper, is_causal):
    inputs = draw(1, 4, 2, 4200, 4130, on_hopper.head_dim, torch.bfloat16)
    actual = output_and_gradients(lambda *x: flash_attention(*x, is_causal, implementation="hopper"), *inputs)
    for x, reference in zip(actual, exact(*inputs, is_causal), strict=True):
        assert (x.double() - reference).norm() <= 1e-2 * reference.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [0.1, -0.3, 0.0, 300.0])
def test_scales_and_the_logsumexp(on_hopper, scale):
    q, k, v, do = draw(2, 4, 2, 333, 290, on_hopper.head_dim, torch.bfloat16)
    o, lse = hopper_forward(q, k, v, True, scale)
    expected, expected_lse = flash_forward(q, k, v, True, scale)
    assert torch.allclose(lse, expected_lse, rtol=1e-5, atol=1e-4)
    assert (o - expected).float().norm() <= 4e-3 * expected.float().norm()
    for x, y in zip(
        hopper_backward(do, q, k, v, o, lse, True, scale), flash_backward(do, q, k, v, o, lse, True, scale), strict=True
    ):
        assert torch.isfinite(x).all()
        assert (x - y).float().norm() <= 1e-2 * y.float().norm()


@pytest.mark.gpu
def test_poisoned_outputs_are_written_and_two_runs_are_equal(on_hopper, monkeypatch):
    q, k, v, do = draw(1, 4, 2, 1000, 900, on_hopper.head_dim, torch.float16)
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda x, **options: empty_like(x, **options).fill_(math.nan))
    runs = [
        output_and_gradients(lambda *x: flash_attention(*x, True, implementation="hopper"), q, k, v, do)
        for _ in range(3)
    ]
    for x, *others in zip(*runs, strict=True):
        assert torch.isfinite(x).all()
        assert all(torch.equal(x, y) for y in others)


@pytest.mark.gpu
def test_a_thousand_repeats_are_equal_bit_for_bit(on_hopper):
    q, k, v, do = draw(2, 4, 2, 1000, 1100, on_hopper.head_dim, torch.bfloat16)

    def run():
        o, lse = hopper_forward(q, k, v, True, 0.1)
        return o, lse, *hopper_backward(do, q, k, v, o, lse, True, 0.1)

    first = run()
    assert _ran(on_hopper.kernels)
    for _ in range(1000):
        assert all(torch.equal(x, y) for x, y in zip(first, run(), strict=True))


_FIRST_CALL = """
import time, torch
from cs336_systems.attention import flash_attention
q = torch.randn(8, 8192, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
torch.cuda.synchronize()
start_s = time.perf_counter()
flash_attention(q, q, q, True).sum().backward()
torch.cuda.synchronize()
print(time.perf_counter() - start_s)
"""


@pytest.mark.gpu
@pytest.mark.skipif(not ON_HOPPER, reason="needs a GPU of compute capability 9.0 (H100, H200)")
def test_a_first_call_compiles_within_20_s_and_a_later_process_does_not_compile(tmp_path):
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}

    def first_call_s():
        command = [sys.executable, "-c", _FIRST_CALL]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return float(run.stdout), {path for path in tmp_path.rglob("*") if path.is_file()}

    compiling_s, compiled = first_call_s()
    assert compiling_s < 20
    assert any(path.suffix == ".cubin" for path in compiled)
    cached_s, after = first_call_s()
    assert after == compiled
    assert cached_s < compiling_s


@pytest.mark.gpu
def test_layouts_that_callers_have(on_hopper):
    """Heads transposed from (batch, length, heads, head_dim), an expanded dO, and three dimensions."""
    q, k, v = (
        torch.randn(2, 300, 4, on_hopper.head_dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for _ in range(3)
    )
    do = torch.ones((), device="cuda", dtype=torch.bfloat16).expand(q.shape)

    def attention(*x):
        return flash_attention(*x, True, implementation="hopper")

    for inputs in ((q, k, v, do), tuple(x[:, 1] for x in (q, k, v, do))):
        expected = exact(*(x if x.ndim == 4 else x.unsqueeze(1) for x in inputs), True)
        for x, reference in zip(output_and_gradients(attention, *inputs), expected, strict=True):
            assert (x.double() - reference.view(x.shape)).norm() <= 1e-2 * reference.norm()


@pytest.mark.gpu
def test_compiled_without_a_graph_break(on_hopper, annotations_unchecked):
    q, k, v, do = draw(1, 4, 4, 512, 512, on_hopper.head_dim, torch.bfloat16)

    def attention(*x):
        return flash_attention(*x, True)  # "auto" is "hopper" here

    compiled = torch.compile(attention, fullgraph=True)
    for x, y in zip(
        output_and_gradients(compiled, q, k, v, do), output_and_gradients(attention, q, k, v, do), strict=True
    ):
        assert torch.equal(x, y)
