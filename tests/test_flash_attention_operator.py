"""`flash_attention` as an operator of PyTorch: registered, compiled, cast, differentiated and copied as others are."""

import copy
import functools
import pickle

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from cs336_systems.attention import flash_attention, implementations, operators
from tests.attention_helpers import PORTABLE, TRITON, largest_error, make_inputs, oracle, output_and_gradients

EVERY_CHECK = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
KERNEL_CHECKS = (
    "test_schema",
    "test_faketensor",
)  # the rest doesn't depend on the kernels, which are slow to interpret


@pytest.mark.parametrize(
    ("implementation", "shape", "dropout_p", "checks"),
    [
        ("pytorch", (2, 9, 8), 0.0, EVERY_CHECK),
        ("pytorch", (1, 4, 9, 8), 0.3, EVERY_CHECK),
        pytest.param("triton", (1, 4, 9, 8), 0.3, KERNEL_CHECKS, marks=TRITON.marks),
    ],
)
def test_opcheck(implementation, shape, dropout_p, checks, device):
    kv_heads = 2 if len(shape) == 4 else None
    q, k, v = make_inputs(*shape, kv_heads=kv_heads, n_keys=7, device=device)
    seed = torch.tensor(5) if dropout_p else None
    settings = (True, 0.3, dropout_p, seed, implementation)
    torch.library.opcheck(operators.flash_attention_forward, (q, k, v, *settings), test_utils=checks)
    with torch.no_grad():
        o, lse = operators.flash_attention_forward(q, k, v, *settings)
        q, k, v = (x.detach() for x in (q, k, v))
    # Which gradients are wanted changes the number of results.
    for needs in ([True, True, True], [False, True, False]):
        arguments = (torch.ones_like(o), q, k, v, o, lse, *settings, needs)
        torch.library.opcheck(operators.flash_attention_backward, arguments, test_utils=checks)


def test_strides_of_the_results_are_those_promised_to_the_compiler():
    q, k, v = (x.detach().transpose(1, 2) for x in make_inputs(2, 9, 3, 8))  # (2, 3, 9, 8), as a model's heads
    o = flash_attention(q, k, v)
    assert o.stride() == q.stride()
    with FakeTensorMode() as mode:
        fake = flash_attention(*(mode.from_tensor(x) for x in (q, k, v)))
        assert (fake.shape, fake.dtype, fake.stride()) == (o.shape, o.dtype, o.stride())
    assert flash_attention(*(x.to("meta") for x in (q, k, v))).shape == o.shape


def test_a_dispatch_mode_sees_the_operators():
    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen = []
    q, k, v = make_inputs(1, 6, 4)
    with Record():
        flash_attention(q, k, v).sum().backward()
    assert operators.flash_attention_forward in seen
    assert operators.flash_attention_backward in seen


@pytest.mark.usefixtures("annotations_unchecked")
@pytest.mark.parametrize("implementation", ["auto", *PORTABLE])
@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
def test_compile_without_a_graph_break(implementation, dropout_p, device):
    if dropout_p and implementation == "reference":
        pytest.skip("plain attention's mask is a random tensor of its own, which compiled code draws differently")
    torch.compiler.reset()
    q, k, v = make_inputs(1, 4, 20, 8, kv_heads=2, device=device)

    def attention(q, k, v):
        return 2 * flash_attention(q + 1, k, v, is_causal=True, dropout_p=dropout_p, implementation=implementation)

    def run(function) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(0)
        return output_and_gradients(function, q, k, v, torch.ones_like(q))

    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    for x, y in zip(run(compiled), run(attention), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.usefixtures("annotations_unchecked")
def test_no_recompilation_for_each_new_length(device):
    torch.compiler.reset()
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(functools.partial(flash_attention, is_causal=True), fullgraph=True, backend=backend)
    counts = []
    for length in (7, 12, 33, 64, 100):
        q, k, v = make_inputs(2, 3, length, 8, device=device)
        compiled(q, k, v).sum().backward()
        counts.append(backend.frame_count)
    assert counts == [1, 2, 2, 2, 2], "the second length makes it dynamic, the rest use that"

    torch.compiler.reset()
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        functools.partial(flash_attention, dropout_p=0.1), fullgraph=True, backend=backend, dynamic=True
    )
    counts = []
    for n_queries, n_keys in ((7, 9), (12, 8), (33, 66), (50, 25)):
        q, k, v = make_inputs(2, 4, n_queries, 8, kv_heads=2, n_keys=n_keys, device=device)
        compiled(q, k, v).sum().backward()
        counts.append(backend.frame_count)
    assert counts == counts[:1] * 4, "dynamic from the start"


