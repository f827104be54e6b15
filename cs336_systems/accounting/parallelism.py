"""When does communication, not arithmetic, decide how long a step takes? Ring collectives, and the limits of data
parallelism, FSDP, tensor parallelism and the last two together.

The model is a stack of feed-forward blocks, D → F → D, in which almost all of a large Transformer's FLOPs are, and the
argument is that of "How to Scale Your Model" (Austin et al. 2025, "How to Parallelize a Transformer for Training"):
communication overlaps with arithmetic, so a step is as long as the longer of the two. Backward has twice the FLOPs of
forward and sends twice the bytes, so it has forward's limits.

Symbols, here and in docs/accounting.md: B tokens in the whole batch, b = B/N tokens a device; X devices for FSDP or
data parallelism, Y for tensor parallelism, N = X·Y; C FLOP/s of a device; W bytes/s that it can send (and, at the same
time, receive) on one axis of the mesh; M_X and M_Y the axes that X and Y have to themselves; α = C/W.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cs336_systems.accounting.flops import require_positive

# ---- Ring collectives ------------------------------------------------------------------------------------------------


def ring_all_gather_seconds(
    num_bytes: float, num_devices: int, bandwidth_bytes_per_s: float, latency_s: float = 0.0
) -> float:
    """Time until each of n devices has all of `num_bytes`, of which each starts with 1/n.

    n − 1 hops: in each, every device sends the piece that it got last, num_bytes / n, to its neighbour. So
    (n − 1)·latency + (n − 1)/n · num_bytes / bandwidth, of which the second part hardly depends on n. `latency_s` is a
    hop's; the bandwidth is what one device sends. Raises ValueError for what cannot be (negative bytes, no devices).
    """
    require_positive(num_devices=num_devices, bandwidth_bytes_per_s=bandwidth_bytes_per_s)
    for name, value in (("num_bytes", num_bytes), ("latency_s", latency_s)):
        if value < 0:
            raise ValueError(f"{name}={value}: must be at least 0")
    hops = num_devices - 1
    return hops * latency_s + hops / num_devices * num_bytes / bandwidth_bytes_per_s


def ring_reduce_scatter_seconds(
    num_bytes: float, num_devices: int, bandwidth_bytes_per_s: float, latency_s: float = 0.0
) -> float:
    """Time until each of n devices has the sum of 1/n of `num_bytes`, of which each starts with all: an all-gather run
    backwards, and as long."""
    return ring_all_gather_seconds(num_bytes, num_devices, bandwidth_bytes_per_s, latency_s)


def ring_all_reduce_seconds(
    num_bytes: float, num_devices: int, bandwidth_bytes_per_s: float, latency_s: float = 0.0
) -> float:
    """Time until each of n devices has the sum of all `num_bytes`: a reduce-scatter, then an all-gather of the sums."""
    return 2 * ring_all_gather_seconds(num_bytes, num_devices, bandwidth_bytes_per_s, latency_s)


# ---- When communication is the longer --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Device:
    """What one device can do: C in FLOP/s and W in bytes/s on one axis of the mesh (the network, if there is one)."""

    flops_per_s: float
    bandwidth_bytes_per_s: float

    def __post_init__(self) -> None:
        require_positive(flops_per_s=self.flops_per_s, bandwidth_bytes_per_s=self.bandwidth_bytes_per_s)

    @property
    def intensity(self) -> float:
        """C / W, α in docs/accounting.md: FLOPs in the time that one byte takes."""
        return self.flops_per_s / self.bandwidth_bytes_per_s


def _ring_factor(num_devices: int | None) -> float:
    """(n − 1) / n of the bytes travel; None stands for so many devices that it is 1."""
    if num_devices is None:
        return 1.0
    require_positive(num_devices=num_devices)
    return (num_devices - 1) / num_devices


def data_parallel_min_tokens(
    device: Device, num_devices: int | None = None, mesh_axes: int = 1, element_bytes: int = 2
) -> float:
    """Tokens a device below which data parallelism, or FSDP, is bound by communication; the two have one limit.

    For each weight of D·F elements: data parallelism computes 4·b·D·F FLOPs in backward and all-reduces
    2·element_bytes·D·F bytes; FSDP computes 2·b·D·F in forward and gathers element_bytes·D·F, in backward twice as much
    of both. So arithmetic is the longer if b > C / W · element_bytes / 2, over the number of mesh axes; the size of the
    weights drops out. With `num_devices` the ring's (n − 1)/n is counted, without it the limit for many devices.
    """
    require_positive(mesh_axes=mesh_axes, element_bytes=element_bytes)
    return device.intensity * element_bytes / 2 / mesh_axes * _ring_factor(num_devices)


def data_parallel_max_devices(device: Device, batch_tokens: float, mesh_axes: int = 1, element_bytes: int = 2) -> int:
    """The most devices on which a batch of `batch_tokens` keeps data parallelism, or FSDP, bound by arithmetic.

    batch_tokens / n ≥ limit · (n − 1)/n, so n ≤ 1 + batch_tokens / limit; 1 always works, as nothing is sent.
    """
    require_positive(batch_tokens=batch_tokens)
    return 1 + math.floor(batch_tokens / data_parallel_min_tokens(device, None, mesh_axes, element_bytes))


def tensor_parallel_max_devices(
    device: Device, d_ff: int, mesh_axes: int = 1, element_bytes: int = 2, num_matrices: int = 2
) -> int:
    """The most devices over which a block's weights can be split along F before communication takes longer.

    A block computes num_matrices·2·B·D·F/Y FLOPs a device, gathers its input, B·D elements, and reduce-scatters its
    output, as many: 2·element_bytes·B·D·(Y − 1)/Y bytes. Batch and D drop out: Y − 1 ≤ num_matrices·F·W·M / (C·
    element_bytes). `num_matrices` is 2 for the plain block, 3 for SwiGLU, which has more to do between the same two.
    """
    require_positive(d_ff=d_ff, mesh_axes=mesh_axes, element_bytes=element_bytes, num_matrices=num_matrices)
    return 1 + math.floor(num_matrices * d_ff * mesh_axes / (device.intensity * element_bytes))


@dataclass(frozen=True)
class MeshTimes:
    """Seconds of one block's forward pass on each device, bfloat16, on an X (FSDP) by Y (tensor parallel) mesh."""

    compute: float
    fsdp: float
    """All-gather of the block's two weights, of which a device holds 1/Y, over X."""
    tensor_parallel: float
    """All-gather of the input and reduce-scatter of the output, for the B/X tokens of its group, over Y."""


