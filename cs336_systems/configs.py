"""What can be built and measured, by name: the model sizes of both editions and the parameters of a benchmark cell.

Plain data with its checks: no torch here, so that a command line can be parsed, refused or explained at once.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Protocol, cast, get_args, get_origin, get_type_hints

Mode = Literal["forward", "forward-backward", "train-step"]
Precision = Literal["fp32", "tf32", "bf16", "fp16"]
Compile = Literal["off", "on", "blocks"]
Attention = Literal["naive", "sdpa", "flash-pytorch", "flash-triton", "flash-hopper"]
Optimizer = Literal["adamw", "adamw-fused"]
Kernels = Literal["plain", "loss", "fused"]
Switch = Literal["off", "on"]

# Of any one dimension: what a signed 32-bit number holds. Larger ones overflow before they run out of memory.
LARGEST = 2**31 - 1

ATTENTION_NAMES: tuple[str, ...] = get_args(Attention)

# What the parts of a model take at most; they refuse more themselves.
MAX_HEAD_DIM = 256  # every attention but naive
MAX_ROPE_HEAD_DIM = 1024  # the fused kernels
MAX_NORM_WIDTH = 2**13


def check(condition: bool, name: str, value: object, allowed: str) -> None:
    """Raises ValueError, naming the argument, its value and what is allowed, unless `condition` holds."""
    if not condition:
        raise ValueError(f"{name}={value!r}: {allowed}")


def check_choice(name: str, value: object, allowed: Collection[str]) -> None:
    """Raises ValueError, as `check`, for a value that is none of `allowed`."""
    check(value in allowed, name, value, f"must be one of {', '.join(allowed)}")


def check_choices(config: object) -> None:
    """Raises ValueError for the first field of a dataclass whose type is a Literal and whose value is none of that."""
    for name, allowed in _choices(type(config)).items():
        check_choice(name, getattr(config, name), allowed)


@functools.cache
def _choices(config_type: type) -> dict[str, tuple[str, ...]]:
    return {name: get_args(hint) for name, hint in get_type_hints(config_type).items() if get_origin(hint) is Literal}


def check_ignored(arguments: object, ignored: Collection[str], why: str) -> None:
    """Raises ValueError, naming the argument, its value and `why` it is not read, for the first of the `ignored` fields
    of a dataclass that has another value than its default."""
    for field in fields(cast(Any, arguments)):
        value = getattr(arguments, field.name)
        if field.name in ignored and value != field.default:
            one = " ".join(map(str, value)) if isinstance(value, tuple) else value
            check(False, field.name, str(one) if isinstance(one, Path) else one, why)


class Incompatible(ValueError):
    """Values each of which can be, but not all together, or not on that device."""


def check_together(cell: object, condition: bool, name: str, value: object, why: str) -> None:
    """Raises Incompatible, naming the argument, its value and why it cannot go with the cell's others, unless
    `condition` holds, or `cell` is a row that says just that."""
    if not condition and getattr(cell, "status", "") != "unsupported":
        raise Incompatible(f"{name}={value!r}: {why}")


class OnDevice(Protocol):
    """A cell that runs on one kind of device, in one precision."""

    @property
    def device(self) -> str: ...
    @property
    def precision(self) -> str: ...


def check_device(cell: OnDevice) -> None:
    """Raises ValueError unless the cell's `device` is a device's name, of a kind on which its `precision` can run."""
    device, precision = cell.device, cell.precision
    check(
        re.fullmatch(r"cpu|mps|cuda(:\d+)?", device) is not None, "device", device, "must be cpu, mps, cuda or cuda:N"
    )
    check_together(
        cell,
        precision != "tf32" or device.startswith("cuda"),
        "precision",
        precision,
        f"is a mode of NVIDIA's tensor cores, and device={device!r}; there fp32 and bf16 run",
    )


@dataclass(frozen=True)
class ModelConfig:
    """A Transformer language model's hyperparameters (vocabulary in tokens, context_length in tokens).

    Raises:
        ValueError: a value below 1, or heads that do not divide d_model into an even head_dim (RoPE turns pairs).
    """

    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int
    vocab_size: int = 10_000
    context_length: int = 256
    rope_theta: float = 10_000.0

    def __post_init__(self) -> None:
        for name in ("d_model", "d_ff", "num_layers", "num_heads", "vocab_size", "context_length"):
            check(1 <= getattr(self, name) <= LARGEST, name, getattr(self, name), f"must be between 1 and {LARGEST}")
        check(
            self.d_model % self.num_heads == 0,
            "num_heads",
            self.num_heads,
            f"must divide d_model={self.d_model}",
        )
        check(
            self.head_dim % 2 == 0,
            "num_heads",
            self.num_heads,
            f"gives head_dim {self.head_dim}, and RoPE turns pairs: d_model / num_heads must be even",
        )

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads


def check_widths(cell: object, model: ModelConfig, attention: str, kernels: str = "plain") -> None:
    """Raises Incompatible, as `check_together`, where the attention or the kernels do not take heads or rows as wide as
    the model's."""
    of_heads = f"and d_model / num_heads is {model.head_dim}"
    fits = attention == "naive" or model.head_dim <= MAX_HEAD_DIM
    takes = f"takes heads of at most {MAX_HEAD_DIM}, {of_heads}; naive takes any"
    check_together(cell, fits, "attention", attention, takes)
    if kernels == "fused":
        takes = f"takes heads of at most {MAX_ROPE_HEAD_DIM}, {of_heads}; plain and loss take any"
        check_together(cell, model.head_dim <= MAX_ROPE_HEAD_DIM, "kernels", kernels, takes)
        takes = f"takes a d_model of at most {MAX_NORM_WIDTH}, and it is {model.d_model}; plain and loss take any"
        check_together(cell, model.d_model <= MAX_NORM_WIDTH, "kernels", kernels, takes)


