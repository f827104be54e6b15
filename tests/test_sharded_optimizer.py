"""The sharded optimizer against the unsharded one: the same weights bit for bit, whatever it wraps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336_basics.optimizer import AdamW
from cs336_systems.distributed import partition
from cs336_systems.distributed.process_group import RankContext
from cs336_systems.distributed.sharded_optimizer import ShardedOptimizer
from tests.adapters import get_sharded_optimizer
from tests.distributed_helpers import CountedCollectives, assert_same_on_all_ranks, make_model, run_gloo
from tests.sharded_optimizer_helpers import (
    OPTIMIZERS,
    SHAPES,
    WITHOUT_GRADIENT,
    assert_equal,
    compare_state,
    make_parameters,
    set_gradients,
)

WORLD_SIZES = (1, 2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 5)))
LARGE = ((120, 101), (100, 101), (7,))


def ten_steps(name: str) -> None:
    """A schedule, a change by hand, a parameter that gets gradients late, and one that is frozen until step 7."""
    optimizer_cls, options = OPTIMIZERS[name]
    plain, sharded = make_parameters(), make_parameters()
    optimizers = optimizer_cls(plain, **options), get_sharded_optimizer(sharded, optimizer_cls, **options)
    assert isinstance(optimizers[1], ShardedOptimizer)
    schedulers = [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 / (1 + i)) for optimizer in optimizers]
    for step in range(10):
        for parameters, optimizer, scheduler in zip((plain, sharded), optimizers, schedulers, strict=True):
            parameters[5].requires_grad_(step >= 7)
            optimizer.zero_grad()
            assert all(parameter.grad is None for parameter in parameters)
            set_gradients(parameters, step, missing=(*WITHOUT_GRADIENT.get(name, ()), *((1,) if step < 3 else ())))
            if step == 5:
                optimizer.param_groups[0]["lr"] *= 2
            optimizer.step()
            scheduler.step()
        assert_equal(sharded, plain)
    assert not torch.equal(plain[5], make_parameters()[5])
    optimizers[1].zero_grad(set_to_none=False)
    assert all(not parameter.grad.any() for parameter in sharded if parameter.grad is not None)
    compare_state(optimizers[1].state_dict(), optimizers[0].state_dict())


def groups_and_late_ones() -> None:
    """Groups with options of their own, one of them added between steps; mixed dtypes; one-cycle schedule; names."""
    pairs = []
    for make in (torch.optim.AdamW, partial(ShardedOptimizer, optimizer_cls=torch.optim.AdamW, bucket_size_mb=0.005)):
        parameters = make_parameters()
        parameters[1].data = parameters[1].data.double()
        groups = [
            {"params": [("large", parameters[0]), ("small", parameters[1])], "weight_decay": 0.3},
            {"params": [("row", parameters[2])], "lr": 0.5, "betas": (0.5, 0.6)},
        ]
        optimizer = make(groups, lr=0.01)
        pairs.append((parameters, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=12)))
    for step in range(10):
        for parameters, optimizer, scheduler in pairs:
            if step == 4:
                optimizer.add_param_group(
                    {"params": [(f"late {i}", p) for i, p in enumerate(parameters[3:])], "lr": 0.2}
                )
            set_gradients(parameters, step)
            optimizer.step()
            if step < 4:  # the schedule knows the two groups that it began with
                scheduler.step()
        assert_equal(pairs[1][0], pairs[0][0])
    state = pairs[1][1].state_dict()
    compare_state(state, pairs[0][1].state_dict())
    assert [len(group["params"]) for group in state["param_groups"]] == [2, 1, 4]


def closure_once() -> None:
    parameters = make_parameters()
    optimizer = ShardedOptimizer(parameters, torch.optim.SGD, lr=0.5)
    calls = []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = sum((parameter**2).sum() for parameter in parameters)
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert calls == [True]
    assert loss.item() == pytest.approx(sum(p.detach().square().sum().item() for p in make_parameters()), rel=1e-5)
    assert all(torch.equal(p, torch.zeros_like(p)) for p in parameters)  # p - 0.5 · 2p


def few_large_pieces(context: RankContext) -> None:
    """One all-gather a piece: of twenty parameters of 16 KB, all ranks' together or two of each rank's."""
    n_mine = -(-20 // context.world_size)
    for bucket_size_mb, n_pieces in ((256.0, 1), (0.033 * context.world_size, -(-n_mine // 2))):
        parameters = make_parameters(((64, 64),) * 20)
        optimizer = ShardedOptimizer(parameters, torch.optim.SGD, lr=0.1, bucket_size_mb=bucket_size_mb)
        set_gradients(parameters, 0)
        with CountedCollectives() as counts:
            optimizer.step()
        assert counts.by_name == ({"_allgather_base_": n_pieces} if context.world_size > 1 else {})


def state_is_divided(context: RankContext) -> None:
    """Every rank holds its slices' state and no more; `.state` is there on all ranks or on none."""
    parameters = make_parameters()
    optimizer = ShardedOptimizer(parameters, torch.optim.AdamW, lr=0.1)
    assert not optimizer.state
    set_gradients(parameters, 0)
    optimizer.step()
    assert optimizer.inner is not None
    held = sum(
        tensor.numel() * tensor.element_size()
        for state in optimizer.inner.state.values()
        for tensor in state.values()
        if tensor.ndim
    )
    owned = sum(piece.n_bytes for piece in optimizer.slices[context.rank] if parameters[piece.parameter].ndim)
    assert held == 2 * owned
    assert len(optimizer.state) == len(parameters)
    # None of it is kept twice: neither the slices nor their gradients outlive the step.
    optimizer.zero_grad()
    assert all(local.grad is None for local in optimizer._local.values())


