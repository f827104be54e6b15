"""A model has one wrapper: what a second would average or divide wrongly is refused when it is wrapped."""

from __future__ import annotations

import gc
import io
import itertools
import weakref

import pytest
import torch
from torch import nn

from cs336_systems.distributed.ddp_bucketed import BucketedDDP
from cs336_systems.distributed.ddp_flat import FlatDDP
from cs336_systems.distributed.ddp_naive import NaiveDDP
from cs336_systems.distributed.ddp_overlapped import OverlappedDDP
from cs336_systems.distributed.fsdp import FSDP
from cs336_systems.distributed.sharded_optimizer import ShardedOptimizer
from tests.distributed_helpers import run_gloo

WRAPPERS = (NaiveDDP, FlatDDP, OverlappedDDP, BucketedDDP)
HOOKED = (OverlappedDDP, BucketedDDP)


def _model():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def _refusals(context):
    for wrapper in WRAPPERS:
        with pytest.raises(ValueError, match=r"parameter 'module\.0\.weight' is this rank's rows of a weight"):
            wrapper(FSDP(_model()))
        with pytest.raises(ValueError, match="module: it is, or holds, a data-parallel wrapper; FSDP averages"):
            FSDP(wrapper(_model()))
    for first, second in itertools.product(HOOKED, WRAPPERS):
        module = _model()
        earlier = first(module)
        for again in (module, earlier):
            with pytest.raises(ValueError, match=r"'(module\.)?0.weight' is averaged by an earlier wrapper; call"):
                second(again)
    with pytest.raises(ValueError, match=r"params: one of shape \(4, 4\) is this rank's rows of a weight that FSDP"):
        ShardedOptimizer(FSDP(_model()).parameters(), torch.optim.SGD, lr=0.0)


def test_a_second_wrapper_is_refused():
    run_gloo(_refusals)


def _one_after_another(context):
    """Gradients of a model that every wrapper has had in turn, the hooks of each removed before the next."""
    torch.manual_seed(0)
    module, x = _model(), torch.randn(6, 4)
    module(x).square().mean().backward()
    alone = [parameter.grad.clone() for parameter in module.parameters()]
    for wrapper in (*HOOKED, *WRAPPERS, *HOOKED):
        wrapped = wrapper(module)
        wrapped.zero_grad()
        wrapped(x).square().mean().backward()
        wrapped.finish_gradient_synchronization()
        for parameter, gradient in zip(module.parameters(), alone, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
        if isinstance(wrapped, HOOKED):
            wrapped.remove_hooks()


def _let_go(context):
    """A wrapper that nobody holds frees its model, or leaves it to whoever holds that."""
    for wrapper in (*WRAPPERS, FSDP):
        wrapped = wrapper(_model())
        parameter = weakref.ref(next(wrapped.parameters()))
        wrapped(torch.ones(2, 4)).sum().backward()
        wrapped.finish_gradient_synchronization()
        del wrapped
        gc.collect()
        assert parameter() is None, wrapper
    for wrapper, second in zip(WRAPPERS, reversed(WRAPPERS), strict=True):
        module = _model()
        wrapped = wrapper(module)
        del wrapped
        gc.collect()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        module(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        second(module)


def test_a_wrapper_that_is_let_go_lets_go_of_its_model():
    run_gloo(_let_go)


def _saved_whole(context):
    for wrapper, second in zip(WRAPPERS, reversed(WRAPPERS), strict=True):
        wrapped = wrapper(_model())
        file = io.BytesIO()
        torch.save(wrapped.module, file)
        file.seek(0)
        second(torch.load(file, weights_only=False))


def test_a_module_that_was_saved_whole_may_be_wrapped():
    run_gloo(_saved_whole, world_size=1)


def test_wrappers_may_follow_each_other():
    run_gloo(_one_after_another)
