"""FSDP's cases of accidents and misuse, functions for ranks: test_fsdp.py runs them, on ranks that others share."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cs336_systems.distributed.fsdp import FSDP
from cs336_systems.distributed.process_group import RankContext
from tests.adapters import fsdp_gather_full_params
from tests.fsdp_helpers import assert_same, average_by_hand, build, loss_on, resident, transformer, wrap


def fail(gradient: torch.Tensor) -> None:
    raise RuntimeError("backward failed")


def fail_in_backward(layer: nn.Module, args: tuple, output: torch.Tensor) -> None:
    """A forward hook."""
    output.register_hook(fail)


def dropped_steps(context: RankContext) -> None:
    """A backward that raised, or a step that nobody took, leaves nothing for the next one once gradients are zeroed."""
    plain, model = build(transformer, 0), wrap(transformer, context)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, fails in enumerate((False, True, False, False)):
        hook = model.module.layers[1].ln1.register_forward_hook(fail_in_backward)
        if not fails:
            hook.remove()
        loss = loss_on(model, step, context.rank, context.world_size)
        hook.remove()
        with pytest.raises(RuntimeError, match="backward failed") if fails else nullcontext():
            loss.backward()
        if step < 3:
            optimizer.zero_grad()  # without a step, nor synchronisation
    model.finish_gradient_synchronization()
    average_by_hand(plain, 3, context.world_size)
    for each in (optimizer, torch.optim.SGD(plain.parameters(), lr=0.1)):
        each.step()
    assert_same(fsdp_gather_full_params(model), plain, 0 if context.world_size <= 2 else 1e-7)


def moved_shards(context: RankContext) -> None:
    """Shards whose memory is another are gathered from there, also for a layer that is called by itself."""
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    model = wrap(lambda: nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)), context)
    with torch.no_grad():
        before = model(x)
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        assert torch.equal(model(x), before)
        for parameter in model.parameters():
            parameter.data = parameter.data * 2
        plain = build(lambda: nn.Linear(4, 6), 0)
        assert torch.equal(model.module[0](x), plain(x) * 2)


def called_by_itself(context: RankContext) -> None:
    """A layer called by itself computes with the shards as they are, whatever an earlier pass has left gathered."""
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    for before, order in (("no backward", (2, 1, 0)), ("no gradients", (0, 1, 2)), ("failed backward", (2, 1, 0))):
        model = wrap(lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), context)
        for _ in range(2):  # the first learns the order
            with torch.no_grad():
                model(x)
                model.module[0](x)  # has no place in it
            model(x).sum().backward()
            model.finish_gradient_synchronization()
        if before == "failed backward":
            hook = model.module[1].register_forward_hook(fail_in_backward)
            with pytest.raises(RuntimeError, match="backward failed"):
                model(x).sum().backward()
            hook.remove()
        else:
            with torch.no_grad() if before == "no gradients" else nullcontext():
                model(x)
        for parameter in model.parameters():
            parameter.data.mul_(2)  # of which not even the version counter tells
        full, recorded = model.gather_full_params(), len(model._manager._order._current)
        for i in order:
            expected = nn.functional.linear(x, full[f"{i}.weight"], full[f"{i}.bias"])
            assert torch.equal(model.module[i](x), expected), (before, i)
        assert resident(model) == []
        assert len(model._manager._order._current) == recorded


def leaf_into_frozen(context: RankContext) -> None:
    """A leaf that is trained before frozen layers gets its gradient, and keeps no hook from one step to the next."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).requires_grad_(False)

    model, plain = wrap(make, context), build(make, 0)
    prompt = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    (expected,) = torch.autograd.grad(plain(prompt).sum(), prompt)
    for step in range(3):
        prompt.grad = None
        (model(prompt) if step else model.module[2](torch.tanh(model.module[0](input=prompt)))).sum().backward()
        assert torch.equal(prompt.grad, expected)
        assert resident(model) == []
        assert not prompt._backward_hooks


class CheckpointedMethod(nn.Module):
    """A method that reads its layer's own parameters, and which is no forward, is computed again in backward."""

    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 4)
        self.matrix, self.scale = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
        self.use_reentrant = use_reentrant

    def method(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.second(torch.relu(x)) @ self.matrix) * self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return (
            self.method(x)
            if self.use_reentrant is None
            else checkpoint(self.method, x, use_reentrant=self.use_reentrant)
        )


