"""The sharded optimizer's state, saved at one world size and loaded at others, whole and by DCP."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from cs336_systems.distributed.process_group import RankContext
from cs336_systems.distributed.sharded_optimizer import ShardedOptimizer
from tests.distributed_helpers import run_gloo
from tests.sharded_optimizer_helpers import (
    OPTIMIZERS,
    WITHOUT_GRADIENT,
    assert_equal,
    compare_state,
    make_parameters,
    set_gradients,
)


def save(context: RankContext, folder: str, name: str) -> None:
    """Three steps, saved in the two ways."""
    optimizer_cls, options = OPTIMIZERS[name]
    parameters = make_parameters()
    optimizer = ShardedOptimizer(parameters, optimizer_cls, **options)
    for step in range(3):
        set_gradients(parameters, step, missing=(1, *WITHOUT_GRADIENT.get(name, ())))
        optimizer.step()
    state = optimizer.state_dict()
    only = optimizer.state_dict(to_rank=0)
    assert len(only["state"]) == (len(state["state"]) if context.rank == 0 else 0)
    if context.rank == 0:
        compare_state(only, state)
        torch.save(state, f"{folder}/{name}.pt")
    module = nn.ParameterList(parameters)
    dcp.save({"optimizer": get_optimizer_state_dict(module, optimizer)}, checkpoint_id=f"{folder}/{name}-dcp")


def go_on(context: RankContext, folder: str, name: str) -> None:
    """Load at this world size, three more steps, and compare with six unsharded ones."""
    optimizer_cls, options = OPTIMIZERS[name]
    plain = make_parameters()
    alone = optimizer_cls(plain, **options)
    for step in range(3):
        set_gradients(plain, step, missing=(1, *WITHOUT_GRADIENT.get(name, ())))
        alone.step()
    saved = copy.deepcopy(plain)
    states = {"unsharded": copy.deepcopy(alone.state_dict()), "full": torch.load(f"{folder}/{name}.pt"), "dcp": None}
    for step in range(3, 6):
        set_gradients(plain, step, missing=WITHOUT_GRADIENT.get(name, ()))
        alone.step()
    for state in states.values():
        parameters = copy.deepcopy(saved)
        optimizer = ShardedOptimizer(parameters, optimizer_cls, **{**options, "lr": 123.0})
        if state is not None:
            before = copy.deepcopy(state)
            optimizer.load_state_dict(state)
        else:
            for parameter in parameters:
                parameter.grad = None
            module = nn.ParameterList(parameters)
            # DCP's template would ask for the state of parameters that had no gradient when this was saved.
            without = [parameters[i] for i in (1, *WITHOUT_GRADIENT.get(name, ()))]
            for parameter in without:
                parameter.requires_grad_(False)
            loaded = {"optimizer": get_optimizer_state_dict(module, optimizer)}
            dcp.load(loaded, checkpoint_id=f"{folder}/{name}-dcp")
            set_optimizer_state_dict(module, optimizer, loaded["optimizer"])
            for parameter in without:
                parameter.requires_grad_(True)
        for step in range(3, 6):
            set_gradients(parameters, step, missing=WITHOUT_GRADIENT.get(name, ()))
            optimizer.step()
        assert_equal(parameters, plain)
        if state is not None:
            compare_state(state, before)  # what was loaded is left alone
            whole = optimizer.state_dict()
            unsharded = optimizer_cls(copy.deepcopy(saved), **options)
            unsharded.load_state_dict(whole)
            compare_state(unsharded.state_dict(), alone.state_dict())


def save_all(context: RankContext, folder: str, names: list[str]) -> None:
    for name in names:
        save(context, folder, name)


def go_on_all(context: RankContext, folder: str, names: list[str]) -> None:
    for name in names:
        go_on(context, folder, name)


@pytest.mark.parametrize("world_size", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_state_at_other_world_sizes(tmp_path: Path, world_size: int) -> None:
    names = ["adamw", "adamw-project", "sgd-momentum", "adafactor"]
    run_gloo(save_all, str(tmp_path), names, world_size=2)
    run_gloo(go_on_all, str(tmp_path), names, world_size=world_size)
