"""Floating-point operations and parameters of the project's Transformer, and what GPUs can do at most.

Plain arithmetic on a model's sizes, without torch. A matrix product of (m, k) by (k, n) is 2·m·k·n operations: one
multiplication and one addition for each of its m·k·n terms.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, Protocol

AttentionCount = Literal["full", "causal"]
Precision = Literal["fp32", "tf32", "bf16", "fp16"]


class ModelShape(Protocol):
    """Any object with these attributes will do, for example `cs336_systems.configs.ModelConfig`."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def context_length(self) -> int: ...
    @property
    def d_model(self) -> int: ...
    @property
    def d_ff(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...


def require_positive(**values: float) -> None:
    """ValueError naming the first argument that is not above zero."""
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name}={value}: must be above 0")


# ---- Parameters ------------------------------------------------------------------------------------------------------


def num_block_parameters(config: ModelShape) -> int:
    """Parameters of one Transformer block: 4·d² for attention, 3·d·d_ff for SwiGLU, 2·d for the two RMSNorms."""
    d = config.d_model
    return 4 * d * d + 3 * d * config.d_ff + 2 * d


def num_parameters(config: ModelShape, input_embedding: bool = True) -> int:
    """All parameters: the blocks', the last RMSNorm's, and vocab_size·d each for input embedding and lm_head (untied).

    `input_embedding=False` leaves the input embedding out: it is a table lookup and costs no matrix product.
    """
    tables = (2 if input_embedding else 1) * config.vocab_size * config.d_model
    return tables + config.num_layers * num_block_parameters(config) + config.d_model


# ---- Operations ------------------------------------------------------------------------------------------------------


def matmul_flops_by_part(
    config: ModelShape, batch_size: int, context_length: int, attention: AttentionCount = "full"
) -> dict[str, int]:
    """FLOPs of the matrix products of one forward pass, all layers together, by part of the model.

    The parts: "qkv_proj", "attention_scores" (q kᵀ), "attention_values" (softmax(…) v), "output_proj", "ffn" (three
    products), "lm_head". `attention="full"` counts all N² scores, as plain attention computes them and as
    torch.utils.flop_counter counts every implementation; "causal" counts half of them, N²/2, the convention for
    attention that skips what the mask hides (Dao 2023, section 4.1; exactly it would be N(N+1)/2).

    Raises ValueError for a batch or context below 1, or another word for `attention`.
    """
    require_positive(batch_size=batch_size, context_length=context_length)
    if attention not in ("full", "causal"):
        raise ValueError(f"attention={attention!r}: must be 'full' or 'causal'")
    tokens, d = batch_size * context_length, config.d_model
    # (N, head_dim) by (head_dim, N), for each head of each sequence: 2·N²·d a sequence, however many heads.
    scores = 2 * tokens * context_length * d // (2 if attention == "causal" else 1)
    per_block = {
        "qkv_proj": 3 * 2 * tokens * d * d,
        "attention_scores": scores,
        "attention_values": scores,
        "output_proj": 2 * tokens * d * d,
        "ffn": 3 * 2 * tokens * d * config.d_ff,
    }
    return {part: config.num_layers * flops for part, flops in per_block.items()} | {
        "lm_head": 2 * tokens * d * config.vocab_size
    }


def matmul_flops_forward(
    config: ModelShape, batch_size: int, context_length: int, attention: AttentionCount = "full"
) -> int:
    """FLOPs of all matrix products of one forward pass over (batch_size, context_length) tokens.

    That is 2·(parameters of the matrices, without the input embedding)·tokens, plus 4·N²·d a layer and sequence for
    attention. See `matmul_flops_by_part` for `attention` and for errors.
    """
    return sum(matmul_flops_by_part(config, batch_size, context_length, attention).values())


def train_step_flops(
    config: ModelShape,
    batch_size: int,
    context_length: int,
    attention: AttentionCount = "full",
    flash_backward: bool = False,
    recomputed_blocks: int = 0,
) -> int:
    """FLOPs of the matrix products of forward and backward; the optimizer has none.

    Backward costs twice forward: each product Y = X W has two, dX = dY Wᵀ and dW = Xᵀ dY, of the same size. That is
    3 times forward in all, the model's FLOPs (PaLM, Chowdhery et al. 2022, appendix B), the default. For what the
    hardware executes:

    Args:
        flash_backward: FlashAttention's backward computes the scores again: 5 products where forward has 2.
        recomputed_blocks: blocks whose forward is run again for activation checkpointing.

    Raises ValueError for `recomputed_blocks` outside 0 … num_layers, and as `matmul_flops_by_part`.
    """
    if not 0 <= recomputed_blocks <= config.num_layers:
        raise ValueError(f"recomputed_blocks={recomputed_blocks}: must be between 0 and {config.num_layers}")
    parts = matmul_flops_by_part(config, batch_size, context_length, attention)
    forward = sum(parts.values())
    recomputed_scores = parts["attention_scores"] if flash_backward else 0
    blocks = forward - parts["lm_head"]
    return 3 * forward + recomputed_scores + blocks * recomputed_blocks // config.num_layers


def softmax_flops_forward(config: ModelShape, batch_size: int, context_length: int) -> int:
    """Operations of attention's softmaxes in one forward pass, all layers together.

    5 a score: compare for the maximum, subtract it, exponentiate, add, divide, each counted as one however long an
    exponential takes. All N² scores of a head are counted.
    """
    require_positive(batch_size=batch_size, context_length=context_length)
    return 5 * config.num_layers * config.num_heads * batch_size * context_length**2


