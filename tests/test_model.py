"""The language model's parts, each against PyTorch's own or its definition, and what a user does with the whole."""

import json
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cs336_basics.model
from cs336_basics.model import (
    BasicsTransformerLM,
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

SIZES = {"vocab_size": 50, "context_length": 12, "d_model": 24, "num_layers": 2, "num_heads": 3, "d_ff": 40}

# What a checkpoint of the course's model holds, for SIZES.
COURSE_STATE_DICT_SHAPES = {
    "token_embeddings.weight": (50, 24),
    "layers.0.attn.q_proj.weight": (24, 24),
    "layers.0.attn.k_proj.weight": (24, 24),
    "layers.0.attn.v_proj.weight": (24, 24),
    "layers.0.attn.output_proj.weight": (24, 24),
    "layers.0.ffn.w1.weight": (40, 24),
    "layers.0.ffn.w2.weight": (24, 40),
    "layers.0.ffn.w3.weight": (40, 24),
    "layers.0.ln1.weight": (24,),
    "layers.0.ln2.weight": (24,),
    "layers.1.attn.q_proj.weight": (24, 24),
    "layers.1.attn.k_proj.weight": (24, 24),
    "layers.1.attn.v_proj.weight": (24, 24),
    "layers.1.attn.output_proj.weight": (24, 24),
    "layers.1.ffn.w1.weight": (40, 24),
    "layers.1.ffn.w2.weight": (24, 40),
    "layers.1.ffn.w3.weight": (40, 24),
    "layers.1.ln1.weight": (24,),
    "layers.1.ln2.weight": (24,),
    "ln_final.weight": (24,),
    "lm_head.weight": (50, 24),
}


def _model(**changes) -> BasicsTransformerLM:
    return BasicsTransformerLM(**{**SIZES, **changes})


def _tokens(*shape: int) -> torch.Tensor:
    return torch.randint(SIZES["vocab_size"], shape)


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


def _rotate_by_definition(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Each pair (x[2i], x[2i + 1]) as a complex number, times exp(j · position · theta^(-2i/dim))."""
    dim = x.shape[-1]
    pairs = torch.view_as_complex(x.double().unflatten(-1, (dim // 2, 2)).contiguous())
    frequencies = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    turned = pairs * torch.exp(1j * positions.double().unsqueeze(-1) * frequencies)
    return torch.cat((turned.real, turned.imag), dim=-1)


@pytest.mark.parametrize("theta", [10000.0, 500.0])
def test_rope_matches_the_complex_definition(theta):
    rope = RotaryEmbedding(40, 8, theta=theta)
    x = torch.randn(2, 3, 30, 8)
    expected = _rotate_by_definition(x, torch.arange(30), theta).float()
    torch.testing.assert_close(rope(x), expected)
    torch.testing.assert_close(rope(x, torch.arange(30)), expected)


def test_rope_takes_positions_for_each_sequence():
    rope = RotaryEmbedding(40, 8)
    x = torch.randn(2, 3, 5, 8)
    positions = torch.randint(40, (2, 1, 5))
    torch.testing.assert_close(rope(x, positions), _rotate_by_definition(x, positions, 10000.0).float())


def test_rope_is_accurate_at_the_end_of_a_long_context():
    rope = RotaryEmbedding(32768, 64)
    x, positions = torch.randn(1, 64), torch.tensor([32767])
    expected = _rotate_by_definition(x, positions, 10000.0)
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


def test_model_matches_a_forward_pass_in_torchs_functions():
    model = _model(rope_theta=700.0).double()
    # Norm weights start at one, so that leaving one out would go unseen.
    for name, parameter in model.named_parameters():
        if "ln" in name:
            parameter.data = torch.rand_like(parameter) + 0.5
    weights = model.state_dict()
    tokens = _tokens(2, 10)

    def norm(x, name):
        return F.rms_norm(x, (24,), weights[f"{name}.weight"], eps=1e-5)

    x = weights["token_embeddings.weight"][tokens]
    for layer in ("layers.0", "layers.1"):
        normed = norm(x, f"{layer}.ln1")
        q, k, v = (
            F.linear(normed, weights[f"{layer}.attn.{name}_proj.weight"]).view(2, 10, 3, 8).transpose(1, 2)
            for name in "qkv"
        )
        q, k = (_rotate_by_definition(y, torch.arange(10), 700.0) for y in (q, k))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 10, 24)
        x = x + F.linear(attended, weights[f"{layer}.attn.output_proj.weight"])
        normed = norm(x, f"{layer}.ln2")
        w1, w2, w3 = (weights[f"{layer}.ffn.w{i}.weight"] for i in (1, 2, 3))
        x = x + F.linear(F.silu(F.linear(normed, w1)) * F.linear(normed, w3), w2)
    expected = F.linear(norm(x, "ln_final"), weights["lm_head.weight"])
    # The rotary cache is float32 even in a float64 model.
    torch.testing.assert_close(model(tokens), expected, rtol=1e-6, atol=1e-6)


def test_a_later_token_changes_no_earlier_logits():
    model, tokens = _model(), _tokens(1, 12)
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 50
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=0)
    assert (before[:, 7:] - after[:, 7:]).abs().amax(-1).min() > 1e-4, "and every later one"


def test_model_takes_one_sequence_without_batch():
    model, tokens = _model(), _tokens(12)
    torch.testing.assert_close(model(tokens), model(tokens[None])[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_gives_low_precision_logits_and_float32_gradients(dtype, monkeypatch):
    dtypes = set()

    def attention(q, k, v, mask):
        dtypes.update((q.dtype, k.dtype, v.dtype))
        return scaled_dot_product_attention(q, k, v, mask)

    monkeypatch.setattr(cs336_basics.model, "scaled_dot_product_attention", attention)
    model, tokens = _model(), _tokens(2, 12)
    with torch.autocast("cpu", dtype=dtype):
        logits = model(tokens)
    assert logits.dtype == dtype
    assert dtypes == {dtype}, "an attention kernel needs q, k and v of one dtype"
    torch.testing.assert_close(logits.float(), model(tokens), rtol=0.1, atol=0.1)
    logits.float().square().mean().backward()
    for parameter in model.parameters():
        assert parameter.grad.dtype == torch.float32
        assert parameter.grad.isfinite().all()
        assert parameter.grad.any()


def test_a_bfloat16_model_runs():
    model, tokens = _model(dtype=torch.bfloat16), _tokens(2, 12)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    logits = model(tokens)
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits.float(), model.float()(tokens), rtol=0.1, atol=0.1)


def test_attention_can_be_swapped_by_its_global_name(monkeypatch):
    model, tokens = _model(), _tokens(2, 12)
    expected = model(tokens)
    calls = []

    def attention(q, k, v, mask):
        calls.append((q.shape, k.shape, v.shape))
        assert torch.equal(mask, torch.ones(12, 12, dtype=torch.bool).tril())
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    monkeypatch.setattr(cs336_basics.model, "scaled_dot_product_attention", attention)
    torch.testing.assert_close(model(tokens), expected)
    assert calls == [((2, 3, 12, 8),) * 3] * 2, "(batch, heads, length, head_dim), once a layer"


def test_attention_that_masks_by_itself_gets_no_mask(monkeypatch):
    model, tokens = _model(), _tokens(2, 12)
    expected = model(tokens)
    masks = []

    def attention(q, k, v, mask=None):
        masks.append(mask)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    attention.is_causal = True
    monkeypatch.setattr(cs336_basics.model, "scaled_dot_product_attention", attention)
    torch.testing.assert_close(model(tokens), expected)
    assert masks == [None, None]


@pytest.mark.usefixtures("annotations_unchecked")
def test_model_compiles_whole_and_sees_a_swapped_attention(monkeypatch):
    model, tokens = _model(), _tokens(2, 12)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    before = compiled(tokens)
    torch.testing.assert_close(before, model(tokens))

    def attention(q, k, v, mask=None):
        assert mask is None
        return 2 * F.scaled_dot_product_attention(q, k, v, is_causal=True)

    attention.is_causal = True
    monkeypatch.setattr(cs336_basics.model, "scaled_dot_product_attention", attention)
    torch.testing.assert_close(compiled(tokens), model(tokens))
    assert (compiled(tokens) - before).abs().max() > 1e-2, "the compiled model kept the old attention"


def test_state_dict_is_that_of_the_courses_model():
    model = _model()
    assert {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()} == COURSE_STATE_DICT_SHAPES
    checkpoint = {name: torch.randn(shape) for name, shape in COURSE_STATE_DICT_SHAPES.items()}
    model.load_state_dict(checkpoint)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, checkpoint[name]), name


@pytest.mark.parametrize(
    ("old", "new"),
    [("", ""), ("^", "_orig_mod."), (r"(layers\.\d)", r"\1._orig_mod")],
    ids=["plain", "compiled", "blocks compiled"],
)
def test_from_pretrained_gives_the_same_model(tmp_path, old, new):
    model = _model(rope_theta=123.0)
    (tmp_path / "model_config.json").write_text(json.dumps(model.config))
    # torch.compile puts this into the names of the module that it wraps.
    state_dict = {re.sub(old, new, name): tensor for name, tensor in model.state_dict().items()}
    torch.save(state_dict, tmp_path / "model.pt")
    loaded = BasicsTransformerLM.from_pretrained(str(tmp_path))
    assert loaded.config == {**SIZES, "rope_theta": 123.0}
    tokens = _tokens(2, 12)
    assert torch.equal(loaded(tokens), model(tokens))


@pytest.mark.parametrize("names", [{"lm_head.weight"}, {"lm_head.weight", "lm_head.bias", "token_embeddings.weight"}])
def test_from_pretrained_rejects_a_state_dict_of_another_model(tmp_path, names):
    model = _model()
    (tmp_path / "model_config.json").write_text(json.dumps(model.config))
    torch.save({name: torch.zeros(50, 24) for name in names}, tmp_path / "model.pt")
    with pytest.raises(RuntimeError, match="Missing key"):
        BasicsTransformerLM.from_pretrained(tmp_path)


def test_number_of_parameters():
    model = _model()
    block = 4 * 24 * 24 + 3 * 24 * 40 + 2 * 24
    assert model.get_num_params() == 2 * block + 24 + 2 * 50 * 24
    assert model.get_num_params(non_embedding=True) == 2 * block + 24 + 50 * 24


@pytest.mark.parametrize("how", ["argument", "context"])
def test_model_is_built_where_it_is_wanted(how):
    if how == "argument":
        model = _model(device="meta")
    else:
        with torch.device("meta"):
            model = _model()
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    # Coming from `meta`, the state dict fills the weights, and nothing but the module itself the rotary cache.
    source, tokens = _model(), _tokens(2, 12)
    model.to_empty(device="cpu")
    model.load_state_dict(source.state_dict())
    assert torch.equal(model(tokens), source(tokens))


@pytest.mark.gpu
def test_model_on_a_gpu_matches_the_cpu():
    with torch.device("cuda"):
        model = _model()
    assert all(tensor.is_cuda for tensor in (*model.parameters(), *model.buffers()))
    tokens = _tokens(2, 12)
    on_gpu = model(tokens.cuda()).cpu()
    assert model.generate(tokens.cuda(), 3, temperature=0.0).is_cuda
    torch.testing.assert_close(model.cpu()(tokens), on_gpu, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "value"), [
    ("vocab_size", 0), ("context_length", 0), ("d_model", -24), ("num_layers", 0), ("num_heads", 0), ("d_ff", 0),
    ("num_heads", 5), ("rope_theta", -1.0),
])  # fmt: skip
def test_model_rejects_bad_sizes(name, value):
    with pytest.raises(ValueError, match=f"{name.removeprefix('rope_')} is {value}"):
        _model(**{name: value})


def test_model_rejects_an_odd_head_dimension():
    with pytest.raises(ValueError, match="dim is 3; rotary"):
        _model(num_heads=8)


def test_model_rejects_an_input_longer_than_its_context():
    with pytest.raises(ValueError, match="x has 13 positions; context_length allows at most 12"):
        _model()(_tokens(1, 13))


def test_a_block_is_pre_norm_with_two_residuals():
    block = TransformerBlock(24, 3, 40, None)
    x = torch.randn(2, 5, 24)
    middle = x + block.attn(block.ln1(x))
    torch.testing.assert_close(block(x), middle + block.ffn(block.ln2(middle)))


def _greedy_by_hand(model: BasicsTransformerLM, prompt: list[int], n: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(n):
        window = tokens[-SIZES["context_length"] :]
        tokens.append(int(model(torch.tensor(window))[-1].argmax()))
    return tokens[len(prompt) :]


def _lively_model() -> BasicsTransformerLM:
    """A model whose greedy continuation does not repeat itself at once."""
    model = _model()
    model.lm_head.weight.data += 0.3 * torch.randn_like(model.lm_head.weight)
    return model


@pytest.mark.parametrize("prompt_length", [1, 5, 11, 12, 13, 40])
@pytest.mark.parametrize("arguments", [{"temperature": 0.0}, {"top_k": 1}, {"temperature": 1e-4}], ids=str)
def test_generate_matches_greedy_decoding_by_hand(prompt_length, arguments):
    model, prompt = _lively_model(), _tokens(prompt_length)
    expected = _greedy_by_hand(model, prompt.tolist(), 15)
    assert len(set(expected)) > 3
    assert model.generate(prompt, 15, **arguments).tolist() == [expected]
    assert model.generate(prompt[None], 15, **arguments).tolist() == [expected]


def test_generate_continues_each_sequence_of_a_batch():
    model, prompts = _lively_model(), _tokens(3, 20)
    expected = [_greedy_by_hand(model, prompt, 6) for prompt in prompts.tolist()]
    assert model.generate(prompts, 6, temperature=0.0).tolist() == expected


def test_generate_samples_at_the_temperature():
    model, prompt = _model(), _tokens(4)
    for temperature in (0.5, 1.0, 2.0):
        drawn = model.generate(prompt.expand(20_000, 4), 1, temperature=temperature).flatten()
        frequencies = torch.bincount(drawn, minlength=50) / 20_000
        probabilities = torch.softmax(model(prompt)[-1] / temperature, dim=-1)
        # Five standard deviations of a binomial frequency, and one draw.
        assert ((frequencies - probabilities).abs() < 5 * (probabilities / 20_000).sqrt() + 1 / 20_000).all()


def test_generate_draws_from_the_top_k_only_and_from_all_of_them():
    model, prompt = _model(), _tokens(4)
    allowed = model(prompt)[-1].topk(3).indices
    drawn = model.generate(prompt.expand(2000, 4), 1, temperature=3.0, top_k=3).flatten()
    assert set(drawn.tolist()) == set(allowed.tolist())
    probabilities = torch.softmax(model(prompt)[-1, allowed] / 3.0, dim=-1)
    frequencies = torch.tensor([(drawn == token).float().mean() for token in allowed])
    torch.testing.assert_close(frequencies, probabilities, rtol=0, atol=0.06)
    assert len(model.generate(prompt.expand(2000, 4), 1, temperature=3.0).unique()) > 10, "without top_k: many more"


def test_top_k_keeps_exactly_k_tied_tokens():
    model = _model()
    nn.init.zeros_(model.lm_head.weight)
    assert len(model.generate(_tokens(1).expand(1000, 1), 1, top_k=4).unique()) == 4
    assert len(model.generate(_tokens(1).expand(5000, 1), 1, top_k=1000).unique()) == 50, "more than there are: all"


def test_generate_ends_before_the_end_of_sequence_token():
    model, prompt = _lively_model(), _tokens(5)
    expected = _greedy_by_hand(model, prompt.tolist(), 15)
    eos = expected[3]
    n_kept = expected.index(eos)
    assert model.generate(prompt, 15, temperature=0.0, eos_token_id=eos).tolist() == [expected[:n_kept]]
    absent = next(token for token in range(50) if token not in expected)
    assert model.generate(prompt, 15, temperature=0.0, eos_token_id=absent).tolist() == [expected]


def test_generate_fills_up_the_sequences_of_a_batch_that_ended():
    model, prompts = _lively_model(), _tokens(2, 5)
    first, second = (_greedy_by_hand(model, prompt, 8) for prompt in prompts.tolist())
    eos = next(token for token in first if token not in second)
    n_kept = first.index(eos)
    expected = [first[:n_kept] + [eos] * (8 - n_kept), second]
    assert model.generate(prompts, 8, temperature=0.0, eos_token_id=eos).tolist() == expected


@pytest.mark.parametrize("is_training", [True, False])
def test_generate_needs_no_gradients_and_restores_the_mode(is_training):
    model = _model().train(is_training)
    modes = []
    model.layers[0].register_forward_hook(
        lambda module, _inputs, output: modes.append((module.training, output.requires_grad))
    )
    model.generate(_tokens(3), 2)
    assert modes == [(False, False)] * 2
    assert all(module.training == is_training for module in model.modules())
    with pytest.raises(IndexError):
        model.generate(torch.tensor([1000]), 2)
    assert all(module.training == is_training for module in model.modules()), "after an error too"


def test_generate_of_no_tokens_is_empty():
    assert _model().generate(_tokens(3), 0).shape == (1, 0)


def test_generate_is_fixed_by_torchs_seed():
    model, prompt, samples = _model(), _tokens(3), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        samples.append(model.generate(prompt, 10).tolist())
    assert samples[0] == samples[1] != samples[2]


@pytest.mark.parametrize(("arguments", "message"), [
    ({"max_new_tokens": -1}, "max_new_tokens is -1"), ({"temperature": -0.5}, "temperature is -0.5"),
    ({"temperature": float("nan")}, "temperature is nan"), ({"top_k": 0}, "top_k is 0"),
    ({"x": torch.zeros(0, dtype=torch.int64)}, "x has shape"),
    ({"x": torch.zeros(1, 1, 1, dtype=torch.int64)}, "x has shape"),
])  # fmt: skip
def test_generate_rejects_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        _model().generate(**{"x": torch.tensor([1, 2]), "max_new_tokens": 3, **arguments})
