"""What a training run is made of, by name: the arguments of scripts/train.py, checked before anything is built.

Plain data: no torch here, so that a command line can be parsed, refused or explained at once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cs336_systems.accounting.flops import num_parameters
from cs336_systems.accounting.memory import FLOAT32_BYTES
from cs336_systems.accounting.training_memory import TrainingMemory, training_memory
from cs336_systems.configs import (
    MODEL_SIZES,
    SIZE_NAMES,
    Attention,
    Compile,
    Kernels,
    ModelConfig,
    Optimizer,
    Precision,
    check,
    check_choice,
    check_choices,
    check_ignored,
    check_widths,
)

Parallel = Literal["none", "ddp", "bucketed", "fsdp"]
TokenDtype = Literal["uint8", "uint16", "int32", "uint32", "int64"]

_SHAPE = ("d_model", "d_ff", "num_layers", "num_heads")
BYTE_VOCABULARY = 256
ID_VOCABULARY = 10_000
LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127


@dataclass(frozen=True)
class TrainArguments:
    """A training run as the command line gives it, not checked yet; see `TrainConfig`."""

    data: Path | None = None
    """Any text file (its bytes are the tokens), or token ids as .npy or .bin. Default: Python's own library."""
    token_dtype: TokenDtype = "uint16"
    """Dtype of the ids in a .bin file."""
    vocab_size: int | None = None
    """Vocabulary, in tokens. Default: 256 for text and 10,000 for ids."""
    validation_share: float = 0.1
    """The end of the data that is kept for validation."""
    size: str = "tiny"
    """tiny, small, medium, large, xl, 2.7b, 10b, 8b; or custom, with the model's four flags below."""
    d_model: int | None = None
    """With --size custom: width of the residual stream."""
    d_ff: int | None = None
    """With --size custom: width of the feed-forward layer."""
    num_layers: int | None = None
    """With --size custom: Transformer blocks."""
    num_heads: int | None = None
    """With --size custom: attention heads; they must divide --d-model."""
    ctx: int = 128
    """Context length, in tokens."""
    batch_size: int = 16
    """Sequences of an optimizer step, over all processes and micro-batches."""
    accumulation_steps: int = 1
    """Micro-batches into which each process divides its part of the batch; their gradients are added up."""
    steps: int = 300
    """Optimizer steps of the whole run. The learning rate depends on it at each of them: --resume cannot change it, and
    a longer run begins anew."""
    warmup_steps: int | None = None
    """Steps over which the learning rate rises, before it follows half a cosine to the end of the run. Default: a tenth
    of the steps, and 20 at most."""
    learning_rate: float = 1e-3
    """The highest learning rate."""
    min_learning_rate: float = 1e-4
    """The last step's learning rate."""
    weight_decay: float = 0.1
    """AdamW's weight decay."""
    clip_norm: float = 1.0
    """The largest L2 norm of all gradients together."""
    optimizer: Optimizer = "adamw"
    """The project's AdamW, or PyTorch's fused one."""
    precision: Precision = "fp32"
    """bf16 and fp16 are autocast over float32 weights; tf32 is fp32 with tensor cores."""
    loss_scaling: bool = True
    """With fp16: scale the loss so that small gradients do not become zero."""
    attention: Attention = "naive"
    """The attention that the model calls."""
    kernels: Kernels = "plain"
    """Triton's instead of PyTorch's: none (plain), last layer with loss, and AdamW (loss), or these and norms, SwiGLU
    and rotary positions (fused)."""
    compile: Compile = "off"
    """torch.compile: off, on (the whole model), or blocks (each block by itself)."""
    parallel: Parallel = "none"
    """Data parallelism: overlapped DDP, bucketed DDP, or fully sharded."""
    processes: int | None = None
    """With --parallel: ranks. Default: torchrun's, else one a GPU, or 2 on a CPU."""
    bucket_size_mb: float = 25.0
    """With --parallel bucketed: a bucket's size in MB (10**6 bytes)."""
    sharded_optimizer: bool = False
    """With --parallel ddp or bucketed: divide the optimizer's state over the ranks."""
    device: str = "auto"
    """cpu, cuda, cuda:N, mps, or auto: the first GPU if there is one."""
    seed: int = 0
    """Seed of the weights and of the order of the data."""
    validate_every: int = 50
    """Steps between validations, on the same batches each time; there is one at the end too."""
    validation_batches: int = 8
    """Batches of --batch-size over which the validation loss is averaged."""
    checkpoint_every: int = 100
    """Steps between checkpoints; one is written at the end too, and on Ctrl-C where one process trains."""
    keep_checkpoints: int = 2
    """The newest ones are kept; with two, one that is damaged has another before it."""
    out: Path = Path("out/train")
    """Folder for metrics, plot and checkpoints; an earlier run's are moved aside, unless resumed."""
    resume: bool = False
    """Go on from the newest good checkpoint under --out."""


