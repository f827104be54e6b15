"""Builds what is measured: a model, a batch, an optimizer and the step to run, from one cell's parameters.

Techniques (an attention, a precision, an optimizer) are chosen by name here and nowhere else; whatever times or
profiles the step does not know which it has.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cs336_basics.model import BasicsTransformerLM, Linear
from cs336_basics.nn_utils import cross_entropy
from cs336_basics.optimizer import AdamW
from cs336_systems.attention.model_attention import set_attention, why_not
from cs336_systems.checkpointing import checkpoint_blocks
from cs336_systems.configs import BenchmarkCell
from cs336_systems.cuda_graphs import GraphedPhases, Phase
from cs336_systems.records import Unsupported

AUTOCAST_DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Workload:
    """One cell's model, batch and optimizer, and `step`, which runs them by phases.

    `step(phase)` opens the phases "forward", "loss", "backward" and "optimizer", as many as the mode has. A forward
    step runs without autograd. Gradients are dropped before each step (set to None), so that backward writes them and
    never adds to the last step's. With kernels other than plain the loss is made inside the model, in "forward", and
    "loss" is an empty phase. float16 in a train step scales the loss, and steps through `torch.amp.GradScaler`.

    With CUDA graphs the first step records what comes before the optimizer, and each step replays it: gradients stay
    at their addresses, where backward writes them anew.

    Attributes:
        model: the `BasicsTransformerLM`, parameters in float32, or the blocks' matrices rounded (`round_matrices`);
            compiled, and its blocks in checkpointed segments, if the cell says so.
        inputs, targets: (batch, context) token ids.
        optimizer: None unless the mode is train-step.
        loss: the last step's loss, on the device, and during backward with its graph; None after a forward step.
        graph_bytes: what CUDA graphs hold at their fullest and the allocator does not count (`GraphedPhases`).
    """

    def __init__(self, cell: BenchmarkCell) -> None:
        """Builds everything on the cell's device, from the cell's seed.

        Raises:
            Unsupported: the cell's attention or kernels cannot run on this machine.
        """
        self.cell = cell
        self.device = torch.device(cell.device)
        if self.device.index is not None:
            torch.cuda.set_device(self.device)
        torch.manual_seed(cell.seed)
        torch.set_float32_matmul_precision("high" if cell.precision == "tf32" else "highest")
        select_attention(cell.attention, self.device, cell.precision)
        check_kernels(cell.kernels, self.device)
        config = cell.model_config()
        self.model = build_model(config, self.device, cell.kernels)
        shape = (cell.batch_size, cell.ctx)
        self.inputs: Int[Tensor, "batch context"] = torch.randint(config.vocab_size, shape, device=self.device)
        self.targets: Int[Tensor, "batch context"] = torch.randint(config.vocab_size, shape, device=self.device)
        self.optimizer = None
        if cell.mode == "train-step":
            self.optimizer = build_optimizer(cell.optimizer, self.model, cell.kernels)
        if cell.master_weights == "on":
            round_matrices(self.model, self.optimizer, AUTOCAST_DTYPE[cell.precision])
        scaled = cell.precision == "fp16" and cell.mode == "train-step"
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=scaled)
        self.loss: Float[Tensor, ""] | None = None
        compile_model(self.model, cell.compile)
        if cell.checkpoint_every:  # after it, so that each block is compiled by itself and not within its segment
            checkpoint_blocks(self.model, cell.checkpoint_every)
        self._graphs = GraphedPhases(self._compute, self.device) if cell.cuda_graphs == "on" else None

    @property
    def graph_bytes(self) -> int:
        return 0 if self._graphs is None else self._graphs.bytes_within

    def autocast(self) -> AbstractContextManager[None]:
        """Mixed precision for forward and loss; nothing in float32."""
        dtype = AUTOCAST_DTYPE.get(self.cell.precision)
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype)

    def step(self, phase: Phase) -> None:
        """Runs one step of the cell's mode, opening each of its phases in turn."""
        compute = self._graphs or self._compute
        compute(phase)
        if self.optimizer is not None:
            with phase("optimizer"):
                self.scaler.step(self.optimizer)
                self.scaler.update()

    def _compute(self, phase: Phase) -> None:
        """All of a step but the optimizer's part."""
        if self.cell.mode == "forward":
            with torch.no_grad(), phase("forward"), self.autocast():
                self.model(self.inputs)
            return
        self.model.zero_grad(set_to_none=True)
        is_fused = self.cell.kernels != "plain"
        with phase("forward"), self.autocast():
            output = self.model(self.inputs, self.targets) if is_fused else self.model(self.inputs)
        with phase("loss"), self.autocast():
            loss = output if is_fused else cross_entropy(output, self.targets)
        del output  # the graph keeps what backward needs; the name would keep it beyond
        self.loss = loss
        with phase("backward"):
            self.scaler.scale(loss).backward()
        self.loss = loss.detach()


