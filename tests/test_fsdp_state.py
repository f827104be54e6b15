"""FSDP's states at other world sizes and in the bare model, and clipping by the global norm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor

from cs336_systems.distributed.fsdp import FSDP
from cs336_systems.distributed.fsdp_state import (
    full_optimizer_state_dict,
    load_optimizer_state_dict,
    sharded_optimizer_state_dict,
)
from cs336_systems.distributed.process_group import RankContext
from tests.distributed_helpers import run_gloo
from tests.fsdp_helpers import Mixed, assert_same, average_by_hand, batch, build, loss_on


def tied() -> nn.Module:
    return Mixed(tied=True)


def make_optimizer(model: nn.Module, lr: float = 0.01) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, context: RankContext | None) -> None:
    """Three steps on whole batches, every rank on the same, so that world sizes agree but for rounding."""
    for step in range(first, first + 3):
        optimizer.zero_grad()
        loss_on(model, step).backward()
        if context is not None:
            model.finish_gradient_synchronization()
        optimizer.step()


def save(context: RankContext, folder: str) -> None:
    model = FSDP(build(tied, context.rank))
    optimizer = make_optimizer(model)
    steps(model, optimizer, 0, context)
    full = model.full_state_dict()
    state = full_optimizer_state_dict(model, optimizer)
    alone = model.full_state_dict(to_rank=1)
    assert bool(alone) == (context.rank == 1)
    assert bool(full_optimizer_state_dict(model, optimizer, to_rank=1)["state"]) == (context.rank == 1)
    if context.rank == 0:
        torch.save({"model": full, "optimizer": state}, f"{folder}/full.pt")
    sharded = {"model": model.state_dict(), "optimizer": sharded_optimizer_state_dict(model, optimizer)}
    kinds = {name: isinstance(value, DTensor) for name, value in sharded["model"].items()}
    assert kinds["first.weight"]
    assert not kinds["twice.bias"]
    # The shards' own memory, not a copy.
    local = sharded["model"]["first.weight"].to_local()
    assert local.data_ptr() == model.module.first.weight.data_ptr()
    dcp.save(sharded, checkpoint_id=f"{folder}/sharded")
    # At this world size a sharded state loads as it is.
    other = FSDP(build(tied, 7))
    other.load_state_dict(model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))
    if context.rank == 0:  # the bare model and its optimizer
        bare = build(tied, 5)
        bare.load_state_dict(full)
        bare_optimizer = make_optimizer(bare)
        bare_optimizer.load_state_dict(state)
        steps(bare, bare_optimizer, 3, None)
        torch.save(bare.state_dict(), f"{folder}/went-on.pt")


def go_on(context: RankContext, folder: str) -> None:
    """At another world size: load in either way, and three more steps."""
    expected = build(tied, 0)
    expected.load_state_dict(torch.load(f"{folder}/went-on.pt"))
    for way in ("full", "sharded"):
        model = FSDP(build(tied, 9))
        optimizer = make_optimizer(model, lr=0.0)
        if way == "full":
            saved = torch.load(f"{folder}/full.pt")
            model.load_state_dict(saved["model"])
            load_optimizer_state_dict(model, optimizer, saved["optimizer"])
        else:
            steps(model, optimizer, 0, context)  # so that there is a state to load into
            into: dict[str, Any] = {
                "model": model.state_dict(),
                "optimizer": sharded_optimizer_state_dict(model, optimizer),
            }
            dcp.load(into, checkpoint_id=f"{folder}/sharded")
            model.load_state_dict(into["model"])
            load_optimizer_state_dict(model, optimizer, into["optimizer"])
        assert optimizer.param_groups[0]["lr"] == 0.01
        steps(model, optimizer, 3, context)
        torch.testing.assert_close(
            model.gather_full_params(), {n: p.detach() for n, p in expected.named_parameters()}, rtol=1e-4, atol=1e-5
        )
        assert torch.equal(model.module.offset, expected.offset)


@pytest.mark.parametrize("world_size", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_states_at_other_world_sizes(tmp_path: Path, world_size: int) -> None:
    run_gloo(save, str(tmp_path), world_size=2)
    run_gloo(go_on, str(tmp_path), world_size=world_size)


def refuses(context: RankContext) -> None:
    model = FSDP(build(Mixed, 0))
    state = model.full_state_dict()
    before = model.gather_full_params()
    state["offset"] = state["offset"] + 1
    for name, change in (
        ("first.weight", lambda weight: weight[:-1]),  # another shape
        ("first.weight", None),  # missing
        ("another.weight", lambda _: torch.zeros(1)),  # unknown
    ):
        changed = dict(state)
        changed.pop(name, None)
        if change is not None:
            changed[name] = change(state.get(name))
        with pytest.raises(ValueError, match=name):
            model.load_state_dict(changed)
    assert all(torch.equal(now, before[name]) for name, now in model.gather_full_params().items())
    assert not torch.equal(model.module.offset, state["offset"])  # nothing was written
    model.load_state_dict({"offset": state["offset"]}, strict=False)
    assert torch.equal(model.module.offset, state["offset"])
    with pytest.raises(ValueError, match="assign=True"):
        model.load_state_dict(state, assign=True)
    with pytest.raises(ValueError, match="to_rank=7"):
        model.full_state_dict(to_rank=7)
    with pytest.raises(ValueError, match="it has 2 parameters"):
        load_optimizer_state_dict(model, make_optimizer(model), make_optimizer(nn.Linear(1, 1)).state_dict())


def clips(context: RankContext) -> None:
    """The norm over all shards and, once, over what is replicated; gradients as torch clips them on a bare model."""
    plain, model = build(Mixed, 0), FSDP(build(Mixed, 0))
    names = {weight.name: weight for weight in model._weights}
    for max_norm in (0.01, 1e6):
        average_by_hand(plain, 0, context.world_size)
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
        model.zero_grad()
        loss_on(model, 0, context.rank, context.world_size).backward()
        model.finish_gradient_synchronization()
        norm = model.clip_grad_norm_(max_norm)
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
        for (name, theirs), whole in zip(model.module.named_parameters(), plain.parameters(), strict=True):
            if whole.grad is not None:
                rows = names[name].rows_of(whole.grad) if name in names else whole.grad
                torch.testing.assert_close(theirs.grad, rows, rtol=1e-5, atol=1e-8)
    model.zero_grad()
    assert model.clip_grad_norm_(1.0) == 0  # no gradient anywhere
    with pytest.raises(ValueError, match="max_norm=0"):
        model.clip_grad_norm_(0.0)
    assert_same(model.gather_full_params(), plain, 0)
    model(batch(0)[0])


def refuses_and_clips(context: RankContext) -> None:
    refuses(context)
    clips(context)


@pytest.mark.parametrize("world_size", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_misuse_and_clipping(world_size: int) -> None:
    run_gloo(refuses_and_clips, world_size=world_size)


def _refused(context: RankContext) -> None:
    model = FSDP(build(tied, context.rank))
    outer = nn.ModuleDict({"net": model})
    with pytest.raises(ValueError, match=r"state_dict\(\) with destination, prefix, .*: a Fully.* its own"):
        outer.state_dict()
    loss_on(model, 0).backward()
    with pytest.raises(RuntimeError, match=r"clip_grad_norm_\(\): .* call finish_gradient_synchronization\(\) after"):
        model.clip_grad_norm_(1.0)
    model.finish_gradient_synchronization()
    model.clip_grad_norm_(1.0)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    optimizer = torch.optim.Muon(matrices)
    with pytest.raises(ValueError, match="Muon: it treats a whole matrix at once, and FSDP's parameters are this rank"):
        optimizer.step()
    empty = FSDP(nn.Sequential(nn.ReLU()))
    assert empty.state_dict() == {} == empty.full_state_dict()
    assert empty.clip_grad_norm_(1.0).item() == 0.0


def test_what_would_be_wrong_without_a_word_is_refused() -> None:
    run_gloo(_refused)