# Handout, both editions: section 1.1 (2025) names small … 2.7b; 2026 calls 2.7b "xl" and adds 10b. 8b is the 2026
# leaderboard's model. `tiny` is this project's own, to run in seconds on a laptop's CPU.
MODEL_SIZES: dict[str, ModelConfig] = {
    "tiny": ModelConfig(d_model=128, d_ff=512, num_layers=2, num_heads=4),
    "small": ModelConfig(d_model=768, d_ff=3072, num_layers=12, num_heads=12),
    "medium": ModelConfig(d_model=1024, d_ff=4096, num_layers=24, num_heads=16),
    "large": ModelConfig(d_model=1280, d_ff=5120, num_layers=36, num_heads=20),
    "xl": ModelConfig(d_model=1600, d_ff=6400, num_layers=48, num_heads=25),
    "2.7b": ModelConfig(d_model=2560, d_ff=10240, num_layers=32, num_heads=32),
    "10b": ModelConfig(d_model=4608, d_ff=12288, num_layers=50, num_heads=36),
    "8b": ModelConfig(d_model=4096, d_ff=11008, num_layers=34, num_heads=32, vocab_size=151_936, context_length=32_768),
}
SIZE_NAMES: tuple[str, ...] = (*MODEL_SIZES, "custom")


