"""FSDP against unsharded copies whose gradients are averaged by hand, and against one process on the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from cs336_basics.model import BasicsTransformerLM
from cs336_systems.distributed.fsdp import FSDP
from cs336_systems.distributed.process_group import RankContext
from tests.adapters import fsdp_gather_full_params, fsdp_on_after_backward
from tests.distributed_helpers import run_gloo
from tests.fsdp_cases import (
    called_by_itself,
    casts_of_parameters,
    dropped_steps,
    fast_path,
    freed,
    leaf_into_frozen,
    misuse,
    moved_shards,
)
from tests.fsdp_helpers import (
    Checkpointed,
    Mixed,
    assert_same,
    average_by_hand,
    batch,
    build,
    expected_rows,
    loss_on,
    resident,
    transformer,
    wrap,
)

# With 5 the rows divide unevenly, and some ranks have none.
WORLD_SIZES = (2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3, 5)))
MODELS: dict[str, Callable[[], nn.Module]] = {
    "mixed": Mixed,
    "tied": partial(Mixed, tied=True),
    "transformer": transformer,
    "root is a layer": lambda: nn.Sequential(nn.Embedding(11, 11)),
}


def train(context: RankContext, make: Callable[[], nn.Module], optimizer_cls: Callable, n_steps: int = 5) -> None:
    """After each step the gathered parameters are those of the unsharded copies; shapes, dtypes, names on the way."""
    world_size = context.world_size
    plain, whole, model = build(make, 0), build(make, 0), wrap(make, context)
    assert_same(fsdp_gather_full_params(model), plain, 0)
    is_sgd = optimizer_cls is torch.optim.SGD
    optimizers = [optimizer_cls(each.parameters(), lr=0.1 if is_sgd else 0.01) for each in (plain, whole, model)]
    shapes = {name: parameter.shape for name, parameter in model.module.named_parameters()}
    for step in range(n_steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        average_by_hand(plain, step, world_size)
        loss_on(whole, step).backward()
        loss_on(model, step, context.rank, world_size).backward()
        fsdp_on_after_backward(model, optimizers[2])
        assert resident(model) == []
        check_gradients(model, plain, shapes, context)
        for optimizer in optimizers:
            optimizer.step()
        full = fsdp_gather_full_params(model)
        assert_same(full, plain, 0 if world_size <= 2 else 1e-7, f"step {step}")  # two numbers have one sum
        if is_sgd:
            assert_same(full, whole, 1e-7, f"step {step}, whole batch")


def check_gradients(model: FSDP, plain: nn.Module, shapes: dict[str, torch.Size], context: RankContext) -> None:
    expected = dict(plain.named_parameters())
    sharded = {weight.shard: weight for weight in model._weights}
    assert list(shapes) == list(expected)
    for name, parameter in model.module.named_parameters():
        whole = expected[name]
        assert (parameter.grad is None) == (whole.grad is None), name
        if parameter in sharded:
            rows = expected_rows(whole.shape[0], context.rank, context.world_size)
            assert parameter.shape == (rows, *whole.shape[1:]), name
        else:
            assert parameter.shape == whole.shape
        if parameter.grad is None:
            continue
        assert parameter.grad.shape == parameter.shape == shapes[name]
        assert parameter.grad.dtype == parameter.dtype == torch.float32
        if parameter not in sharded:
            copies = [torch.empty_like(parameter) for _ in range(context.world_size)]
            dist.all_gather(copies, parameter.grad)
            assert all(torch.equal(copy, copies[0]) for copy in copies), name


def which_layers(context: RankContext) -> None:
    model = wrap(Mixed, context)
    names = [f"{layer}.weight" for layer in ("embedding", "positions", "first", "twice", "frozen", "unused")]
    assert [weight.name for weight in model._weights] == [*names, "narrow.weight", "widen.weight", "head.weight"]
    tied = wrap(partial(Mixed, tied=True), context)
    assert len(tied._weights) == 8
    assert tied.module.head.weight is tied.module.embedding.weight

    class Own(nn.Linear):
        pass

    others = wrap(lambda: nn.ModuleDict({"own": Own(6, 6), "attention": nn.MultiheadAttention(6, 2)}), context)
    assert others._weights == []


def low_precision(context: RankContext, n_steps: int) -> None:
    """compute_dtype: layers compute in it, masters and gradients are float32, and training follows float32's."""
    plain, model = build(transformer, 0), wrap(transformer, context, compute_dtype=torch.float16)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (plain, model)]
    dtypes = []
    model.module.layers[0].ffn.w1.register_forward_hook(
        lambda layer, args, output: dtypes.extend((args[0].dtype, layer.weight.dtype, output.dtype))
    )
    for step in range(n_steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        average_by_hand(plain, step, context.world_size)
        loss_on(model, step, context.rank, context.world_size).backward()
        fsdp_on_after_backward(model, optimizers[1])
        assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
        for optimizer in optimizers:
            optimizer.step()
        full = fsdp_gather_full_params(model)
        assert {parameter.dtype for parameter in full.values()} == {torch.float32}
        assert_same(full, plain, 1e-4, f"step {step}")
    # The hook ran before the wrapper's own, which takes the weight away.
    assert set(dtypes) == {torch.float16} or dtypes[1] == torch.float32
    for dtype in (torch.float16, torch.bfloat16):  # biases and both kinds of norms
        model = wrap(Mixed, context, compute_dtype=dtype)
        logits = model(batch(0)[0])
        assert logits.dtype == dtype
        expected = build(Mixed, 0)(batch(0)[0])
        torch.testing.assert_close(logits.float(), expected, rtol=0, atol=0.05 if dtype == torch.bfloat16 else 0.006)
        logits.float().square().mean().backward()
        model.finish_gradient_synchronization()
        for name, parameter in model.module.named_parameters():
            assert parameter.dtype == torch.float32
            assert parameter.grad is None or parameter.grad.dtype == torch.float32, name


def checkpointing(context: RankContext) -> None:
    """Blocks computed again in backward: the same gradients, bit for bit, with one or several blocks a segment."""
    variants = [(0, False), (1, False), (2, False), (3, False), (1, True), (2, True)]
    if context.world_size != 2:
        variants = [(0, False), (2, False), (1, True)]
    gradients = []
    for segment, use_reentrant in variants:
        model = wrap(partial(Checkpointed, segment, use_reentrant), context)
        for step in range(2):  # the first learns the order
            model.zero_grad()
            loss_on(model, step, context.rank, context.world_size).backward()
            model.finish_gradient_synchronization()
            assert resident(model) == []
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for theirs in gradients[1:]:
        assert all(torch.equal(theirs[name], expected) for name, expected in gradients[0].items())


def without_gradients(context: RankContext) -> None:
    """Evaluation and generation equal the bare module's, and leave nothing behind."""
    plain, model = build(transformer, 0), wrap(transformer, context)
    tokens = batch(0)[0]
    for mode in (torch.no_grad, torch.inference_mode):
        for _ in range(2):
            with mode():
                assert torch.equal(model(tokens), plain(tokens))
            assert resident(model) == []
    assert isinstance(model.module, BasicsTransformerLM)
    assert isinstance(plain, BasicsTransformerLM)
    prompt = tokens[0, :2]
    assert torch.equal(model.module.generate(prompt, 5, temperature=0), plain.generate(prompt, 5, temperature=0))
    # Between two training steps, with an order of its own.
    for step in range(2):
        average_by_hand(plain, step, context.world_size)
        model.zero_grad()
        loss = loss_on(model, step, context.rank, context.world_size)
        with torch.no_grad():
            model(tokens[:2])
        loss.backward()
        model.finish_gradient_synchronization()
        for (name, theirs), expected in zip(model.module.named_parameters(), plain.parameters(), strict=True):
            assert expected.grad is not None
            if theirs.shape == expected.shape:
                torch.testing.assert_close(theirs.grad, expected.grad, rtol=1e-5, atol=1e-7, msg=name)


def several_passes(context: RankContext) -> None:
    """Gradients add up: over backward passes, over forward passes before one backward, over calls of finish."""
    plain = build(Mixed, 0)
    for i in range(2):
        average_by_hand(plain, i, context.world_size)
        if i == 0:
            first = {name: p.grad.clone() for name, p in plain.named_parameters() if p.grad is not None}
    expected = {name: first[name] + p.grad for name, p in plain.named_parameters() if p.grad is not None}
    rank, world_size = context.rank, context.world_size

    def twice(model: FSDP) -> None:
        for step in range(2):
            loss_on(model, step, rank, world_size).backward()
        model.finish_gradient_synchronization()

    def together(model: FSDP) -> None:
        (loss_on(model, 0, rank, world_size) + loss_on(model, 1, rank, world_size)).backward()
        model.finish_gradient_synchronization()

    def crossed(model: FSDP) -> None:
        losses = [loss_on(model, step, rank, world_size) for step in range(2)]
        for loss in losses:
            loss.backward(retain_graph=True)
        model.finish_gradient_synchronization()

    def finished_twice(model: FSDP) -> None:
        for step in range(2):
            loss_on(model, step, rank, world_size).backward()
            model.finish_gradient_synchronization()

    model = wrap(Mixed, context)
    for passes in (twice, together, crossed, finished_twice, twice):
        model.zero_grad()
        passes(model)
        assert resident(model) == []
        whole = {weight.name: weight for weight in model._weights}
        for name, parameter in model.module.named_parameters():
            if name in expected:
                theirs = whole[name].rows_of(expected[name]) if name in whole else expected[name]
                torch.testing.assert_close(parameter.grad, theirs, rtol=1e-5, atol=1e-6, msg=f"{passes} {name}")
            else:
                assert parameter.grad is None


def partial_backward(context: RankContext) -> None:
    """Only the input's gradient, a frozen model, and a forward that raises: nothing stays gathered."""
    model = wrap(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), context)
    plain = build(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), 0)
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    (expected,) = torch.autograd.grad(plain(x).sum(), x)
    for _ in range(3):
        (gradient,) = torch.autograd.grad(model(x).sum(), x)
        assert torch.equal(gradient, expected)
        assert resident(model) == []
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        model(torch.randn(5, 3))
    assert all(weight.n_users == 0 for weight in model._weights)
    model.finish_gradient_synchronization()
    assert resident(model) == []  # nor what was gathered ahead
    assert model.module[0].weight is model._weights[0].shard
    model.requires_grad_(False)  # frozen after wrapping
    for _ in range(2):
        (gradient,) = torch.autograd.grad(model(x).sum(), x)
        assert torch.equal(gradient, expected)
        assert resident(model) == []
    model.requires_grad_(True)
    model(x).sum().backward()
    assert torch.equal(x.grad, expected)
    model.finish_gradient_synchronization()
    assert all(parameter.grad is not None for parameter in model.parameters())

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> None:  # ty: ignore[invalid-method-override]
            raise RuntimeError("backward failed")

    with pytest.raises(RuntimeError, match="backward failed"):
        model.module[2](Fails.apply(model.module[0](x))).sum().backward()
    model.finish_gradient_synchronization()
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))
    assert resident(model) == []


def all_cases(context: RankContext) -> None:
    torch.set_num_threads(1)  # threads that wait for a busy core take longer than the work
    torch.use_deterministic_algorithms(True)
    n_steps = 3 if context.world_size == 2 else 2  # the first learns the order
    for make in MODELS.values():
        train(context, make, torch.optim.SGD, n_steps)
    if context.world_size == 2:
        train(context, Mixed, torch.optim.AdamW)
    which_layers(context)
    low_precision(context, n_steps)
    checkpointing(context)
    without_gradients(context)
    several_passes(context)
    partial_backward(context)
    dropped_steps(context)
    moved_shards(context)
    called_by_itself(context)
    leaf_into_frozen(context)
    casts_of_parameters(context)
    fast_path(context)
    freed(context)
    misuse(context)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_equals_unsharded_copies(world_size: int) -> None:
    """Cases that share their ranks, since starting these takes seconds; the traceback names the case."""
    run_gloo(all_cases, world_size=world_size)


def test_needs_a_process_group() -> None:
    with pytest.raises(RuntimeError, match="no process group"):
        FSDP(nn.Linear(2, 2))
