"""Memory of a training step by formula: parameters, gradients, optimizer state, and what backward needs kept.

Plain arithmetic on a model's sizes, without torch. Activations are counted tensor by tensor, as autograd keeps them for
the project's own model run eagerly (torch.compile keeps fewer); a tensor that two operations keep counts once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from cs336_systems.accounting.flops import (
    ModelShape,
    Precision,
    num_block_parameters,
    num_parameters,
    require_positive,
)

Attention = Literal["naive", "sdpa", "flash-pytorch", "flash-triton"]
Sharding = Literal["none", "optimizer", "gradients", "fsdp"]

FLOAT32_BYTES = 4


def compute_bytes(precision: Precision) -> int:
    """Bytes of an element of a matrix product's operands: 4 in fp32 and tf32, 2 under bf16 and fp16 autocast."""
    sizes = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}
    if precision not in sizes:
        raise ValueError(f"precision={precision!r}: must be one of {', '.join(sizes)}")
    return sizes[precision]


# ---- Kept for backward -----------------------------------------------------------------------------------------------


def residual_stream_bytes(config: ModelShape, batch_size: int, context_length: int, element_bytes: int = 4) -> int:
    """One activation of the residual stream: (batch_size, context_length, d_model), float32 in all our precisions.

    For example 2.7b, batch 4, context 128: 4·128·2560·4 bytes = 5.0 MiB.
    """
    require_positive(batch_size=batch_size, context_length=context_length)
    return batch_size * context_length * config.d_model * element_bytes


def attention_saved_tensors(
    batch_size: int, num_heads: int, context_length: int, head_dim: int, element_bytes: int, attention: Attention
) -> dict[str, int]:
    """Bytes that causal attention alone keeps for backward, by tensor; q, k and v included.

    `naive` keeps two (batch, heads, N, N) tensors: the exponentials, in float32, and the probabilities that multiply v,
    in the operands' dtype. The others (FlashAttention-2, Dao 2023, section 3.1) keep the output and a logsumexp a row.
    """
    rows = batch_size * num_heads * context_length
    operand = rows * head_dim * element_bytes
    saved = {"q": operand, "k": operand, "v": operand}
    if attention == "naive":
        return saved | {
            "attention exponentials": rows * context_length * FLOAT32_BYTES,
            "attention probabilities": rows * context_length * element_bytes,
            "attention exponentials' sums": rows * FLOAT32_BYTES,
            "causal mask": context_length**2,  # a byte each; every block makes its own
        }
    if attention in ("sdpa", "flash-pytorch", "flash-triton"):
        return saved | {"attention output by head": operand, "attention logsumexp": rows * FLOAT32_BYTES}
    raise ValueError(f"attention={attention!r}: must be 'naive', 'sdpa', 'flash-pytorch' or 'flash-triton'")


def block_saved_tensors(
    config: ModelShape,
    batch_size: int,
    context_length: int,
    precision: Precision = "fp32",
    attention: Attention = "naive",
) -> dict[str, int]:
    """Bytes that one Transformer block keeps for backward, by tensor, its input included and its parameters not.

    The residual stream and the norms are float32 under autocast too, as the embedding's output is; what enters a matrix
    product is cast, once for each product, where the casts of a weight are shared (see `autocast_weight_bytes`).

    For example the five largest: `sorted(block_saved_tensors(config, 4, 512).items(), key=lambda x: -x[1])[:5]`.
    Raises ValueError for a batch or context below 1, or an unknown precision or attention.
    """
    width = compute_bytes(precision)
    stream = residual_stream_bytes(config, batch_size, context_length)
    tokens = batch_size * context_length
    operand = tokens * config.d_model * width
    hidden = tokens * config.d_ff * width
    inverse_rms = tokens * FLOAT32_BYTES
    is_cast = width != FLOAT32_BYTES
    head_dim = config.d_model // config.num_heads
    return {
        "ln1 input": stream,
        "ln1 normalized": stream,
        "ln1 inverse rms": inverse_rms,
        "q_proj, k_proj, v_proj input": operand * (3 if is_cast else 1),
        **attention_saved_tensors(batch_size, config.num_heads, context_length, head_dim, width, attention),
        "output_proj input": operand,
        "ln2 input": stream,
        "ln2 normalized": stream,
        "ln2 inverse rms": inverse_rms,
        "w1, w3 input": operand * (2 if is_cast else 1),
        "w1 output": hidden,
        "sigmoid of w1 output": hidden,
        "silu of w1 output": hidden,
        "w3 output": hidden,
        "w2 input": hidden,
    }


