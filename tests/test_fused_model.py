"""The model with fused kernels beside the plain one, in float32: loss, gradients, state dicts, copies, compiled."""

import copy
import math
import pickle

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")

from cs336_basics.model import BasicsTransformerLM
from cs336_basics.nn_utils import cross_entropy
from cs336_systems.kernels.fused_model import recompute_elementwise, use_fused_kernels
from tests.attention_helpers import IGNORE_INTERPRETER

pytestmark = IGNORE_INTERPRETER

VOCAB, CONTEXT = 53, 12


@pytest.fixture
def models(device):
    plain = BasicsTransformerLM(VOCAB, CONTEXT, d_model=24, num_layers=1, num_heads=2, d_ff=40, device=device)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if "ln" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))  # all ones would hide an error
    return plain, use_fused_kernels(copy.deepcopy(plain))


def draw(device, batch=2, seq=5):
    return (torch.randint(VOCAB, (batch, seq), device=device) for _ in range(2))


def loss_of(plain, inputs, targets):
    return cross_entropy(plain(inputs), targets)


def gradients(loss, model):
    return torch.autograd.grad(loss, list(model.parameters()))


def assert_equal_gradients(ours, theirs):
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-4, atol=1e-6)


def test_logits_loss_and_gradients_are_the_plain_models(models, device):
    plain, fused = models
    inputs, targets = draw(device)
    logits = fused(inputs)
    expected = plain(inputs)
    torch.testing.assert_close(logits, expected)
    loss, expected_loss = fused(inputs, targets), cross_entropy(expected, targets)
    torch.testing.assert_close(loss, expected_loss)
    expected_gradients = gradients(expected_loss, plain)
    assert_equal_gradients(gradients(loss, fused), expected_gradients)
    assert_equal_gradients(gradients(cross_entropy(logits, targets), fused), expected_gradients)


@pytest.mark.parametrize("autocast", [False, True])
def test_what_blocks_make_again_is_what_they_made(models, device, autocast):
    _, fused = models
    inputs, targets = draw(device)
    results = []
    for recomputes in (False, True):
        if recomputes:
            recompute_elementwise(fused.layers[0])
        with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
            loss = fused(inputs, targets)
        results.append([loss, *gradients(loss, fused)])
    assert all(map(torch.equal, *results))


def test_only_the_loss(models, device):
    plain, fused = models
    with_loss = use_fused_kernels(copy.deepcopy(plain), only_loss=True)
    assert {type(module) for module in with_loss.layers.modules()} == {
        type(module) for module in plain.layers.modules()
    }
    inputs, targets = draw(device)
    torch.testing.assert_close(with_loss(inputs, targets), fused(inputs, targets))
    assert torch.equal(with_loss(inputs), plain(inputs))


def test_state_dicts_go_both_ways_and_parameters_are_the_same_objects(models):
    plain, fused = models
    assert list(plain.state_dict()) == list(fused.state_dict())
    fused.load_state_dict(plain.state_dict())
    plain.load_state_dict(fused.state_dict())
    parameters = list(plain.parameters())
    assert all(a is b for a, b in zip(parameters, use_fused_kernels(plain).parameters(), strict=True))


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_has_all_of_its_own(again, models, device):
    _, fused = models
    recompute_elementwise(fused.layers[0])
    inputs, targets = draw(device, batch=1, seq=2)
    copied = again(fused)
    assert copied.layers[0].recomputes
    assert copied.layers[0].ffn.recomputes
    expected = fused(inputs, targets)
    torch.nn.init.zeros_(fused.lm_head.weight)
    assert fused(inputs, targets).item() == pytest.approx(math.log(VOCAB))
    assert torch.equal(copied(inputs, targets), expected)


def test_it_generates_what_the_plain_model_does(models, device):
    plain, fused = models
    prompt, _ = draw(device, seq=3)
    assert torch.equal(fused.generate(prompt, 3, temperature=0), plain.generate(prompt, 3, temperature=0))


@pytest.mark.parametrize("shape", [(9,), (2, 9), (1, 9)])
def test_positions_as_the_attention_passes_them(shape, models, device):
    plain, fused = models
    x, positions = torch.randn(2, 9, 24, device=device), torch.randint(CONTEXT, shape, device=device)
    torch.testing.assert_close(fused.layers[0].attn(x, positions), plain.layers[0].attn(x, positions))


def test_rotary_shapes_that_the_kernel_does_not_take(models, device):
    plain, fused = (model.positional_encoder for model in models)
    x, by_head = torch.randn(2, 3, 5, 12, device=device), torch.randint(CONTEXT, (2, 3, 5), device=device)
    torch.testing.assert_close(fused(x, by_head), plain(x, by_head))
    torch.testing.assert_close(fused(x[0]), plain(x[0]))
    with pytest.raises(ValueError, match="context_length allows at most 12"):
        fused(torch.randn(1, 1, 13, 12, device=device))
    with pytest.raises(ValueError, match="it must be 12"):
        fused(torch.randn(1, 1, 3, 10, device=device))


def test_under_autocast_gradients_are_as_near_as_the_plain_models(models, device):
    plain, fused = models
    inputs, targets = draw(device)
    exact_model = copy.deepcopy(plain).double()
    exact = gradients(loss_of(exact_model, inputs, targets), exact_model)
    with torch.autocast(device, dtype=torch.float16 if device == "cpu" else torch.bfloat16):
        ours, theirs = fused(inputs, targets), loss_of(plain, inputs, targets)
    for our, their, true in zip(gradients(ours, fused), gradients(theirs, plain), exact, strict=True):
        assert our.dtype == torch.float32
        assert (our - true).norm() <= 2 * (their - true).norm() + 1e-3 * true.norm()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["whole", "blocks"])
def test_compiled(how, models, device, annotations_unchecked):
    plain, fused = models
    inputs, targets = draw(device)
    for module in [fused] if how == "whole" else fused.layers:
        module.compile(backend="aot_eager", fullgraph=True)
    loss = fused(inputs, targets)
    expected = loss_of(plain, inputs, targets)
    torch.testing.assert_close(loss, expected)
    assert_equal_gradients(gradients(loss, fused), gradients(expected, plain))


def test_only_a_plain_model_is_changed(models):
    _, fused = models
    with pytest.raises(TypeError, match="model is a FusedTransformerLM; it must be a BasicsTransformerLM"):
        use_fused_kernels(fused)