@dataclass(frozen=True)
class BenchmarkCell:
    """One cell of a sweep: everything that decides what is built and how it is timed.

    `size` is a label, one of `SIZE_NAMES`; the hyperparameters beside it are what is built. `warmup` and `steps` count
    steps; `ctx` counts tokens. `checkpoint_every` is the number of blocks in a checkpointed segment, 0 for none.
    `cuda_graphs` records forward and backward once and launches each as one piece (`workload.Workload`).
    `master_weights` holds the blocks' matrices in bfloat16, to which autocast would round them in each step, and their
    float32 masters in the project's fused AdamW.
    `cold_caches` gives the cell empty compile caches of its own.

    Raises:
        ValueError: a value out of its range, or a combination that cannot run (`Incompatible`), naming the parameter
            and what is allowed.
    """

    size: str
    ctx: int
    mode: Mode = "train-step"
    precision: Precision = "fp32"
    compile: Compile = "off"
    cuda_graphs: Switch = "off"
    attention: Attention = "naive"
    kernels: Kernels = "plain"
    optimizer: Optimizer = "adamw"
    master_weights: Switch = "off"
    checkpoint_every: int = 0
    warmup: int = 5
    steps: int = 10
    batch_size: int = 4
    device: str = "cpu"
    seed: int = 0
    cold_caches: bool = False
    vocab_size: int = 10_000
    d_model: int = 128
    d_ff: int = 512
    num_layers: int = 2
    num_heads: int = 4

    def __post_init__(self) -> None:
        check_choice("size", self.size, SIZE_NAMES)
        check_choices(self)
        check(1 <= self.ctx <= LARGEST, "ctx", self.ctx, f"must be between 1 and {LARGEST}")
        check(self.warmup >= 0, "warmup", self.warmup, "must be 0 or more")
        check(self.steps >= 1, "steps", self.steps, "must be at least 1")
        check(1 <= self.batch_size <= LARGEST, "batch_size", self.batch_size, f"must be between 1 and {LARGEST}")
        check(0 <= self.seed < 2**63, "seed", self.seed, "must be between 0 and 2**63 - 1")
        check(self.checkpoint_every >= 0, "checkpoint_every", self.checkpoint_every, self._checkpoints_allowed())
        self.model_config()  # refuses hyperparameters that do not fit each other
        check_device(self)
        self._check_together()

    def _check_together(self) -> None:
        check_widths(self, self.model_config(), self.attention, self.kernels)
        check_together(
            self,
            self.precision != "fp16" or self.device != "mps",
            "precision",
            self.precision,
            "needs a gradient scaler, which device='mps' lacks; there fp32 and bf16 run",
        )
        check_together(
            self,
            self.checkpoint_every <= self.num_layers,
            "checkpoint_every",
            self.checkpoint_every,
            self._checkpoints_allowed(),
        )
        if self.cuda_graphs == "on":
            on_gpu = self.device.startswith("cuda")
            check_together(self, on_gpu, "cuda_graphs", "on", f"needs a GPU, and device={self.device!r}")
            check_together(
                self,
                self.checkpoint_every == 0,
                "cuda_graphs",
                "on",
                f"goes without checkpoints, which ask for the generator's state, and checkpoint_every="
                f"{self.checkpoint_every}",
            )
        if self.master_weights == "on":
            for name, needed in (("precision", "bf16"), ("mode", "train-step"), ("optimizer", "adamw")):
                value = getattr(self, name)
                needs = f"needs {name}={needed!r}, and {name}={value!r}"
                check_together(self, value == needed, "master_weights", "on", needs)
            needs = "needs kernels='loss' or 'fused', and kernels='plain'"
            check_together(self, self.kernels != "plain", "master_weights", "on", needs)

    def _checkpoints_allowed(self) -> str:
        return f"must be between 1 and {self.num_layers}, the model's blocks, or 0 for no checkpoints"

    def model_config(self) -> ModelConfig:
        """The model that this cell builds; its context is the cell's."""
        return ModelConfig(
            d_model=self.d_model,
            d_ff=self.d_ff,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            vocab_size=self.vocab_size,
            context_length=self.ctx,
        )


def named_shape(size: str) -> dict[str, Any]:
    """What a size's name stands for: `BenchmarkCell`'s size, hyperparameters and vocabulary. ValueError for a size that
    has no name here."""
    check_choice("size", size, MODEL_SIZES)
    named = MODEL_SIZES[size]
    return {
        "size": size,
        **{name: getattr(named, name) for name in ("d_model", "d_ff", "num_layers", "num_heads", "vocab_size")},
    }


def named_cell(size: str, ctx: int, **parameters) -> BenchmarkCell:
    """A cell of a named size; keyword arguments are `BenchmarkCell`'s other fields.

    For example `named_cell("small", 256, mode="forward")`. Raises ValueError for a size that has no name here.
    """
    return BenchmarkCell(**(named_shape(size) | parameters), ctx=ctx)


CELL_PARAMETERS: tuple[str, ...] = tuple(field.name for field in fields(BenchmarkCell))