def head_saved_tensors(
    config: ModelShape, batch_size: int, context_length: int, precision: Precision = "fp32"
) -> dict[str, int]:
    """Bytes that the last norm, lm_head and the cross-entropy keep for backward, by tensor.

    The loss keeps float32 logits: lm_head's own output, or under autocast a copy of it.
    """
    stream = residual_stream_bytes(config, batch_size, context_length)
    tokens = batch_size * context_length
    return {
        "ln_final input": stream,
        "ln_final normalized": stream,
        "ln_final inverse rms": tokens * FLOAT32_BYTES,
        "lm_head input": tokens * config.d_model * compute_bytes(precision),
        "float32 logits": tokens * config.vocab_size * FLOAT32_BYTES,
        "loss logsumexp": tokens * FLOAT32_BYTES,
    }


def saved_activation_bytes(
    config: ModelShape,
    batch_size: int,
    context_length: int,
    precision: Precision = "fp32",
    attention: Attention = "naive",
    checkpoint_every: int | None = None,
) -> int:
    """What the whole model and its loss keep between forward and backward, weights' autocast copies not counted.

    With `checkpoint_every=k`, blocks are in checkpointed segments of k (the last may be shorter), and only each
    segment's input is kept (Chen et al. 2016, section 4).
    """
    head = sum(head_saved_tensors(config, batch_size, context_length, precision).values())
    if checkpoint_every is None:
        block = sum(block_saved_tensors(config, batch_size, context_length, precision, attention).values())
        return config.num_layers * block + head
    segments = len(_segment_lengths(config, checkpoint_every))
    return segments * residual_stream_bytes(config, batch_size, context_length) + head


def peak_activation_bytes(
    config: ModelShape,
    batch_size: int,
    context_length: int,
    precision: Precision = "fp32",
    attention: Attention = "naive",
    checkpoint_every: int | None = None,
) -> int:
    """The most that kept activations take at any time of a step: at the end of forward, or, with checkpoints, when a
    segment has just been run again and the inputs of those before it are still kept."""
    peak = saved_activation_bytes(config, batch_size, context_length, precision, attention, checkpoint_every)
    if checkpoint_every is None:
        return peak
    stream = residual_stream_bytes(config, batch_size, context_length)
    block = sum(block_saved_tensors(config, batch_size, context_length, precision, attention).values())
    for inputs_before, length in enumerate(_segment_lengths(config, checkpoint_every)):
        # The segment's own input is the "ln1 input" of its first block.
        peak = max(peak, inputs_before * stream + length * block)
    return peak


def best_checkpoint_every(
    config: ModelShape,
    batch_size: int,
    context_length: int,
    precision: Precision = "fp32",
    attention: Attention = "naive",
) -> int:
    """The segment length with the least `peak_activation_bytes`; of equals the longest, as it has the fewest segments.

    Segments of k keep about num_layers / k inputs and then k blocks, least at k = sqrt(num_layers · input / block).
    A block keeps 15 to 100 times its input, so for the named sizes that is 1 or 2.
    """

    def peak(every: int) -> int:
        return peak_activation_bytes(config, batch_size, context_length, precision, attention, every)

    return min(range(config.num_layers, 0, -1), key=peak)


def _segment_lengths(config: ModelShape, checkpoint_every: int) -> list[int]:
    if not 1 <= checkpoint_every <= config.num_layers:
        raise ValueError(f"checkpoint_every={checkpoint_every}: must be between 1 and {config.num_layers}")
    whole, rest = divmod(config.num_layers, checkpoint_every)
    return [checkpoint_every] * whole + ([rest] if rest else [])


# ---- Weights and what goes with them ---------------------------------------------------------------------------------