@pytest.mark.usefixtures("annotations_unchecked")
@pytest.mark.parametrize("is_compiled", [False, True])
def test_autocast_casts_as_pytorch_does(is_compiled, device):
    torch.compiler.reset()
    q, k, v = make_inputs(1, 2, 20, 8, device=device)
    v = v.detach().bfloat16().requires_grad_()  # mixed dtypes are an error outside autocast only
    attention = torch.compile(flash_attention, fullgraph=True, backend="aot_eager") if is_compiled else flash_attention
    with torch.autocast(device, dtype=torch.bfloat16):
        o = attention(q, k, v)
        assert o.dtype == F.scaled_dot_product_attention(q, k, v).dtype == torch.bfloat16
        doubles = [x.detach().double() for x in (q, k, v)]
        assert F.scaled_dot_product_attention(*doubles).dtype == torch.float64
        assert attention(*doubles, implementation="pytorch").dtype == torch.float64
    o.sum().backward()
    assert [x.grad.dtype for x in (q, k, v)] == [torch.float32, torch.float32, torch.bfloat16]
    expected = flash_attention(q.bfloat16(), k.bfloat16(), v)
    assert torch.equal(o, expected)


@pytest.mark.parametrize("wanted", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1)])
def test_gradients_for_those_inputs_only_that_need_them(wanted, monkeypatch):
    q, k, v = make_inputs(1, 2, 6, 4)
    expected = output_and_gradients(flash_attention, q, k, v, torch.ones_like(q))[1:]
    forward, backward = implementations.kernels("pytorch")
    asked = []

    def spying_backward(*args):
        asked.append(args[-1])
        return backward(*args)

    monkeypatch.setattr(operators, "kernels", lambda name: (forward, spying_backward))
    inputs = [x.detach().requires_grad_(bool(need)) for x, need in zip((q, k, v), wanted, strict=True)]
    flash_attention(*inputs).sum().backward()
    assert asked == [tuple(bool(need) for need in wanted)]
    for x, gradient in zip(inputs, expected, strict=True):
        assert torch.equal(x.grad, gradient) if x.requires_grad else x.grad is None


def test_second_derivative_is_an_error_when_it_is_used():
    q, k, v = make_inputs(1, 6, 4)
    o = flash_attention(q, k, v)
    (dq,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
    assert largest_error(dq, oracle(q, k, v, 2 * o.detach(), False)[1]) < 1e-5
    with pytest.raises(RuntimeError, match=r"no second derivative.*implementation=\"reference\""):
        dq.sum().backward()
    reference = flash_attention(q, k, v, implementation="reference")
    (dq,) = torch.autograd.grad(reference.square().sum(), q, create_graph=True)
    dq.sum().backward()


def test_no_gradient_of_the_output_is_no_gradient_of_the_inputs():
    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return None

    q, k, v = make_inputs(1, 6, 4)
    grads = torch.autograd.grad(Stop.apply(flash_attention(q, k, v)).sum(), (q, k, v), allow_unused=True)
    assert grads == (None, None, None)


def test_forward_mode_is_an_error_not_a_zero():
    q, k, v = (x.detach() for x in make_inputs(1, 6, 4))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="jvp"):
        flash_attention(torch.autograd.forward_ad.make_dual(q, q), k, v)


class Attention(nn.Module):
    """A module with `flash_attention` among its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(8, 24)
        self.attention = functools.partial(flash_attention, is_causal=True, implementation="pytorch")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(*self.projection(x).chunk(3, dim=-1))


@pytest.mark.parametrize("how", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_of_a_module_that_uses_it(how):
    module = Attention()
    x = torch.randn(2, 6, 8)
    module(x).sum().backward()
    copied = how(module)
    assert torch.equal(copied(x), module(x))
    assert copied.projection.weight is not module.projection.weight
