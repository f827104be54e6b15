"""The teaching kernel against float64 arithmetic, through Triton's interpreter on a CPU and compiled on a GPU."""

import importlib.util
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")

from cs336_systems.kernels import weighted_sum as module
from cs336_systems.kernels.weighted_sum import WeightedSum, weighted_sum

# NumPy's, about how the interpreter reads a loop's bounds.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Where tiles end: one element, one less and one more than a tile of rows (16) and of columns (256), several tiles.
SHAPES = [(1, 1), (15, 255), (16, 256), (17, 257), (50, 1000), (3, 2, 5, 31), (7,), (2, 1)]


def _allowed_error(values: torch.Tensor, magnitude: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Float32 accumulation of terms whose absolute values sum to `magnitude`, and one rounding to `dtype`. One unit in
    the last place and not half of it, as Triton's interpreter truncates to bfloat16 where the GPU rounds."""
    accumulation = 8 * torch.finfo(torch.float32).eps * magnitude
    rounding = torch.finfo(dtype).eps * values.abs() + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    return accumulation + rounding


def _check_against_float64(x: torch.Tensor, w: torch.Tensor, grad_y: torch.Tensor | None = None) -> None:
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    y = weighted_sum(x, w)
    grad_y = torch.randn_like(y) if grad_y is None else grad_y
    grad_x, grad_w = torch.autograd.grad(y, (x, w), grad_y)

    x64, w64, grad_y64 = x.detach().double(), w.detach().double(), grad_y.double()
    dims = tuple(range(x.ndim - 1))
    grad_terms = x64 * grad_y64[..., None]
    expected = {
        "y": (y, (x64 * w64).sum(-1), (x64 * w64).abs().sum(-1), torch.promote_types(x.dtype, w.dtype)),
        "grad_x": (grad_x, grad_y64[..., None] * w64, torch.zeros_like(x64), x.dtype),
        "grad_w": (
            grad_w,
            grad_terms.sum(dims) if dims else grad_terms,
            grad_terms.abs().sum(dims) if dims else grad_terms.abs(),
            w.dtype,
        ),
    }
    for name, (actual, reference, magnitude, dtype) in expected.items():
        assert actual.dtype == dtype, name
        assert actual.shape == reference.shape, name
        excess = (actual.double() - reference).abs() - _allowed_error(reference, magnitude, dtype)
        assert (excess <= 0).all(), f"{name}: {excess.max().item():.3g} over the allowed error"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_float64(shape, dtype, device):
    x = torch.randn(shape, device=device).to(dtype)
    w = torch.randn(shape[-1], device=device).to(dtype)
    _check_against_float64(x, w)


@settings(max_examples=40, deadline=None)
@given(
    leading=st.lists(st.integers(1, 7), min_size=0, max_size=3),
    d=st.integers(1, 600),
    x_dtype=st.sampled_from(DTYPES),
    w_dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**16),
)
def test_matches_float64_on_drawn_shapes_and_mixed_dtypes(leading, d, x_dtype, w_dtype, seed):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*leading, d, generator=generator).to(device, x_dtype)
    w = torch.randn(d, generator=generator).to(device, w_dtype)
    _check_against_float64(x, w)


def test_float16_is_accumulated_in_float32(device):
    # In float16 the running sum would stop at 2048, where the next number but one is 2050.
    x = torch.ones(2, 4096, device=device, dtype=torch.float16)
    assert weighted_sum(x, x[0]).tolist() == [4096.0, 4096.0]


def _transposed(shape, device):
    return torch.randn(*shape[:-2], shape[-1], shape[-2], device=device).transpose(-1, -2)


def _sliced(shape, device):
    return torch.randn(*shape[:-1], 3 * shape[-1], device=device)[..., 1::3]


def _permuted(shape, device):
    return torch.randn(shape[1], shape[0], *shape[2:], device=device).transpose(0, 1)


def _expanded_rows(shape, device):
    return torch.randn(shape[-1], device=device).expand(shape)


def _expanded_columns(shape, device):
    return torch.randn(*shape[:-1], 1, device=device).expand(shape)


@pytest.mark.parametrize("view", [_transposed, _sliced, _permuted, _expanded_rows, _expanded_columns])
def test_any_strides(view, device):
    x = view((3, 20, 70), device)
    assert not x.is_contiguous()
    _check_against_float64(x, torch.randn(140, device=device)[::2])


