"""`flash_attention`, the public function: every implementation, which one is chosen, bad input, and dropout."""

import functools
import math
import subprocess
import sys
import textwrap

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from cs336_systems.attention import flash_attention, implementations, operators
from tests.attention_helpers import PORTABLE, TRITON, largest_error, make_inputs, oracle, output_and_gradients

KERNELS = ["pytorch", TRITON]


# ---- right, whichever implementation ----


@pytest.mark.parametrize("implementation", [*PORTABLE, "auto"])
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


@pytest.mark.parametrize("implementation", PORTABLE)
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles there")
@pytest.mark.parametrize("implementation", ["triton", "auto"])
def test_bfloat16_is_not_left_to_tritons_interpreter(implementation):
    """Which multiplies its raw bits; "auto" takes another."""
    q, k, v = torch.randn(3, 1, 2, 16, 16).bfloat16()
    if implementation == "triton":
        with pytest.raises(RuntimeError, match="Triton's interpreter multiplies bfloat16 wrongly"):
            flash_attention(q, k, v, implementation="triton")
        return
    expected = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float())
    torch.testing.assert_close(flash_attention(q, k, v).float(), expected, atol=2e-2, rtol=2e-2)
