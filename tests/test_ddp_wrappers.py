"""The four data-parallel wrappers against one process on the whole batch, in easy and in awkward cases."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from torch import nn

from cs336_systems.distributed.process_group import RankContext
from tests.ddp_cases import N_COLLECTIVES, WRAPPERS, each_wrapper
from tests.distributed_helpers import (
    CountedCollectives,
    assert_same_on_all_ranks,
    assert_same_weights,
    batch,
    finish,
    loss_of,
    make_model,
    make_optimizer,
    part,
    run_gloo,
    train_beside_one_process,
)


def _plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, i_step: int, rank: int, world_size: int) -> None:
    tokens, targets = (part(tensor, rank, world_size) for tensor in batch(i_step))
    optimizer.zero_grad(set_to_none=i_step % 2 == 0)  # both ways, in turn
    loss_of(model, tokens, targets).backward()
    finish(model)
    optimizer.step()


# Ten steps, one to four ranks


def _ten_steps(context: RankContext, name: str) -> dict[str, int]:
    wrapped, plain = train_beside_one_process(context, WRAPPERS[name], 10, _plain_step)
    assert_same_weights(wrapped, plain)
    assert_same_on_all_ranks(wrapped)
    assert isinstance(wrapped.module, nn.Module)
    assert not torch.equal(wrapped.module.first.weight.cpu(), make_model(0).first.weight)  # it has learned something
    with CountedCollectives() as counts:
        _plain_step(wrapped, make_optimizer(wrapped), 11, context.rank, context.world_size)
    return dict(counts.by_name)


@each_wrapper
@pytest.mark.parametrize("world_size", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3, 4))])
def test_ten_steps_equal_one_process_on_the_whole_batch(name: str, world_size: int) -> None:
    assert run_gloo(_ten_steps, name, world_size=world_size) == [N_COLLECTIVES[name]] * world_size


# Parameters without a gradient


def _branch_on(ranks: str, rank: int, world_size: int, step: int) -> bool:
    """Whether this rank's batch takes the branch; a single process takes it if any rank does."""
    if ranks == "alternating":
        return step % 2 == 0
    return ranks == "some" and (rank == 1 or world_size == 1)


def _step_with_branch(
    ranks: str, model: nn.Module, optimizer: torch.optim.Optimizer, i_step: int, rank: int, world_size: int
) -> None:
    tokens, targets = batch(i_step)
    optimizer.zero_grad()
    if world_size == 1 and ranks == "some":
        # The whole batch in one process, of which rank 1's part alone takes the branch.
        losses = [loss_of(model, tokens.chunk(3)[r], targets.chunk(3)[r], use_branch=r == 1) / 3 for r in range(3)]
        torch.stack(losses).sum().backward()
    else:
        use_branch = _branch_on(ranks, rank, world_size, i_step)
        loss_of(
            model, part(tokens, rank, world_size), part(targets, rank, world_size), use_branch=use_branch
        ).backward()
    finish(model)
    optimizer.step()


def _unused_parameters(context: RankContext, name: str, ranks: str) -> None:
    wrapped, plain = train_beside_one_process(context, WRAPPERS[name], 4, partial(_step_with_branch, ranks))
    assert_same_weights(wrapped, plain)
    assert_same_on_all_ranks(wrapped)
    gradients = {n: p.grad is None for n, p in wrapped.module.named_parameters()}
    assert gradients == {n: p.grad is None for n, p in plain.named_parameters()}
    assert gradients["unused.weight"]
    assert not gradients["first.weight"]


@each_wrapper
@pytest.mark.parametrize("ranks", ["some", "none", "alternating"])
def test_parameters_used_on_some_ranks_or_none(name: str, ranks: str) -> None:
    """Weight decay moves a parameter whose gradient is zero and not one that has none: both as in one process."""
    run_gloo(_unused_parameters, name, ranks, world_size=3)


def _no_gradient_at_all(context: RankContext, name: str) -> None:
    wrapped = WRAPPERS[name](make_model(0))
    finish(wrapped)  # no backward pass on any rank
    assert all(p.grad is None for p in wrapped.parameters())
    if context.rank == 0:  # and one on rank 0 alone
        loss_of(wrapped, *(part(t, 0, 2) for t in batch(0))).backward()
    finish(wrapped)
    plain = make_model(0)
    (loss_of(plain, *(part(t, 0, 2) for t in batch(0))) / 2).backward()
    torch.testing.assert_close(wrapped.module.first.weight.grad, plain.first.weight.grad)
    assert wrapped.module.unused.weight.grad is None


@each_wrapper
def test_ranks_without_a_backward_pass_take_part(name: str) -> None:
    run_gloo(_no_gradient_at_all, name)


