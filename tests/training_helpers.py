"""What the training tests share: a model that trains in milliseconds, and a text for it."""

import random
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from cs336_systems.training.config import TrainConfig
from cs336_systems.training.data import TokenFile, prepare_tokens
from cs336_systems.training.loop import Summary, train_rank
from cs336_systems.training.metrics import METRICS, read_metrics
from cs336_systems.training.trainer import Trainer
from tests.example_rows import RUN

SHAPE = {"size": "custom", "d_model": 16, "d_ff": 24, "num_layers": 1, "num_heads": 2}
QUICK = {
    **SHAPE,
    "ctx": 8,
    "batch_size": 4,
    "steps": 8,
    "warmup_steps": 2,
    "learning_rate": 1e-2,
    "min_learning_rate": 1e-3,
    "validate_every": 4,
    "validation_batches": 2,
    "checkpoint_every": 3,
    "device": "cpu",
}


def write_text(folder: Path, n_bytes: int = 4000) -> Path:
    """Words in a random order: something to learn, the same at each call."""
    choice = random.Random(0).choice
    text = " ".join(choice(["one", "two", "three", "four", "five"]) for _ in range(n_bytes // 4))
    path = folder / "text.txt"
    path.write_text(text[:n_bytes])
    return path


def make_config(folder: Path, **changes) -> TrainConfig:
    """A quick run on `write_text`'s text, into `folder`/out."""
    return TrainConfig(**{**QUICK, "data": write_text(folder), "out": folder / "out", **changes})


def tokens_of(config: TrainConfig) -> TokenFile:
    vocab_size = config.model_config().vocab_size
    return prepare_tokens(config.data, config.token_dtype, vocab_size, config.ctx, config.validation_share)


def train(config: TrainConfig) -> Summary:
    """The run in this process, without the command line around it."""
    config.out.mkdir(parents=True, exist_ok=True)
    return train_rank(None, config, tokens_of(config), "cpu", RUN)


def lines(config: TrainConfig, kind: str) -> list[dict]:
    """The metrics' lines of a kind, without the clock's part."""
    found = [line for line in read_metrics(config.out / METRICS) if line["kind"] == kind]
    return [{name: value for name, value in line.items() if name not in ("step_ms", "tokens_per_s")} for line in found]


def trainer_of(config: TrainConfig) -> Trainer:
    """The config's trainer, on the CPU, before its first step."""
    return Trainer(config, tokens_of(config), torch.device("cpu"))


def weights_of(trainer: Trainer) -> Tensor:
    """All parameters, one after the other."""
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.bare.parameters()])


def changed_trainer(change: Callable[[Trainer], object]) -> type[Trainer]:
    """A Trainer that `change` is applied to."""

    class Changed(Trainer):
        def __init__(self, *args):
            super().__init__(*args)
            change(self)

    return Changed
