"""What the distributed tests share: gloo ranks on this machine, counted collectives, a small model and its data."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import tests.conftest  # noqa: F401  the ranks check the jaxtyping annotations too
from cs336_systems.distributed.process_group import GroupOptions, RankContext, launcher, spawn_ranks
from cs336_systems.distributed.spawn import start_fork_server

ROOT = Path(__file__).resolve().parents[1]
# A test that hangs should say so long before pytest's own limit.
OPTIONS = GroupOptions("cpu", timeout_s=200.0)
BATCH_SIZE = 12  # divisible by 1, 2, 3 and 4 ranks

if launcher() is None:
    # While pytest still collects: all that a rank of any test imports (every optimizer imports torch._dynamo), and what
    # a script needs for tables and pictures.
    start_fork_server(
        "torch._dynamo",
        "cs336_systems.workload",
        "tests.distributed_helpers",
        "tests.ddp_cases",
        "pandas",
        "matplotlib.backends.backend_agg",
        "matplotlib.pyplot",
        "tests.frozen_heap",
    )


def run_gloo(function: Any, *args: Any, world_size: int = 2) -> list[Any]:
    """Results of `function(context, *args)` on `world_size` fresh gloo ranks, in rank order."""
    return spawn_ranks(function, *args, world_size=world_size, options=OPTIONS)


class CountedCollectives(TorchDispatchMode):
    """How often each collective reaches the process group on this rank, by whichever function of torch.distributed:

    with CountedCollectives() as counts:
        ...
    assert counts.by_name == {"allreduce_": 3}
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_name: Counter[str] = Counter()
        self.n_elements: list[int] = []  # of each collective's first tensor, in the order of launching

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace == "c10d":
            self.by_name[func._opname] += 1
            tensors = args[0] if isinstance(args[0], list) else [args[0]]
            self.n_elements.append(tensors[0].numel())
        return func(*args, **(kwargs or {}))


class TiedModel(nn.Module):
    """Token ids (batch, 3) to logits (batch, 3, 11): tied embedding and head, a frozen layer, a buffer, an unused
    layer, and a branch that runs only when asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.first = nn.Linear(6, 8)
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.branch = nn.Linear(8, 8)
        self.unused = nn.Linear(4, 4)
        self.second = nn.Linear(8, 6, bias=False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("offset", torch.randn(8))

    def forward(self, tokens: Tensor, use_branch: bool = True) -> Tensor:
        hidden = self.frozen(torch.tanh(self.first(self.embedding(tokens)))) + self.offset
        if use_branch:
            hidden = hidden + self.branch(hidden)
        return self.head(self.second(torch.tanh(hidden)))


N_TRAINABLE = 8  # embedding, first ×2, branch ×2, unused ×2, second


def make_model(seed: int, dtype: torch.dtype = torch.float64) -> TiedModel:
    """A `TiedModel` of its seed. In float64 a wrong average cannot hide behind rounding."""
    torch.manual_seed(seed)
    return TiedModel().to(dtype)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Step's whole batch, the same on every rank: tokens and targets, (BATCH_SIZE, 3) each."""
    generator = torch.Generator().manual_seed(1000 + step)
    shape = (BATCH_SIZE, 3)
    return torch.randint(11, shape, generator=generator), torch.randint(11, shape, generator=generator)


def part(tensor: Tensor, rank: int, world_size: int) -> Tensor:
    """This rank's part of the whole batch."""
    return tensor.chunk(world_size)[rank]


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor, **kwargs: Any) -> Tensor:
    """Mean cross-entropy, on the model's device."""
    device = next(model.parameters()).device
    return nn.functional.cross_entropy(model(tokens.to(device), **kwargs).flatten(0, 1), targets.to(device).flatten())


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with a strong weight decay, under which a gradient of zero is not the same as none."""
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.2)


def assert_same_on_all_ranks(module: nn.Module) -> None:
    """Parameters and buffers are bit for bit the same on all ranks."""
    for name, tensor in module.state_dict().items():
        copies = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(copies, tensor.contiguous())
        for copy in copies:
            torch.testing.assert_close(copy, copies[0], rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")


def assert_same_weights(module: nn.Module, expected: nn.Module, rtol: float = 1e-9, atol: float = 1e-12) -> None:
    """Parameters and buffers of two modules agree."""
    theirs = expected.state_dict()
    assert list(module.state_dict()) == list(theirs)
    for name, tensor in module.state_dict().items():
        torch.testing.assert_close(tensor, theirs[name], rtol=rtol, atol=atol, msg=lambda t, n=name: f"{n}: {t}")


def train_beside_one_process(
    context: RankContext,
    wrap: Callable[[nn.Module], nn.Module],
    n_steps: int,
    step: Callable[..., None],
    dtype: torch.dtype = torch.float64,
) -> tuple[nn.Module, nn.Module]:
    """Train a wrapped model on this rank's part of each batch, and a plain one on the whole batch.

    `step(model, optimizer, i_step, rank, world_size)` runs one step; the plain model gets rank 0 of 1. The ranks start
    from different weights, the plain model from rank 0's. Returns the wrapped and the plain model, both on this rank's
    device.
    """
    plain = make_model(0, dtype).to(context.device)
    wrapped = wrap(make_model(context.rank, dtype).to(context.device))
    optimizers = make_optimizer(plain), make_optimizer(wrapped)
    for i_step in range(n_steps):
        step(plain, optimizers[0], i_step, 0, 1)
        step(wrapped, optimizers[1], i_step, context.rank, context.world_size)
    return wrapped, plain


def finish(model: nn.Module) -> None:
    """finish_gradient_synchronization, of a wrapped model; nothing for a plain one."""
    getattr(model, "finish_gradient_synchronization", lambda: None)()


def start_python(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Python on `arguments`, in the repository's root, with one thread a process and its output captured."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
