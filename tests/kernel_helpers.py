"""What the tests of the fused kernels share: dtypes, and PyTorch's own error as the measure of ours."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from tests.attention_helpers import largest_error

# Triton's interpreter truncates where it should round to bfloat16.
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def rows_far_apart(monkeypatch: pytest.MonkeyPatch, device: str, d: int) -> Tensor:
    """(3, d) float16 numbers, the last row 2**31 elements behind the first: index and stride fit into int32, and their
    product does not. On a CPU only the pages that are touched come to exist."""
    if device == "cpu":
        # The interpreter ends a launch by copying all of each argument's memory back: here onto itself, 4 GiB of it.
        from triton.runtime.interpreter import GridExecutor

        monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *args: None)
    stride = 2**30
    rows = torch.empty(2 * stride + d, dtype=torch.float16, device=device).as_strided((3, d), (stride, 1))
    return rows.copy_(torch.randn(3, d))


def outputs_and_gradients(
    function: Callable, inputs: Sequence[Tensor], gradient_dtype: torch.dtype | None = None
) -> list[Tensor]:
    """The function's output or outputs, and the gradients of its inputs for output gradients that are the same at each
    call, rounded to `gradient_dtype` if it is given."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    outputs = function(*inputs)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    generator = torch.Generator().manual_seed(1)
    gradients = [
        torch.randn(y.shape, generator=generator).to(y.device, gradient_dtype or y.dtype).to(y.dtype) for y in outputs
    ]
    return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, inputs, gradients)]


def assert_no_worse_than_eager(ours: Callable, eager: Callable, inputs: Sequence[Tensor]) -> None:
    """The error of each output and gradient, against `eager` in float64, is at most twice that of `eager` in the dtype
    of the inputs, with room for float32's rounding and for half a unit in the last place of a narrow dtype."""
    exact = outputs_and_gradients(eager, [x.double() for x in inputs], inputs[0].dtype)
    theirs = outputs_and_gradients(eager, inputs)
    for index, (our, their, true) in enumerate(
        zip(outputs_and_gradients(ours, inputs), theirs, exact, strict=True),
    ):
        assert our.dtype == their.dtype, index
        if true.numel():
            unit = 0.5 * torch.finfo(our.dtype).eps if our.dtype != torch.float32 else 0.0
            floor = (8 * torch.finfo(torch.float32).eps + unit) * true.abs().max().item()
            assert largest_error(our, true) <= 2 * largest_error(their, true) + floor, index
