"""FSDP on NCCL: the same weights as averaging by hand, and what only GPUs can show: memory, and work that is queued."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from cs336_systems.distributed.fsdp import FSDP
from cs336_systems.distributed.process_group import GroupOptions, RankContext, spawn_ranks
from tests.distributed_helpers import assert_same_on_all_ranks
from tests.fsdp_helpers import (
    Checkpointed,
    Mixed,
    assert_same,
    average_by_hand,
    build,
    loss_on,
    resident,
    transformer,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]
OPTIONS = GroupOptions("cuda", timeout_s=120.0)
MODELS: dict[str, Callable[[], nn.Module]] = {
    "mixed": Mixed,
    "tied": partial(Mixed, tied=True),
    "transformer": transformer,
    "checkpointed": partial(Checkpointed, 2, False),
}
D_MODEL, N_LAYERS = 2048, 8
WEIGHT_BYTES = 4 * D_MODEL**2


def train(context: RankContext, name: str, compute_dtype: torch.dtype | None, atol: float) -> None:
    plain = build(MODELS[name], 0).to(context.device)
    model = FSDP(build(MODELS[name], context.rank).to(context.device), compute_dtype)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(10):
        for optimizer in optimizers:
            optimizer.zero_grad()
        average_by_hand(plain, step, context.world_size)
        loss_on(model, step, context.rank, context.world_size).backward()
        model.finish_gradient_synchronization()
        assert resident(model) == []
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
        for optimizer in optimizers:
            optimizer.step()
    assert_same(model.gather_full_params(), plain, atol)


@pytest.mark.parametrize("name", MODELS)
def test_ten_steps_equal_averaging_by_hand(name: str) -> None:
    spawn_ranks(train, name, None, 2e-6, world_size=2, options=OPTIONS)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float16, 5e-3), (torch.bfloat16, 4e-2)])
def test_low_precision_follows_float32(dtype: torch.dtype, atol: float) -> None:
    spawn_ranks(train, "transformer", dtype, atol, world_size=2, options=OPTIONS)


def _layers(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(D_MODEL, D_MODEL, bias=False) for _ in range(N_LAYERS)]).to(device)


def _input(rank: int, device: torch.device) -> Tensor:
    return torch.randn(64, D_MODEL, generator=torch.Generator().manual_seed(rank)).to(device)


def _large_layers(context: RankContext) -> None:
    """Weights that take long enough to travel for a missing wait to show, and a second pass over memory used before."""
    plain, model = _layers(context.device), FSDP(_layers(context.device))
    for _ in range(4):
        plain.zero_grad()
        model.zero_grad()
        for rank in range(context.world_size):
            (plain(_input(rank, context.device)).square().mean() / context.world_size).backward()
        model(_input(context.rank, context.device)).square().mean().backward()
        model.finish_gradient_synchronization()
        for theirs, whole, weight in zip(model.parameters(), plain.parameters(), model._weights, strict=True):
            expected = weight.rows_of(whole.grad)
            torch.testing.assert_close(theirs.grad, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
        with torch.no_grad():
            for parameter in (*plain.parameters(), *model.parameters()):
                parameter.add_(parameter.grad, alpha=-0.1)


def test_gradients_of_large_layers() -> None:
    spawn_ranks(_large_layers, world_size=2, options=OPTIONS)


def _memory(context: RankContext) -> tuple[int, int]:
    """Bytes held after wrapping, and the peak of a step that knows the order, beyond gradients and activations."""
    x = _input(context.rank, context.device)
    module = _layers(context.device)
    module(x).sum().backward()  # cuBLAS takes its workspaces
    module.zero_grad()
    before = torch.cuda.memory_allocated(context.device)
    model = FSDP(module)
    held = N_LAYERS * WEIGHT_BYTES + torch.cuda.memory_allocated(context.device) - before
    others = before - N_LAYERS * WEIGHT_BYTES
    for _ in range(2):
        model.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        model(x).sum().backward()
        model.finish_gradient_synchronization()
    torch.cuda.synchronize()
    shards = N_LAYERS * WEIGHT_BYTES // context.world_size
    return held, torch.cuda.max_memory_allocated(context.device) - others - 2 * shards


def test_memory_is_the_shards_and_a_few_whole_weights() -> None:
    for held, beyond in spawn_ranks(_memory, world_size=2, options=OPTIONS):
        assert held == pytest.approx(N_LAYERS * WEIGHT_BYTES / 2, rel=0.02)
        # The weight in use and two ahead; the gradient just made, one that waits for it and two that travel; and
        # activations, 0.3 of a weight.
        assert beyond < 7.5 * WEIGHT_BYTES


def _host_runs_ahead(context: RankContext) -> bool:
    model = FSDP(_layers(context.device))
    x = _input(context.rank, context.device)
    for _ in range(2):
        model(x).sum().backward()
        model.finish_gradient_synchronization()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    model(x).sum().backward()
    model.finish_gradient_synchronization()
    return not torch.cuda.current_stream().query()  # still asleep


def test_a_step_does_not_wait_for_the_device() -> None:
    assert spawn_ranks(_host_runs_ahead, world_size=2, options=OPTIONS) == [True, True]


def _full_state(context: RankContext) -> None:
    plain, model = build(Mixed, 0).to(context.device), FSDP(build(Mixed, context.rank).to(context.device))
    state = model.full_state_dict()
    assert all(torch.equal(state[name], tensor.cpu()) for name, tensor in plain.state_dict().items())
    model.load_state_dict({name: tensor + 1 for name, tensor in state.items()})
    loaded = model.gather_full_params()
    assert all(torch.equal(loaded[name], p + 1) for name, p in plain.named_parameters())
    # The norm over shards on two cards is the whole gradient's.
    average_by_hand(plain, 0, context.world_size)
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    model.load_state_dict(state)
    loss_on(model, 0, context.rank, context.world_size).backward()
    model.finish_gradient_synchronization()
    torch.testing.assert_close(model.clip_grad_norm_(0.01), expected, rtol=1e-4, atol=0)
    assert_same_on_all_ranks(model._replicated[0].module)


def test_states_and_clipping() -> None:
    spawn_ranks(_full_state, world_size=2, options=OPTIONS)