def num_matrix_parameters(config: ModelShape) -> int:
    """Weights that matrix products use: all but the input embedding and the norms."""
    d = config.d_model
    return config.num_layers * (num_block_parameters(config) - 2 * d) + config.vocab_size * d


def autocast_weight_bytes(config: ModelShape, precision: Precision) -> int:
    """Copies of the weights in the low precision that autocast makes: one a weight, kept for backward by its product
    (and by autocast's cache until the context ends). Not an activation: batch and context do not change it."""
    width = compute_bytes(precision)
    return 0 if width == FLOAT32_BYTES else num_matrix_parameters(config) * width


def fsdp_gathered_bytes(config: ModelShape, precision: Precision, layers_ahead: int = 2) -> int:
    """Whole weights on a device at once under FSDP at most: the layer in use and `layers_ahead` gathered before use.

    A layer is one Linear or Embedding. Weights are gathered in the precision that they are used in.
    """
    if layers_ahead < 0:
        raise ValueError(f"layers_ahead={layers_ahead}: must be at least 0")
    d, f, table = config.d_model, config.d_ff, config.vocab_size * config.d_model
    # In order of use; one block more than the window can hold shows every window that there is.
    block = [d * d] * 4 + [d * f] * 3
    in_order = [table] + block * min(config.num_layers, 1 + math.ceil((layers_ahead + 1) / len(block))) + [table]
    window = layers_ahead + 1
    largest = max(sum(in_order[i : i + window]) for i in range(max(1, len(in_order) - window + 1)))
    return largest * compute_bytes(precision)


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes on one device, by kind. What is not in it: temporaries, the allocator's rounding, the CUDA context."""

    parameters: int
    gradients: int
    optimizer_state: int
    weight_copies: int
    """In the low precision: autocast's, or the layers that FSDP has gathered."""
    activations: int
    """Kept for backward, at the most."""

    @property
    def peak(self) -> int:
        """The most at any time of a step, after the first, that drops gradients before forward (set_to_none): backward
        frees activations as it makes gradients, so the most is at one of its ends."""
        always = self.parameters + self.optimizer_state + self.weight_copies
        return always + max(self.activations, self.gradients)


def training_memory(
    config: ModelShape,
    batch_size: int,
    context_length: int,
    precision: Precision = "fp32",
    attention: Attention = "naive",
    checkpoint_every: int | None = None,
    sharding: Sharding = "none",
    num_devices: int = 1,
) -> TrainingMemory:
    """Memory of training with AdamW on one of `num_devices`, each with `batch_size` sequences of its own.

    Parameters, gradients and AdamW's two moments are float32. They are divided over the devices by `sharding` (ZeRO,
    Rajbhandari et al. 2020, section 5): "optimizer" the moments (stage 1), "gradients" the gradients as well (stage 2),
    "fsdp" the weights too (stage 3; the norms' weights stay whole).

    Raises ValueError for an unknown word, or a batch, context, number of devices or `checkpoint_every` out of range.
    """
    require_positive(num_devices=num_devices)
    if sharding not in ("none", "optimizer", "gradients", "fsdp"):
        raise ValueError(f"sharding={sharding!r}: must be 'none', 'optimizer', 'gradients' or 'fsdp'")
    whole = num_parameters(config)
    norms = (2 * config.num_layers + 1) * config.d_model
    replicated = norms if sharding == "fsdp" else 0
    share = replicated + math.ceil((whole - replicated) / num_devices)
    parameters = share if sharding == "fsdp" else whole
    gradients = share if sharding in ("gradients", "fsdp") else whole
    moments = 2 * (whole if sharding == "none" else share)
    return TrainingMemory(
        parameters=parameters * FLOAT32_BYTES,
        gradients=gradients * FLOAT32_BYTES,
        optimizer_state=moments * FLOAT32_BYTES,
        weight_copies=(
            fsdp_gathered_bytes(config, precision) if sharding == "fsdp" else autocast_weight_bytes(config, precision)
        ),
        activations=peak_activation_bytes(config, batch_size, context_length, precision, attention, checkpoint_every),
    )
