"""Softmax, cross-entropy and gradient clipping against PyTorch's own."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from cs336_basics.nn_utils import clip_gradient, cross_entropy, log_softmax, softmax

PAIRS = [(softmax, F.softmax), (log_softmax, F.log_softmax)]


@pytest.mark.parametrize(("ours", "torchs"), PAIRS, ids=["softmax", "log_softmax"])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_softmax_and_gradient_match_torch(ours, torchs, dim):
    x = torch.randn(5, 7, 11, dtype=torch.float64, requires_grad=True)
    weight = torch.randn_like(x)
    (ours_grad,) = torch.autograd.grad((ours(x, dim) * weight).sum(), x)
    (torchs_grad,) = torch.autograd.grad((torchs(x, dim) * weight).sum(), x)
    torch.testing.assert_close(ours(x, dim), torchs(x, dim))
    torch.testing.assert_close(ours_grad, torchs_grad)


@pytest.mark.parametrize(("ours", "torchs"), PAIRS, ids=["softmax", "log_softmax"])
@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_softmax_is_stable_far_from_zero(ours, torchs, offset):
    x = torch.tensor([[0.0, 1.0, -3.0], [0.0, 0.0, 500.0]]) + offset
    assert ours(x, -1).isfinite().all()
    torch.testing.assert_close(ours(x, -1), torchs(x, -1))


def test_softmax_of_masked_scores_is_zero_where_masked():
    probabilities = softmax(torch.tensor([0.5, float("-inf"), 0.5]), dim=0)
    assert probabilities.tolist() == [0.5, 0.0, 0.5]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("ours", "torchs"), PAIRS, ids=["softmax", "log_softmax"])
def test_low_precision_input_is_summed_in_float32(ours, torchs, dtype):
    # 100,000 equal logits: their exponentials sum to more than float16's largest number.
    x = torch.zeros(100_000, dtype=dtype)
    result = ours(x, 0)
    assert result.dtype == dtype
    torch.testing.assert_close(result, torchs(x.float(), 0).to(dtype), atol=0, rtol=0)


@pytest.mark.parametrize("shape", [(6,), (3, 5), (2, 3, 4), ()])
def test_cross_entropy_and_gradient_match_torch(shape):
    logits = torch.randn(*shape, 13, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(13, shape)
    expected = F.cross_entropy(logits.reshape(-1, 13), targets.reshape(-1))
    actual = cross_entropy(logits, targets)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(torch.autograd.grad(actual, logits), torch.autograd.grad(expected, logits))


def test_cross_entropy_is_stable():
    logits = torch.tensor([[1e4, 0.0, -1e4], [3e38, -3e38, 0.0]])
    assert cross_entropy(logits, torch.tensor([0, 0])).item() == 0.0
    assert cross_entropy(logits[:1], torch.tensor([1])).item() == 1e4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_cross_entropy_of_low_precision_logits_is_computed_in_float32(dtype):
    logits = (4 * torch.randn(64, 1000)).to(dtype).requires_grad_()
    targets = torch.randint(1000, (64,))
    loss = cross_entropy(logits, targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, F.cross_entropy(logits.float(), targets))
    loss.backward()
    assert logits.grad.dtype == dtype


def test_cross_entropy_saves_nothing_of_the_logits_size_but_the_logits():
    logits = torch.randn(32, 1000, requires_grad=True)
    saved: dict[int, int] = {}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        cross_entropy(logits, torch.randint(1000, (32,)))
    assert logits.untyped_storage().data_ptr() in saved
    assert sum(saved.values()) < logits.nbytes + 1000


@pytest.mark.parametrize("targets_shape", [(4,), (8, 1), (8, 2), ()])
def test_cross_entropy_rejects_targets_of_another_shape(targets_shape):
    with pytest.raises(ValueError, match="targets has shape"):
        cross_entropy(torch.randn(8, 5), torch.zeros(targets_shape, dtype=torch.int64))


def _parameters(*scales: float) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.randn(3, i + 1)) for i in range(len(scales))]
    for parameter, scale in zip(parameters, scales, strict=True):
        parameter.grad = scale * torch.randn_like(parameter)
    return parameters


@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e6])
@pytest.mark.parametrize("scales", [(1.0,), (0.1, 10.0, 1.0), (1e-4, 1e-4), (0.0, 0.0)])
def test_clip_gradient_matches_torch(max_norm, scales):
    ours = _parameters(*scales)
    torchs = [nn.Parameter(parameter.detach().clone()) for parameter in ours]
    for parameter, source in zip(torchs, ours, strict=True):
        parameter.grad = source.grad.clone()
    storages = [parameter.grad.data_ptr() for parameter in ours]
    assert clip_gradient(ours, max_norm) is None
    torch.nn.utils.clip_grad_norm_(torchs, max_norm)
    for a, b in zip(ours, torchs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    assert [parameter.grad.data_ptr() for parameter in ours] == storages, "not in place"


def test_clip_gradient_leaves_a_small_gradient_bit_for_bit():
    parameters = _parameters(1.0, 1.0)
    before = [parameter.grad.clone() for parameter in parameters]
    clip_gradient(parameters, max_norm=1e3)
    assert all(torch.equal(parameter.grad, grad) for parameter, grad in zip(parameters, before, strict=True))


def test_clip_gradient_takes_a_generator_and_skips_parameters_without_gradient():
    parameters = _parameters(3.0, 4.0, 5.0)
    parameters[1].grad = None
    clip_gradient((parameter for parameter in parameters), max_norm=0.5)
    assert parameters[1].grad is None
    norm = torch.cat([parameters[0].grad.flatten(), parameters[2].grad.flatten()]).norm()
    assert norm.item() == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("parameters", [[], [nn.Parameter(torch.ones(2))]], ids=["none", "none with a gradient"])
def test_clip_gradient_without_gradients_does_nothing(parameters):
    clip_gradient(parameters, max_norm=1.0)
    assert all(parameter.grad is None for parameter in parameters)


def test_clip_gradient_sums_low_precision_gradients_in_float32():
    parameter = nn.Parameter(torch.zeros(40_000, dtype=torch.float16))
    parameter.grad = torch.full_like(parameter, 600.0)
    clip_gradient([parameter], max_norm=1200.0)  # the norm, 120,000, is more than float16 can hold
    assert parameter.grad.dtype == torch.float16
    torch.testing.assert_close(parameter.grad.float(), torch.full((40_000,), 6.0), rtol=1e-3, atol=0)


@pytest.mark.parametrize("max_norm", [0.0, -1.0, float("nan")])
def test_clip_gradient_rejects_a_norm_not_above_zero(max_norm):
    with pytest.raises(ValueError, match="max_norm is"):
        clip_gradient(_parameters(1.0), max_norm)


class _NoWaiting(TorchFunctionMode):
    """Fails on what makes the host wait for a tensor's value."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        reads = (torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__bool__, torch.Tensor.__float__)
        assert func not in reads, "the host reads a tensor's value"
        return func(*args, **(kwargs or {}))


def test_nothing_makes_the_host_wait():
    logits, parameters = torch.randn(4, 7, requires_grad=True), _parameters(1.0, 2.0)
    with _NoWaiting():
        cross_entropy(softmax(logits, dim=-1), torch.tensor([0, 1, 2, 6])).backward()
        clip_gradient(parameters, max_norm=1.0)
    with _NoWaiting(), pytest.raises(AssertionError, match="the host reads"):
        bool(logits.sum() > 0)
