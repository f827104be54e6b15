"""How many blocks of a fused model may keep what backward needs, and how many must run again, so that a training step
under FSDP fits into a card's memory.

Running 8b's block again at 32,768 tokens, but for its attention, takes 18 ms on an H200 and saves 2.4 GiB. What
elementwise kernels return is cheaper to make again: 0.8 ms for 1.2 GiB. So no block keeps that, if `recomputes`.

Plain arithmetic on a model's sizes, without torch. Parameters, gradients and AdamW's two moments have one dtype, and so
have activations: `precision` is "bf16" or "fp32" throughout, and no autocast is meant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cs336_systems.accounting.flops import (
    ModelShape,
    Precision,
    num_block_parameters,
    num_parameters,
    require_positive,
)
from cs336_systems.accounting.memory import FLOAT32_BYTES, compute_bytes
from cs336_systems.accounting.training_memory import fsdp_gathered_bytes

GIB = 2**30
LOGITS_BYTES = GIB  # of a chunk, as kernels/linear_cross_entropy.py has it by default


def fused_block_saved_tensors(config: ModelShape, tokens: int, precision: Precision = "bf16") -> dict[str, int]:
    """Bytes that one block of kernels/fused_model.py keeps for backward with FlashAttention, by tensor, its input
    included and its parameters not.

    For 8b, 32,768 tokens and bfloat16 they are 4.02 GiB: eight activations as wide as the stream and three of d_ff.

    Raises ValueError for tokens below 1 or an unknown precision.
    """
    require_positive(tokens=tokens)
    width = compute_bytes(precision)
    stream, hidden = tokens * config.d_model * width, tokens * config.d_ff * width
    inverse_rms = tokens * FLOAT32_BYTES
    return {
        "ln1 input": stream,
        "ln1 inverse rms": inverse_rms,
        "q_proj, k_proj, v_proj input": stream,
        "q": stream,
        "k": stream,
        "v": stream,
        "attention output": stream,  # laid out by token, so that it is also output_proj's input
        "attention logsumexp": tokens * config.num_heads * FLOAT32_BYTES,
        "ln2 input": stream,
        "ln2 inverse rms": inverse_rms,
        "w1, w3 input": stream,
        "w1 output": hidden,
        "w3 output": hidden,
        "w2 input": hidden,
    }


# What is left of these in a block that is checkpointed and keeps attention's output.
KEPT_IN_CHECKPOINT = ("ln1 input", "attention output", "attention logsumexp")
# What a block that is not checkpointed need not keep either: one elementwise kernel makes each again.
ELEMENTWISE = ("q_proj, k_proj, v_proj input", "w1, w3 input", "w2 input")


@dataclass(frozen=True)
class MemoryPlan:
    """What the blocks keep, and the memory predicted for that, in bytes.

    The first `n_checkpointed` blocks keep their input and attention's output and logsumexp, and the last `n_kept`
    all that matrix products and attention return, or, unless `recomputes`, everything: backward begins with these, and
    has freed them when it runs a checkpointed block again.
    """

    n_kept: int
    n_checkpointed: int
    moment: str
    """When the peak is, e.g. "backward of block 33"."""
    parts: dict[str, int]
    """What is held at that moment, by kind."""
    memory_bytes: float
    """What the plan may use."""

    @property
    def peak_bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.memory_bytes

    def rows(self) -> list[tuple[str, str]]:
        """The parts and their sum in GiB, for a table."""
        lines = [(name, f"{size / GIB:.2f}") for name, size in self.parts.items()]
        return [*lines, (f"peak, in {self.moment}", f"{self.peak_bytes / GIB:.2f}")]


def plan_memory(
    config: ModelShape,
    tokens_per_rank: int,
    world_size: int,
    memory_gib: float,
    precision: Precision = "bf16",
    recomputes: bool = True,
) -> MemoryPlan:
    """The plan in which the most blocks are not checkpointed and the predicted peak is at most `memory_gib`; where not
    even all blocks checkpointed fit, that, with `fits` False.

    Weights, gradients and AdamW's moments are divided over `world_size` ranks by FSDP (ZeRO stage 3, Rajbhandari et al.
    2020, section 5). The formula leaves out the CUDA context, the communication library's and cuBLAS's buffers, and
    what the allocator loses to rounding: leave some of a card's memory to them.

    For example 8b with 32,768 tokens on each of 2 ranks and 75 GiB: `plan_memory(MODEL_SIZES["8b"], 32768, 2, 75.0)`.
    Raises ValueError for a number that is not above 0.
    """
    require_positive(tokens_per_rank=tokens_per_rank, world_size=world_size, memory_gib=memory_gib)
    arguments = config, tokens_per_rank, world_size
    how = memory_gib, precision, recomputes
    plans = (predict_memory(*arguments, n, *how) for n in reversed(range(1, config.num_layers + 1)))
    return next((plan for plan in plans if plan.fits), predict_memory(*arguments, 0, *how))


def predict_memory(
    config: ModelShape,
    tokens_per_rank: int,
    world_size: int,
    n_kept: int,
    memory_gib: float = math.inf,
    precision: Precision = "bf16",
    recomputes: bool = True,
) -> MemoryPlan:
    """The plan in which `n_kept` blocks are not checkpointed, whether it fits or not; the rest is as in `plan_memory`.

    Raises ValueError for `n_kept` outside 0 … num_layers, and as `plan_memory`.
    """
    require_positive(tokens_per_rank=tokens_per_rank, world_size=world_size, memory_gib=memory_gib)
    if not 0 <= n_kept <= config.num_layers:
        raise ValueError(f"n_kept={n_kept}: must be between 0 and {config.num_layers}, the number of blocks")
    moments = _moments(config, tokens_per_rank, world_size, n_kept, precision, recomputes)
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    return MemoryPlan(n_kept, config.num_layers - n_kept, moment, moments[moment], memory_gib * GIB)


def _moments(
    config: ModelShape, tokens: int, world_size: int, n_kept: int, precision: Precision, recomputes: bool
) -> dict[str, dict[str, int]]:
    """What is held, by kind, at each moment of a step that may be the peak."""
    width = compute_bytes(precision)
    stream, hidden = tokens * config.d_model * width, tokens * config.d_ff * width
    table = config.vocab_size * config.d_model
    saved = fused_block_saved_tensors(config, tokens, precision)
    whole_block = sum(saved.values())
    made_again = [saved[name] for name in ELEMENTWISE] if recomputes else [0]
    kept_block = whole_block - sum(made_again)
    checkpointed_block = sum(saved[name] for name in KEPT_IN_CHECKPOINT)
    n_checkpointed = config.num_layers - n_kept
    before_head = n_checkpointed * checkpointed_block + n_kept * kept_block
    # The norms' weights, which FSDP leaves whole, are a thousandth of a percent and counted as if shared out.
    weights = width * -(-num_parameters(config) // world_size)
    # Of three layers at most: the one in use and two ahead; on the way back, the one just made and two being averaged.
    whole_layers = fsdp_gathered_bytes(config, precision)
    always = {"weights": weights, "AdamW's moments": 2 * weights, "gathered weights": whole_layers}
    summed_gradient = table * FLOAT32_BYTES  # of lm_head, summed over the chunks
    logits = min(LOGITS_BYTES, tokens * config.vocab_size * width)
    # ln_final's input and output, and the output's gradient.
    head = {"kept activations": before_head + 3 * stream + tokens * FLOAT32_BYTES}
    moments = {
        "the loss": always | head | {"the loss's buffers": summed_gradient + logits},
        "the loss's backward": always
        | head
        | {"the loss's buffers": summed_gradient, "gradients": width * (table + -(-table // world_size))},
        "the optimizer's step": always | {"gathered weights": 0, "gradients": weights},
    }
    for block in range(config.num_layers):
        is_kept = block >= n_checkpointed
        others = min(block, n_checkpointed) * checkpointed_block + max(block - n_checkpointed, 0) * kept_block
        done = config.d_model + table + (config.num_layers - block) * num_block_parameters(config)
        parts = {
            "kept activations": others + (kept_block if is_kept else checkpointed_block),
            # One kernel each makes a kept block's again, and each is gone when the next is made.
            "computed again": max(made_again) if is_kept else whole_block - checkpointed_block,
            # SwiGLU's: the gradients of w1's and w3's outputs, while that of w2's input is in w2's input's place; and
            # the stream's gradient, which goes by, and its sum with the block's.
            "a block's backward": 2 * hidden + 2 * stream,
            "gradients": width * -(-done // world_size) + whole_layers,
        }
        moments[f"backward of block {block}"] = always | parts
    return moments