def attention_flops(batch_size: int, num_heads: int, length: int, head_dim: int, is_causal: bool) -> dict[str, int]:
    """FLOPs of one attention by pass, in the FlashAttention papers' convention (Dao 2023, section 4.1).

    "forward" is 4·batch_size·num_heads·length²·head_dim, halved when causal; "backward" is 2.5 times that (five
    products, one of them the recomputed scores, against two), whatever the implementation really computes.
    """
    require_positive(batch_size=batch_size, num_heads=num_heads, length=length, head_dim=head_dim)
    forward = 4 * batch_size * num_heads * length**2 * head_dim // (2 if is_causal else 1)
    return {"forward": forward, "backward": forward * 5 // 2, "both": forward + forward * 5 // 2}


# ---- What the hardware can do ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GpuPeak:
    """A GPU's peak in TFLOP/s without sparsity; float16 and bfloat16 with float32 accumulation, float32 without tensor
    cores. None where the GPU has no such unit."""

    fp32: float
    tf32: float | None
    bf16: float | None
    fp16: float
    source: str


_HOPPER = "NVIDIA H100 Tensor Core GPU Architecture whitepaper (dense figures)"
_H100 = "NVIDIA H100 Tensor Core GPU datasheet (tensor cores: half of the figures, which are with sparsity)"
_H200 = "NVIDIA H200 Tensor Core GPU datasheet (tensor cores: half of the figures, which are with sparsity)"
_ADA = "NVIDIA Ada GPU Architecture whitepaper, appendix A (FP16 with FP32 accumulate)"
_AMPERE_GEFORCE = "NVIDIA Ampere GA102 GPU Architecture whitepaper, appendix A (FP16 with FP32 accumulate)"
_BLACKWELL_GEFORCE = "NVIDIA RTX Blackwell GPU Architecture whitepaper, appendix A (FP16 with FP32 accumulate)"

# The keys are what follows the maker's name in torch.cuda.get_device_name(), whole: a "MIG 1g.10gb" behind it is a part
# of the card, and an "RTX 4090 D" or "RTX 4090 Laptop GPU" another chip, so none of them may match.
GPU_PEAKS: dict[str, GpuPeak] = {
    r"B200": GpuPeak(75, 1100, 2250, 2250, "NVIDIA HGX B200 datasheet (tensor cores: half of the sparse figures)"),
    r"H200": GpuPeak(66.9, 494.7, 989.4, 989.4, _H200),
    r"H200 NVL": GpuPeak(60, 417.5, 835.5, 835.5, _H200),
    r"H100 80GB HBM3": GpuPeak(66.9, 494.7, 989.4, 989.4, _HOPPER),
    r"H100 PCIe": GpuPeak(51.2, 378, 756, 756, _HOPPER),
    r"H100 NVL": GpuPeak(60, 417.5, 835.5, 835.5, _H100),
    r"A100-(SXM4|PCIE|PCIe)-(40|80)GB|A100 80GB PCIe": GpuPeak(
        19.5, 156, 312, 312, "NVIDIA A100 Tensor Core GPU datasheet"
    ),
    r"L4": GpuPeak(30.3, 60, 121, 121, "NVIDIA L4 Tensor Core GPU datasheet (half of the sparse figures)"),
    r"L40S": GpuPeak(91.6, 183, 362, 362, "NVIDIA L40S datasheet"),
    r"T4": GpuPeak(8.1, None, None, 65, "NVIDIA T4 Tensor Core GPU datasheet"),
    r"RTX 5090": GpuPeak(104.8, 104.8, 209.5, 209.5, _BLACKWELL_GEFORCE),
    r"RTX 4090": GpuPeak(82.6, 82.6, 165.2, 165.2, _ADA),
    r"RTX 3090": GpuPeak(35.6, 35.6, 71, 71, _AMPERE_GEFORCE),
}


def gpu_peak(gpu_name: str) -> GpuPeak | None:
    """The table's entry for a GPU named as torch.cuda.get_device_name() does, for example "NVIDIA H100 80GB HBM3";
    None for one that is not in the table."""
    model = re.sub(r"^((NVIDIA|Tesla|GeForce)\s+)+", "", gpu_name.strip())
    for pattern, peak in GPU_PEAKS.items():
        if re.fullmatch(pattern, model):
            return peak
    return None


def peak_tflops(gpu_name: str, precision: Precision) -> float | None:
    """Peak dense TFLOP/s of matrix products in a precision; None for an unknown GPU or a unit that it lacks.

    "fp32" is IEEE float32 (no tensor cores), "tf32" float32 rounded to 10 bits of mantissa for the tensor cores. For
    example `peak_tflops("NVIDIA H200", "bf16")` is 989.4. Raises ValueError for another precision.
    """
    if precision not in ("fp32", "tf32", "bf16", "fp16"):
        raise ValueError(f"precision={precision!r}: must be 'fp32', 'tf32', 'bf16' or 'fp16'")
    peak = gpu_peak(gpu_name)
    return None if peak is None else getattr(peak, precision)


def model_flops_utilization(flops: float, seconds: float, peak_tflops: float, num_gpus: int = 1) -> float:
    """The share, 0 … 1, of the GPUs' peak that a step of `flops` in `seconds` reaches (Chowdhery et al. 2022, app. B).

    For example 989.4e12 FLOPs in 2 s on one GPU of 989.4 TFLOP/s are 0.5. Raises ValueError unless seconds, peak and
    num_gpus are above 0.
    """
    require_positive(seconds=seconds, peak_tflops=peak_tflops, num_gpus=num_gpus)
    return flops / (seconds * peak_tflops * 1e12 * num_gpus)
