"""`flash_attention`, the public function: every implementation, bad input, and what PyTorch expects of an operator."""

import copy
import functools
import math
import pickle
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from cs336_systems.attention import flash_attention, implementations, operators
from cs336_systems.attention.implementations import IMPLEMENTATIONS
from tests.attention_helpers import (
    IGNORE_INTERPRETER,
    NEEDS_TRITON,
    largest_error,
    make_inputs,
    oracle,
    output_and_gradients,
)

TRITON = pytest.param("triton", marks=[NEEDS_TRITON, IGNORE_INTERPRETER])
# Hopper's kernels run on no CPU: test_flash_hopper.py has their tests.
PORTABLE = [name for name in IMPLEMENTATIONS if name != "hopper"]
ALL = [pytest.param(name, marks=TRITON.marks if name == "triton" else []) for name in PORTABLE]
KERNELS = ["pytorch", TRITON]


# ---- right, whichever implementation ----


@pytest.mark.parametrize("implementation", [*ALL, "auto"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("shape", "options", "scale"),
    [
        ((2, 20, 8), {}, None),
        ((2, 20, 8), {"n_keys": 33}, 0.5),
        ((1, 4, 33, 12), {"kv_heads": 2, "n_keys": 20}, None),
        ((1, 2, 1, 16), {"n_keys": 1}, -1.0),
    ],
)
def test_every_implementation(implementation, is_causal, shape, options, scale, device):
    q, k, v = make_inputs(*shape, **options, device=device)
    do = torch.randn(shape, device=device)
    attention = functools.partial(flash_attention, is_causal=is_causal, scale=scale, implementation=implementation)
    actual = output_and_gradients(attention, q, k, v, do)
    for x, y in zip(actual, oracle(q, k, v, do, is_causal, scale)[:4], strict=True):
        assert x.dtype == torch.float32
        assert largest_error(x, y) <= (1e-5 if device == "cpu" else 1e-4)


@pytest.mark.parametrize("implementation", KERNELS)
def test_a_query_with_nothing_to_attend(implementation, device):
    q, k, v = make_inputs(1, 2, 3, 8, n_keys=0, device=device)
    o, dq, dk, dv = output_and_gradients(
        functools.partial(flash_attention, implementation=implementation), q, k, v, torch.ones_like(q)
    )
    assert (o == 0).all()
    assert (dq == 0).all()
    assert dk.shape == dv.shape == k.shape
    _, lse = operators.flash_attention_forward(q, k, v, False, 1.0, 0.0, None, implementation)
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("implementation", ["pytorch", "reference", "sdpa"])
def test_float64(implementation):
    q, k, v = make_inputs(1, 2, 6, 4, kv_heads=1, dtype=torch.float64)
    attention = functools.partial(flash_attention, is_causal=True, implementation=implementation)
    assert torch.autograd.gradcheck(attention, (q, k, v))


@pytest.mark.parametrize("implementation", KERNELS)
def test_two_runs_are_equal_bit_for_bit(implementation, device):
    q, k, v = make_inputs(1, 2, 80 if device == "cpu" else 700, 16, device=device)
    attention = functools.partial(flash_attention, is_causal=True, implementation=implementation)
    runs = [output_and_gradients(attention, q, k, v, torch.ones_like(q)) for _ in range(2)]
    for x, y in zip(*runs, strict=True):
        assert torch.equal(x, y)


def test_what_is_kept_for_backward(device):
    q, k, v = make_inputs(2, 3, 20, 8, device=device)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(tuple(x.shape)) or x, lambda x: x):
        flash_attention(q, k, v)
    assert sorted(saved) == sorted([(2, 3, 20, 8)] * 4 + [(2, 3, 20)])
    saved.clear()
    with torch.no_grad():
        assert not flash_attention(q, k, v).requires_grad


# ---- which implementation ----


def test_auto_is_tiled_pytorch_on_a_cpu_even_where_triton_is_interpreted(monkeypatch):
    monkeypatch.setattr(implementations, "_TRITON_IS_INTERPRETED", True)
    assert implementations.choose(torch.empty(1)) == "pytorch"


def test_auto_is_hopper_or_triton_on_a_gpu_where_they_can_run(monkeypatch):
    monkeypatch.setattr(implementations, "_TRITON_IS_INSTALLED", True)
    with FakeTensorMode():
        for is_hopper, chosen in ((True, "hopper"), (False, "triton")):
            monkeypatch.setattr(implementations, "_is_hopper", lambda device, is_hopper=is_hopper: is_hopper)
            assert implementations.choose(torch.empty(1, device="cuda")) == chosen
        assert implementations.choose(torch.empty(1, device="cuda", dtype=torch.float64)) == "pytorch"
        monkeypatch.setattr(implementations, "_TRITON_IS_INSTALLED", False)
        assert implementations.choose(torch.empty(1, device="cuda")) == "pytorch"


