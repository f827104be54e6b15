"""FlashAttention-2 as the course's tests look at it: `.apply(q, k, v, is_causal)` on (4, 128, 64) in float32.

The tiled PyTorch version runs on the CPU; the Triton version on a GPU, or without one in Triton's interpreter.
"""

import pytest
import torch
from torch import Tensor

from tests.adapters import (
    get_flashattention_autograd_function_pytorch,
    get_flashattention_autograd_function_triton,
)
from tests.attention_helpers import IGNORE_INTERPRETER, NEEDS_TRITON, make_inputs, oracle

TOLERANCE = {"rtol": 1e-2, "atol": 1e-2}


@pytest.fixture(params=["pytorch", pytest.param("triton", marks=[NEEDS_TRITON, IGNORE_INTERPRETER])])
def attention(request: pytest.FixtureRequest) -> type[torch.autograd.Function]:
    if request.param == "pytorch":
        return get_flashattention_autograd_function_pytorch()
    return get_flashattention_autograd_function_triton()


@pytest.fixture
def inputs(attention: type[torch.autograd.Function], device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the output's gradient; on the CPU for the version in PyTorch."""
    where = "cpu" if "PyTorch" in attention.__name__ else device
    q, k, v = make_inputs(4, 128, 64, device=where)
    return q, k, v, torch.randn(4, 128, 64, device=where)


@pytest.mark.parametrize("is_causal", [False, True])
def test_output_and_the_one_saved_logsumexp(attention, inputs, is_causal):
    q, k, v, do = inputs
    o = attention.apply(q, k, v, is_causal)
    saved = [x for x in o.grad_fn.saved_tensors if x.shape == (4, 128)]
    assert len(saved) == 1, f"saved for backward: {[tuple(x.shape) for x in o.grad_fn.saved_tensors]}"

    expected_o, *_, expected_lse = oracle(q, k, v, do, is_causal)
    torch.testing.assert_close(o, expected_o.to(o.dtype), **TOLERANCE)
    torch.testing.assert_close(saved[0], expected_lse.to(o.dtype), **TOLERANCE)


@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients(attention, inputs, is_causal):
    q, k, v, do = inputs
    attention.apply(q, k, v, is_causal).backward(do)
    _, *expected, _ = oracle(q, k, v, do, is_causal)
    for x, gradient in zip((q, k, v), expected, strict=True):
        torch.testing.assert_close(x.grad, gradient.to(x.dtype), **TOLERANCE)


def test_is_causal_is_not_ignored(attention, inputs):
    q, k, v, _ = inputs
    with torch.no_grad():
        changed = v.clone()
        changed[:, -1] += 100.0  # the last value: seen by the last query only
        causal, causal_changed = (attention.apply(q, k, x, True) for x in (v, changed))
        # Float32 in parts has one exponent for all values of a head: the last may change the others' last bits.
        torch.testing.assert_close(causal[:, :-1], causal_changed[:, :-1], rtol=1e-5, atol=1e-6)
        assert not torch.equal(causal[:, -1], causal_changed[:, -1])
        assert not torch.allclose(attention.apply(q, k, v, False), causal)
