"""Generation from the language model: greedy as by hand, sampled at its probabilities, ended and filled up."""

import pytest
import torch
from torch import nn

from cs336_basics.model import BasicsTransformerLM
from tests.model_helpers import SIZES, draw_tokens, make_model


def _greedy_by_hand(model: BasicsTransformerLM, prompt: list[int], n: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(n):
        window = tokens[-SIZES["context_length"] :]
        tokens.append(int(model(torch.tensor(window))[-1].argmax()))
    return tokens[len(prompt) :]


def _lively_model() -> BasicsTransformerLM:
    """A model whose greedy continuation does not repeat itself at once."""
    model = make_model()
    model.lm_head.weight.data += 0.3 * torch.randn_like(model.lm_head.weight)
    return model


@pytest.mark.parametrize("prompt_length", [1, 5, 11, 12, 13, 40])
@pytest.mark.parametrize("arguments", [{"temperature": 0.0}, {"top_k": 1}, {"temperature": 1e-4}], ids=str)
def test_generate_matches_greedy_decoding_by_hand(prompt_length, arguments):
    model, prompt = _lively_model(), draw_tokens(prompt_length)
    expected = _greedy_by_hand(model, prompt.tolist(), 15)
    assert len(set(expected)) > 3
    assert model.generate(prompt, 15, **arguments).tolist() == [expected]
    assert model.generate(prompt[None], 15, **arguments).tolist() == [expected]


def test_generate_continues_each_sequence_of_a_batch():
    model, prompts = _lively_model(), draw_tokens(3, 20)
    expected = [_greedy_by_hand(model, prompt, 6) for prompt in prompts.tolist()]
    assert model.generate(prompts, 6, temperature=0.0).tolist() == expected


def test_generate_samples_at_the_temperature():
    model, prompt = make_model(), draw_tokens(4)
    for temperature in (0.5, 1.0, 2.0):
        drawn = model.generate(prompt.expand(20_000, 4), 1, temperature=temperature).flatten()
        frequencies = torch.bincount(drawn, minlength=50) / 20_000
        probabilities = torch.softmax(model(prompt)[-1] / temperature, dim=-1)
        # Five standard deviations of a binomial frequency, and one draw.
        assert ((frequencies - probabilities).abs() < 5 * (probabilities / 20_000).sqrt() + 1 / 20_000).all()


def test_generate_draws_from_the_top_k_only_and_from_all_of_them():
    model, prompt = make_model(), draw_tokens(4)
    allowed = model(prompt)[-1].topk(3).indices
    drawn = model.generate(prompt.expand(2000, 4), 1, temperature=3.0, top_k=3).flatten()
    assert set(drawn.tolist()) == set(allowed.tolist())
    probabilities = torch.softmax(model(prompt)[-1, allowed] / 3.0, dim=-1)
    frequencies = torch.tensor([(drawn == token).float().mean() for token in allowed])
    torch.testing.assert_close(frequencies, probabilities, rtol=0, atol=0.06)
    assert len(model.generate(prompt.expand(2000, 4), 1, temperature=3.0).unique()) > 10, "without top_k: many more"


def test_top_k_keeps_exactly_k_tied_tokens():
    model = make_model()
    nn.init.zeros_(model.lm_head.weight)
    assert len(model.generate(draw_tokens(1).expand(1000, 1), 1, top_k=4).unique()) == 4
    assert len(model.generate(draw_tokens(1).expand(5000, 1), 1, top_k=1000).unique()) == 50, "more than there are: all"


def test_generate_ends_before_the_end_of_sequence_token():
    model, prompt = _lively_model(), draw_tokens(5)
    expected = _greedy_by_hand(model, prompt.tolist(), 15)
    eos = expected[3]
    n_kept = expected.index(eos)
    assert model.generate(prompt, 15, temperature=0.0, eos_token_id=eos).tolist() == [expected[:n_kept]]
    absent = next(token for token in range(50) if token not in expected)
    assert model.generate(prompt, 15, temperature=0.0, eos_token_id=absent).tolist() == [expected]


def test_generate_fills_up_the_sequences_of_a_batch_that_ended():
    model, prompts = _lively_model(), draw_tokens(2, 5)
    first, second = (_greedy_by_hand(model, prompt, 8) for prompt in prompts.tolist())
    eos = next(token for token in first if token not in second)
    n_kept = first.index(eos)
    expected = [first[:n_kept] + [eos] * (8 - n_kept), second]
    assert model.generate(prompts, 8, temperature=0.0, eos_token_id=eos).tolist() == expected


@pytest.mark.parametrize("is_training", [True, False])
def test_generate_needs_no_gradients_and_restores_the_mode(is_training):
    model = make_model().train(is_training)
    modes = []
    model.layers[0].register_forward_hook(
        lambda module, _inputs, output: modes.append((module.training, output.requires_grad))
    )
    model.generate(draw_tokens(3), 2)
    assert modes == [(False, False)] * 2
    assert all(module.training == is_training for module in model.modules())
    with pytest.raises(IndexError):
        model.generate(torch.tensor([1000]), 2)
    assert all(module.training == is_training for module in model.modules()), "after an error too"


def test_generate_of_no_tokens_is_empty():
    assert make_model().generate(draw_tokens(3), 0).shape == (1, 0)


def test_generate_is_fixed_by_torchs_seed():
    model, prompt, samples = make_model(), draw_tokens(3), []
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
        make_model().generate(**{"x": torch.tensor([1, 2]), "max_new_tokens": 3, **arguments})
