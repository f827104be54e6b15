"""What the tests of the Triton attention kernels share: inputs, a float64 reference, the kernels launched by a plan,
and the error allowed."""

import math

import pytest
import torch
from torch import Tensor

from cs336_systems.attention import triton_launch
from cs336_systems.attention.flash_triton import flash_backward, flash_forward
from cs336_systems.attention.triton_plan import plan_backward, plan_forward
from cs336_systems.attention.triton_tuning import KernelConfig

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


def make_config(own, step, **options):
    return KernelConfig(block_own=own, block_step=step, num_warps=4, num_stages=2, **options)


PLANS = {
    "tall tiles": [("dkdv", make_config(32, 16)), ("dq", make_config(32, 16))],
    "wide tiles": [("dkdv", make_config(16, 32)), ("dq", make_config(16, 32))],
    "descriptors": [("dkdv", make_config(32, 16, use_tma=True)), ("dq", make_config(16, 16, use_tma=True))],
    "dK and dV apart": [("dv", make_config(32, 16)), ("dk", make_config(16, 32)), ("dq", make_config(32, 16))],
    "one launch": [("fused", make_config(16, 32))],  # D inline
    "one launch, descriptors": [("fused", make_config(32, 32, use_tma=True))],
}