class _TwoOrders(nn.Module):
    """Two layers whose gradients become ready in one order or the other."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 5, bias=False)
        self.c = nn.Linear(5, 3, bias=False)

    def forward(self, x: torch.Tensor, reverse: bool) -> torch.Tensor:
        return self.a(self.c(self.b(x))) if reverse else self.c(self.b(self.a(x)))


def _ready_in_different_orders(context: RankContext, name: str) -> list[int]:
    torch.manual_seed(0)
    bare = _TwoOrders().double()
    torch.manual_seed(0)
    wrapped = WRAPPERS[name](_TwoOrders().double())
    if name.startswith("bucketed"):
        wrapped.remove_hooks()
        wrapped = partial(WRAPPERS[name], bucket_size_mb=1e-6)(wrapped.module)  # one parameter a bucket
    x = torch.randn(4, 3, dtype=torch.float64)
    with CountedCollectives() as counts:
        wrapped(x[context.rank :: 2], reverse=context.rank == 1).square().mean().backward()
        finish(wrapped)
    (sum(bare(x[rank::2], reverse=rank == 1).square().mean() for rank in range(2)) / 2).backward()
    for parameter, expected in zip(wrapped.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)
    return counts.n_elements


@each_wrapper
def test_launch_order_is_the_same_whatever_the_ready_order(name: str) -> None:
    orders = run_gloo(_ready_in_different_orders, name)
    assert orders[0] == orders[1]


# Several passes


def _accumulate(model: nn.Module, optimizer: torch.optim.Optimizer, i_step: int, rank: int, world_size: int) -> None:
    tokens, targets = (part(tensor, rank, world_size) for tensor in batch(i_step))
    optimizer.zero_grad(set_to_none=i_step % 2 == 0)
    if world_size == 1:
        loss_of(model, tokens, targets).backward()
    else:
        with model.no_sync(), CountedCollectives() as counts:
            # The branch is used in this part only: its gradient must travel though the last pass does not touch it.
            (loss_of(model, tokens[::2], targets[::2]) / 2).backward()
            finish(model)
        assert not counts.by_name
        (loss_of(model, tokens[1::2], targets[1::2]) / 2).backward()
    finish(model)
    optimizer.step()


def _accumulation(context: RankContext, name: str) -> None:
    wrapped, plain = train_beside_one_process(context, WRAPPERS[name], 4, _accumulate)
    assert_same_weights(wrapped, plain)


@each_wrapper
def test_no_sync_accumulates(name: str) -> None:
    run_gloo(_accumulation, name)


def _branch_in_no_sync_only(context: RankContext, name: str) -> None:
    wrapped, plain = WRAPPERS[name](make_model(0)), make_model(0)
    mine = [part(tensor, context.rank, 2) for tensor in batch(0)]
    with wrapped.no_sync():
        loss_of(wrapped, *mine, use_branch=True).backward()
    loss_of(wrapped, *mine, use_branch=False).backward()
    finish(wrapped)
    for use_branch in (True, False):
        loss_of(plain, *batch(0), use_branch=use_branch).backward()
    for parameter, expected in zip(wrapped.parameters(), plain.parameters(), strict=True):
        assert (parameter.grad is None) == (expected.grad is None)
        if expected.grad is not None:
            torch.testing.assert_close(parameter.grad, expected.grad)


@each_wrapper
def test_gradients_of_earlier_passes_travel_though_the_last_pass_has_none(name: str) -> None:
    run_gloo(_branch_in_no_sync_only, name)


def _several_forwards(model: nn.Module, optimizer: torch.optim.Optimizer, i: int, rank: int, world_size: int) -> None:
    optimizer.zero_grad()
    losses = [loss_of(model, *(part(tensor, rank, world_size) for tensor in batch(i + 50 * k))) for k in range(3)]
    torch.stack(losses).sum().backward()
    finish(model)
    optimizer.step()


def _several_forwards_on_a_rank(context: RankContext, name: str) -> None:
    wrapped, plain = train_beside_one_process(context, WRAPPERS[name], 4, _several_forwards)
    assert_same_weights(wrapped, plain)


@each_wrapper
def test_several_forward_passes_before_one_backward(name: str) -> None:
    run_gloo(_several_forwards_on_a_rank, name)


def _two_backwards(context: RankContext, name: str) -> str:
    wrapped = WRAPPERS[name](make_model(0))
    mine = [part(tensor, context.rank, 2) for tensor in batch(0)]
    loss_of(wrapped, *mine).backward()
    try:
        loss_of(wrapped, *mine).backward()
    except RuntimeError as error:
        return str(error)
    finish(wrapped)
    plain = make_model(0)
    (2 * loss_of(plain, *batch(0))).backward()
    torch.testing.assert_close(wrapped.module.first.weight.grad, plain.first.weight.grad)
    return "right"


@each_wrapper
def test_two_backward_passes_before_finish_are_right_or_refused(name: str) -> None:
    """Those that communicate after backward add them up; those that communicate within backward cannot any more."""
    expected = "right" if name in ("naive", "flat") else "parameter '.*' got a second gradient before finish"
    for result in run_gloo(_two_backwards, name):
        assert re.match(expected, result)


def _float16_sum_overflows(context: RankContext, name: str) -> list[float]:
    wrapped = WRAPPERS[name](nn.Linear(1, 1, bias=False).half().to(context.device))
    (
        wrapped(torch.ones(1, 1, dtype=torch.float16, device=context.device)) * 40_000.0
    ).sum().backward()  # two sum to more than 65,504
    finish(wrapped)
    return wrapped.module.weight.grad.flatten().tolist()


@each_wrapper
def test_float16_gradients_whose_sum_overflows_are_averaged(name: str) -> None:
    for gradient in run_gloo(_float16_sum_overflows, name, world_size=3):
        assert gradient == [pytest.approx(40_000, rel=2e-3)]
