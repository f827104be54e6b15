"""RMSNorm's kernels against float64 arithmetic, through Triton's interpreter on a CPU and compiled on a GPU."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")

from cs336_systems.kernels import rms_norm as module
from cs336_systems.kernels.rms_norm import add_rms_norm, rms_norm
from tests.attention_helpers import IGNORE_INTERPRETER
from tests.kernel_helpers import DTYPES, assert_no_worse_than_eager, outputs_and_gradients, rows_far_apart

pytestmark = IGNORE_INTERPRETER

SHAPES = [(1, 2), (3, 17), (2, 5, 64), (7,), (9, 100), (4, 1023)]


def eager(x, weight, eps=1e-5):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def eager_with_residual(x, residual, weight):
    h = x + residual
    return eager(h, weight), h


def draw(shape, dtype, device, n=1):
    weight = 1 + 0.5 * torch.randn(shape[-1], device=device)
    return [*(torch.randn(shape, device=device).to(dtype) for _ in range(n)), weight.to(dtype)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_float64(shape, dtype, device):
    assert_no_worse_than_eager(rms_norm, eager, draw(shape, dtype, device))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 17), (2, 5, 64)], ids=str)
def test_with_a_residual_matches_float64(shape, dtype, device):
    assert_no_worse_than_eager(add_rms_norm, eager_with_residual, draw(shape, dtype, device, 2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sum_is_rounded_before_it_is_normed(dtype, device):
    """As by the two operators: what backward reads is what forward normed."""
    x, residual, weight = draw((5, 33), dtype, device, 2)
    y, h = add_rms_norm(x, residual, weight, dtype=torch.float32)
    assert torch.equal(h, x + residual)
    torch.testing.assert_close(y, rms_norm(h, weight, dtype=torch.float32), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 11])
def test_rows_of_the_weights_gradient_are_shared_by_programs(rows, device):
    assert_no_worse_than_eager(rms_norm, eager, draw((rows, 33), torch.float32, device))


def test_mixed_dtypes_as_under_autocast(device):
    x, residual, weight = draw((5, 40), torch.float32, device, 2)
    x = x.half()
    y, h, dx, dresidual, dweight = outputs_and_gradients(
        lambda *inputs: add_rms_norm(*inputs, dtype=torch.float16), [x, residual, weight]
    )
    assert [t.dtype for t in (y, h, dx, dresidual, dweight)] == [
        torch.float16, torch.float32, torch.float16, torch.float32, torch.float32
    ]  # fmt: skip
    torch.testing.assert_close(y, eager(x + residual, weight).half())
    torch.testing.assert_close(h, x + residual)

    def peer(*inputs):
        y, h = eager_with_residual(*inputs)
        return y.half(), h

    expected = outputs_and_gradients(peer, [x, residual, weight])
    for our, their in zip((dx, dresidual, dweight), expected[2:], strict=True):
        torch.testing.assert_close(our, their)


def test_any_strides(device):
    base = torch.randn(3, 2, 10, device=device)
    for x in (base.transpose(0, 1), base[..., ::2], base[:, 1, 5:], base.mT):
        assert_no_worse_than_eager(rms_norm, eager, [x, torch.randn(2 * x.shape[-1], device=device)[::2]])


@pytest.mark.parametrize("used", ["y", "h"])
def test_one_output_that_nobody_uses(used, device):
    x, residual, weight = (t.requires_grad_() for t in draw((3, 17), torch.float32, device, 2))
    y, h = add_rms_norm(x, residual, weight)
    expected_y, expected_h = eager_with_residual(x, residual, weight)
    ours, theirs = (y, expected_y) if used == "y" else (h, expected_h)
    inputs = [x, residual, weight] if used == "y" else [x, residual]
    gradient = torch.randn_like(ours)
    for our, their in zip(
        torch.autograd.grad(ours, inputs, gradient), torch.autograd.grad(theirs, inputs, gradient), strict=True
    ):
        torch.testing.assert_close(our, their)


def test_a_frozen_weight_gets_no_gradient(device):
    x, weight = draw((3, 17), torch.float32, device)
    x.requires_grad_()
    rms_norm(x, weight).sum().backward()
    expected = torch.autograd.grad(eager(x, weight).sum(), x)[0]
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.parametrize("shape", [(0, 5), (2, 0, 3)])
def test_without_rows(shape, device):
    y, dx, dweight = outputs_and_gradients(rms_norm, draw(shape, torch.float32, device))
    assert y.shape == dx.shape == shape
    assert dweight.tolist() == [0.0] * shape[-1]


def test_large_and_small_values(device):
    # Squares pass float16's range and stay in float32's; zeros are divided by the root of eps alone.
    x = torch.tensor([[6e4, -3e4, 1.0], [0.0, 0.0, 0.0], [1e-4, 2e-4, -1e-4]], device=device).half()
    assert_no_worse_than_eager(rms_norm, eager, [x, torch.ones(3, device=device).half()])


def test_offsets_pass_2_to_the_31(device, monkeypatch):
    x, weight = rows_far_apart(monkeypatch, device, 8), torch.ones(8, device=device).half()
    y, _, inverse_rms = module._rms_norm_forward(x, x, weight, 1e-5, x.dtype)
    torch.testing.assert_close(y, eager(x + x, weight))
    dx, _ = module._rms_norm_backward(x, x, x, weight, inverse_rms, True)
    near = x.contiguous()
    torch.testing.assert_close(dx, module._rms_norm_backward(near, near, near, weight, inverse_rms, True)[0])


def test_every_element_of_the_results_is_written(device, monkeypatch):
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: new_empty(*a, **k).fill_(float("nan")))
    x, residual, weight = draw((7, 100), torch.float32, device, 2)
    y, h, inverse_rms = module._rms_norm_forward(x, residual, weight, 1e-5, x.dtype)
    dx, dw = module._rms_norm_backward(y, h, h, weight, inverse_rms, True)
    assert not any(t.isnan().any() for t in (y, h, inverse_rms, dx, dw))


def test_two_runs_agree_bit_for_bit(device):
    inputs = draw((9, 40), torch.float32, device)
    first, second = (outputs_and_gradients(rms_norm, inputs) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_second_derivative_is_refused(device):
    x, weight = (t.requires_grad_() for t in draw((3, 17), torch.float32, device))
    (dx,) = torch.autograd.grad(rms_norm(x, weight).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@pytest.mark.parametrize(
    ("x", "residual", "weight", "message"),
    [
        (torch.ones(3, 4), None, torch.ones(5), r"\(3, 4\) and \(5,\)"),
        (torch.ones(3, 4), torch.ones(4), torch.ones(4), r"residual is \(4,\); .* \(3, 4\)"),
        (torch.ones(3, 4).double(), None, torch.ones(4), r"x is torch\.float64"),
        (torch.ones(3, 0), None, torch.ones(0), "last dimension of 0"),
        (torch.ones(1, 8193), None, torch.ones(8193), "last dimension of 8193"),
        (torch.ones(3, 4), None, torch.ones(4, device="meta"), "x on cpu, weight on meta"),
    ],
)
def test_bad_input(x, residual, weight, message):
    with pytest.raises(ValueError, match=message):
        rms_norm(x, weight) if residual is None else add_rms_norm(x, residual, weight)


def test_a_dtype_that_is_none_of_the_three():
    with pytest.raises(ValueError, match=r"dtype is torch\.float64"):
        rms_norm(torch.ones(3, 4), torch.ones(4), dtype=torch.float64)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", [768, 2560, 4096, 8192])
def test_large_on_a_gpu(d, dtype):
    assert_no_worse_than_eager(rms_norm, eager, draw((3000, d), dtype, "cuda"))
    assert_no_worse_than_eager(add_rms_norm, eager_with_residual, draw((3000, d), dtype, "cuda", 2))
