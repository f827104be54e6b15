"""The language model as a whole, against a forward pass in PyTorch's functions, and what a user does with it."""

import json
import re

import pytest
import torch
from torch.nn import functional as F

import cs336_basics.model
from cs336_basics.model import BasicsTransformerLM, scaled_dot_product_attention
from tests.model_helpers import SIZES, draw_tokens, make_model, rotate_by_definition

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


def test_model_matches_a_forward_pass_in_torchs_functions():
    model = make_model(rope_theta=700.0).double()
    # Norm weights start at one, so that leaving one out would go unseen.
    for name, parameter in model.named_parameters():
        if "ln" in name:
            parameter.data = torch.rand_like(parameter) + 0.5
    weights = model.state_dict()
    tokens = draw_tokens(2, 10)

    def norm(x, name):
        return F.rms_norm(x, (24,), weights[f"{name}.weight"], eps=1e-5)

    x = weights["token_embeddings.weight"][tokens]
    for layer in ("layers.0", "layers.1"):
        normed = norm(x, f"{layer}.ln1")
        q, k, v = (
            F.linear(normed, weights[f"{layer}.attn.{name}_proj.weight"]).view(2, 10, 3, 8).transpose(1, 2)
            for name in "qkv"
        )
        q, k = (rotate_by_definition(y, torch.arange(10), 700.0) for y in (q, k))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 10, 24)
        x = x + F.linear(attended, weights[f"{layer}.attn.output_proj.weight"])
        normed = norm(x, f"{layer}.ln2")
        w1, w2, w3 = (weights[f"{layer}.ffn.w{i}.weight"] for i in (1, 2, 3))
        x = x + F.linear(F.silu(F.linear(normed, w1)) * F.linear(normed, w3), w2)
    expected = F.linear(norm(x, "ln_final"), weights["lm_head.weight"])
    # The rotary cache is float32 even in a float64 model.
    torch.testing.assert_close(model(tokens), expected, rtol=1e-6, atol=1e-6)


def test_a_later_token_changes_no_earlier_logits():
    model, tokens = make_model(), draw_tokens(1, 12)
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 50
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=0)
    assert (before[:, 7:] - after[:, 7:]).abs().amax(-1).min() > 1e-4, "and every later one"


def test_model_takes_one_sequence_without_batch():
    model, tokens = make_model(), draw_tokens(12)
    torch.testing.assert_close(model(tokens), model(tokens[None])[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_gives_low_precision_logits_and_float32_gradients(dtype, monkeypatch):
    dtypes = set()

    def attention(q, k, v, mask):
        dtypes.update((q.dtype, k.dtype, v.dtype))
        return scaled_dot_product_attention(q, k, v, mask)

    monkeypatch.setattr(cs336_basics.model, "scaled_dot_product_attention", attention)
    model, tokens = make_model(), draw_tokens(2, 12)
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
    model, tokens = make_model(dtype=torch.bfloat16), draw_tokens(2, 12)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    logits = model(tokens)
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits.float(), model.float()(tokens), rtol=0.1, atol=0.1)


def test_attention_can_be_swapped_by_its_global_name(monkeypatch):
    model, tokens = make_model(), draw_tokens(2, 12)
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
    model, tokens = make_model(), draw_tokens(2, 12)
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
    model, tokens = make_model(), draw_tokens(2, 12)
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
    model = make_model()
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
    model = make_model(rope_theta=123.0)
    (tmp_path / "model_config.json").write_text(json.dumps(model.config))
    # torch.compile puts this into the names of the module that it wraps.
    state_dict = {re.sub(old, new, name): tensor for name, tensor in model.state_dict().items()}
    torch.save(state_dict, tmp_path / "model.pt")
    loaded = BasicsTransformerLM.from_pretrained(str(tmp_path))
    assert loaded.config == {**SIZES, "rope_theta": 123.0}
    tokens = draw_tokens(2, 12)
    assert torch.equal(loaded(tokens), model(tokens))


@pytest.mark.parametrize("names", [{"lm_head.weight"}, {"lm_head.weight", "lm_head.bias", "token_embeddings.weight"}])
def test_from_pretrained_rejects_a_state_dict_of_another_model(tmp_path, names):
    model = make_model()
    (tmp_path / "model_config.json").write_text(json.dumps(model.config))
    torch.save({name: torch.zeros(50, 24) for name in names}, tmp_path / "model.pt")
    with pytest.raises(RuntimeError, match="Missing key"):
        BasicsTransformerLM.from_pretrained(tmp_path)


def test_number_of_parameters():
    model = make_model()
    block = 4 * 24 * 24 + 3 * 24 * 40 + 2 * 24
    assert model.get_num_params() == 2 * block + 24 + 2 * 50 * 24
    assert model.get_num_params(non_embedding=True) == 2 * block + 24 + 50 * 24


@pytest.mark.parametrize("how", ["argument", "context"])
def test_model_is_built_where_it_is_wanted(how):
    if how == "argument":
        model = make_model(device="meta")
    else:
        with torch.device("meta"):
            model = make_model()
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    # Coming from `meta`, the state dict fills the weights, and nothing but the module itself the rotary cache.
    source, tokens = make_model(), draw_tokens(2, 12)
    model.to_empty(device="cpu")
    model.load_state_dict(source.state_dict())
    assert torch.equal(model(tokens), source(tokens))


@pytest.mark.gpu
def test_model_on_a_gpu_matches_the_cpu():
    with torch.device("cuda"):
        model = make_model()
    assert all(tensor.is_cuda for tensor in (*model.parameters(), *model.buffers()))
    tokens = draw_tokens(2, 12)
    on_gpu = model(tokens.cuda()).cpu()
    assert model.generate(tokens.cuda(), 3, temperature=0.0).is_cuda
    torch.testing.assert_close(model.cpu()(tokens), on_gpu, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "value"), [
    ("vocab_size", 0), ("context_length", 0), ("d_model", -24), ("num_layers", 0), ("num_heads", 0), ("d_ff", 0),
    ("num_heads", 5), ("rope_theta", -1.0),
])  # fmt: skip
def test_model_rejects_bad_sizes(name, value):
    with pytest.raises(ValueError, match=f"{name.removeprefix('rope_')} is {value}"):
        make_model(**{name: value})


def test_model_rejects_an_odd_head_dimension():
    with pytest.raises(ValueError, match="dim is 3; rotary"):
        make_model(num_heads=8)


def test_model_rejects_an_input_longer_than_its_context():
    with pytest.raises(ValueError, match="x has 13 positions; context_length allows at most 12"):
        make_model()(draw_tokens(1, 13))
