"""SwiGLU's elementwise kernels against float64 arithmetic, through Triton's interpreter on a CPU and compiled on a
GPU."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")

from cs336_systems.kernels import swiglu as module
from cs336_systems.kernels.swiglu import silu_multiply
from tests.attention_helpers import IGNORE_INTERPRETER
from tests.kernel_helpers import DTYPES, assert_no_worse_than_eager, outputs_and_gradients, rows_far_apart

pytestmark = IGNORE_INTERPRETER


def eager(a, b):
    return a * torch.sigmoid(a) * b


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (7,), (3, 17), (2, 3, 64), (2, 1025), (0, 4), (4, 0)], ids=str)
def test_matches_float64(shape, dtype, device):
    assert_no_worse_than_eager(silu_multiply, eager, [torch.randn(shape, device=device).to(dtype) for _ in range(2)])


def test_halves_of_one_product_are_read_where_they_are(device, monkeypatch):
    both = torch.randn(2, 3, 20, device=device)
    pointers = []
    original = module.launch

    def launch(kernel, n_programs, a, b, *others, **options):
        pointers.append(b.data_ptr())
        original(kernel, n_programs, a, b, *others, **options)

    monkeypatch.setattr(module, "launch", launch)
    a, b = both.chunk(2, -1)
    silu_multiply(a, b)
    assert pointers == [b.data_ptr()]
    monkeypatch.undo()
    assert_no_worse_than_eager(silu_multiply, eager, [a, b])
    assert_no_worse_than_eager(silu_multiply, eager, [both.mT[:, ::2], both.mT[:, 1::2]])


def test_offsets_pass_2_to_the_31(device, monkeypatch):
    a = rows_far_apart(monkeypatch, device, 8)
    near = a.contiguous()
    torch.testing.assert_close(module._silu_multiply_forward(a, a), module._silu_multiply_forward(near, near))
    for far, expected in zip(
        module._silu_multiply_backward(a, a, a), module._silu_multiply_backward(near, near, near), strict=True
    ):
        torch.testing.assert_close(far, expected)


def test_far_from_zero(device):
    a = torch.tensor([-1e4, -100.0, -20.0, 0.0, 20.0, 100.0, 1e4], device=device)
    assert_no_worse_than_eager(silu_multiply, eager, [a, torch.linspace(-2, 2, 7, device=device)])


def test_gradients_of_any_strides(device):
    a, b = (torch.randn(5, 6, device=device, requires_grad=True) for _ in range(2))
    expected = torch.autograd.grad(eager(a, b).sum(), (a, b))
    for our, their in zip(torch.autograd.grad(silu_multiply(a, b).sum(), (a, b)), expected, strict=True):
        torch.testing.assert_close(our, their)


def test_a_second_derivative_is_refused(device):
    a, b = (torch.randn(5, 6, device=device, requires_grad=True) for _ in range(2))
    (da,) = torch.autograd.grad(silu_multiply(a, b).sum(), a, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        da.sum().backward()


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (torch.ones(3, 4), torch.ones(3, 5), r"\(3, 4\) torch.float32 and \(3, 5\)"),
        (torch.ones(3, 4), torch.ones(3, 4).half(), r"torch.float32 and \(3, 4\) torch.float16"),
        (torch.ones(3, 4).double(), torch.ones(3, 4).double(), r"a is torch\.float64"),
        (torch.ones(3, 4), torch.ones(3, 4, device="meta"), "a on cpu, b on meta"),
    ],
)
def test_bad_input(a, b, message):
    with pytest.raises(ValueError, match=message):
        silu_multiply(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", [3072, 11008, 10_007])
def test_large_on_a_gpu(d, dtype):
    inputs = [torch.randn(2000, d, device="cuda").to(dtype) for _ in range(2)]
    assert_no_worse_than_eager(silu_multiply, eager, inputs)
    assert all(not t.isnan().any() for t in outputs_and_gradients(silu_multiply, inputs))
