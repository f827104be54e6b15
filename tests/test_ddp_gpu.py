"""The data-parallel wrappers on NCCL: what the CPU tests ask of them on gloo, and what only GPUs can show."""

from __future__ import annotations

import pytest
import torch

from cs336_systems.distributed.ddp_bucketed import BucketedDDP
from cs336_systems.distributed.process_group import GroupOptions, RankContext, spawn_ranks
from tests.ddp_cases import N_COLLECTIVES, SMALL_MB, each_wrapper
from tests.distributed_helpers import batch, finish, loss_of, make_model, part
from tests.test_ddp_wrappers import _float16_sum_overflows, _ten_steps, _unused_parameters

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]
OPTIONS = GroupOptions("cuda", timeout_s=120.0)


@each_wrapper
def test_ten_steps_equal_one_process_on_the_whole_batch(name: str) -> None:
    assert spawn_ranks(_ten_steps, name, world_size=2, options=OPTIONS) == [N_COLLECTIVES[name]] * 2


@each_wrapper
def test_parameters_used_on_alternating_steps(name: str) -> None:
    spawn_ranks(_unused_parameters, name, "alternating", world_size=2, options=OPTIONS)


@each_wrapper
def test_float16_gradients_whose_sum_overflows_are_averaged(name: str) -> None:
    for gradient in spawn_ranks(_float16_sum_overflows, name, world_size=2, options=OPTIONS):
        assert gradient == [pytest.approx(40_000, rel=2e-3)]


def _rounded(context: RankContext, views: bool) -> None:
    exact, rounded = (
        BucketedDDP(
            make_model(0, torch.float32).to(context.device),
            SMALL_MB,
            gradient_as_bucket_view=views,
            bucket_comm_dtype=comm_dtype,
        )
        for comm_dtype in (None, torch.bfloat16)
    )
    for _ in range(3):
        for model in (exact, rounded):
            model.zero_grad()
            loss_of(model, *(part(tensor, context.rank, 2) for tensor in batch(0))).backward()
            finish(model)
        for parameter, expected in zip(rounded.parameters(), exact.parameters(), strict=True):
            if expected.grad is not None:
                torch.testing.assert_close(parameter.grad, expected.grad, rtol=2e-2, atol=2e-4)


@pytest.mark.parametrize("views", [True, False])
def test_gradients_travel_in_bfloat16(views: bool) -> None:
    spawn_ranks(_rounded, views, world_size=2, options=OPTIONS)


def test_a_cap_on_ctas_and_a_stream_of_high_priority_change_no_result() -> None:
    options = GroupOptions("cuda", timeout_s=120.0, max_ctas=2, high_priority=True)
    assert spawn_ranks(_ten_steps, "bucketed", world_size=2, options=options) == [N_COLLECTIVES["bucketed"]] * 2


def _memory_between_steps(context: RankContext, views: bool) -> tuple[int, int]:
    torch.manual_seed(0)
    module = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)]).to(context.device)
    n_bytes = sum(p.numel() * 4 for p in module.parameters())
    module(torch.randn(4, 1024, device=context.device)).sum().backward()  # cuBLAS takes its workspaces
    module.zero_grad()
    before = torch.cuda.memory_allocated(context.device)
    model = BucketedDDP(module, 10.0, gradient_as_bucket_view=views)
    for _ in range(2):
        model(torch.randn(4, 1024, device=context.device)).sum().backward()
        finish(model)
        model.zero_grad()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(context.device) - before, n_bytes


@pytest.mark.parametrize("views", [True, False])
def test_between_steps_only_buckets_of_views_hold_memory(views: bool) -> None:
    for held, gradients in spawn_ranks(_memory_between_steps, views, world_size=2, options=OPTIONS):
        assert held == pytest.approx(gradients if views else 0, abs=0.05 * gradients)


def _host_runs_ahead(context: RankContext) -> bool:
    """With all gradients there, finishing must not make the host wait for the device."""
    module = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)]).to(context.device)
    model = BucketedDDP(module, 1.0)
    for _ in range(2):
        model(torch.randn(4, 256, device=context.device)).sum().backward()
        finish(model)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    model(torch.randn(4, 256, device=context.device)).sum().backward()
    finish(model)
    return not torch.cuda.current_stream().query()  # still asleep


def test_finishing_does_not_wait_for_the_device() -> None:
    assert spawn_ranks(_host_runs_ahead, world_size=2, options=OPTIONS) == [True, True]