@pytest.mark.parametrize("grad_y_of", ["expanded scalar", "strided", "transposed"])
def test_any_strides_of_the_incoming_gradient(grad_y_of, device):
    x, w = torch.randn(6, 20, 33, device=device), torch.randn(33, device=device)
    grad_y = {
        "expanded scalar": torch.tensor(0.5, device=device).expand(6, 20),
        "strided": torch.randn(6, 60, device=device)[:, ::3],
        "transposed": torch.randn(20, 6, device=device).T,
    }[grad_y_of]
    _check_against_float64(x, w, grad_y)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0, 5), (0,), (4, 0), (2, 3, 0), (0, 0)], ids=str)
def test_empty_inputs(shape, device):
    x = torch.randn(shape, device=device, requires_grad=True)
    w = torch.randn(shape[-1], device=device, requires_grad=True)
    y = weighted_sum(x, w)
    y.sum().backward()
    assert torch.equal(y, torch.zeros(shape[:-1], device=device))
    assert x.grad.shape == x.shape
    assert torch.equal(w.grad, torch.zeros_like(w))


@pytest.mark.parametrize("d", [1, 33, 300])
def test_gradients_agree_with_finite_differences_of_the_forward_kernel(d, device):
    # y is linear in x and in w, so differences over a step of any size give the directional derivative exactly.
    x = torch.randn(19, d, device=device, requires_grad=True)
    w = torch.randn(d, device=device, requires_grad=True)
    x_step, w_step, grad_y = torch.randn_like(x), torch.randn_like(w), torch.randn(19, device=device)
    grad_x, grad_w = torch.autograd.grad(weighted_sum(x, w), (x, w), grad_y)
    with torch.no_grad():
        along_x = ((weighted_sum(x + x_step, w) - weighted_sum(x, w)) * grad_y).sum()
        along_w = ((weighted_sum(x, w + w_step) - weighted_sum(x, w)) * grad_y).sum()
    torch.testing.assert_close((grad_x * x_step).sum(), along_x, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close((grad_w * w_step).sum(), along_w, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("x_needs", "w_needs"), [(True, False), (False, True), (False, False)])
def test_only_the_gradients_that_are_needed(x_needs, w_needs, device, monkeypatch):
    made = []

    def launch(*args):
        gradients = original(*args)
        made.append([gradient is not None for gradient in gradients])
        return gradients

    original = module._launch_weighted_sum_backward
    monkeypatch.setattr(module, "_launch_weighted_sum_backward", launch)
    x = torch.randn(20, 30, device=device, requires_grad=x_needs)
    w = torch.randn(30, device=device, requires_grad=w_needs)
    y = weighted_sum(x, w)
    if not (x_needs or w_needs):
        assert not y.requires_grad
        return
    y.sum().backward()
    assert made == [[x_needs, w_needs]]
    if x_needs:
        torch.testing.assert_close(x.grad, w.detach().expand(20, 30))
    else:
        torch.testing.assert_close(w.grad, x.detach().sum(0))


@pytest.fixture
def poisoned_memory(monkeypatch):
    """torch.empty hands out NaN, so an element that no kernel writes is seen."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(float("nan")))


@pytest.mark.parametrize("shape", [(1, 1), (17, 257), (40, 100), (5, 0)], ids=str)
def test_every_element_of_the_outputs_is_written(shape, device, poisoned_memory):
    x = torch.ones(shape, device=device, requires_grad=True)
    w = torch.ones(shape[-1], device=device, requires_grad=True)
    y = weighted_sum(x, w)
    y.sum().backward()
    assert not any(tensor.isnan().any() for tensor in (y, x.grad, w.grad))


def test_nothing_outside_a_view_is_read(device):
    surroundings = torch.full((40, 400), float("nan"), device=device)
    surroundings[3:20, 5:300] = 1.0
    x = surroundings[3:20, 5:300].detach().requires_grad_()
    w = torch.ones(295, device=device, requires_grad=True)
    y = weighted_sum(x, w)
    y.sum().backward()
    assert y.tolist() == [295.0] * 17
    assert w.grad.tolist() == [17.0] * 295


def test_offsets_pass_2_to_the_31(device, monkeypatch):
    if device == "cpu":
        # The interpreter ends a launch by copying all of each argument's memory back: here onto itself, 4 GiB of it.
        from triton.runtime.interpreter import GridExecutor

        monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *args: None)
    # Index and stride fit in int32, and their product does not; on a CPU only the pages that are touched come to exist.
    stride = 2**30
    memory = torch.empty(3 * stride + 8, dtype=torch.float16, device=device)
    for shape, strides in [((4, 8), (stride, 1)), ((8, 4), (1, stride))]:
        x = memory.as_strided(shape, strides)
        x.copy_(torch.arange(32.0).reshape(shape))
        w = torch.ones(shape[1], dtype=torch.float16, device=device, requires_grad=True)
        y = weighted_sum(x, w)
        y.sum().backward()
        assert y.tolist() == torch.arange(32.0).reshape(shape).sum(1).tolist()
        assert w.grad.tolist() == torch.arange(32.0).reshape(shape).sum(0).tolist()


def test_two_runs_agree_bit_for_bit(device):
    x, w = torch.randn(300, 700, device=device), torch.randn(700, device=device, requires_grad=True)
    first, second = (torch.autograd.grad(weighted_sum(x, w).sum(), w)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_a_second_derivative_is_refused(device):
    x = torch.randn(4, 5, device=device, requires_grad=True)
    w = torch.randn(5, device=device, requires_grad=True)
    (grad_x,) = torch.autograd.grad(weighted_sum(x, w).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="marked with @once_differentiable"):
        grad_x.sum().backward()
    # Where the incoming gradient is a constant, the gradient comes out as one too.
    (grad_x,) = torch.autograd.grad(weighted_sum(x, w).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        grad_x.sum().backward()


@pytest.mark.parametrize(
    ("x", "w", "message"),
    [
        (torch.ones(3, 4), torch.ones(5), r"\(3, 4\) and \(5,\)"),
        (torch.ones(3, 4), torch.ones(4, 1), r"\(3, 4\) and \(4, 1\)"),
        (torch.ones(()), torch.ones(1), r"\(\) and \(1,\)"),
        (torch.ones(3, 4), torch.ones(()), r"\(3, 4\) and \(\)"),
        (torch.ones(3, 4).double(), torch.ones(4), "float64"),
        (torch.ones(3, 4), torch.ones(4).int(), "int32"),
        (torch.ones(3, 4), torch.ones(4, device="meta"), "x on cpu and w on meta"),
        (torch.ones(3, 4, device="meta"), torch.ones(4, device="meta"), "must be on a CUDA device, got x on meta"),
    ],
)
def test_bad_input(x, w, message):
    with pytest.raises(ValueError, match=message):
        weighted_sum(x, w)


def test_the_function_alone_can_be_applied(device):
    x, w = torch.randn(4, 5, device=device), torch.randn(5, device=device)
    torch.testing.assert_close(WeightedSum.apply(x, w), (x * w).sum(-1))


def _run_python(code: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_compiles_for_other_gpus_without_spilling():
    """No GPU need be present: the compiler and ptxas come with Triton. Each card, and each dtype on one of them."""
    output = _run_python(
        """
        import os, subprocess, tempfile
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.backends.nvidia.compiler import get_ptxas
        from triton.compiler import ASTSource
        from cs336_systems.kernels import weighted_sum as module

        tile = {"ROW_TILE": module.ROW_TILE, "COLUMN_TILE": module.MAX_COLUMN_TILE}
        needs = {"NEEDS_GRAD_X": True, "NEEDS_GRAD_W": True}

        def compile(kernel, constexprs, dtype, capability):
            def type_of(name):
                if name in constexprs:
                    return "constexpr"
                if name == "partial_grad_w_ptr":
                    return "*fp32"
                return f"*{dtype}" if name.endswith("_ptr") else "i32"

            signature = {name: type_of(name) for name in kernel.arg_names}
            source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs)
            compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
            assert compiled.metadata.shared <= 48 * 1024  # what every card has without asking
            with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
                file.write(compiled.asm["ptx"])
                file.flush()
                architecture = f"sm_{capability}" + ("a" if capability >= 90 else "")
                command = [get_ptxas(capability).path, "-v", f"--gpu-name={architecture}", file.name]
                print(subprocess.run([*command, "-o", os.devnull], capture_output=True, text=True).stderr)

        for capability, dtype in [(75, "fp16"), (80, "bf16"), (90, "bf16"), (120, "fp32")]:
            compile(module._weighted_sum_forward_kernel, tile, dtype, capability)
            compile(module._weighted_sum_backward_kernel, needs | tile, dtype, capability)
        """,
        TRITON_INTERPRET="0",
    )
    assert output.count("0 bytes spill stores, 0 bytes spill loads") == 2 * 4, output


def test_a_cpu_without_the_interpreter_is_told_what_to_set(monkeypatch):
    monkeypatch.setattr(module, "KERNELS_ARE_INTERPRETED", False)
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        weighted_sum(torch.ones(2, 3), torch.ones(3))


def test_imports_without_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)  # `import triton` now raises ImportError
    without_triton = importlib.util.module_from_spec(spec := importlib.util.find_spec(module.__name__))
    spec.loader.exec_module(without_triton)
    with pytest.raises(ValueError, match="not installed"):
        without_triton.weighted_sum(torch.ones(2, 3), torch.ones(3))
