"""What the FSDP tests share: models with every kind of layer, data, and training on unsharded copies."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cs336_basics.model import BasicsTransformerLM, Embedding, Linear, RMSNorm
from cs336_basics.nn_utils import cross_entropy
from cs336_systems.distributed.fsdp import FSDP, FullyShardedDataParallel
from cs336_systems.distributed.process_group import RankContext
from tests.adapters import get_fsdp

VOCABULARY = 11  # divides by no world size but 1
BATCH_SIZE = 30  # divides by 1, 2, 3 and 5


class Mixed(nn.Module):
    """Tokens (batch, 4) to logits (batch, 4, 11): both packages' layers, biases, norms, a weight used twice, a frozen
    layer, an unused one, a buffer, a layer of fewer rows than ranks; and tied ends if asked for."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding = Embedding(VOCABULARY, 6)
        self.positions = nn.Embedding(4, 6)
        self.first = Linear(6, 7)
        self.norm = RMSNorm(7)
        self.twice = nn.Linear(7, 7)
        self.layer_norm = nn.LayerNorm(7)
        self.frozen = nn.Linear(7, 7)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(3, 5)
        self.narrow = nn.Linear(7, 2, bias=False)
        self.widen = Linear(2, 6)
        self.head = nn.Linear(6, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.register_buffer("offset", torch.randn(7))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.first(self.embedding(tokens) + self.positions(torch.arange(4, device=tokens.device)))
        x = torch.tanh(self.twice(self.norm(x)) + self.offset.to(x.dtype))
        x = self.frozen(self.layer_norm(self.twice(x)))
        return self.head(torch.relu(self.widen(self.narrow(x))))


class Checkpointed(nn.Module):
    """A Transformer whose blocks, `segment` at a time, are computed again in backward."""

    def __init__(self, segment: int, use_reentrant: bool) -> None:
        super().__init__()
        self.transformer = transformer()
        self.segment, self.use_reentrant = segment, use_reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        model = self.transformer
        x = model.token_embeddings(tokens)
        for i in range(0, len(model.layers), self.segment or 1):
            segment = nn.Sequential(*model.layers[i : i + (self.segment or 1)])
            x = checkpoint(segment, x, use_reentrant=self.use_reentrant) if self.segment else segment(x)
        return model.lm_head(model.ln_final(x))


def transformer(num_layers: int = 3) -> BasicsTransformerLM:
    return BasicsTransformerLM(VOCABULARY, 4, 8, num_layers, 2, 12)


def build(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def wrap(make: Callable[[], nn.Module], context: RankContext, **options: torch.dtype) -> FullyShardedDataParallel:
    """A model of this rank's own seed, wrapped: it must end up with rank 0's weights."""
    model = get_fsdp(build(make, context.rank), **options)
    assert isinstance(model, FSDP)
    return model


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Step's whole batch, the same on every rank: tokens and targets, (BATCH_SIZE, 4) each."""
    generator = torch.Generator().manual_seed(500 + step)
    shape = (BATCH_SIZE, 4)
    return torch.randint(VOCABULARY, shape, generator=generator), torch.randint(VOCABULARY, shape, generator=generator)


def loss_on(model: nn.Module, step: int, rank: int = 0, world_size: int = 1) -> Tensor:
    """Mean cross-entropy of a rank's part of the step's batch, on the model's device."""
    device = next(model.parameters()).device
    tokens, targets = (tensor.chunk(world_size)[rank].to(device) for tensor in batch(step))
    return cross_entropy(model(tokens), targets)


def average_by_hand(model: nn.Module, step: int, world_size: int) -> None:
    """The mean of the gradients that each rank's part gives on an unsharded model, summed in the ranks' order."""
    mean: dict[str, Tensor] = {}
    for rank in range(world_size):
        model.zero_grad()
        loss_on(model, step, rank, world_size).backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                part = parameter.grad / world_size
                mean[name] = mean[name] + part if name in mean else part
    for name, parameter in model.named_parameters():
        parameter.grad = mean.get(name)


def assert_same(theirs: dict[str, Tensor], expected: nn.Module, atol: float, what: str = "") -> None:
    """Gathered parameters equal a bare module's: bit for bit where `atol` is 0, else to it, or to float32's spacing
    where that is wider (beyond 1)."""
    parameters = dict(expected.named_parameters())
    assert list(theirs) == list(parameters)
    for name, parameter in parameters.items():
        torch.testing.assert_close(
            theirs[name],
            parameter.detach(),
            rtol=1.2e-7 if atol else 0,
            atol=atol,
            msg=lambda text, name=name: f"{what} {name}: {text}",
        )


def resident(model: Any) -> list[str]:
    """Names of the weights whose whole has memory."""
    return [w.name for w in model._weights if w.gathered.untyped_storage().nbytes() > 0]


def expected_rows(n_rows: int, rank: int, world_size: int) -> int:
    per_rank = math.ceil(n_rows / world_size)
    return max(0, min(per_rank, n_rows - rank * per_rank))