def casts_of_parameters(context: RankContext) -> None:
    """With compute_dtype whatever reads a replicated parameter during a pass finds it cast, and afterwards itself."""
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    gradients = []
    for use_reentrant in (None, False, True):
        model = wrap(partial(CheckpointedMethod, use_reentrant), context, compute_dtype=torch.bfloat16)
        model(x).float().square().mean().backward()
        model.finish_gradient_synchronization()
        assert type(model.module).__name__ == "CheckpointedMethod"
        assert all(getattr(model.module, name) is model.module._parameters[name] for name in ("matrix", "scale"))
        gradients.append([parameter.grad for parameter in model.parameters()])
        assert all(torch.equal(*pair) for pair in zip(gradients[0], gradients[-1], strict=True))
    del model.module.scale
    assert not hasattr(model.module, "scale")

    def make() -> nn.Module:
        return nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)  # reads its out_proj's parameters

    plain, model = build(make, 0), wrap(make, context, compute_dtype=torch.bfloat16)
    torch.testing.assert_close(model(x[None]).float(), plain(x[None]), rtol=0, atol=0.05)
    left = weakref.ref(model)
    del model
    gc.collect()
    assert left() is None


def fast_path(context: RankContext) -> None:
    """nn.TransformerEncoderLayer in evaluation, which reads its layers' weights itself where it can."""

    def make() -> nn.Module:
        return nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))

    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    model, plain = wrap(make, context), build(make, 0)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), plain.train(False)(x), rtol=1e-5, atol=1e-6)


def freed(context: RankContext) -> None:
    """A model that nobody holds is freed, whole."""
    model = wrap(transformer, context)
    loss_on(model, 0, context.rank, context.world_size).backward()
    model.finish_gradient_synchronization()
    left = [weakref.ref(model), *(weakref.ref(weight) for weight in model._weights)]
    del model
    gc.collect()
    assert [reference() for reference in left if reference() is not None] == []


class OtherLinear(nn.Linear):
    """A subclass, which is not sharded."""


def tied_to_another() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), OtherLinear(4, 4))
    model[1].weight = model[0].weight
    return model


def misuse(context: RankContext) -> None:
    with pytest.raises(ValueError, match=r"'1\.weight' is tied .* and OtherLinear is not among the layers"):
        FSDP(tied_to_another())
    module = nn.Sequential(nn.Linear(4, 2 * context.world_size))
    model = FSDP(module)
    with pytest.raises(ValueError, match=r"'0\.weight' has been sharded already"):
        FSDP(module)
    for copying in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"the layer of '0\.weight' is sharded .* neither copied nor pickled"):
            copying(model.module[0])
    for dtype in (torch.int64, torch.complex64, torch.float8_e4m3fn):
        with pytest.raises(ValueError, match=rf"compute_dtype={dtype}: must be one of \(torch\.float16"):
            FSDP(nn.Linear(2, 2), compute_dtype=dtype)
        module = nn.Sequential(nn.Linear(2, 2))
        module[0].weight = nn.Parameter(torch.zeros(2, 2).to(dtype), requires_grad=dtype.is_floating_point)
        with pytest.raises(ValueError, match=rf"parameter '0\.weight' is {dtype}; to be sharded it must be one of"):
            FSDP(module)
    with pytest.raises(ValueError, match="FullyShardedDataParallel already"):
        FSDP(nn.Sequential(FSDP(nn.Linear(2, 2))))
    for option in ({"sparse": True}, {"max_norm": 1.0}):
        with pytest.raises(ValueError, match=r"embedding '0' has .*max_norm=None"):
            FSDP(nn.Sequential(nn.Embedding(3, 2, **option)))
    for change in (lambda module: module.half(), lambda module: module.to("meta")):
        model = FSDP(nn.Sequential(nn.Linear(2, 2)))
        change(model.module)
        with pytest.raises(
            RuntimeError, match=r"weight '0\.weight' was a parameter of torch\.float32 on cpu when it was sharded"
        ):
            model(torch.randn(1, 2))
    if context.world_size > 1:
        with pytest.raises(ValueError, match="the ranks built different ones"):
            FSDP(nn.Linear(2, 3 + context.rank))
