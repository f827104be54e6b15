"""What a data-parallel step leaves out is refused: averaging the gradients, and parameters that came after wrapping."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from cs336_systems.distributed.ddp_bucketed import BucketedDDP
from cs336_systems.distributed.ddp_naive import NaiveDDP
from cs336_systems.distributed.fsdp import FSDP
from cs336_systems.distributed.process_group import RankContext
from cs336_systems.distributed.sharded_optimizer import ShardedOptimizer
from tests.ddp_cases import WRAPPERS
from tests.distributed_helpers import run_gloo

ALL: dict[str, Callable[..., Any]] = {**WRAPPERS, "fsdp": FSDP}
NOT_AVERAGED = re.escape("step(): these gradients are this rank's alone; call finish_gradient_synchronization()")


class _OnData(torch.optim.Optimizer):
    """As the course's students write theirs: the parameters' versions don't tell of the step."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data -= 0.1 * parameter.grad.data


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4))


def _forgotten(context: RankContext) -> None:
    x = torch.full((2, 4), 1.0 + context.rank)
    makers = [lambda p: _OnData(p, {}), lambda p: torch.optim.AdamW(p, fused=True)]
    for name, wrap in ALL.items():
        for make in [*makers, *([] if name == "fsdp" else [lambda p: ShardedOptimizer(p, torch.optim.SGD, lr=0.1)])]:
            model = wrap(_model())
            optimizer = make(model.parameters())
            before = [parameter.detach().clone() for parameter in model.parameters()]
            model(x).square().mean().backward()
            with torch.no_grad():
                model(x)
            for _ in range(2):  # and so it is until they are averaged
                with pytest.raises(RuntimeError, match=NOT_AVERAGED):
                    optimizer.step()
            for parameter, value in zip(model.parameters(), before, strict=True):
                assert torch.equal(parameter, value)
            model.finish_gradient_synchronization()
            optimizer.step()


def test_a_step_with_gradients_that_are_not_averaged_is_refused() -> None:
    run_gloo(_forgotten)


def _in_a_closure(context: RankContext) -> None:
    x = torch.full((2, 4), 1.0 + context.rank)

    def closure(model: Any, optimizer: Any, finishes: bool) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        if finishes:
            model.finish_gradient_synchronization()
        return loss

    for wrap in WRAPPERS.values():
        for make in (torch.optim.SGD, torch.optim.LBFGS):
            model = wrap(_model())
            optimizer = make(model.parameters(), lr=1e-3)
            optimizer.step(lambda: closure(model, optimizer, True))  # noqa: B023
            with pytest.raises(RuntimeError, match=NOT_AVERAGED + "|got a second gradient before finish"):
                optimizer.step(lambda: closure(model, optimizer, False))  # noqa: B023


def test_a_closure_that_does_not_average_is_refused() -> None:
    run_gloo(_in_a_closure)


def _allowed(context: RankContext) -> None:
    x = torch.full((2, 4), 1.0 + context.rank)
    for name, wrap in ALL.items():
        model, other = wrap(_model()), nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.step()
        model(x).sum().backward()
        torch.optim.SGD(other.parameters(), lr=0.1).step()  # of parameters that nobody averages
        optimizer.zero_grad()  # dropped: nothing is used
        optimizer.step()
        model.finish_gradient_synchronization()
        optimizer.step()
        model(x).sum().backward()
        optimizer.zero_grad(set_to_none=False)
        if name not in ("naive", "flat", "fsdp"):  # whose averages are on their way into the zeros
            with pytest.raises(RuntimeError, match=NOT_AVERAGED):
                optimizer.step()
        else:
            optimizer.step()
        model.finish_gradient_synchronization()
        optimizer.zero_grad()
        if hasattr(model, "no_sync"):
            with model.no_sync():
                model(x).sum().backward()
            optimizer.step()  # on this rank alone, as is asked for
            optimizer.zero_grad()
        torch.autograd.grad(model(x.requires_grad_()).sum(), x)
        x = x.detach()
        optimizer.step()
        if name in ("naive", "flat"):
            model(x).sum().backward()
            wrapped_again = NaiveDDP(model.module)  # which is asked from now on
            optimizer.zero_grad()
            wrapped_again(x).sum().backward()
            wrapped_again.finish_gradient_synchronization()
            optimizer.step()


def test_gradients_may_be_dropped_and_kept_on_a_rank() -> None:
    run_gloo(_allowed)


def _replace(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())


def _add(model: nn.Module) -> None:
    model.append(nn.Linear(4, 4))


def _unfreeze(model: nn.Module) -> None:
    model[1].requires_grad_(True)


@pytest.mark.parametrize(("change", "name"), [(_replace, "0.weight"), (_add, "3.weight"), (_unfreeze, "1.weight")])
def test_parameters_that_come_after_wrapping_are_refused_by_name(change: Any, name: str) -> None:
    run_gloo(_changed, change, name, world_size=1)


def _changed(context: RankContext, change: Any, name: str) -> None:
    for wrapper, wrap in ALL.items():
        module = _model()
        module[1].requires_grad_(False)
        model = wrap(module)
        model.requires_grad_(False)
        model.finish_gradient_synchronization()  # frozen now, as may be
        module[0].requires_grad_(True)
        change(module)
        if not (wrapper == "fsdp" and change is _replace):  # whose forward refuses it
            model(torch.ones(2, 4)).sum().backward()
        with pytest.raises(RuntimeError, match=rf"module: its parameter '{name}' was replaced, added or unfrozen"):
            model.finish_gradient_synchronization()


def _cast(_: RankContext) -> None:
    for keep in (True, False):
        model = BucketedDDP(_model())
        model.zero_grad(set_to_none=not keep)
        model.bfloat16()
        with torch.no_grad():
            model(torch.ones(2, 4, dtype=torch.bfloat16))  # nothing is averaged
        with pytest.raises(
            RuntimeError, match=r"is torch.bfloat16 on cpu, and was torch.float32 on cpu when it was wr"
        ):
            model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
        with pytest.raises(RuntimeError, match="wrap after casting and moving"):
            model.zero_grad(set_to_none=False)


def test_buckets_of_a_model_that_was_cast_are_refused() -> None:
    run_gloo(_cast, world_size=1)