def cut_by_rows(context: RankContext) -> None:
    """In balance to 1%, for elementwise optimizers; the weights agree but for the rounding at a slice's end."""
    partition.SMALLEST_MOVE_BYTES = 1024  # in this rank's process
    for optimizer_cls, options in (OPTIMIZERS[name] for name in ("adamw", "adamw-fused", "adamw-project", "sgd")):
        plain, sharded = make_parameters(LARGE), make_parameters(LARGE)
        optimizers = (
            optimizer_cls(plain, **options),
            ShardedOptimizer(sharded, optimizer_cls, cut_parameters=True, bucket_size_mb=0.03, **options),
        )
        for step in range(10):
            for parameters, optimizer in zip((plain, sharded), optimizers, strict=True):
                for parameter in parameters:
                    parameter.data = parameter.data.clone()  # the slices follow
                set_gradients(parameters, step)
                optimizer.step()
            if step == 4:
                optimizers[1].load_state_dict(optimizers[1].state_dict())
        for a, b in zip(sharded, plain, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        expected, state = optimizers[0].state_dict(), optimizers[1].state_dict()
        assert state["param_groups"] == expected["param_groups"]
        torch.testing.assert_close(state["state"], expected["state"], rtol=1e-6, atol=1e-6)
        slices = optimizers[1].slices
        loads = [sum(piece.n_bytes for piece in owned) for owned in slices]
        assert max(loads) <= 1.01 * sum(loads) / context.world_size + 1024
        assert (sum(map(len, slices)) > len(LARGE)) == (context.world_size > 1)
        assert_equal_on_ranks(sharded)


def assert_equal_on_ranks(parameters: list[nn.Parameter]) -> None:
    assert_same_on_all_ranks(nn.ParameterList(parameters))


def moved_memory() -> None:
    """`parameter.data` may be replaced (by a wrapper's flat buffer, say): the step follows."""
    plain, sharded = make_parameters(), make_parameters()
    optimizers = torch.optim.AdamW(plain), ShardedOptimizer(sharded, torch.optim.AdamW)
    for step in range(3):
        for parameters, optimizer in zip((plain, sharded), optimizers, strict=True):
            for parameter in parameters:
                parameter.data = parameter.data.clone()
            set_gradients(parameters, step)
            optimizer.step()
    assert_equal(sharded, plain)
    transposed = [nn.Parameter(torch.randn(300, 200, generator=torch.Generator().manual_seed(1)).T) for _ in range(2)]
    optimizers = torch.optim.SGD(transposed[:1], lr=0.1), ShardedOptimizer(transposed[1:], torch.optim.SGD, lr=0.1)
    for parameter, optimizer in zip(transposed, optimizers, strict=True):
        set_gradients([parameter], 0)
        optimizer.step()
    assert_equal(transposed[1:], transposed[:1])


def owns_nothing(context: RankContext) -> None:
    """One small parameter: some ranks own nothing, and all end with its update."""
    plain, sharded = make_parameters(((3, 2),)), make_parameters(((3, 2),))
    optimizers = torch.optim.AdamW(plain), ShardedOptimizer(sharded, torch.optim.AdamW)
    assert sum(bool(slices) for slices in optimizers[1].slices) == 1
    for step in range(3):
        for parameters, optimizer in zip((plain, sharded), optimizers, strict=True):
            set_gradients(parameters, step)
            optimizer.step()
            if step == 1:
                optimizer.load_state_dict(optimizer.state_dict())
    assert_equal(sharded, plain)
    compare_state(optimizers[1].state_dict(), optimizers[0].state_dict())


def tied_and_sparse() -> None:
    """Tied layers are one parameter; a whole parameter may have a sparse gradient, a cut one may not."""
    model = make_model(0)
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW)
    assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))
    embeddings = [nn.Embedding(20, 3, sparse=True) for _ in range(2)]
    embeddings[1].load_state_dict(embeddings[0].state_dict())
    dist.broadcast(embeddings[0].weight.data, 0)
    dist.broadcast(embeddings[1].weight.data, 0)
    optimizers = (
        torch.optim.SGD(embeddings[0].parameters()),
        ShardedOptimizer(embeddings[1].parameters(), torch.optim.SGD),
    )
    for embedding, optimizer in zip(embeddings, optimizers, strict=True):
        embedding(torch.tensor([1, 5, 1])).square().sum().backward()
        optimizer.step()
    assert torch.equal(embeddings[0].weight, embeddings[1].weight)


