"""What must not happen to gradients that may be on their way: refused, or done before they leave."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cs336_systems.distributed.process_group import RankContext
from tests.ddp_cases import WRAPPERS, each_wrapper
from tests.distributed_helpers import run_gloo

LATE = ("naive", "flat")  # they send gradients after backward


def _loss(model: nn.Module, context: RankContext, scale: float) -> torch.Tensor:
    return model(torch.full((2, 3), scale * (1 + context.rank), device=context.device)).square().sum()


def _model(context: RankContext) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(context.device)


def _local_gradients(context: RankContext, scale: float) -> list[torch.Tensor]:
    model = _model(context)
    return list(torch.autograd.grad(_loss(model, context, scale), list(model.parameters())))


def _mean(context: RankContext, local: list[torch.Tensor]) -> list[torch.Tensor]:
    for gradient in local:
        torch.distributed.all_reduce(gradient)
        gradient /= context.world_size
    return local


def _sent_and_then_no_sync(context: RankContext, name: str) -> None:
    model = WRAPPERS[name](_model(context))
    _loss(model, context, 1.0).backward()
    if name not in LATE:
        with model.no_sync(), pytest.raises(RuntimeError, match="got a second gradient before finish"):
            _loss(model, context, 2.0).backward()
        return
    with model.no_sync():
        _loss(model, context, 2.0).backward()
    model.finish_gradient_synchronization()
    first, second = (_local_gradients(context, scale) for scale in (1.0, 2.0))
    expected = _mean(context, [a + b for a, b in zip(first, second, strict=True)])
    torch.testing.assert_close([p.grad for p in model.parameters()], expected)


@each_wrapper
def test_a_pass_in_no_sync_after_one_that_was_sent_is_right_or_refused(name: str) -> None:
    run_gloo(_sent_and_then_no_sync, name)


def _clamp(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-0.5, 0.5)


def _hooks_after_wrapping(context: RankContext, name: str) -> None:
    model = WRAPPERS[name](_model(context))
    for removed in (False, True):  # also hooks that take another's place
        hooks = [parameter.register_post_accumulate_grad_hook(_clamp) for parameter in model.parameters()]
        if removed:
            hooks.pop().remove()
            hooks.append([*model.parameters()][-1].register_post_accumulate_grad_hook(_clamp))
        expected = _mean(context, [g.clamp(-0.5, 0.5) for g in _local_gradients(context, 1.0)])
        for _ in range(2):
            model.zero_grad()
            _loss(model, context, 1.0).backward()
            model.finish_gradient_synchronization()
            torch.testing.assert_close([p.grad for p in model.parameters()], expected)
        for hook in hooks:
            hook.remove()
    if name not in LATE:
        model.remove_hooks()
        model.module[0].weight.register_post_accumulate_grad_hook(_clamp)
        model.zero_grad()
        _loss(model, context, 1.0).backward()
        gradients = _local_gradients(context, 1.0)
        gradients[0].clamp_(-0.5, 0.5)
        torch.testing.assert_close([p.grad for p in model.parameters()], gradients)


@each_wrapper
def test_hooks_registered_after_wrapping_run_before_gradients_leave(name: str) -> None:
    run_gloo(_hooks_after_wrapping, name)


def _compiled_whole(context: RankContext, name: str) -> None:
    model = WRAPPERS[name](_model(context))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(_clamp)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for step in range(2):
        model.zero_grad()
        _loss(compiled, context, 1.0).backward()
        model.finish_gradient_synchronization()
        expected = _mean(context, [g.clamp(-0.5, 0.5) for g in _local_gradients(context, 1.0)])
        if name in LATE or step > 0:  # the first step's finish puts them in their order
            torch.testing.assert_close([p.grad for p in model.parameters()], expected)


@each_wrapper
def test_a_wrapper_can_be_compiled_whole(name: str) -> None:
    run_gloo(_compiled_whole, name)


def _create_graph(context: RankContext, name: str) -> None:
    model = WRAPPERS[name](_model(context))
    if name == "bucketed":
        with pytest.raises(RuntimeError, match=r"create_graph=True\): .* wrap with gradient_as_bucket_view=False"):
            _loss(model, context, 1.0).backward(create_graph=True)
        return
    _loss(model, context, 1.0).backward(create_graph=True)
    model.finish_gradient_synchronization()
    expected = _mean(context, _local_gradients(context, 1.0))
    torch.testing.assert_close([p.grad.detach() for p in model.parameters()], expected)


@pytest.mark.filterwarnings("ignore:Using backward.* with create_graph=True")
@each_wrapper
def test_a_backward_pass_with_a_graph_is_right_or_refused(name: str) -> None:
    run_gloo(_create_graph, name)


def _conjugate_buffer(context: RankContext) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("turned", torch.tensor([1 + 2j, 3 - 1j]).mul(1 + context.rank).conj())
    WRAPPERS["flat"](model)
    assert model.turned.tolist() == [1 - 2j, 3 + 1j]


def test_a_lazily_conjugate_buffer_is_broadcast() -> None:
    run_gloo(_conjugate_buffer)
