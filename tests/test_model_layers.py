"""The language model's parts, each against PyTorch's own or its definition."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from cs336_basics.model import (
    CausalMultiHeadSelfAttention,
    Embedding,
    Linear,
    RMSNorm,
    RotaryEmbedding,
    SwiGLU,
    TransformerBlock,
    scaled_dot_product_attention,
    silu,
)
from tests.model_helpers import rotate_by_definition


def _assert_same_gradients(ours: nn.Module, torchs: nn.Module, x: torch.Tensor) -> None:
    """Outputs, input gradients and weight gradients of two modules that have the same weights in the same order."""
    weight = torch.randn_like(ours(x))
    gradients = [
        torch.autograd.grad((module(x) * weight).sum(), [x, *module.parameters()]) for module in (ours, torchs)
    ]
    torch.testing.assert_close(ours(x), torchs(x))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5)])
def test_linear_matches_torch(shape):
    ours, torchs = Linear(5, 7).double(), nn.Linear(5, 7, bias=False).double()
    torchs.load_state_dict(ours.state_dict())
    _assert_same_gradients(ours, torchs, torch.randn(shape, dtype=torch.float64, requires_grad=True))


def test_embedding_matches_torch():
    ours, torchs = Embedding(11, 4), nn.Embedding(11, 4)
    torchs.load_state_dict(ours.state_dict())
    ids = torch.randint(11, (3, 6))
    torch.testing.assert_close(ours(ids), torchs(ids))
    for module in (ours, torchs):
        (module(ids) ** 2).sum().backward()
    torch.testing.assert_close(ours.weight.grad, torchs.weight.grad)


@pytest.mark.parametrize("token_id", [-1, 11])
def test_embedding_rejects_an_id_outside_the_vocabulary(token_id):
    with pytest.raises(IndexError):
        Embedding(11, 4)(torch.tensor([0, token_id]))


@pytest.mark.parametrize("eps", [1e-5, 0.1])
def test_rms_norm_matches_torch(eps):
    ours, torchs = RMSNorm(9, eps=eps).double(), nn.RMSNorm(9, eps=eps).double()
    for module in (ours, torchs):
        module.weight.data = torch.linspace(-1, 2, 9, dtype=torch.float64)
    _assert_same_gradients(ours, torchs, torch.randn(2, 4, 9, dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rms_norm_computes_in_float32_and_returns_the_inputs_dtype(dtype):
    x = (300 * torch.randn(4, 64)).to(dtype)  # a square overflows float16
    result = RMSNorm(64)(x)
    assert result.dtype == dtype
    torch.testing.assert_close(result, F.rms_norm(x.float(), (64,), eps=1e-5).to(dtype), atol=0, rtol=0)


def test_silu_matches_torch():
    x = torch.linspace(-100, 100, 401)
    torch.testing.assert_close(silu(x), F.silu(x))


def test_swiglu_is_its_formula():
    module = SwiGLU(6, 10).double()
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    gate = F.silu(F.linear(x, module.w1.weight))
    expected = F.linear(gate * F.linear(x, module.w3.weight), module.w2.weight)
    torch.testing.assert_close(module(x), expected)


@pytest.mark.parametrize(
    ("module", "std"),
    [(Linear(700, 1300), (2 / 2000) ** 0.5), (Embedding(1300, 700), 1.0)],
    ids=["Linear", "Embedding"],
)
def test_weights_start_truncated_normal(module, std):
    weight = module.weight.detach() / std
    # Cutting a standard normal at 3 leaves a standard deviation of 0.98658 and reaches nearly to the cut.
    assert weight.std().item() == pytest.approx(0.98658, rel=3e-3)
    assert weight.mean().item() == pytest.approx(0, abs=4e-3)
    assert 2.98 < weight.abs().max() <= 3 + 1e-5
    assert ((weight.abs() < 1).double().mean()).item() == pytest.approx(0.68269 / 0.99730, abs=2e-3)


@pytest.mark.parametrize("theta", [10000.0, 500.0])
def test_rope_matches_the_complex_definition(theta):
    rope = RotaryEmbedding(40, 8, theta=theta)
    x = torch.randn(2, 3, 30, 8)
    expected = rotate_by_definition(x, torch.arange(30), theta).float()
    torch.testing.assert_close(rope(x), expected)
    torch.testing.assert_close(rope(x, torch.arange(30)), expected)


def test_rope_takes_positions_for_each_sequence():
    rope = RotaryEmbedding(40, 8)
    x = torch.randn(2, 3, 5, 8)
    positions = torch.randint(40, (2, 1, 5))
    torch.testing.assert_close(rope(x, positions), rotate_by_definition(x, positions, 10000.0).float())


def test_rope_is_accurate_at_the_end_of_a_long_context():
    rope = RotaryEmbedding(32768, 64)
    x, positions = torch.randn(1, 64), torch.tensor([32767])
    expected = rotate_by_definition(x, positions, 10000.0)
    assert (rope(x, positions) - expected).abs().max() < 1e-6


def test_rope_scores_depend_on_relative_positions_only():
    rope = RotaryEmbedding(64, 16).double()
    q, k = torch.randn(2, 10, 16, dtype=torch.float64)
    positions = torch.arange(10)
    here = rope(q, positions) @ rope(k, positions).T
    there = rope(q, positions + 50) @ rope(k, positions + 50).T
    torch.testing.assert_close(here, there, rtol=0, atol=1e-5)
    torch.testing.assert_close(here.diagonal(), (q * k).sum(-1), rtol=0, atol=1e-5)
    assert (here - q @ k.T).abs().max() > 0.1


def test_rope_cache_stays_float32_and_out_of_the_state_dict():
    rope = RotaryEmbedding(4096, 8)
    exact = rope.cos.clone()
    assert rope.state_dict() == {}
    for _ in range(2):
        rope.to(torch.bfloat16)
        assert rope.cos.dtype == rope.sin.dtype == torch.float32
        assert torch.equal(rope.cos, exact)
    assert rope(torch.randn(3, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("seq", [13, 100])
def test_rope_rejects_what_is_longer_than_its_cache(seq):
    with pytest.raises(ValueError, match=f"x has {seq} positions; context_length allows at most 12"):
        RotaryEmbedding(12, 8)(torch.randn(seq, 8))


@pytest.mark.parametrize(("arguments", "message"), [
    ((12, 7), "dim is 7"), ((12, 0), "dim is 0"), ((0, 8), "context_length is 0"), ((12, 8, 0.0), "theta is 0.0"),
])  # fmt: skip
def test_rope_rejects_bad_sizes(arguments, message):
    with pytest.raises(ValueError, match=message):
        RotaryEmbedding(*arguments)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("leading", [(), (2,), (2, 3)])
def test_attention_matches_torch(is_causal, leading):
    q, k, v = (torch.randn(*leading, 7, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    mask = torch.ones(7, 7, dtype=torch.bool).tril() if is_causal else None
    ours = scaled_dot_product_attention(q, k, v, mask)
    torchs = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(ours, torchs)
    weight = torch.randn_like(ours)
    gradients = [torch.autograd.grad((output * weight).sum(), (q, k, v)) for output in (ours, torchs)]
    torch.testing.assert_close(*gradients)


def test_attention_takes_more_keys_than_queries_and_a_mask_for_each_sequence():
    q, k, v = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 9, 8), torch.randn(2, 3, 9, 5)
    mask = (torch.rand(2, 1, 4, 9) < 0.5) | (torch.arange(9) == 0)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, mask), expected)


def test_multi_head_attention_without_positions_matches_torch():
    ours, torchs = CausalMultiHeadSelfAttention(24, 3), nn.MultiheadAttention(24, 3, bias=False, batch_first=True)
    torchs.in_proj_weight.data = torch.cat((ours.q_proj.weight, ours.k_proj.weight, ours.v_proj.weight)).detach()
    torchs.out_proj.weight.data = ours.output_proj.weight.detach()
    x = torch.randn(2, 9, 24)
    hidden = torch.ones(9, 9, dtype=torch.bool).triu(1)
    torch.testing.assert_close(ours(x), torchs(x, x, x, attn_mask=hidden, need_weights=False)[0])


def test_multi_head_attention_takes_positions():
    attention = CausalMultiHeadSelfAttention(24, 3, RotaryEmbedding(40, 8))
    x = torch.randn(2, 9, 24)
    torch.testing.assert_close(attention(x, torch.arange(9)), attention(x))
    torch.testing.assert_close(attention(x, torch.arange(9).expand(2, 9) + 5), attention(x), rtol=1e-4, atol=1e-5)
    assert (attention(x, 3 * torch.arange(9)) - attention(x)).abs().max() > 1e-3


def test_a_block_is_pre_norm_with_two_residuals():
    block = TransformerBlock(24, 3, 40, None)
    x = torch.randn(2, 5, 24)
    middle = x + block.attn(block.ln1(x))
    torch.testing.assert_close(block(x), middle + block.ffn(block.ln2(middle)))
