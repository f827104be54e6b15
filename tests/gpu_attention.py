"""What the tests of attention on a card share: inputs, a float64 oracle, and SDPA's error as the measure of ours."""

import math

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from cs336_systems.attention import flash_attention


def draw(batch, heads, kv_heads, n_queries, n_keys, head_dim, dtype, seed=0) -> list[Tensor]:
    """q, k, v, do."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    shapes = [(heads, n_queries), (kv_heads, n_keys), (kv_heads, n_keys), (heads, n_queries)]
    return [torch.randn(batch, *s, head_dim, generator=generator, device="cuda").to(dtype) for s in shapes]


# Each head_dim and group is another compilation, so those are drawn from few; lengths, batches and seeds are free.
SHAPES = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 2),
        "kv_heads": st.integers(1, 2),
        "group": st.sampled_from([1, 3]),
        "n_queries": st.integers(1, 700),
        "n_keys": st.integers(1, 700),
        "seed": st.integers(0, 1000),
    }
)


def draw_shape(batch, kv_heads, group, n_queries, n_keys, seed, *, head_dim, dtype) -> list[Tensor]:
    """q, k, v, do of one of `SHAPES`, in a batch of at least 256 queries: two implementations round a single query's
    few weights up or down as chance has it, and only many of them tell which one's error is larger."""
    batch = max(batch, 256 // n_queries)
    return draw(batch, kv_heads * group, kv_heads, n_queries, n_keys, head_dim, dtype, seed)


def output_and_gradients(attention, q, k, v, do) -> list[Tensor]:
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    o = attention(q, k, v)
    return [o.detach(), *torch.autograd.grad(o, (q, k, v), do)]


def exact(q, k, v, do, is_causal) -> list[Tensor]:
    def attention(q, k, v):
        group = q.shape[1] // k.shape[1]
        scores = q @ k.repeat_interleave(group, 1).mT * q.shape[-1] ** -0.5
        if is_causal:
            visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
            scores = scores.masked_fill(~visible, -math.inf)
        return scores.softmax(-1) @ v.repeat_interleave(group, 1)

    return output_and_gradients(attention, *(x.double() for x in (q, k, v, do)))


def assert_no_worse_than_sdpa(implementation, q, k, v, do, is_causal) -> None:
    """The error of the output and of each gradient is at most one and a half times SDPA's."""
    head_dim, group = q.shape[-1], q.shape[1] // k.shape[1]
    expected = exact(q, k, v, do, is_causal)
    ours = output_and_gradients(
        lambda q, k, v: flash_attention(q, k, v, is_causal, implementation=implementation), q, k, v, do
    )
    # SDPA's fused kernels take no groups in float32: it is given copies of the keys, and the gradients are summed.
    sdpas = output_and_gradients(
        lambda q, k, v: F.scaled_dot_product_attention(
            q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), is_causal=is_causal
        ),
        q, k, v, do,
    )  # fmt: skip
    # Where gradients cancel to nothing (one key, say), what is left is the rounding of their terms: dP and D are sums
    # of head_dim products, and round off like its square root. In dV it is P's, whose exponent is such a sum too.
    terms = do.norm() * v.norm(dim=-1).max() * head_dim**-0.5
    terms = {"o": 0.0, "dv": do.norm(), "dq": terms * k.norm(dim=-1).max(), "dk": terms * q.norm(dim=-1).max()}
    for name, x, sdpa, reference in zip(("o", "dq", "dk", "dv"), ours, sdpas, expected, strict=True):
        error, sdpas_error = ((y.double() - reference).norm().item() for y in (x, sdpa))
        # Where SDPA happens to be exact, a quarter of the rounding of the result itself is allowed too.
        floor = torch.finfo(q.dtype).eps / 4 * reference.norm().item() + 2**-24 * head_dim**0.5 * float(terms[name])
        assert error <= max(1.5 * sdpas_error, floor), f"{name}: {error:.2e}, SDPA {sdpas_error:.2e}"
