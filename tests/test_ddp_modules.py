"""The four data-parallel wrappers around modules of all kinds, and what wrapping itself must do."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from cs336_systems.distributed.ddp_naive import NaiveDDP
from cs336_systems.distributed.process_group import RankContext
from cs336_systems.distributed.spawn import RankFailedError
from tests.ddp_cases import WRAPPERS, each_wrapper
from tests.distributed_helpers import (
    CountedCollectives,
    assert_same_weights,
    batch,
    finish,
    loss_of,
    make_model,
    part,
    run_gloo,
)


class _MixedDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 5)
        self.b = nn.Linear(5, 5).double()
        self.c = nn.Linear(5, 3).bfloat16()
        self.d = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.e = nn.Linear(3, 2)
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.c(self.b(self.a(x).double()).bfloat16()).float()
        return self.e((x * self.d).abs()) * self.scalar + self.empty.sum()


def _mixed_dtypes(context: RankContext, name: str) -> dict[str, int]:
    torch.manual_seed(context.rank)
    wrapped = WRAPPERS[name](_MixedDtypes())
    torch.manual_seed(0)
    plain = _MixedDtypes()
    x = torch.randn(8, 4)
    with CountedCollectives() as counts:
        wrapped(x.chunk(2)[context.rank]).square().mean().backward()
        finish(wrapped)
    plain(x).square().mean().backward()
    for (label, parameter), expected in zip(wrapped.module.named_parameters(), plain.parameters(), strict=True):
        low = label.startswith(("a.", "b.", "c."))  # what has passed through bfloat16
        assert parameter.grad is not None
        assert parameter.grad.dtype == expected.grad.dtype
        torch.testing.assert_close(
            parameter.grad, expected.grad, rtol=3e-2 if low else 1e-4, atol=2e-2 if low else 1e-5
        )
    return dict(counts.by_name)


@each_wrapper
def test_several_dtypes(name: str) -> None:
    n_collectives = {"naive": 11, "flat": 4, "overlapped": 11}
    for counts in run_gloo(_mixed_dtypes, name):
        if name in n_collectives:
            assert counts == {"allreduce_": n_collectives[name]}


class _Nothing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def _no_parameters(_: RankContext, name: str) -> None:
    for module in (_Nothing(), nn.Linear(2, 2).requires_grad_(False)):
        wrapped = WRAPPERS[name](module)
        assert wrapped(torch.ones(2)).shape == (2,)
        with CountedCollectives() as counts:
            finish(wrapped)
        assert not counts.by_name
        with wrapped.no_sync():
            finish(wrapped)
        wrapped.zero_grad(set_to_none=False)


@each_wrapper
def test_modules_without_trainable_parameters(name: str) -> None:
    run_gloo(_no_parameters, name)


def _strides(context: RankContext, name: str) -> None:
    """A parameter in channels-last order, whose gradient autograd lays out in the same."""
    torch.manual_seed(0)
    wrapped = WRAPPERS[name](nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last))
    plain = nn.Conv2d(2, 3, 2)
    plain.load_state_dict(wrapped.state_dict())
    x = torch.randn(4, 2, 5, 5)
    for _ in range(2):
        wrapped(x.chunk(2)[context.rank]).square().mean().backward()
        finish(wrapped)
        plain(x).square().mean().backward()
        torch.testing.assert_close(wrapped.module.weight.grad, plain.weight.grad)
        assert wrapped.module.weight.grad.stride() == wrapped.module.weight.stride() != plain.weight.stride()
        wrapped.zero_grad()
        plain.zero_grad()


@each_wrapper
def test_parameters_with_other_strides(name: str) -> None:
    run_gloo(_strides, name)


class _Checkpointed(nn.Module):
    """Three layers, whose activations backward computes again, by one of PyTorch's two ways."""

    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for layer in self.layers:
            x = layer(x) if self.use_reentrant is None else checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x


def _checkpointed(context: RankContext, name: str, use_reentrant: bool) -> None:
    torch.manual_seed(0)
    wrapped, plain = WRAPPERS[name](_Checkpointed(use_reentrant)), _Checkpointed(None)
    plain.load_state_dict(wrapped.state_dict())
    x = torch.randn(6, 4)
    for _ in range(2):
        wrapped.zero_grad()
        wrapped(x.chunk(2)[context.rank].clone()).square().mean().backward()
        finish(wrapped)
    plain(x).square().mean().backward()
    for parameter, expected in zip(wrapped.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)


@each_wrapper
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(name: str, use_reentrant: bool) -> None:
    run_gloo(_checkpointed, name, use_reentrant)


class _Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3, sparse=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table(tokens).sum()


def _sparse(_: RankContext, name: str) -> None:
    wrapped = WRAPPERS[name](_Sparse())
    wrapped(torch.tensor([1, 2])).backward()
    finish(wrapped)


