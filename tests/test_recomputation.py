"""Tensors that backward makes again: the same gradients, less memory, and a recipe that runs once a backward pass."""

import gc
from functools import partial

import pytest
import torch

from cs336_systems.profiling.storage_trace import StorageTrace
from cs336_systems.recomputation import made_again


def _two_products(recipe, x, w1, w2):
    """relu(x) twice multiplied, of which `recipe` can be kept in its place."""
    hidden = torch.relu(x)
    with made_again(hidden, recipe):
        return (hidden.flatten(0, 1) @ w1).sum() + (hidden @ w2).square().sum()


@pytest.fixture
def tensors():
    return [torch.randn(shape, requires_grad=True) for shape in ((2, 3, 4), (4, 5), (4, 2))]


def test_gradients_are_the_same_bit_for_bit_and_the_recipe_runs_once(tensors):
    runs = []

    def recipe():
        runs.append(torch.is_grad_enabled())
        return torch.relu(tensors[0].detach())

    hidden = torch.relu(tensors[0])
    plain = (hidden.flatten(0, 1) @ tensors[1]).sum() + (hidden @ tensors[2]).square().sum()
    expected = torch.autograd.grad(plain, tensors)
    loss = _two_products(recipe, *tensors)
    assert runs == []
    for times in (1, 2):
        gradients = torch.autograd.grad(loss, tensors, retain_graph=True)
        assert all(map(torch.equal, gradients, expected))
        assert runs == times * [False]


def test_what_is_made_again_is_not_kept_before_or_after_backward(tensors):
    x, weight, _ = tensors
    with StorageTrace(tensors, has_stacks=False) as trace:
        known_bytes = trace.live_bytes
        hidden = x.clone()  # its own backward keeps nothing
        with made_again(hidden, partial(torch.clone, x.detach())):
            y = hidden @ weight
        del hidden
        for _ in range(2):
            gc.collect()
            assert trace.live_bytes - known_bytes == y.nbytes
            torch.autograd.grad(y.sum(), [x, weight], retain_graph=True)


def test_other_tensors_are_kept_as_ever(tensors):
    x, weight, _ = tensors
    hidden, other = torch.relu(x), torch.tanh(x)
    with made_again(hidden, lambda: torch.full_like(x, 7.0)):  # the wrong values, to see who asks for them
        y = (other @ weight).sum() + (hidden @ weight).sum()
    (gradient,) = torch.autograd.grad(y, [weight])
    expected = (other.sum((0, 1)) + 7.0 * x.shape[0] * x.shape[1]).unsqueeze(1).expand_as(weight)
    torch.testing.assert_close(gradient, expected)


def test_a_kept_tensor_that_was_changed_is_refused(tensors):
    x, weight, _ = tensors
    hidden = torch.relu(x)
    with made_again(hidden, partial(torch.relu, x.detach())):
        y = hidden @ weight
    with torch.no_grad():
        weight.add_(1.0)
    with pytest.raises(RuntimeError, match=r"\(4, 5\) torch.float32, .* modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize(("rows", "device"), [(0, "cpu"), (3, "meta")])
def test_tensors_without_an_address_are_told_apart(rows, device):
    x, weight, hidden = (torch.empty(rows, 3, device=device) for _ in range(3))
    with made_again(hidden, pytest.fail):
        y = x * weight.requires_grad_()
    y.sum().backward()


def test_frozen_weights_ask_for_nothing(tensors):
    x, weight, _ = tensors
    hidden = torch.relu(x)
    with made_again(hidden, pytest.fail):
        y = hidden @ weight.detach()
    torch.autograd.grad(y.sum(), [x])
