"""Ring collectives against a ring run step by step, the limits against a search, and the paper exercise's answers."""

import math
import subprocess
import sys
from pathlib import Path

import pytest

from cs336_systems.accounting.parallelism import (
    Device,
    data_parallel_max_devices,
    data_parallel_min_tokens,
    mesh_forward_times,
    mesh_max_devices,
    mesh_min_tokens,
    ring_all_gather_seconds,
    ring_all_reduce_seconds,
    ring_reduce_scatter_seconds,
    tensor_parallel_max_devices,
)
from cs336_systems.accounting.xxl import XXL, XXL_DEVICE, FeedForwardModel, derivation

DEVICE = Device(flops_per_s=1e12, bandwidth_bytes_per_s=1e10)  # 100 FLOPs a byte


def run_ring(n: int) -> tuple[int, list[list[int]]]:
    """A reduce-scatter and then an all-gather of n pieces over n devices; device r starts with 10**r in each piece.

    In every hop each device sends one piece to the next. Returns the hops of one half, and what each device ends with.
    """
    held = [[10**rank] * n for rank in range(n)]
    reducing, gathering = range(n - 1), range(n - 1)
    for hop in reducing:
        sent = [held[rank][(rank - hop) % n] for rank in range(n)]
        for rank in range(n):
            held[rank][(rank - 1 - hop) % n] += sent[rank - 1]
    for hop in gathering:
        sent = [held[rank][(rank + 1 - hop) % n] for rank in range(n)]
        for rank in range(n):
            held[rank][(rank - hop) % n] = sent[rank - 1]
    return len(reducing), held


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4, 7])
def test_ring_times_are_those_of_a_ring_run_step_by_step(num_devices):
    hops, result = run_ring(num_devices)
    assert result == [[sum(10**rank for rank in range(num_devices))] * num_devices] * num_devices
    seconds = hops * (3e-6 + 8e6 / num_devices / 1e10)
    assert ring_all_gather_seconds(8e6, num_devices, 1e10, 3e-6) == pytest.approx(seconds)
    assert ring_reduce_scatter_seconds(8e6, num_devices, 1e10, 3e-6) == pytest.approx(seconds)
    assert ring_all_reduce_seconds(8e6, num_devices, 1e10, 3e-6) == pytest.approx(2 * seconds)


def feed_forward_seconds(tokens: float, d_model: int, d_ff: int, num_matrices: int = 2) -> float:
    return num_matrices * 2 * tokens * d_model * d_ff / DEVICE.flops_per_s


@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("batch_tokens", [90, 1010, 12345])
def test_data_parallel_limit_is_where_the_times_cross(batch_tokens, element_bytes):
    d_model, d_ff = 64, 200

    def is_bound_by_arithmetic(devices: int) -> bool:
        backward = 2 * feed_forward_seconds(batch_tokens / devices, d_model, d_ff)
        reduce = 2 * ring_all_reduce_seconds(element_bytes * d_model * d_ff, devices, DEVICE.bandwidth_bytes_per_s)
        forward = feed_forward_seconds(batch_tokens / devices, d_model, d_ff)
        gather = 2 * ring_all_gather_seconds(element_bytes * d_model * d_ff, devices, DEVICE.bandwidth_bytes_per_s)
        assert (backward >= reduce) == (forward >= gather)  # data parallelism and FSDP have one limit
        return backward >= reduce

    most = max(devices for devices in range(1, 500) if is_bound_by_arithmetic(devices))
    assert data_parallel_max_devices(DEVICE, batch_tokens, element_bytes=element_bytes) == most
    if most > 1:
        assert batch_tokens / most >= data_parallel_min_tokens(DEVICE, most, element_bytes=element_bytes)
    least = data_parallel_min_tokens(DEVICE, most + 1, element_bytes=element_bytes)
    assert batch_tokens / (most + 1) < least
    assert data_parallel_min_tokens(DEVICE, mesh_axes=2) == data_parallel_min_tokens(DEVICE) / 2


@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("num_matrices", [2, 3])
@pytest.mark.parametrize("d_ff", [60, 550, 5_120])
def test_tensor_parallel_limit_is_where_the_times_cross(d_ff, num_matrices, element_bytes):
    tokens, d_model = 777, 64

    def is_bound_by_arithmetic(devices: int) -> bool:
        compute = feed_forward_seconds(tokens, d_model, d_ff, num_matrices) / devices
        activations = element_bytes * tokens * d_model
        bandwidth = DEVICE.bandwidth_bytes_per_s
        gather = ring_all_gather_seconds(activations, devices, bandwidth)
        return compute >= gather + ring_reduce_scatter_seconds(activations, devices, bandwidth)

    most = max(devices for devices in range(1, 500) if is_bound_by_arithmetic(devices))
    limit = tensor_parallel_max_devices(DEVICE, d_ff, element_bytes=element_bytes, num_matrices=num_matrices)
    assert limit == most


