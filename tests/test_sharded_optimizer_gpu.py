"""The sharded optimizer on NCCL, whose parameters are cut by rows there, against the unsharded one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from cs336_basics.optimizer import AdamW
from cs336_systems.distributed.ddp_bucketed import BucketedDDP
from cs336_systems.distributed.process_group import GroupOptions, RankContext, spawn_ranks
from cs336_systems.distributed.sharded_optimizer import ShardedOptimizer
from tests.distributed_helpers import assert_same_on_all_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]
OPTIONS = GroupOptions("cuda", timeout_s=120.0)
SHAPES = ((3000, 1024), (16, 33), (1, 7), (), (30, 40), (1024,), (50257, 64))
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw-fused": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "fused": True}),
    "adamw-foreach": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    "adamw-project": (AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "sgd-momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.05}),
}


def _parameters(device: torch.device, shapes: tuple[tuple[int, ...], ...] = SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator(device).manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator, device=device)) for shape in shapes]


def _set_gradients(parameters: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator(parameters[0].device).manual_seed(100 + step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator, device=parameter.device)


def _ten_steps(context: RankContext, name: str) -> bool:
    """Also over a state dict at half-way. Returns whether any parameter has several owners."""
    optimizer_cls, options = OPTIMIZERS[name]
    shapes = tuple(shape for shape in SHAPES if shape != ()) if name == "adafactor" else SHAPES
    plain, sharded = _parameters(context.device, shapes), _parameters(context.device, shapes)
    optimizers = optimizer_cls(plain, **options), ShardedOptimizer(sharded, optimizer_cls, bucket_size_mb=8, **options)
    for step in range(10):
        for parameters, optimizer in zip((plain, sharded), optimizers, strict=True):
            _set_gradients(parameters, step)
            optimizer.step()
        if step == 4:
            optimizers[1].load_state_dict(optimizers[1].state_dict())
    for theirs, expected in zip(sharded, plain, strict=True):
        torch.testing.assert_close(theirs, expected, rtol=1e-6, atol=1e-6)
    assert_same_on_all_ranks(nn.ParameterList(sharded))
    torch.testing.assert_close(
        optimizers[1].state_dict()["state"],
        optimizers[0].state_dict()["state"],
        rtol=1e-5,
        atol=1e-6,
        check_device=False,
    )
    return sum(map(len, optimizers[1].slices)) > len(shapes)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ten_steps_equal_the_unsharded_optimizer(name: str) -> None:
    is_cut = spawn_ranks(_ten_steps, name, world_size=2, options=OPTIONS)
    assert is_cut == [name != "adafactor"] * 2  # whose update of an element depends on its row and column


def _state_memory(context: RankContext) -> tuple[int, int]:
    parameters = _parameters(context.device, ((12000, 1024), (20000, 1024), (1024,)))
    n_bytes = sum(4 * parameter.numel() for parameter in parameters)
    _set_gradients(parameters, 0)
    optimizer = ShardedOptimizer(parameters, torch.optim.AdamW, fused=True, bucket_size_mb=4)
    before = torch.cuda.memory_allocated(context.device)
    optimizer.step()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(context.device) - before, n_bytes


def test_each_rank_holds_half_of_the_state() -> None:
    for held, n_bytes in spawn_ranks(_state_memory, world_size=2, options=OPTIONS):
        assert held == pytest.approx(2 * n_bytes / 2, rel=0.03)  # the allocator rounds each tensor up


def _train(context: RankContext, make: Any, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]).to(context.device)
    model = BucketedDDP(module, bucket_size_mb=1.0)
    optimizer = make(model.parameters(), **options)
    for step in range(10):
        x = torch.randn(8, 512, generator=torch.Generator().manual_seed(2 * step + context.rank)).to(context.device)
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        model(x).square().mean().backward()
        model.finish_gradient_synchronization()
        optimizer.step()
    return module


def _under_data_parallelism(context: RankContext) -> None:
    expected = _train(context, torch.optim.AdamW, lr=0.001, fused=True)
    module = _train(context, ShardedOptimizer, optimizer_cls=torch.optim.AdamW, lr=0.001, fused=True)
    assert_same_on_all_ranks(module)
    for theirs, parameter in zip(module.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(theirs, parameter, rtol=1e-4, atol=1e-5)


def test_under_the_bucketed_wrapper() -> None:
    spawn_ranks(_under_data_parallelism, world_size=2, options=OPTIONS)


def _host_runs_ahead(context: RankContext) -> bool:
    parameters = _parameters(context.device)
    optimizer = ShardedOptimizer(parameters, torch.optim.AdamW, lr=0.01, fused=True, bucket_size_mb=4)
    for step in range(2):
        _set_gradients(parameters, step)
        optimizer.step()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    optimizer.step()
    return not torch.cuda.current_stream().query()  # still asleep


def test_a_step_does_not_wait_for_the_device() -> None:
    assert spawn_ranks(_host_runs_ahead, world_size=2, options=OPTIONS) == [True, True]
