"""The model's attention by name: all are the same function of the model's queries, keys and values."""

import copy
import pickle

import pytest
import torch

import cs336_basics.model
from cs336_basics.model import BasicsTransformerLM
from cs336_systems import configs
from cs336_systems.attention import (
    MODEL_ATTENTION_NAMES,
    flash_attention,
    model_attention,
    set_attention,
    use_attention,
)
from tests.attention_helpers import IGNORE_INTERPRETER, NEEDS_TRITON, make_inputs

NAMES = [
    pytest.param(name, marks=[NEEDS_TRITON, IGNORE_INTERPRETER] if name == "flash-triton" else [])
    for name in MODEL_ATTENTION_NAMES
    if name != "flash-hopper"  # runs on no CPU: test_flash_hopper.py
]


@pytest.fixture(autouse=True)
def _restore_attention():
    before = cs336_basics.model.scaled_dot_product_attention
    yield
    cs336_basics.model.scaled_dot_product_attention = before


def small_model(device: str) -> BasicsTransformerLM:
    torch.manual_seed(0)
    return BasicsTransformerLM(50, 32, d_model=32, num_layers=2, num_heads=4, d_ff=64).to(device)


def loss_and_gradients(model: torch.nn.Module, tokens: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    loss = model(tokens).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def test_names_are_those_of_the_configuration():
    assert configs.ATTENTION_NAMES == MODEL_ATTENTION_NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_model_is_the_same_with_each(name, device):
    model, tokens = small_model(device), torch.randint(50, (2, 20), device=device)
    expected = loss_and_gradients(model, tokens)
    with use_attention(name):
        actual = loss_and_gradients(model, tokens)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("annotations_unchecked")
@pytest.mark.parametrize("name", NAMES[1:])
def test_the_model_compiles_as_one_graph_with_each(name, device):
    if name == "flash-triton" and device == "cpu":
        pytest.skip("compiled code holds the same operator as for flash-pytorch, and the interpreter is slow")
    torch.compiler.reset()
    model, tokens = small_model(device), torch.randint(50, (2, 20), device=device)
    expected = loss_and_gradients(model, tokens)
    with use_attention(name):
        compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
        actual = loss_and_gradients(compiled, tokens)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_under_autocast(name, device):
    if name == "flash-triton" and device == "cpu":
        pytest.skip("Triton's interpreter multiplies bfloat16's raw bits")
    model, tokens = small_model(device), torch.randint(50, (2, 20), device=device)
    expected = loss_and_gradients(model, tokens)
    with use_attention(name), torch.autocast(device, dtype=torch.bfloat16):
        actual = loss_and_gradients(model, tokens)
    torch.testing.assert_close(actual[0].float(), expected[0], rtol=0.05, atol=0.01)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(20, 8), (3, 20, 8), (2, 3, 20, 8), (2, 1, 3, 20, 8)])
def test_leading_dimensions(name, shape, device):
    q, k, v = make_inputs(*shape, device=device)
    mask = torch.ones(20, 20, dtype=torch.bool, device=device).tril()
    attention = model_attention.model_attention(name)
    expected = cs336_basics.model.scaled_dot_product_attention(q, k, v, mask)
    # The causal mask is what a model may pass, and what is assumed without one.
    torch.testing.assert_close(attention(q, k, v, mask), expected, rtol=1e-4, atol=1e-5)
    if name != "naive":
        torch.testing.assert_close(attention(q, k, v), expected, rtol=1e-4, atol=1e-5)


def test_only_the_others_than_naive_say_that_they_are_causal():
    for name in MODEL_ATTENTION_NAMES:
        attention = model_attention.model_attention(name)
        assert getattr(attention, "is_causal", False) is (name != "naive")
        assert pickle.loads(pickle.dumps(attention)) is attention
    assert model_attention.model_attention("naive") is cs336_basics.model.scaled_dot_product_attention


def test_each_name_asks_for_its_own_implementation(monkeypatch):
    asked = []

    def spy(q, k, v, is_causal, implementation):
        asked.append((is_causal, implementation))
        return q

    monkeypatch.setattr(model_attention, "flash_attention", spy)
    q, k, v = make_inputs(1, 1, 4, 8)
    for name in MODEL_ATTENTION_NAMES[1:]:
        model_attention.model_attention(name)(q, k, v)
    assert asked == [(True, "sdpa"), (True, "pytorch"), (True, "triton"), (True, "hopper")]


def test_the_model_makes_no_mask_for_them(monkeypatch):
    masks = []

    def spy(q, k, v, mask=None):
        masks.append(mask)
        return flash_attention(q, k, v, is_causal=True)

    spy.is_causal = True
    monkeypatch.setattr(cs336_basics.model, "scaled_dot_product_attention", spy)
    small_model("cpu")(torch.randint(50, (1, 8)))
    assert masks == [None, None]


def test_use_attention_restores_what_was_there():
    set_attention("sdpa")
    assert cs336_basics.model.scaled_dot_product_attention is model_attention.sdpa_attention
    with use_attention("flash-pytorch"):
        assert cs336_basics.model.scaled_dot_product_attention is model_attention.flash_pytorch_attention
        with use_attention("naive"):
            assert cs336_basics.model.scaled_dot_product_attention is model_attention.naive_attention
        assert cs336_basics.model.scaled_dot_product_attention is model_attention.flash_pytorch_attention
    assert cs336_basics.model.scaled_dot_product_attention is model_attention.sdpa_attention
    with pytest.raises(ZeroDivisionError), use_attention("naive"):
        raise ZeroDivisionError
    assert cs336_basics.model.scaled_dot_product_attention is model_attention.sdpa_attention


def test_an_unknown_name():
    with pytest.raises(ValueError, match=r"'flash'.*naive, sdpa, flash-pytorch, flash-triton"):
        set_attention("flash")
    with pytest.raises(ValueError, match="'flash'"), use_attention("flash"):
        pass


def test_why_not(monkeypatch):
    monkeypatch.setattr("cs336_systems.attention.implementations._TRITON_IS_INSTALLED", True)
    monkeypatch.setattr("cs336_systems.attention.implementations._TRITON_IS_INTERPRETED", False)
    run_on_a_cpu = [name for name in MODEL_ATTENTION_NAMES if model_attention.why_not(name, "cpu") is None]
    assert run_on_a_cpu == ["naive", "sdpa", "flash-pytorch"]
    for is_hopper, n_run in ((True, 5), (False, 4)):
        monkeypatch.setattr(
            "cs336_systems.attention.implementations._is_hopper", lambda device, answer=is_hopper: answer
        )
        assert sum(model_attention.why_not(name, "cuda") is None for name in MODEL_ATTENTION_NAMES) == n_run
    assert "9.0" in model_attention.why_not("flash-hopper", "cuda")
    assert "GPU" in model_attention.why_not("flash-triton", "cpu")