@pytest.mark.parametrize(("tensor_devices", "fsdp_axes", "tensor_axes"), [(1, 1, 1), (4, 2, 1), (8, 1, 2), (30, 1, 1)])
@pytest.mark.parametrize("axes_overlap", [True, False])
def test_mesh_limit_is_where_the_times_cross(tensor_devices, fsdp_axes, tensor_axes, axes_overlap):
    d_model, d_ff, fsdp_devices = 64, 2_000, 16
    axes = (tensor_devices, fsdp_axes, tensor_axes)
    least = mesh_min_tokens(DEVICE, d_ff, *axes, axes_overlap=axes_overlap)

    def is_bound_by_arithmetic(tokens_per_device: float) -> bool:
        tokens = tokens_per_device * fsdp_devices * tensor_devices
        times = mesh_forward_times(DEVICE, tokens, d_model, d_ff, fsdp_devices, *axes)
        both = (times.fsdp, times.tensor_parallel)
        return times.compute >= (max(both) if axes_overlap else sum(both))

    if math.isinf(least):
        assert tensor_devices == 30
        assert not is_bound_by_arithmetic(1e12)
    else:
        assert is_bound_by_arithmetic(least * 1.0001)
        assert not is_bound_by_arithmetic(least * 0.9999)


def test_mesh_max_devices_is_what_a_search_finds():
    d_ff, tokens = 2_000, 100_000
    found = max(
        math.floor(tokens / mesh_min_tokens(DEVICE, d_ff, tensor, 2, 1))
        for tensor in range(1, 50)
        if not math.isinf(mesh_min_tokens(DEVICE, d_ff, tensor, 2, 1))
    )
    assert mesh_max_devices(DEVICE, tokens, d_ff, 2, 1) == found == tokens * d_ff * 2 // 100**2
    # Too narrow to split a block: what FSDP alone allows.
    assert mesh_max_devices(DEVICE, tokens, 50) == tokens // 100


def test_xxl_memory():
    assert XXL.num_parameters == 126 * 2 * 16384 * 53248 == 219_848_638_464
    assert XXL.state_bytes == pytest.approx(3.5e12, rel=0.01)
    assert math.ceil(XXL.state_bytes / 80e9) == 44
    assert XXL.saved_bytes(1) == 126 * 2 * (16384 + 53248)
    assert XXL.min_devices(95e9) == 38
    assert XXL.sharded_bytes(38) < 95e9 < XXL.sharded_bytes(37)
    assert XXL.min_devices(95e9, tokens=2048) == 46
    assert XXL.sharded_bytes(46, 2048) < 95e9 < XXL.sharded_bytes(45, 2048)
    with pytest.raises(ValueError, match=r"^tokens=20000: .*must be below memory_bytes"):
        XXL.min_devices(95e9, tokens=20_000)
    # A state that fills N devices to the last byte is not below their memory.
    assert FeedForwardModel(2, 5, 1).min_devices(160) == 3


def test_xxl_batch():
    # α = 4.6e14 / 1.8e11; FSDP: α / (4 · 2); tensor parallelism: 4 < 53248 / α.
    tokens = mesh_min_tokens(XXL_DEVICE, 53248, tensor_devices=4, fsdp_axes=2, tensor_axes=1)
    assert tokens == pytest.approx(4.6e14 / 1.8e11 / 8)
    assert tokens * 64 == pytest.approx(20_444, abs=1)
    in_turn = mesh_min_tokens(XXL_DEVICE, 53248, 4, 2, 1, axes_overlap=False)
    assert in_turn == pytest.approx(395.3, abs=0.1)


def test_derivation_is_printed_step_by_step():
    script = Path(__file__).resolve().parents[1] / "scripts" / "accounting.py"
    result = subprocess.run([sys.executable, script, "--handout"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == derivation().strip()
    for step in ("= 2.198e+11", "3.518e+12 / 80e9 = 43.97, so 44 cards", "so N = 38", "= 319.4", "B ≥ 20444 in all"):
        assert step in result.stdout


@pytest.mark.parametrize(
    "call",
    [
        lambda: Device(0, 1),
        lambda: ring_all_gather_seconds(-1, 2, 1e9),
        lambda: ring_all_reduce_seconds(1, 0, 1e9),
        lambda: ring_all_reduce_seconds(1, 2, 0),
        lambda: data_parallel_max_devices(DEVICE, 0),
        lambda: data_parallel_min_tokens(DEVICE, num_devices=0),
        lambda: tensor_parallel_max_devices(DEVICE, d_ff=0),
        lambda: mesh_min_tokens(DEVICE, 100, tensor_devices=0),
        lambda: mesh_forward_times(DEVICE, 1, 1, 1, 0, 1),
        lambda: FeedForwardModel(0, 1, 1),
        lambda: XXL.sharded_bytes(0),
    ],
)
def test_bad_input_names_the_argument(call):
    with pytest.raises(ValueError, match=r"^\w+=.*: must be "):
        call()
