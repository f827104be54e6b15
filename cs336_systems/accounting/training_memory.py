"""Memory of a training step by formula: weights, gradients, optimizer state and activations, shared out or not, and
the peak.

Plain arithmetic on a model's sizes, without torch.
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
from cs336_systems.accounting.memory import (
    FLOAT32_BYTES,
    Attention,
    autocast_weight_bytes,
    block_saved_tensors,
    compute_bytes,
    num_block_matrix_parameters,
    peak_activation_bytes,
    residual_stream_bytes,
    saved_activation_bytes,
    segment_lengths,
)

Sharding = Literal["none", "optimizer", "gradients", "fsdp"]


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes on one device, by kind."""

    parameters: int
    gradients: int
    optimizer_state: int
    weight_copies: int
    """In the low precision: those that autocast's products keep for backward, or the layers that FSDP has gathered."""
    activations: int
    """Kept for backward, at the most."""
    peak: int
    """The most at any time of a step, after the first, that drops gradients before forward (set_to_none). What is not
    in it: the optimizer's temporaries, the allocator's rounding, the CUDA context."""


def training_memory(
    config: ModelShape,
    batch_size: int,
    context_length: int,
    precision: Precision = "fp32",
    attention: Attention = "naive",
    checkpoint_every: int | None = None,
    sharding: Sharding = "none",
    num_devices: int = 1,
    keeps_gradients: bool = False,
) -> TrainingMemory:
    """Memory of training with AdamW on one of `num_devices`, each with `batch_size` sequences of its own.

    Parameters, gradients and AdamW's two moments are float32. They are divided over the devices by `sharding` (ZeRO,
    Rajbhandari et al. 2020, section 5): "optimizer" the moments (stage 1), "gradients" the gradients as well (stage 2),
    "fsdp" the weights too (stage 3; the norms' weights stay whole). With `keeps_gradients` the gradients' memory lasts
    from step to step, as that of buckets does into which they are views.

    Raises ValueError for an unknown word, or a batch, context, number of devices or `checkpoint_every` out of range.
    """
    require_positive(num_devices=num_devices)
    if sharding not in ("none", "optimizer", "gradients", "fsdp"):
        raise ValueError(f"sharding={sharding!r}: must be 'none', 'optimizer', 'gradients' or 'fsdp'")
    whole = num_parameters(config)
    norms = (2 * config.num_layers + 1) * config.d_model
    replicated = norms if sharding == "fsdp" else 0
    share = replicated + math.ceil((whole - replicated) / num_devices)
    parameters = FLOAT32_BYTES * (share if sharding == "fsdp" else whole)
    gradients = FLOAT32_BYTES * (share if sharding in ("gradients", "fsdp") else whole)
    moments = FLOAT32_BYTES * 2 * (whole if sharding == "none" else share)
    step = (config, batch_size, context_length, precision, attention, checkpoint_every)
    gathered = fsdp_gathered_bytes(config, precision) if sharding == "fsdp" else 0
    kept, made_anew = (gradients, 0) if keeps_gradients else (0, gradients)
    moving = _moving_peak(*step, made_anew, keeps_copies=sharding != "fsdp")
    return TrainingMemory(
        parameters=parameters,
        gradients=gradients,
        optimizer_state=moments,
        weight_copies=gathered or autocast_weight_bytes(config, precision, checkpoint_every),
        activations=peak_activation_bytes(*step),
        peak=parameters + moments + gathered + kept + moving,
    )


