"""The rotary kernel against the model's own embedding in float64, through Triton's interpreter on a CPU and compiled on
a GPU."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")

from cs336_basics.rotary import RotaryEmbedding
from cs336_systems.kernels import rope as module
from cs336_systems.kernels.rope import rope
from tests.attention_helpers import IGNORE_INTERPRETER
from tests.kernel_helpers import DTYPES, assert_no_worse_than_eager, rows_far_apart

pytestmark = IGNORE_INTERPRETER


def check(x, context_length=None, positions=None):
    embedding = RotaryEmbedding(context_length or x.shape[2], x.shape[3], device=x.device)
    pos_ids = positions if positions is None or positions.ndim == 1 else positions.unsqueeze(1)
    assert_no_worse_than_eager(
        lambda x: rope(x, embedding.cos, embedding.sin, positions), lambda x: embedding(x, pos_ids), [x]
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1, 2), (2, 3, 5, 6), (1, 9, 3, 80), (2, 4, 33, 128), (1, 2, 0, 4)], ids=str)
def test_matches_float64(shape, dtype, device):
    check(torch.randn(shape, device=device).to(dtype), context_length=40)


def test_heads_that_lie_between_positions(device):
    """As projections give them: no copy, and the result lies like that too."""
    x = torch.randn(2, 7, 3, 8, device=device).transpose(1, 2)
    embedding = RotaryEmbedding(7, 8, device=device)
    assert rope(x, embedding.cos, embedding.sin).stride() == x.stride()
    for dy in (torch.randn(x.shape, device=device), torch.ones((), device=device).expand(x.shape)):
        (dx,) = torch.autograd.grad(rope(x.requires_grad_(), embedding.cos, embedding.sin), x, dy)
        assert dx.stride() == x.stride()
    check(x.detach())
    check(torch.randn(2, 3, 8, 7, device=device).mT)
    check(torch.randn(2, 3, 7, 16, device=device)[:, 1:, 2:, ::2])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_positions(dtype, device):
    x = torch.randn(2, 3, 5, 6, device=device)
    check(x, 50, torch.randint(50, (2, 5), device=device).to(dtype))
    check(x, 50, torch.arange(5, 10, device=device).to(dtype))


@pytest.mark.parametrize("outside", [-1, 8, -(2**40), 2**40])
def test_a_position_out_of_range_reads_nothing(outside, device, monkeypatch):
    """Not what lies beside the cosines: NaN, of the token at that position only, in both directions."""
    x = torch.randn(1, 2, 4, 6, device=device, requires_grad=True)
    embedding = RotaryEmbedding(9, 6, device=device)
    cos, sin = embedding.cos[:8], embedding.sin[:8]  # behind them in memory lies a ninth
    positions = torch.tensor([3, outside, 0, 7], device=device)
    if device == "cpu":
        with pytest.raises(ValueError, match=rf"rope: a position is {outside}; cos and sin have those from 0 to 7"):
            rope(x, cos, sin, positions)
        monkeypatch.setattr(module, "_check_range", lambda *_: None)
    y = rope(x, cos, sin, positions)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    for turned in (y, dx):
        assert turned.isnan().all(dim=-1).tolist() == [[[False, True, False, False]] * 2]
        assert turned.isnan().any(dim=-1).tolist() == [[[False, True, False, False]] * 2]
    check(x.detach(), 8, positions.clamp(0, 7))


def test_offsets_pass_2_to_the_31(device, monkeypatch):
    rows, embedding = rows_far_apart(monkeypatch, device, 8), RotaryEmbedding(3, 8, device=device)
    monkeypatch.setattr(torch, "empty_like", lambda x: x.new_empty(x.shape))  # not laid out like x
    for dim in (0, 1, 2):
        x = rows[(None,) * dim + (slice(None),) + (None,) * (2 - dim)]
        for y_strides in ((), x.contiguous().stride()):
            turned = module._rope(x, embedding.cos, embedding.sin, None, y_strides)
            expected = module._rope(x.contiguous(), embedding.cos, embedding.sin, None, y_strides)
            torch.testing.assert_close(turned, expected)


def test_gradients_that_are_one_number_expanded(device):
    x = torch.randn(1, 2, 3, 4, device=device, requires_grad=True)
    embedding = RotaryEmbedding(3, 4, device=device)
    (ours,) = torch.autograd.grad(rope(x, embedding.cos, embedding.sin).sum(), x)
    (theirs,) = torch.autograd.grad(embedding(x).sum(), x)
    torch.testing.assert_close(ours, theirs)


def test_every_element_of_the_result_is_written(device, monkeypatch):
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: empty_like(*a, **k).fill_(float("nan")))
    x = torch.randn(2, 5, 9, 6, device=device, requires_grad=True)
    embedding = RotaryEmbedding(9, 6, device=device)
    y = rope(x, embedding.cos, embedding.sin)
    (dx,) = torch.autograd.grad(y, x, y.detach())
    torch.testing.assert_close(dx, x.detach())  # turned there and back
    assert not y.isnan().any()


def test_a_second_derivative_is_refused(device):
    x = torch.randn(1, 2, 3, 4, device=device, requires_grad=True)
    embedding = RotaryEmbedding(3, 4, device=device)
    (dx,) = torch.autograd.grad(rope(x, embedding.cos, embedding.sin).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


TABLE = torch.ones(4, 3)


@pytest.mark.parametrize(
    ("x", "cos", "sin", "positions", "message"),
    [
        (torch.ones(2, 4, 6), TABLE, TABLE, None, r"x is \(2, 4, 6\)"),
        (torch.ones(1, 2, 4, 5), TABLE, TABLE, None, "an even head_dim from 2 to 1024"),
        (torch.ones(1, 2, 4, 6), TABLE.half(), TABLE, None, r"cos is \(4, 3\) torch.float16"),
        (torch.ones(1, 2, 4, 6), TABLE, TABLE[:3], None, r"sin is \(3, 3\)"),
        (torch.ones(1, 2, 4, 8), TABLE, TABLE, None, r"must be \(positions, 4\) float32"),
        (torch.ones(1, 2, 5, 6), TABLE, TABLE, None, "x has 5 positions; cos and sin have 4"),
        (torch.ones(1, 2, 4, 6), TABLE, TABLE, torch.zeros(3).long(), r"positions is \(3,\); it must be \(4,\)"),
        (torch.ones(1, 2, 4, 6).double(), TABLE, TABLE, None, r"x is torch\.float64"),
        (torch.ones(1, 2, 4, 6), TABLE.to("meta"), TABLE, None, "x on cpu, cos on meta"),
    ],
)  # fmt: skip
def test_bad_input(x, cos, sin, positions, message):
    with pytest.raises(ValueError, match=message):
        rope(x, cos, sin, positions)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_large_on_a_gpu(head_dim, dtype):
    check(torch.randn(2, 1000, 12, head_dim, device="cuda").to(dtype).transpose(1, 2))