def misuse(context: RankContext) -> None:
    parameters = make_parameters()
    with pytest.raises(ValueError, match="listed twice"):
        ShardedOptimizer([*parameters, parameters[0]], torch.optim.SGD)
    optimizer = ShardedOptimizer(parameters, torch.optim.AdamW, lr=0.1)
    with pytest.raises(ValueError, match="listed twice"):
        optimizer.add_param_group({"params": [parameters[3]]})
    with pytest.raises(ValueError, match=r"LBFGS.*all parameters at once"):
        ShardedOptimizer(parameters, torch.optim.LBFGS)
    with pytest.raises(ValueError, match="empty parameter list"):
        ShardedOptimizer([], torch.optim.SGD)
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        ShardedOptimizer(parameters, torch.optim.AdamW, lr=-1.0)
    with pytest.raises(ValueError, match="weight_decay is -1"):  # a group's option, on every rank
        ShardedOptimizer([{"params": parameters, "weight_decay": -1.0}], AdamW)
    with pytest.raises(ValueError, match="bucket_size_mb=0"):
        ShardedOptimizer(parameters, torch.optim.SGD, bucket_size_mb=0)
    with pytest.raises(TypeError, match="must be tensors, got str"):
        ShardedOptimizer(["weight"], torch.optim.SGD)
    with pytest.raises(ValueError, match="to_rank=9"):
        optimizer.state_dict(to_rank=9)
    for other in (parameters[:2], make_parameters(((3, 3), *SHAPES[1:]))):
        unsharded = torch.optim.AdamW(other)
        set_gradients(list(other), 0)
        unsharded.step()
        with pytest.raises(ValueError, match="another model's"):
            optimizer.load_state_dict(unsharded.state_dict())
    with pytest.raises(ValueError, match="must have 'state' and 'param_groups'"):
        optimizer.load_state_dict({"model": {}})
    set_gradients(parameters, 0)
    parameters[1].grad = None
    parameters[1].data = parameters[1].data.half()
    with pytest.raises(ValueError, match=r"parameter 1 was .*float32.*float16"):
        optimizer.step()
    if context.world_size > 1:
        shapes = ((3,),) if context.rank == 0 else ((4,),)
        with pytest.raises(ValueError, match="rank 1 lists other parameters than rank 0"):
            ShardedOptimizer(make_parameters(shapes), torch.optim.SGD)
    with pytest.raises(ValueError, match=r"cut_parameters=True: must not be set for .*Adafactor"):
        ShardedOptimizer(parameters, torch.optim.Adafactor, cut_parameters=True)
    large = make_parameters(LARGE)
    cut = ShardedOptimizer(large, torch.optim.SGD, cut_parameters=True)
    for parameter in large:
        parameter.grad = torch.zeros_like(parameter).to_sparse()
    if context.world_size == 5:
        with pytest.raises(ValueError, match="must not be sparse"):
            cut.step()
    owned = ShardedOptimizer(large, _ChangesItsOptions)
    set_gradients(large, 0)
    if owned.slices[context.rank]:
        with pytest.raises(ValueError, match=r"_ChangesItsOptions.*changes its option 'lr'"):
            owned._update(owned.slices[context.rank])


class _ChangesItsOptions(torch.optim.SGD):
    """As optimizers do that find their learning rate from all parameters' gradients."""

    def step(self, closure: Callable | None = None) -> None:  # ty: ignore[invalid-method-override]
        self.param_groups[0]["lr"] = 0.5 * self.param_groups[0]["lr"]


def all_cases(context: RankContext) -> None:
    torch.set_num_threads(1)  # threads that wait for a busy core take longer than the work
    for name in OPTIMIZERS:
        ten_steps(name)
    groups_and_late_ones()
    closure_once()
    few_large_pieces(context)
    state_is_divided(context)
    moved_memory()
    owns_nothing(context)
    tied_and_sparse()
    cut_by_rows(context)
    misuse(context)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_equals_the_unsharded_optimizer(world_size: int) -> None:
    """Cases that share their ranks, since starting these takes seconds; the traceback names the case."""
    run_gloo(all_cases, world_size=world_size)


def test_needs_a_process_group() -> None:
    with pytest.raises(RuntimeError, match="no process group"):
        ShardedOptimizer(make_parameters(), torch.optim.SGD)
