"""The handout's paper exercise: the XXL model's memory, and the batch at which its forward pass is bound by arithmetic.

The model is 126 blocks of two linear layers, 16,384 → 53,248 → 16,384, without attention, embeddings or activation
functions: the feed-forward layers are where the FLOPs of a model of this size are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cs336_systems.accounting.flops import require_positive
from cs336_systems.accounting.parallelism import (
    Device,
    data_parallel_max_devices,
    data_parallel_min_tokens,
    mesh_forward_times,
    mesh_max_devices,
    mesh_min_tokens,
    ring_all_gather_seconds,
    ring_all_reduce_seconds,
    tensor_parallel_max_devices,
)


@dataclass(frozen=True)
class FeedForwardModel:
    """Blocks of two linear layers, D → F → D, and nothing else: the handout's model for accounting."""

    d_model: int
    d_ff: int
    num_blocks: int

    def __post_init__(self) -> None:
        require_positive(d_model=self.d_model, d_ff=self.d_ff, num_blocks=self.num_blocks)

    @property
    def num_parameters(self) -> int:
        return self.num_blocks * 2 * self.d_model * self.d_ff

    @property
    def state_bytes(self) -> int:
        """Weights, gradients and AdamW's two moments, all float32: 16 bytes a parameter."""
        return 16 * self.num_parameters

    def saved_bytes(self, tokens: int) -> int:
        """Kept for backward in bfloat16 without checkpoints: each linear layer's input, D + F a block and token."""
        return self.num_blocks * 2 * (self.d_model + self.d_ff) * tokens

    def sharded_bytes(self, num_devices: int, tokens: int = 0) -> float:
        """On each device if state and half of the activations are sharded N ways (every second layer's) and the other
        half is whole, `tokens` being a device's: (state + saved/2) / N + saved/2."""
        require_positive(num_devices=num_devices)
        half = self.saved_bytes(tokens) / 2
        return (self.state_bytes + half) / num_devices + half

    def min_devices(self, memory_bytes: float, tokens: int = 0) -> int:
        """The least N with `sharded_bytes` below `memory_bytes`. Raises ValueError if no N is enough."""
        half = self.saved_bytes(tokens) / 2
        if half >= memory_bytes:
            raise ValueError(
                f"tokens={tokens}: half of their activations, {half:.3g} bytes, must be below memory_bytes"
            )
        devices = math.ceil((self.state_bytes + half) / (memory_bytes - half))
        return devices if self.sharded_bytes(devices, tokens) < memory_bytes else devices + 1


XXL = FeedForwardModel(d_model=16384, d_ff=53248, num_blocks=126)
# As the handout gives it: a TPU v5p, whose links carry 9e10 B/s in each of an axis's two directions.
XXL_DEVICE = Device(flops_per_s=4.6e14, bandwidth_bytes_per_s=1.8e11)


def derivation(
    model: FeedForwardModel = XXL,
    device: Device = XXL_DEVICE,
    fsdp_devices: int = 16,
    tensor_devices: int = 4,
    fsdp_axes: int = 2,
    tensor_axes: int = 1,
    tokens_per_device: int = 2048,
    batch_tokens: int = 4_000_000,
) -> str:
    """The exercise's answers step by step, as text, with the handout's numbers by default.

    `tokens_per_device` is an example for what activations add, `batch_tokens` one for the largest numbers of devices.
    """
    mesh = (model.d_ff, tensor_devices, fsdp_axes, tensor_axes)
    return "\n\n".join(
        [
            _memory_steps(model),
            _sharding_steps(model, tokens_per_device),
            _mesh_steps(model, device, fsdp_devices, *mesh[1:]),
            _limit_steps(model, device, batch_tokens, fsdp_axes, tensor_axes),
        ]
    )


def _memory_steps(model: FeedForwardModel) -> str:
    parameters, state = model.num_parameters, model.state_bytes
    per_token = model.saved_bytes(1)
    return f"""(a) One device
  parameters    blocks · 2 · D · F = {model.num_blocks} · 2 · {model.d_model} · {model.d_ff} = {parameters:.4g}
  state         float32 weights, gradients and two AdamW moments: 4 · 4 bytes a parameter
                16 · {parameters:.4g} = {state:.4g} bytes
  80 GB cards   {state:.4g} / 80e9 = {state / 80e9:.2f}, so {math.ceil(state / 80e9)} cards before activations
  activations   bfloat16, each linear layer's input: blocks · 2 · (D + F) = {per_token:,} bytes a token
                ({80e9 / per_token:,.0f} tokens fill one more card)"""


