"""The fused linear cross-entropy under autograd, autocast and torch.compile."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")

from cs336_systems.kernels import linear_cross_entropy as module
from cs336_systems.kernels.linear_cross_entropy import linear_cross_entropy
from tests.attention_helpers import IGNORE_INTERPRETER, largest_error
from tests.cross_entropy_helpers import draw, exact, loss_and_gradients, plain

pytestmark = IGNORE_INTERPRETER


@pytest.mark.parametrize(("x_needs", "weight_needs"), [(True, False), (False, True), (False, False)])
def test_only_the_gradients_that_are_needed(x_needs, weight_needs, device, monkeypatch):
    made = []

    def record(*args):
        results = original(*args)
        made.append([gradient.numel() > 0 for gradient in results[2:]])
        return results

    original = module._loss_and_gradients
    monkeypatch.setattr(module, "_loss_and_gradients", record)
    x, weight, targets = draw(4, 10, 8, torch.float32, device)
    expected = loss_and_gradients(plain, x, weight, targets)
    x.requires_grad_(x_needs)
    weight.requires_grad_(weight_needs)
    loss = linear_cross_entropy(x, weight, targets)
    assert made == [[x_needs, weight_needs]]
    assert loss.requires_grad == (x_needs or weight_needs)
    if loss.requires_grad:
        loss.backward()
        tensor, gradient = (x, expected[1]) if x_needs else (weight, expected[2])
        torch.testing.assert_close(tensor.grad, gradient)


def test_without_autograd_no_gradient_is_made(device, monkeypatch):
    launches = []
    original = module._launch_cross_entropy
    monkeypatch.setattr(module, "_launch_cross_entropy", lambda *args: (launches.append(args[-1]), original(*args)))
    x, weight, targets = draw(4, 10, 8, torch.float32, device)
    with torch.no_grad():
        loss = linear_cross_entropy(x, weight, targets)
    assert launches == [False]
    torch.testing.assert_close(loss, plain(x, weight, targets).detach())


def test_the_gradients_of_two_losses_add_up(device):
    x, weight, targets = draw(4, 10, 8, torch.float32, device)
    expected = loss_and_gradients(plain, x, weight, targets, scale=3.0)
    (linear_cross_entropy(x, weight, targets) + 2 * linear_cross_entropy(x, weight, targets)).backward()
    torch.testing.assert_close(x.grad, expected[1])
    torch.testing.assert_close(weight.grad, expected[2])


def test_a_second_backward_pass_is_refused(device):
    x, weight, targets = draw(4, 10, 8, torch.float32, device)
    loss = linear_cross_entropy(x, weight, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_second_derivative_is_refused(device):
    x, weight, targets = draw(4, 10, 8, torch.float32, device)
    loss = linear_cross_entropy(x, weight, targets)
    (dx,) = torch.autograd.grad(loss.square(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_autocast_takes_masters_in_float32_and_gives_them_gradients_in_float32(device):
    x, weight, targets = draw(6, 40, 16, torch.float32, device)
    dtype = torch.float16 if device == "cpu" else torch.bfloat16
    with torch.autocast(device, dtype=dtype):
        ours = loss_and_gradients(linear_cross_entropy, x, weight, targets)
        peers = loss_and_gradients(plain, x, weight, targets)
        mixed = linear_cross_entropy(x.to(dtype), weight, targets)
    assert mixed == ours[0]  # so the masters were rounded too
    expected = loss_and_gradients(exact, x, weight, targets, torch.float64)
    for our, peer, true in zip(ours, peers, expected, strict=True):
        assert our.dtype == torch.float32
        assert largest_error(our, true) <= 2 * largest_error(peer, true) + 1e-6


@pytest.mark.slow
def test_under_torch_compile(device, annotations_unchecked):
    def loss_of(x, weight, targets):
        return 3 * linear_cross_entropy(x * 2, weight, targets, chunk_bytes=3 * 64 * 4)

    x, weight, targets = draw(7, 40, 8, torch.float32, device)
    compiled = torch.compile(loss_of, backend="aot_eager", fullgraph=True)
    for tokens in (7, 4):
        ours = loss_and_gradients(compiled, x[:tokens], weight, targets[:tokens])
        expected = loss_and_gradients(loss_of, x[:tokens], weight, targets[:tokens])
        for our, theirs in zip(ours, expected, strict=True):
            torch.testing.assert_close(our, theirs)


@pytest.mark.gpu
def test_compiled_by_inductor_on_a_gpu(annotations_unchecked):
    x, weight, targets = draw(300, 1000, 64, torch.bfloat16, "cuda")
    compiled = torch.compile(linear_cross_entropy, fullgraph=True)
    for our, theirs in zip(
        loss_and_gradients(compiled, x, weight, targets),
        loss_and_gradients(linear_cross_entropy, x, weight, targets),
        strict=True,
    ):
        torch.testing.assert_close(our, theirs)