def mesh_forward_times(
    device: Device,
    batch_tokens: float,
    d_model: int,
    d_ff: int,
    fsdp_devices: int,
    tensor_devices: int,
    fsdp_axes: int = 1,
    tensor_axes: int = 1,
) -> MeshTimes:
    """The three times that decide, each for many devices ((n − 1)/n taken as 1, as the handout has it).

    compute = 4·B·D·F / (N·C); fsdp = 4·D·F / (Y·W·M_X); tensor_parallel = 4·B·D / (X·W·M_Y); one device alone sends
    nothing. Raises ValueError unless all are positive.
    """
    require_positive(batch_tokens=batch_tokens, d_model=d_model, d_ff=d_ff)
    require_positive(fsdp_devices=fsdp_devices, tensor_devices=tensor_devices)
    require_positive(fsdp_axes=fsdp_axes, tensor_axes=tensor_axes)
    bandwidth = device.bandwidth_bytes_per_s
    weight_bytes, activation_bytes = 4 * d_model * d_ff, 4 * batch_tokens * d_model
    return MeshTimes(
        compute=4 * batch_tokens * d_model * d_ff / (fsdp_devices * tensor_devices * device.flops_per_s),
        fsdp=weight_bytes / (tensor_devices * bandwidth * fsdp_axes) if fsdp_devices > 1 else 0.0,
        tensor_parallel=activation_bytes / (fsdp_devices * bandwidth * tensor_axes) if tensor_devices > 1 else 0.0,
    )


def mesh_min_tokens(
    device: Device,
    d_ff: int,
    tensor_devices: int,
    fsdp_axes: int = 1,
    tensor_axes: int = 1,
    axes_overlap: bool = True,
) -> float:
    """Tokens a device, B/N, from which the forward pass on an FSDP × tensor-parallel mesh is bound by arithmetic.

    Axes of their own let FSDP's and tensor parallelism's bytes travel at the same time (`axes_overlap`): then compute
    has to be no shorter than each, b ≥ α / (Y·M_X) and Y ≤ F·M_Y / α; else no shorter than their sum,
    b ≥ α / (Y·M_X) / (1 − Y·α / (F·M_Y)). Infinite where tensor parallelism alone takes too long: no batch helps.
    """
    require_positive(d_ff=d_ff, tensor_devices=tensor_devices, fsdp_axes=fsdp_axes, tensor_axes=tensor_axes)
    # Tensor parallelism's time, as a share of the time for arithmetic.
    tensor_share = tensor_devices * device.intensity / (d_ff * tensor_axes) if tensor_devices > 1 else 0.0
    fsdp_tokens = device.intensity / (tensor_devices * fsdp_axes)
    if axes_overlap:
        return fsdp_tokens if tensor_share <= 1 else math.inf
    return fsdp_tokens / (1 - tensor_share) if tensor_share < 1 else math.inf


def mesh_max_devices(device: Device, batch_tokens: float, d_ff: int, fsdp_axes: int = 1, tensor_axes: int = 1) -> int:
    """The most devices on which some FSDP × tensor-parallel mesh keeps `batch_tokens` bound by arithmetic.

    With the largest Y that tensor parallelism allows, F·M_Y/α, tokens a device can be as few as α² / (F·M_X·M_Y), so
    N ≤ B·F·M_X·M_Y / α², a little less as Y is whole; axes overlap. Where Y can't be above 1 it is FSDP's own limit.
    """
    largest = max(1, math.floor(d_ff * tensor_axes / device.intensity))
    return max(1, math.floor(batch_tokens / mesh_min_tokens(device, d_ff, largest, fsdp_axes, tensor_axes)))