def _sharding_steps(model: FeedForwardModel, tokens: int) -> str:
    saved = model.saved_bytes(tokens)
    without, with_saved = model.min_devices(95e9), model.min_devices(95e9, tokens)
    return f"""(b) State and half of the activations on N devices, A being what a device's own tokens keep for backward
  memory(N)     (16 · parameters + A/2) / N + A/2
  95 GB, A = 0  N > {model.state_bytes:.4g} / 95e9 = {model.state_bytes / 95e9:.2f}, so N = {without}: \
{model.sharded_bytes(without) / 1e9:.1f} GB a device
  A of {tokens} tokens = {saved:.4g} bytes
                N > ({model.state_bytes:.4g} + {saved / 2:.4g}) / (95e9 - {saved / 2:.4g}), so N = {with_saved}: \
{model.sharded_bytes(with_saved, tokens) / 1e9:.1f} GB a device"""


def _mesh_steps(
    model: FeedForwardModel,
    device: Device,
    fsdp_devices: int,
    tensor_devices: int,
    fsdp_axes: int,
    tensor_axes: int,
) -> str:
    devices = fsdp_devices * tensor_devices
    axes = (model.d_ff, tensor_devices, fsdp_axes, tensor_axes)
    tokens = mesh_min_tokens(device, *axes)
    tokens_in_turn = mesh_min_tokens(device, *axes, axes_overlap=False)
    times = mesh_forward_times(
        device,
        tokens * devices,
        model.d_model,
        model.d_ff,
        fsdp_devices,
        tensor_devices,
        fsdp_axes,
        tensor_axes,
    )
    alpha = device.intensity
    most_tensor = model.d_ff * tensor_axes / alpha
    return f"""(c) Forward on X = {fsdp_devices} (FSDP) by Y = {tensor_devices} (tensor parallel) devices, \
N = {devices}, with M_X = {fsdp_axes} and M_Y = {tensor_axes} mesh axes
  α             C / W = {device.flops_per_s:.3g} / {device.bandwidth_bytes_per_s:.3g} = {alpha:.1f} FLOPs a byte
  a block       compute          4·B·D·F / (N·C)
                FSDP             2 weights of 2·D·F/Y bytes gathered:  4·D·F / (Y·W·M_X)
                tensor parallel  2·B·D/X bytes gathered, as many reduce-scattered:  4·B·D / (X·W·M_Y)
  FSDP          compute is longer if B/N > α / (Y·M_X) = {alpha:.1f} / ({tensor_devices} · {fsdp_axes}) \
= {alpha / tensor_devices / fsdp_axes:.1f}
  tensor par.   compute is longer if Y < F·M_Y / α = {model.d_ff} · {tensor_axes} / {alpha:.1f} = {most_tensor:.1f}, \
whatever the batch: {tensor_devices} {"is" if tensor_devices <= most_tensor else "is not"}
  so            B/N ≥ {tokens:.1f} tokens a device, {tokens * tensor_devices:.0f} for each of the {fsdp_devices} FSDP \
groups, B ≥ {tokens * devices:.0f} in all
  there         compute {times.compute * 1e3:.3f} ms, FSDP {times.fsdp * 1e3:.3f} ms, tensor parallel \
{times.tensor_parallel * 1e3:.3f} ms a block
  in turn       if the two communications can't overlap each other: B/N > α / (Y·M_X) / (1 - Y·α / (F·M_Y)) \
= {tokens_in_turn:.1f}, B ≥ {tokens_in_turn * devices:.0f}"""


def _limit_steps(model: FeedForwardModel, device: Device, batch_tokens: int, fsdp_axes: int, tensor_axes: int) -> str:
    weight_bytes = 2 * model.d_model * model.d_ff
    bandwidth = device.bandwidth_bytes_per_s
    gather = ring_all_gather_seconds(weight_bytes, 16, bandwidth)
    reduce = ring_all_reduce_seconds(weight_bytes, 16, bandwidth)
    return f"""(d) Ring collectives, and the limits of each scheme on this device (one mesh axis, bfloat16)
  all-gather    (n-1)/n · bytes / W, reduce-scatter the same, all-reduce twice that: one weight of {weight_bytes:.3g} \
bytes over 16 devices {gather * 1e3:.2f} ms, {gather * 1e3:.2f} ms, {reduce * 1e3:.2f} ms
  DP, FSDP      B/N ≥ α = {data_parallel_min_tokens(device):.1f} tokens a device: {batch_tokens:,} tokens feed \
{data_parallel_max_devices(device, batch_tokens)} devices
  tensor par.   Y - 1 ≤ F / α: at most {tensor_parallel_max_devices(device, model.d_ff)} devices
  FSDP × TP     N ≤ B·F·M_X·M_Y / α², on {fsdp_axes} and {tensor_axes} axes: {batch_tokens:,} tokens feed \
{mesh_max_devices(device, batch_tokens, model.d_ff, fsdp_axes, tensor_axes):,} devices"""
