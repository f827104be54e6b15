"""Low-precision weights beside float32 masters: the same updates as autocast's over float32 weights, to the bit."""

import copy
import pickle

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")

from cs336_basics.optimizer import AdamW
from cs336_systems.kernels.adamw import FusedAdamW
from tests.attention_helpers import IGNORE_INTERPRETER

pytestmark = IGNORE_INTERPRETER

# Triton's interpreter does not round to bfloat16 as a GPU does.
DTYPES = [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
SHAPES = [(7, 5), (2, 2049), (1,), ()]


def make_weights(device, dtype, **settings):
    """(an optimizer over float32 weights, one over the same as masters), and the weights of both."""
    plain = [torch.randn(shape, device=device, requires_grad=True) for shape in SHAPES]
    rounded = [weight.detach().clone().requires_grad_() for weight in plain]
    plain_optimizer, optimizer = FusedAdamW(plain, lr=0.01, **settings), FusedAdamW(rounded, lr=0.01, **settings)
    optimizer.use_master_weights(rounded, dtype)
    return plain_optimizer, optimizer, plain, rounded


def set_gradients(plain, rounded):
    """What a product in low precision makes: as it is for its own weights, widened for autocast's."""
    for wide, narrow in zip(plain, rounded, strict=True):
        narrow.grad = torch.randn(wide.shape, device=wide.device).to(narrow.dtype)
        wide.grad = narrow.grad.to(wide.dtype)


def masters(optimizer, weights):
    return [optimizer.state[weight]["master"] for weight in weights]


def assert_all_equal(ours, theirs):
    assert all(torch.equal(our, their) for our, their in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masters_are_the_float32_weights_and_parameters_those_rounded(dtype, device):
    plain_optimizer, optimizer, plain, rounded = make_weights(device, dtype, weight_decay=0.1)
    for step in range(4):
        set_gradients(plain, rounded)
        for one in (plain_optimizer, optimizer):
            one.param_groups[0]["lr"] = 0.01 * (step + 1)
            one.step()
        assert_all_equal(masters(optimizer, rounded), plain)
        assert_all_equal(rounded, [weight.detach().to(dtype) for weight in plain])
    assert all(optimizer.state[weight]["exp_avg"].dtype == torch.float32 for weight in rounded)


def test_some_weights_have_masters_and_others_none(device):
    plain_optimizer, optimizer, plain, weights = make_weights(device, torch.float16)
    optimizer.add_param_group({"params": [torch.ones(3, device=device, requires_grad=True)]})
    plain_optimizer.add_param_group({"params": [torch.ones(3, device=device, requires_grad=True)]})
    plain.append(plain_optimizer.param_groups[1]["params"][0])
    weights.append(optimizer.param_groups[1]["params"][0])
    for _ in range(2):
        set_gradients(plain, weights)
        optimizer.step()
        plain_optimizer.step()
    assert "master" not in optimizer.state[weights[-1]]
    assert torch.equal(weights[-1], plain[-1])
    assert_all_equal(masters(optimizer, weights[:-1]), plain[:-1])


def test_updates_too_small_for_the_rounded_weight_add_up(device):
    weight = torch.ones(8, device=device, requires_grad=True)
    optimizer = FusedAdamW([weight], lr=1e-5, weight_decay=0.0)
    optimizer.use_master_weights([weight], torch.float16)
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert weight[0].item() == pytest.approx(0.999, abs=torch.finfo(torch.float16).eps)


@pytest.mark.parametrize("model_first", [True, False])
def test_training_goes_on_from_both_state_dicts_in_any_order(model_first, device):
    plain_optimizer, optimizer, plain, rounded = make_weights(device, torch.float16)
    set_gradients(plain, rounded)
    optimizer.step()
    plain_optimizer.step()
    saved = pickle.loads(pickle.dumps(optimizer.state_dict()))
    weights = [weight.detach().clone() for weight in rounded]
    _, again, _, loaded = make_weights(device, torch.float16)
    set_gradients(loaded, loaded)
    again.step()  # it has looked at its own weights before it is given others
    with torch.no_grad():
        if not model_first:
            again.load_state_dict(saved)
        for weight, value in zip(loaded, weights, strict=True):
            weight.copy_(value)
        if model_first:
            again.load_state_dict(saved)
    set_gradients(plain, rounded)
    for weight, other in zip(loaded, rounded, strict=True):
        weight.grad = other.grad
    plain_optimizer.step()
    again.step()
    assert_all_equal(masters(again, loaded), plain)


def test_a_weight_that_someone_changed_is_its_masters_new_value(device):
    _, optimizer, plain, rounded = make_weights(device, torch.float16)
    for change in range(3):
        set_gradients(plain, rounded)
        optimizer.step()
        before = [master.clone() for master in masters(optimizer, rounded)]
        with torch.no_grad():
            if change:
                rounded[1][0, :5] = 3.0
                before[1][0, :5] = 3.0
        for weight in rounded:
            weight.grad = torch.zeros_like(weight)
        reference = [value.clone().requires_grad_() for value in before]
        expected = FusedAdamW(reference, lr=0.01)
        for value, weight in zip(reference, rounded, strict=True):
            expected.state[value] = {k: copy.deepcopy(v) for k, v in optimizer.state[weight].items() if k != "master"}
            value.grad = torch.zeros_like(value)
        expected.step()
        optimizer.step()
        assert_all_equal(masters(optimizer, rounded), reference)


def test_states_with_and_without_masters_are_exchanged(device):
    """Other optimizers' states have none: the parameters as they are take their place; and the other way round."""
    plain_optimizer, optimizer, plain, rounded = make_weights(device, torch.float16)
    set_gradients(plain, rounded)
    optimizer.step()
    plain_optimizer.step()
    optimizer.load_state_dict(copy.deepcopy(plain_optimizer.state_dict()))
    assert_all_equal(masters(optimizer, rounded), [weight.float() for weight in rounded])
    other = AdamW(plain, lr=0.01)
    plain_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert all("master" not in plain_optimizer.state[weight] for weight in plain)
    set_gradients(plain, rounded)
    other.step()


def test_layouts_that_differ_from_the_states(device):
    """A weight that is part of another tensor, and gradients in another order of memory."""
    base = torch.randn(9, 12, device=device)
    weight = base[1:8:2, ::3].requires_grad_()
    plain = weight.detach().clone().requires_grad_()
    optimizer, plain_optimizer = FusedAdamW([weight], lr=0.1), FusedAdamW([plain], lr=0.1)
    optimizer.use_master_weights([weight], torch.float16)
    narrow = torch.zeros(9, 12, device=device, dtype=torch.float16)[1:8:2, ::3]
    weight.data = narrow.copy_(weight.detach())
    for _ in range(3):
        weight.grad = torch.randn(weight.shape[::-1], device=device).half().T
        plain.grad = weight.grad.float()
        optimizer.step()
        plain_optimizer.step()
    assert torch.equal(optimizer.state[weight]["master"], plain)
    assert torch.equal(weight, plain.detach().half())
    assert weight.data_ptr() == narrow.data_ptr()


def test_gradients_that_are_there_are_rounded_too(device):
    weight = torch.ones(3, device=device, requires_grad=True)
    weight.square().sum().backward()
    optimizer = FusedAdamW([weight])
    optimizer.use_master_weights([weight])
    assert weight.dtype == weight.grad.dtype == torch.bfloat16
    assert weight.grad.tolist() == [2.0] * 3
    assert weight.requires_grad
    assert weight.is_leaf


def test_what_has_no_masters_is_refused(device):
    weight, other = (torch.ones(3, device=device, requires_grad=True) for _ in range(2))
    half = torch.ones(3, device=device, dtype=torch.float16, requires_grad=True)
    optimizer = FusedAdamW([weight, half])
    with pytest.raises(ValueError, match=r"dtype is torch\.float32; it must be float16 or bfloat16"):
        optimizer.use_master_weights([weight], torch.float32)
    with pytest.raises(ValueError, match=r"weights\[1\], \(3,\), is no parameter of this optimizer"):
        optimizer.use_master_weights([weight, other])
    with pytest.raises(ValueError, match=r"weights\[1\] is torch\.float16; it must be float32"):
        optimizer.use_master_weights([weight, half])
    assert weight.dtype == torch.float32  # nothing was changed by a call that was refused