def build_model(config, device: torch.device | str, kernels: str = "plain") -> BasicsTransformerLM:
    """A `BasicsTransformerLM` of `config` (a `ModelConfig`) with random float32 weights, made on `device` itself; with
    `kernels` other than "plain", `use_fused_kernels` of the same."""
    with torch.device(device):
        model = BasicsTransformerLM(
            vocab_size=config.vocab_size,
            context_length=config.context_length,
            d_model=config.d_model,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            d_ff=config.d_ff,
            rope_theta=config.rope_theta,
        )
    if kernels != "plain":
        from cs336_systems.kernels.fused_model import use_fused_kernels

        use_fused_kernels(model, only_loss=kernels == "loss")
    return model


def optimizer_class(name: str, kernels: str = "plain") -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The project's AdamW ("adamw"; in one launch unless kernels are plain) or PyTorch's own fused one ("adamw-fused"):
    the class, and the keywords that make it so."""
    if name == "adamw-fused":
        return torch.optim.AdamW, {"fused": True}
    if name != "adamw":
        raise ValueError(f"optimizer={name!r}: must be adamw or adamw-fused")
    if kernels != "plain":
        from cs336_systems.kernels.adamw import FusedAdamW

        return FusedAdamW, {}
    return AdamW, {}


def build_optimizer(name: str, model: torch.nn.Module, kernels: str = "plain") -> torch.optim.Optimizer:
    """`optimizer_class` of the model's parameters, with its default settings."""
    make, keywords = optimizer_class(name, kernels)
    return make(model.parameters(), **keywords)


def round_matrices(model: BasicsTransformerLM, optimizer: Any, dtype: torch.dtype) -> None:
    """Leaves the blocks' matrices, which autocast rounds in each step, rounded, and their float32 values to a
    `FusedAdamW`. Call it before the model is compiled and before its first step. The last layer's weight stays float32,
    as the fused loss sums its gradient in float32, and the embeddings, which autocast never rounds."""
    matrices = [module.weight for module in model.layers.modules() if isinstance(module, Linear)]
    optimizer.use_master_weights(matrices, dtype)


def hide_compiler_search() -> None:
    """Inductor looks for a CUDA compiler on a CPU too, and would warn of one without a GPU."""
    if not torch.cuda.is_available():
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


def compile_model(model: BasicsTransformerLM, how: str) -> None:
    """Compiles in place: "on" the whole model as one graph, "blocks" each Transformer block by itself.

    All blocks share one compiled code, so "blocks" compiles in a few seconds whatever the depth; "on" also fuses across
    blocks, and its compile time grows with them. The compilation itself happens at the first call.
    """
    if how != "off":
        hide_compiler_search()
    if how == "on":
        model.compile()
    elif how == "blocks":
        for block in model.layers:
            block.compile()


def why_attention_not(name: str, device: torch.device | str, precision: str) -> str | None:
    """What is missing to run the model with this attention on a device, in the precision; None where it can run."""
    return why_not(name, device, AUTOCAST_DTYPE.get(precision, torch.float32))


def select_attention(name: str, device: torch.device, precision: str) -> None:
    """`set_attention`; raises Unsupported where it cannot run on the device in the precision."""
    missing = why_attention_not(name, device, precision)
    if missing is not None:
        raise Unsupported(f"attention {name!r}: {missing}")
    set_attention(name)


def why_kernels_not(name: str, device: torch.device | str) -> str | None:
    """What is missing to run the model with these kernels on a device; None where they can run."""
    return None if name == "plain" else why_not("flash-triton", device)  # what attention's need is all that these do


def check_kernels(name: str, device: torch.device) -> None:
    """Raises Unsupported where the model's kernels cannot run on the device."""
    missing = why_kernels_not(name, device)
    if missing is not None:
        raise Unsupported(f"kernels {name!r}: {missing}")
