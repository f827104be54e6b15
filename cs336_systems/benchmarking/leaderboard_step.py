"""The 2026 leaderboard's step on one rank: forward, loss, backward and AdamW of the 8b model, two sequences of 32,768
tokens on two GPUs. This project's parts, and in the same run what PyTorch ships.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from cs336_basics.model import BasicsTransformerLM
from cs336_systems.accounting.flops import model_flops_utilization, peak_tflops, train_step_flops
from cs336_systems.benchmarking.leaderboard_cells import LeaderboardCell
from cs336_systems.benchmarking.rank_timing import time_phases, time_whole_steps
from cs336_systems.checkpointing import CheckpointedSegment, checkpoint_blocks
from cs336_systems.distributed.fsdp import FullyShardedDataParallel
from cs336_systems.distributed.process_group import RankContext
from cs336_systems.workload import build_model, build_optimizer, check_kernels, compile_model, select_attention

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
LOSS_CHUNK_TOKENS = 4096


class ChunkedLossLM(nn.Module):
    """A model with the loss in its forward pass, of whose logits only a chunk's exist at a time, also in backward."""

    def __init__(self, model: BasicsTransformerLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Int[Tensor, "batch seq"], targets: Int[Tensor, "batch seq"]) -> Float[Tensor, ""]:
        """The mean cross-entropy of (batch, seq) token ids."""
        hidden = self.model.token_embeddings(inputs)
        for layer in self.model.layers:
            hidden = layer(hidden)
        hidden, targets = self.model.ln_final(hidden).flatten(0, 1), targets.flatten()
        chunks = zip(hidden.split(LOSS_CHUNK_TOKENS), targets.split(LOSS_CHUNK_TOKENS), strict=True)
        losses = [checkpoint(self._summed_loss, *chunk, use_reentrant=False) for chunk in chunks]
        return torch.stack(losses).sum() / len(targets)

    def _summed_loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.model.lm_head(hidden).float(), targets, reduction="sum")


class LeaderboardStep:
    """A rank's model, optimizer and part of the batch, and its train step, called as `step(phase)`.

    Attributes:
        model: called as `model(inputs, targets)`, it returns the loss.
        inputs, targets: (batch, context) token ids, this rank's own.
        loss: the last step's, a float32 scalar on the device; this rank's part of the mean.
    """

    def __init__(self, context: RankContext, cell: LeaderboardCell) -> None:
        """Builds everything, from the cell's seed; a collective call.

        Raises:
            Unsupported: the cell's attention or kernels cannot run on this machine.
        """
        self.cell, self.device = cell, context.device
        torch.manual_seed(cell.seed)  # the same weights on every rank
        torch.set_float32_matmul_precision("highest")
        select_attention(cell.attention, self.device, cell.precision)
        check_kernels(cell.kernels, self.device)
        module = build_model(cell.model_config(), self.device, cell.kernels).to(DTYPES[cell.precision])
        self.model = _wrap(cell, module, self.device)
        self.optimizer = build_optimizer(cell.optimizer, self.model, cell.kernels)
        torch.manual_seed(cell.seed + 1 + context.rank)
        shape = (cell.batch_size, cell.ctx)
        self.inputs = torch.randint(cell.vocab_size, shape, device=self.device)
        self.targets = torch.randint(cell.vocab_size, shape, device=self.device)
        self.loss: Float[Tensor, ""] | None = None

    def __call__(self, phase: Callable[[str], Any]) -> None:
        self.compute_gradients(phase)
        with phase("optimizer"):
            self.optimizer.step()

    def compute_gradients(self, phase: Callable[[str], Any]) -> None:
        """Forward, loss, backward, and the wait for the gradients."""
        self.optimizer.zero_grad()
        backend = SDPBackend.CUDNN_ATTENTION if self.device.type == "cuda" else SDPBackend.MATH
        with sdpa_kernel(
            backend
        ):  # for backward too, where checkpoints run forward again; flash attention is another's
            with phase("forward"):
                loss = self.model(self.inputs, self.targets)
            with phase("backward"):
                loss.backward()
        self.loss = loss.detach()
        with phase("synchronization"):
            if isinstance(self.model, FullyShardedDataParallel):
                self.model.finish_gradient_synchronization()


def _wrap(cell: LeaderboardCell, module: BasicsTransformerLM, device: torch.device) -> nn.Module:
    """The module with its checkpoints, its weights divided over the ranks. This is the one place that knows the
    implementations by name."""
    compile_model(module, cell.compile)
    n_checkpointed = cell.num_layers - cell.kept_blocks
    if cell.recomputes:
        from cs336_systems.kernels.fused_model import recompute_elementwise

        for block in list(module.layers)[n_checkpointed:]:
            recompute_elementwise(block)
    checkpoint_blocks(module, 1, keep_attention=cell.implementation == "fused", n_blocks=n_checkpointed)
    if cell.implementation == "fused":
        return FullyShardedDataParallel(module)
    # FSDP2's hooks must be outside of what is compiled and run again: on a segment, be it a plain one.
    module.layers = nn.ModuleList(
        layer if isinstance(layer, CheckpointedSegment) else nn.Sequential(layer) for layer in module.layers
    )
    mesh = init_device_mesh(device.type, (cell.world_size,))
    for segment in module.layers:
        fully_shard(segment, mesh=mesh)
    model = ChunkedLossLM(module)
    fully_shard(model, mesh=mesh)
    return model


def measure_leaderboard_step(context: RankContext, cell: LeaderboardCell) -> dict[str, Any]:
    """`LeaderboardRow`'s results on this rank; a collective call, with the same numbers on every rank."""
    on_gpu = context.device.type == "cuda"
    if on_gpu and not os.environ.keys() & {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}:
        # FSDP gives whole weights of many sizes back at every layer; segments that can grow are not cut up by that.
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    step = LeaderboardStep(context, cell)
    gc.collect()
    if on_gpu:  # the pieces of the whole model in float32, which was before the shards
        torch.cuda.empty_cache()
    times, phases_ms = time_whole_steps(context, cell, step), time_phases(context, step)
    names = ("forward", "backward", "synchronization", "optimizer")
    flops = train_step_flops(cell.model_config(), cell.batch_size, cell.ctx, attention="causal")
    seconds = times["step_median_ms"] / 1e3
    peak = peak_tflops(torch.cuda.get_device_name(context.device), cell.precision) if on_gpu else None
    return {
        **times,
        **{f"{name}_ms": phases_ms[name] for name in names},
        "tflops": flops / seconds / 1e12,
        "peak_share": model_flops_utilization(flops, seconds, peak) if peak else None,
    }