@each_wrapper
def test_a_sparse_gradient_is_refused_by_name(name: str) -> None:
    with pytest.raises(RankFailedError, match=r"ValueError: the gradient of parameter 'table.weight' is sparse"):
        run_gloo(_sparse, name)


# Wrapping


def _wrap_different(context: RankContext, difference: str) -> str:
    module = make_model(0)
    if context.rank == 1:
        if difference == "shape":
            module.first = nn.Linear(6, 9).double()
        elif difference == "name":
            module.second_branch = module.branch
            del module.branch
        elif difference == "dtype":
            module.first.float()
        elif difference == "frozen":
            module.first.weight.requires_grad_(False)
        elif difference == "tied":
            module.head.weight = nn.Parameter(module.head.weight.detach().clone())
        elif difference == "buffer":
            module.register_buffer("another", torch.zeros(3))
    with pytest.raises(ValueError, match="module: the ranks built different ones") as failure:
        NaiveDDP(module)
    return str(failure.value)


@pytest.mark.parametrize(
    ("difference", "message"),
    [
        (
            "shape",
            r"Rank 1 has parameter 'first.weight' float64 \(9, 6\) where rank 0 has .*'first.weight' float64 \(8, 6",
        ),
        ("name", r"Rank 1 has parameter 'unused.weight' .* where rank 0 has parameter 'branch.weight'"),
        ("dtype", r"Rank 1 has parameter 'first.weight' float32 .* where rank 0 has parameter 'first.weight' float64"),
        ("frozen", r"Rank 1 has parameter 'first.weight' float64 \(8, 6\) \(frozen\) where"),
        ("tied", r"Rank 1 has parameter 'head.weight' .* where rank 0 has buffer 'offset'"),
        ("buffer", r"Rank 1 has buffer 'another' float32 \(3,\) where rank 0 has nothing more"),
    ],
)
def test_ranks_with_different_modules_all_learn_how(difference: str, message: str) -> None:
    for text in run_gloo(_wrap_different, difference, world_size=3):
        assert re.search(message, text), text


class _Buffers(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.register_buffer("transposed", torch.randn(3, 2).t())
        for dtype in (torch.float16, torch.bfloat16, torch.int16, torch.int64, torch.bool, torch.complex128):
            self.register_buffer(f"a_{dtype}".replace(".", "_"), (4 * torch.randn(3)).to(dtype))
        self.register_buffer("scalar", torch.tensor(seed))
        self.register_buffer("temporary", torch.randn(2), persistent=False)
        self.register_buffer("nothing", None)
        self.register_buffer("empty", torch.zeros(0))


def _broadcast_buffers(context: RankContext) -> None:
    module, expected = _Buffers(context.rank), _Buffers(0)
    NaiveDDP(module)
    for (name, buffer), theirs in zip(module.named_buffers(), expected.buffers(), strict=True):
        assert torch.equal(buffer, theirs), name


def test_buffers_of_every_dtype_and_shape_are_broadcast() -> None:
    run_gloo(_broadcast_buffers, world_size=2)


def _state_dicts(context: RankContext, name: str) -> None:
    wrapped, bare = WRAPPERS[name](make_model(context.rank)), make_model(7)
    bare.load_state_dict(wrapped.state_dict())
    assert_same_weights(bare, make_model(0))
    other = make_model(8)
    wrapped.load_state_dict(other.state_dict())
    assert_same_weights(wrapped.module, other)
    names = [n.removeprefix("module.") for n, _ in wrapped.named_parameters()]
    assert names == [n for n, _ in bare.named_parameters()]


@each_wrapper
def test_state_dicts_are_the_bare_modules(name: str) -> None:
    run_gloo(_state_dicts, name)


def test_wrapping_without_a_process_group_is_refused() -> None:
    with pytest.raises(RuntimeError, match="no process group"):
        NaiveDDP(nn.Linear(1, 1))


def _subgroup(context: RankContext, name: str) -> None:
    """Only ranks 1 and 2 of 3 train together; rank 1 is the subgroup's rank 0."""
    group = dist.new_group([1, 2])
    if context.rank == 0:
        return
    wrapped = WRAPPERS[name](make_model(context.rank), process_group=group)
    assert_same_weights(wrapped, make_model(1))
    loss_of(wrapped, *(part(tensor, context.rank - 1, 2) for tensor in batch(0))).backward()
    finish(wrapped)
    plain = make_model(1)
    loss_of(plain, *batch(0)).backward()
    torch.testing.assert_close(wrapped.module.first.weight.grad, plain.first.weight.grad)


@each_wrapper
def test_a_process_group_of_some_ranks(name: str) -> None:
    run_gloo(_subgroup, name, world_size=3)