def test_asking_for_triton_on_a_cpu_says_what_is_missing(monkeypatch):
    q, k, v = make_inputs(1, 4, 8)
    monkeypatch.setattr(implementations, "_TRITON_IS_INSTALLED", True)
    monkeypatch.setattr(implementations, "_TRITON_IS_INTERPRETED", False)
    with pytest.raises(RuntimeError, match=r"triton.*on cpu.*TRITON_INTERPRET=1"):
        flash_attention(q, k, v, implementation="triton")


def test_asking_triton_for_float64_says_what_it_takes(monkeypatch):
    q, k, v = make_inputs(1, 4, 8, dtype=torch.float64)
    monkeypatch.setattr(implementations, "_TRITON_IS_INSTALLED", True)
    monkeypatch.setattr(implementations, "_TRITON_IS_INTERPRETED", True)
    with pytest.raises(RuntimeError, match="float32, float16 and bfloat16"):
        flash_attention(q, k, v, implementation="triton")


def test_a_machine_without_triton():
    """In a process where `import triton` fails: the package imports and attends, and says why Triton can't."""
    program = textwrap.dedent("""
        import sys
        sys.modules["triton"] = None
        import cs336_systems.attention as attention
        assert "torch" not in sys.modules, "the names of the implementations need no torch"
        assert "flash-triton" in attention.MODEL_ATTENTION_NAMES
        import torch
        from cs336_systems.attention.flash_triton import flash_forward
        q = torch.randn(1, 4, 8, requires_grad=True)
        attention.flash_attention(q, q, q).sum().backward()
        for call in (
            lambda: attention.flash_attention(q, q, q, implementation="triton"),
            lambda: flash_forward(q[None], q[None], q[None], False, 1.0),
        ):
            try:
                call()
            except RuntimeError as error:
                print(error)
    """)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("the package triton is not installed") == 2


# ---- bad input ----


def of(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


@pytest.mark.parametrize("implementation", ["auto", "pytorch", "triton", "reference", "sdpa"])
@pytest.mark.parametrize(
    ("q", "k", "v", "problem"),
    [
        (of(4, 8), of(4, 8), of(4, 8), "must all be"),
        (of(1, 1, 1, 4, 8), of(1, 1, 1, 4, 8), of(1, 1, 1, 4, 8), "must all be"),
        (of(1, 2, 4, 8), of(2, 4, 8), of(2, 4, 8), "must all be"),
        (of(2, 4, 8), of(2, 4, 8), of(1, 2, 4, 8), "k and v must have the same shape"),
        (of(2, 4, 8), of(2, 5, 8), of(2, 4, 8), "k and v must have the same shape"),
        (of(2, 4, 8), of(2, 4, 8), of(2, 4, 16), "k and v must have the same shape"),
        (of(2, 4, 8), of(2, 4, 16), of(2, 4, 16), "same head_dim"),
        (of(2, 4, 257), of(2, 4, 257), of(2, 4, 257), "from 1 to 256"),
        (of(2, 4, 0), of(2, 4, 0), of(2, 4, 0), "from 1 to 256"),
        (of(2, 4, 8), of(3, 4, 8), of(3, 4, 8), "same batch size"),
        (of(1, 3, 4, 8), of(1, 2, 4, 8), of(1, 2, 4, 8), "multiple of the heads"),
        (of(1, 2, 4, 8), of(1, 4, 4, 8), of(1, 4, 4, 8), "multiple of the heads"),
        (of(1, 2, 4, 8), of(1, 0, 4, 8), of(1, 0, 4, 8), "multiple of the heads"),
        (of(2, 4, 8), of(2, 4, 8, dtype=torch.float16), of(2, 4, 8), "same dtype"),
        (of(2, 4, 8), of(2, 4, 8), of(2, 4, 8, dtype=torch.bfloat16), "same dtype"),
        (*[of(2, 4, 8, dtype=torch.int64)] * 3, "must be float32"),
        (*[of(2, 4, 8, dtype=torch.bool)] * 3, "must be float32"),
        (*[of(2, 4, 8).to(torch.float8_e4m3fn)] * 3, "must be float32"),
        (*[of(2, 4, 8, dtype=torch.complex64)] * 3, "must be float32"),
        (of(2, 4, 8), of(2, 4, 8, device="meta"), of(2, 4, 8), "same device"),
    ],
)  # fmt: skip
def test_inputs_that_do_not_fit_together(implementation, q, k, v, problem, monkeypatch):
    monkeypatch.setattr(operators, "kernels", lambda name: pytest.fail("a kernel was asked for"))
    with pytest.raises(ValueError, match=problem) as error:
        flash_attention(q, k, v, implementation=implementation)
    for x in (q, k, v):
        assert str(tuple(x.shape)) in str(error.value)


@pytest.mark.parametrize("dropout_p", [-0.1, 1.0, math.nan])
def test_dropout_outside_its_range(dropout_p):
    with pytest.raises(ValueError, match=r"dropout_p.*at least 0 and less than 1"):
        flash_attention(of(1, 4, 8), of(1, 4, 8), of(1, 4, 8), dropout_p=dropout_p)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -float("inf")])
