"""What a step keeps between forward and backward, by formula; training_memory.py adds the rest.

Plain arithmetic on a model's sizes, without torch. Activations are counted tensor by tensor, as autograd keeps them for
the project's own model run eagerly (torch.compile keeps fewer); a tensor that two operations keep counts once.
"""

from __future__ import annotations

from typing import Literal

from cs336_systems.accounting.flops import (
    ModelShape,
    Precision,
    num_block_parameters,
    require_positive,
)

Attention = Literal["naive", "sdpa", "flash-pytorch", "flash-triton", "flash-hopper"]

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
    fused = ("sdpa", "flash-pytorch", "flash-triton", "flash-hopper")
    if attention in fused:
        return saved | {"attention output by head": operand, "attention logsumexp": rows * FLOAT32_BYTES}
    raise ValueError(f"attention={attention!r}: must be one of naive, {', '.join(fused)}")


def block_saved_tensors(
    config: ModelShape,
    batch_size: int,
    context_length: int,
    precision: Precision = "fp32",
    attention: Attention = "naive",
) -> dict[str, int]:
    """Bytes that one Transformer block keeps for backward, by tensor, its input included and its parameters not.

    The residual stream and the norms are float32 under autocast too, as the embedding's output is; what enters a matrix
    product is cast, once for each product. The casts of weights are not counted here (see `autocast_weight_bytes`).

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
    segments = len(segment_lengths(config, checkpoint_every))
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
    for inputs_before, length in enumerate(segment_lengths(config, checkpoint_every)):
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
    A block keeps 16 times its input and more, so for the named sizes that is 1 or 2.
    """

    def peak(every: int) -> int:
        return peak_activation_bytes(config, batch_size, context_length, precision, attention, every)

    return min(range(config.num_layers, 0, -1), key=peak)


def segment_lengths(config: ModelShape, checkpoint_every: int) -> list[int]:
    """Blocks in each checkpointed segment, e.g. 5 blocks with checkpoint_every=2: [2, 2, 1]."""
    if not 1 <= checkpoint_every <= config.num_layers:
        raise ValueError(f"checkpoint_every={checkpoint_every}: must be between 1 and {config.num_layers}")
    whole, rest = divmod(config.num_layers, checkpoint_every)
    return [checkpoint_every] * whole + ([rest] if rest else [])


# ---- Copies of weights -----------------------------------------------------------------------------------------------


def num_block_matrix_parameters(config: ModelShape) -> int:
    """A block's weights that matrix products use: all but its norms."""
    return num_block_parameters(config) - 2 * config.d_model


def num_matrix_parameters(config: ModelShape) -> int:
    """Weights that matrix products use: all but the input embedding and the norms."""
    return config.num_layers * num_block_matrix_parameters(config) + config.vocab_size * config.d_model


def autocast_weight_bytes(config: ModelShape, precision: Precision, checkpoint_every: int | None = None) -> int:
    """Copies of the weights in the low precision, which their products keep for backward: one a weight, and none within
    checkpoints, so that with them lm_head's alone is left. Not an activation: batch and context do not change it.

    Autocast's cache holds none of them. It caches casts of leaf tensors, and the model's `x @ weight.T` hands it a
    view; where nothing is kept for backward, a copy goes as soon as its product is done.
    """
    width = compute_bytes(precision)
    if width == FLOAT32_BYTES:
        return 0
    in_checkpoints = 0 if checkpoint_every is None else config.num_layers * num_block_matrix_parameters(config)
    return (num_matrix_parameters(config) - in_checkpoints) * width
