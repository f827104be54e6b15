"""The formulas as Markdown tables for one model; scripts/accounting.py prints them."""

from __future__ import annotations

from collections.abc import Sequence

from cs336_systems.accounting.flops import (
    ModelShape,
    Precision,
    gpu_peak,
    matmul_flops_by_part,
    num_block_parameters,
    num_parameters,
    peak_tflops,
    require_positive,
    softmax_flops_forward,
    train_step_flops,
)
from cs336_systems.accounting.memory import (
    Attention,
    attention_saved_tensors,
    best_checkpoint_every,
    block_saved_tensors,
    compute_bytes,
    peak_activation_bytes,
    residual_stream_bytes,
    saved_activation_bytes,
)
from cs336_systems.accounting.parallelism import (
    Device,
    data_parallel_max_devices,
    data_parallel_min_tokens,
    ring_all_reduce_seconds,
    tensor_parallel_max_devices,
)
from cs336_systems.accounting.training_memory import Sharding, training_memory


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; the first column to the left, the others to the right."""
    lines = [headings, ["---"] + ["---:"] * (len(headings) - 1), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.3f}"


def model_report(
    config: ModelShape,
    batch_size: int,
    context_length: int,
    precision: Precision = "fp32",
    attention: Attention = "naive",
    checkpoint_every: int | None = None,
    sharding: Sharding = "none",
    num_devices: int = 1,
    gpu: str | None = None,
    bandwidth_gb_per_s: float | None = None,
) -> str:
    """Parameters, FLOPs, memory and communication limits of one model, as Markdown.

    With `gpu` (a name as torch.cuda.get_device_name() gives it) times at its peak are added, and with a bandwidth (in
    1e9 bytes/s) as well, the limits of data and tensor parallelism. Raises ValueError for arguments that cannot be,
    among them a GPU of which no peak in the precision is known, and a bandwidth without a GPU.
    """
    if bandwidth_gb_per_s is not None:
        require_positive(bandwidth_gb_per_s=bandwidth_gb_per_s)
        if gpu is None:
            raise ValueError(
                f"bandwidth_gb_per_s={bandwidth_gb_per_s}: must be given with gpu, whose peak it is set beside"
            )
    sections = [
        _parameter_section(config),
        _flops_section(config, batch_size, context_length, precision, attention, checkpoint_every, gpu),
        _memory_section(
            config, batch_size, context_length, precision, attention, checkpoint_every, sharding, num_devices
        ),
        _block_section(config, batch_size, context_length, precision, attention),
    ]
    if gpu is not None and bandwidth_gb_per_s is not None:
        peak, _ = _known_peak(gpu, precision)
        device = Device(peak * 1e12, bandwidth_gb_per_s * 1e9)
        sections.append(_limits_section(config, device, batch_size * context_length, compute_bytes(precision)))
    return "\n\n".join(sections)


def _known_peak(gpu: str, precision: Precision) -> tuple[float, str]:
    """`peak_tflops` and where it is from; ValueError where none is known."""
    peak, card = peak_tflops(gpu, precision), gpu_peak(gpu)
    if card is None:
        raise ValueError(
            f"gpu={gpu!r}: must be a card whose peak is known, by the name of torch.cuda.get_device_name, such as "
            "'NVIDIA H200' or 'NVIDIA RTX 4090'"
        )
    if peak is None:
        raise ValueError(f"precision={precision!r}: must be one that gpu={gpu!r} has a unit for")
    return peak, card.source


def _parameter_section(config: ModelShape) -> str:
    total, block, table = num_parameters(config), num_block_parameters(config), config.vocab_size * config.d_model
    rows = [
        ("input embedding", f"{table:,}"),
        (f"{config.num_layers} blocks of {block:,}", f"{config.num_layers * block:,}"),
        ("last norm", f"{config.d_model:,}"),
        ("lm_head", f"{table:,}"),
        ("all", f"{total:,}"),
    ]
    return "### Parameters\n\n" + markdown_table(("part", "parameters"), rows)


def _flops_section(
    config: ModelShape,
    batch_size: int,
    context_length: int,
    precision: Precision,
    attention: Attention,
    checkpoint_every: int | None,
    gpu: str | None,
) -> str:
    parts = matmul_flops_by_part(config, batch_size, context_length)
    forward = sum(parts.values())
    step = train_step_flops(config, batch_size, context_length)
    hardware = train_step_flops(
        config,
        batch_size,
        context_length,
        flash_backward=attention != "naive",
        recomputed_blocks=config.num_layers if checkpoint_every else 0,
    )
    rows = [(part, f"{flops / 1e12:.4g}", f"{flops / forward:.1%}") for part, flops in parts.items()]
    rows += [
        ("forward", f"{forward / 1e12:.4g}", "100.0%"),
        ("forward and backward", f"{step / 1e12:.4g}", f"{step / forward:.1%}"),
        ("the same with what is recomputed", f"{hardware / 1e12:.4g}", f"{hardware / forward:.1%}"),
    ]
    text = "### Matrix products\n\n" + markdown_table(("part", "TFLOP", "of forward"), rows)
    softmax = softmax_flops_forward(config, batch_size, context_length)
    attention_products = parts["attention_scores"] + parts["attention_values"]
    text += (
        f"\n\nAll N² scores are counted. Softmax beside them: {softmax / 1e12:.4g} TFLOP, "
        f"{softmax / attention_products:.2%} of attention's two products."
    )
    if gpu is not None:
        peak, source = _known_peak(gpu, precision)
        text += (
            f"\n\nAt {peak:g} TFLOP/s ({gpu}, {precision}; {source}) forward takes "
            f"{forward / peak / 1e9:.3g} ms at least, forward and backward {step / peak / 1e9:.3g} ms."
        )
    return text


def _memory_section(
    config: ModelShape,
    batch_size: int,
    context_length: int,
    precision: Precision,
    attention: Attention,
    checkpoint_every: int | None,
    sharding: Sharding,
    num_devices: int,
) -> str:
    memory = training_memory(
        config, batch_size, context_length, precision, attention, checkpoint_every, sharding, num_devices
    )
    rows = [
        ("parameters", _gib(memory.parameters)),
        ("gradients", _gib(memory.gradients)),
        ("AdamW's moments", _gib(memory.optimizer_state)),
        ("low-precision or gathered weights", _gib(memory.weight_copies)),
        ("activations kept for backward, at most", _gib(memory.activations)),
        ("at the peak", _gib(memory.peak)),
    ]
    model = (config, batch_size, context_length, precision, attention)
    best = best_checkpoint_every(*model)
    note = (
        "The peak has activations or gradients, the larger, as backward frees the first while it makes the second. "
        f"After forward {_gib(saved_activation_bytes(*model, checkpoint_every))} GiB are kept. Checkpoints would take "
        f"the most that is kept from {_gib(peak_activation_bytes(*model))} GiB to "
        f"{_gib(peak_activation_bytes(*model, best))} GiB, with segments of {best}."
    )
    heading = f"### Memory of one of {num_devices} devices" if num_devices > 1 else "### Memory"
    return f"{heading}\n\n" + markdown_table(("kind", "GiB"), rows) + f"\n\n{note}"


def _block_section(
    config: ModelShape, batch_size: int, context_length: int, precision: Precision, attention: Attention
) -> str:
    saved = block_saved_tensors(config, batch_size, context_length, precision, attention)
    total = sum(saved.values())
    in_attention = attention_saved_tensors(
        batch_size,
        config.num_heads,
        context_length,
        config.d_model // config.num_heads,
        compute_bytes(precision),
        attention,
    )
    largest = sorted(saved.items(), key=lambda item: -item[1])[:5]
    rows = [(name, f"{size / 2**20:.2f}", f"{size / total:.1%}") for name, size in largest]
    rows += [
        ("attention's", f"{sum(in_attention.values()) / 2**20:.2f}", f"{sum(in_attention.values()) / total:.1%}"),
        ("all of the block's", f"{total / 2**20:.2f}", "100.0%"),
    ]
    stream = residual_stream_bytes(config, batch_size, context_length)
    return (
        "### Kept for backward by one block\n\n"
        + markdown_table(("tensor", "MiB", "share"), rows)
        + f"\n\nOne activation of the residual stream is {stream / 2**20:.2f} MiB."
    )


def _limits_section(config: ModelShape, device: Device, batch_tokens: int, width: int) -> str:
    rows = []
    for scheme, element_bytes in (("data parallel, float32 gradients", 4), (f"FSDP, {width}-byte weights", width)):
        tokens = data_parallel_min_tokens(device, element_bytes=element_bytes)
        devices = data_parallel_max_devices(device, batch_tokens, element_bytes=element_bytes)
        rows.append((scheme, f"{tokens:,.0f}", f"{devices:,}"))
    devices = tensor_parallel_max_devices(device, config.d_ff, element_bytes=width, num_matrices=3)
    rows.append((f"tensor parallel, {width}-byte activations", "any", f"{devices:,}"))
    seconds = ring_all_reduce_seconds(4 * num_parameters(config), 2, device.bandwidth_bytes_per_s)
    return (
        "### Where communication takes over\n\n"
        f"At {device.flops_per_s:.3g} FLOP/s and {device.bandwidth_bytes_per_s:.3g} B/s a device computes "
        f"{device.intensity:,.0f} FLOPs while it sends a byte.\n\n"
        + markdown_table(("scheme", "tokens a device, at least", f"devices for {batch_tokens:,} tokens, at most"), rows)
        + f"\n\nA ring all-reduce of float32 gradients over 2 devices takes {seconds * 1e3:.3g} ms."
    )