def test_a_scale_that_is_no_number(scale):
    with pytest.raises(ValueError, match=f"scale is {scale}; it must be a finite number"):
        flash_attention(of(1, 4, 8), of(1, 4, 8), of(1, 4, 8), scale=scale)


def test_an_unknown_implementation():
    with pytest.raises(ValueError, match=r"'cuda'.*auto, .*triton, hopper, pytorch, reference, sdpa"):
        flash_attention(of(1, 4, 8), of(1, 4, 8), of(1, 4, 8), implementation="cuda")


# ---- dropout ----


@pytest.mark.parametrize("implementation", ALL)
def test_dropout_follows_manual_seed(implementation, device):
    q, k, v = make_inputs(1, 20, 16, device=device)

    def run(seed: int) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(seed)
        attention = functools.partial(flash_attention, dropout_p=0.4, implementation=implementation)
        return output_and_gradients(attention, q, k, v, torch.ones_like(q))

    first, again, other = run(1), run(1), run(2)
    for x, y, z in zip(first, again, other, strict=True):
        assert torch.equal(x, y)
        assert not torch.equal(x, z)
    assert not torch.equal(flash_attention(q, k, v), flash_attention(q, k, v, dropout_p=0.4))


@pytest.mark.parametrize("implementation", KERNELS)
def test_dropout_rescales_what_it_keeps(implementation, device):
    length = 64
    q, k = (torch.zeros(2, 2, length, length, device=device) for _ in range(2))
    eye = torch.eye(length, device=device).expand_as(q)  # with unit vectors for values the output is the probabilities
    o = flash_attention(q, k, eye, dropout_p=0.25, implementation=implementation)
    kept = o != 0
    torch.testing.assert_close(o[kept], torch.full_like(o[kept], 1 / length / 0.75))
    assert abs(kept.float().mean().item() - 0.75) < 5 * math.sqrt(0.1875 / kept.numel())


def test_dropout_differentiates_the_mask_it_used():
    q, k, v = make_inputs(1, 2, 5, 4, dtype=torch.float64)

    def attention(*inputs: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return flash_attention(*inputs, is_causal=True, dropout_p=0.3)

    assert torch.autograd.gradcheck(attention, (q, k, v))


def test_checkpointing_draws_the_same_dropout_again(device):
    q, k, v = make_inputs(1, 2, 40, 16, device=device)

    def gradients(attention) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(0)
        return torch.autograd.grad(attention(q, k, v).square().sum(), (q, k, v))

    def attention(q, k, v):
        return flash_attention(q, k, v, dropout_p=0.3)

    again = gradients(lambda *inputs: checkpoint(attention, *inputs, use_reentrant=False))
    for x, y in zip(gradients(attention), again, strict=True):
        assert torch.equal(x, y)


# ---- an operator of PyTorch ----


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
@pytest.mark.parametrize("implementation", ["auto", *ALL])
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


# ---- on a GPU ----


@pytest.mark.gpu
def test_dropout_does_not_wait_for_the_gpu():
    q, k, v = make_inputs(1, 2, 64, 16, device="cuda")
    flash_attention(q, k, v, dropout_p=0.1).sum().backward()  # compiled
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        flash_attention(q, k, v, is_causal=False, dropout_p=0.1).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_tensors_on_two_devices():
    with pytest.raises(ValueError, match=r"same device.*cuda:0.*cpu"):
        flash_attention(of(1, 4, 8, device="cuda"), of(1, 4, 8), of(1, 4, 8))