@dataclass(frozen=True)
class TrainConfig(TrainArguments):
    """A training run that can be. Steps count optimizer steps, from 1; sizes count tokens.

    Raises:
        ValueError: a value out of its range, or a combination that cannot run (naming the parameter and what is
            allowed).
    """

    @property
    def rising_steps(self) -> int:
        """`warmup_steps`, or what stands for it where none is given."""
        return min(20, self.steps // 10) if self.warmup_steps is None else self.warmup_steps

    def __post_init__(self) -> None:
        check_choices(self)
        for name in (
            "ctx",
            "batch_size",
            "accumulation_steps",
            "steps",
            "validate_every",
            "validation_batches",
            "checkpoint_every",
            "keep_checkpoints",
        ):
            check(getattr(self, name) >= 1, name, getattr(self, name), "must be at least 1")
        check(0 <= self.rising_steps <= self.steps, "warmup_steps", self.warmup_steps, f"must be 0 to {self.steps}")
        rate, allowed = self.learning_rate, f"must be above 0 and at most {LARGEST_FLOAT32}, float32's largest"
        check(0 < rate <= LARGEST_FLOAT32, "learning_rate", rate, allowed)
        least = self.min_learning_rate
        check(
            0 <= least <= self.learning_rate, "min_learning_rate", least, f"must be between 0 and {self.learning_rate}"
        )
        decay, allowed = self.weight_decay, f"must be between 0 and {LARGEST_FLOAT32}, float32's largest"
        check(0 <= decay <= LARGEST_FLOAT32, "weight_decay", decay, allowed)
        check(self.clip_norm > 0, "clip_norm", self.clip_norm, "must be above 0 (inf does not clip)")
        check(0 < self.validation_share < 1, "validation_share", self.validation_share, "must be between 0 and 1")
        check(0 <= self.seed < 2**31, "seed", self.seed, "must be between 0 and 2**31 - 1")
        if self.data is None or self.data.suffix != ".bin":
            check_ignored(self, {"token_dtype"}, "goes with --data of a .bin file")
        self._check_device_and_precision()
        self._check_parallel()
        self._check_shape()

    def _check_device_and_precision(self) -> None:
        check(
            re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", self.device) is not None,
            "device",
            self.device,
            "must be auto, cpu, mps, cuda or cuda:N",
        )
        check(
            self.precision != "tf32" or self.device == "auto" or self.device.startswith("cuda"),
            "precision",
            self.precision,
            f"is a mode of NVIDIA's tensor cores, and device={self.device!r}",
        )
        check(
            self.precision != "fp16" or self.device != "mps",
            "precision",
            self.precision,
            "needs a gradient scaler, which device='mps' lacks; there fp32 and bf16 run",
        )
        check(
            self.loss_scaling or self.precision == "fp16",
            "loss_scaling",
            self.loss_scaling,
            f"only fp16 scales the loss, and precision={self.precision!r}",
        )

    def _check_parallel(self) -> None:
        if self.parallel == "none":
            check(
                self.processes in (None, 1), "processes", self.processes, "goes with --parallel ddp, bucketed or fsdp"
            )
        else:
            check(self.processes is None or self.processes >= 1, "processes", self.processes, "must be at least 1")
            check(
                ":" not in self.device and self.device != "mps",
                "device",
                self.device,
                "each rank takes the card of its number: must be auto, cpu or cuda",
            )
        check(
            self.parallel != "fsdp" or self.compile == "off",
            "compile",
            self.compile,
            "must be off with --parallel fsdp, whose layers must not be compiled over",
        )
        check(self.bucket_size_mb > 0, "bucket_size_mb", self.bucket_size_mb, "must be above 0")
        if self.parallel != "bucketed":
            check_ignored(self, {"bucket_size_mb"}, f"goes with --parallel bucketed, and parallel={self.parallel!r}")
        check(
            not self.sharded_optimizer or self.parallel in ("ddp", "bucketed"),
            "sharded_optimizer",
            self.sharded_optimizer,
            f"goes with --parallel ddp or bucketed, and parallel={self.parallel!r}",
        )

    def _check_shape(self) -> None:
        check_choice("size", self.size, SIZE_NAMES)
        for name in _SHAPE:
            value = getattr(self, name)
            if self.size == "custom":
                check(value is not None, name, value, f"--size custom needs it (with {', '.join(_SHAPE)})")
            else:
                check(value is None, name, value, f"goes with --size custom; {self.size!r} has its own")
        model = self.model_config()  # refuses hyperparameters that do not fit each other
        check_widths(self, model, self.attention, self.kernels)

    @property
    def is_text(self) -> bool:
        """Whether tokens are bytes: everything but .npy and .bin."""
        return self.data is None or self.data.suffix not in (".npy", ".bin")

    def model_config(self) -> ModelConfig:
        """The model to train; its vocabulary is the data's, and its context the run's."""
        source: Any = self if self.size == "custom" else MODEL_SIZES[self.size]
        shape = {name: getattr(source, name) for name in _SHAPE}
        vocab_size = self.vocab_size
        if vocab_size is None:
            vocab_size = BYTE_VOCABULARY if self.is_text else ID_VOCABULARY
        return ModelConfig(**shape, vocab_size=vocab_size, context_length=self.ctx)

    def rank_memory(self, world_size: int) -> TrainingMemory:
        """By formula, of one of `world_size` ranks in a step."""
        return training_memory(
            self.model_config(),
            self.batch_size // (world_size * self.accumulation_steps),
            self.ctx,
            self.precision,
            self.attention if self.compile == "off" else "sdpa",  # compiled code keeps fewer tensors
            sharding="fsdp" if self.parallel == "fsdp" else "optimizer" if self.sharded_optimizer else "none",
            num_devices=world_size,
            keeps_gradients=self.parallel == "bucketed" or self.accumulation_steps > 1,
        )

    def gathered_bytes(self) -> int:
        """Of what rank 0 gathers for a checkpoint beside its own parts, float32: AdamW's two moments where they are
        divided, and the weights where these are."""
        n_tensors = 3 if self.parallel == "fsdp" else 2 if self.sharded_optimizer else 0
        return n_tensors * FLOAT32_BYTES * num_parameters(self.model_config())

    def check_world_size(self, world_size: int) -> None:
        """Raises ValueError unless the batch divides into the ranks' micro-batches."""
        parts = world_size * self.accumulation_steps
        check(
            self.batch_size % parts == 0,
            "batch_size",
            self.batch_size,
            f"must be a multiple of {parts}: {world_size} processes with {self.accumulation_steps} micro-batches each",
        )


# What may differ when a run goes on from a checkpoint: what its losses do not come from, other than by rounding.
FREE_ON_RESUME = frozenset(
    {
        "data",  # its content is compared
        "out",
        "resume",
        "device",
        "compile",
        "attention",
        "kernels",
        "accumulation_steps",
        "parallel",
        "processes",
        "bucket_size_mb",
        "sharded_optimizer",
        "validate_every",
        "validation_batches",
        "checkpoint_every",
        "keep_checkpoints",
    }
)