def step_peak_bytes(
    config: ModelShape,
    batch_size: int,
    context_length: int,
    mode: Literal["forward", "forward-backward", "train-step"] = "train-step",
    precision: Precision = "fp32",
    attention: Attention = "naive",
    checkpoint_every: int | None = None,
) -> int:
    """`training_memory`'s peak on one device for a step of one mode; without an optimizer there are no moments.

    A forward step keeps nothing for backward: beside the weights there are, at the least, the logits, or plain
    attention's two (batch, heads, N, N) tensors of one block. Raises ValueError as `training_memory`.
    """
    step = (config, batch_size, context_length, precision, attention)
    memory = training_memory(*step, checkpoint_every)
    if mode == "train-step":
        return memory.peak
    if mode == "forward-backward":
        return memory.peak - memory.optimizer_state
    block = block_saved_tensors(*step)
    scores = sum(block.get(f"attention {name}", 0) for name in ("exponentials", "probabilities"))
    logits = batch_size * context_length * config.vocab_size * compute_bytes(precision)
    return memory.parameters + max(scores, logits)


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


def _moving_peak(
    config: ModelShape,
    batch_size: int,
    context_length: int,
    precision: Precision,
    attention: Attention,
    checkpoint_every: int | None,
    gradients: int,
    keeps_copies: bool,
) -> int:
    """The most that activations, copies of weights, gradients and backward's temporaries take together.

    Backward is followed from the loss to the first block: it frees what a block kept and makes the block's gradients,
    which are `gradients` bytes in all.
    """
    shape = (config, batch_size, context_length)
    stream = residual_stream_bytes(*shape)
    logits = batch_size * context_length * config.vocab_size * FLOAT32_BYTES
    block = sum(block_saved_tensors(*shape, precision, attention).values())
    is_copied = keeps_copies and compute_bytes(precision) != FLOAT32_BYTES
    block_copies = num_block_matrix_parameters(config) * compute_bytes(precision) if is_copied else 0
    kept_copies = autocast_weight_bytes(config, precision, checkpoint_every) if is_copied else 0
    gradient_bytes = gradients / num_parameters(config)  # of a parameter, on this device
    in_block = max(
        block + block_copies + 2 * stream,
        _in_softmax_backward(*shape, precision, attention, is_copied, gradient_bytes),
    )
    # The loss's backward is at three float32 tensors of the logits' size, while the logits are kept.
    kept = saved_activation_bytes(*shape, precision, attention, checkpoint_every)
    peak: float = kept + kept_copies + 3 * logits
    with_gradient = config.d_model * (config.vocab_size + 1)  # the parameters that have theirs
    segments = [config.num_layers] if checkpoint_every is None else segment_lengths(config, checkpoint_every)
    for inputs_before in reversed(range(len(segments))):
        for blocks_before in reversed(range(segments[inputs_before])):  # in the segment, which has just been run again
            held = inputs_before * stream + blocks_before * (block + block_copies)
            peak = max(peak, held + in_block + with_gradient * gradient_bytes)
            with_gradient += num_block_parameters(config)
    return max(round(peak), gradients)


def _in_softmax_backward(
    config: ModelShape,
    batch_size: int,
    context_length: int,
    precision: Precision,
    attention: Attention,
    is_copied: bool,
    gradient_bytes: float,
) -> float:
    """What a block holds while backward is in plain attention's division by the exponentials' sums, with the gradients
    that it has by then: five float32 tensors of N² scores a head, beside what it still keeps. 0 for FlashAttention."""
    if attention != "naive":
        return 0
    saved = block_saved_tensors(config, batch_size, context_length, precision, attention)
    tensors = list(saved)
    # Backward goes from the last tensor to the first, and has come to the exponentials: the probabilities are freed.
    still_kept = tensors[: tensors.index("attention exponentials") + 1]
    still_kept += ["attention exponentials' sums", "causal mask"]
    d = config.d_model
    copies = 3 * d * d * compute_bytes(precision) if is_copied else 0  # of q_proj, k_proj, v_proj
    return (
        sum(saved[name] for name in still_kept)
        + copies
        + 5 * saved["attention exponentials"]
        + 2 * residual_stream_bytes(config, batch_size, context_length)
        + (d * d + 3 * d * config.d_ff) * gradient_bytes
    )
