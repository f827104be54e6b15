"""What the attention benchmarks measure: peers that are right or say why not, times, errors, memory by formula."""

import time
from dataclasses import replace
from typing import get_args

import pytest
import torch

from cs336_systems.attention.reference import attention_reference
from cs336_systems.benchmarking import flash_benchmark
from cs336_systems.benchmarking.attention_benchmark import (
    AttentionBenchmarkCell,
    formulas,
    measure_attention,
    memory_formula_bytes,
)
from cs336_systems.benchmarking.attention_cells import EagerPeerName, PeerName, make_inputs
from cs336_systems.benchmarking.attention_peers import PEERS, open_peer
from cs336_systems.benchmarking.call_timing import time_calls, time_in_a_row
from cs336_systems.benchmarking.flash_benchmark import FlashCell, FlashMeasure, flash_cells
from cs336_systems.benchmarking.grouped_sweep import Skipped
from cs336_systems.records import Unsupported

CPU = torch.device("cpu")


def test_every_name_is_a_peer():
    assert set(PEERS) == set(get_args(PeerName))
    assert set(get_args(EagerPeerName)) == {name for name, peer in PEERS.items() if not peer.is_compiled}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shape", [(2, 20, 16), (1, 2, 20, 16)])
@pytest.mark.parametrize("name", ["naive", "naive-compiled", "sdpa-flash", "flash-pytorch", "flash-triton"])
def test_peers_agree_with_the_reference(name, shape, is_causal):
    """Uncompiled, and on a CPU with Triton's interpreter."""
    inputs = torch.randn(3, *shape, requires_grad=True)
    do = torch.randn(shape)
    expected = attention_reference(*inputs, is_causal)[0]
    (expected_gradient,) = torch.autograd.grad(expected, inputs, do)
    try:
        with open_peer(name, CPU, compiler=lambda function: function) as attention:
            o = attention(*inputs, is_causal)
            (gradient,) = torch.autograd.grad(o, inputs, do)
    except Unsupported as reason:
        assert name == "flash-triton"
        pytest.skip(str(reason))
    torch.testing.assert_close(o, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-5)


def test_sdpa_uses_the_peers_backend_and_no_other():
    q = torch.randn(1, 1, 32, 16, requires_grad=True)
    with open_peer("sdpa-flash", CPU) as attention:
        assert "FlashAttention" in type(attention(q, q, q, True).grad_fn).__name__
        assert not torch.backends.cuda.math_sdp_enabled()
    assert torch.backends.cuda.math_sdp_enabled()


def test_a_peer_that_cannot_run_says_why_and_other_errors_pass():
    q = torch.randn(1, 1, 32, 16)
    for name in ("sdpa-cudnn", "sdpa-efficient", "flex"):
        with pytest.raises(Unsupported, match=f"{name} runs on NVIDIA GPUs"), open_peer(name, CPU):
            pass
    with pytest.raises(Unsupported, match=r"head_dim|head dim|last dim"), open_peer("sdpa-flash", CPU) as attention:
        attention(q, q, q[..., :8], False)  # a value head_dim of its own
    with pytest.raises(ZeroDivisionError), open_peer("naive", CPU):
        raise ZeroDivisionError
    with pytest.raises(RuntimeError, match="CUDA error"), open_peer("naive", CPU):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    with (
        pytest.raises(Unsupported, match="out of resource"),
        open_peer("naive-compiled", CPU, lambda function: function),
    ):
        raise RuntimeError("No valid triton configs. OutOfResources: out of resource: shared memory")
    with pytest.raises(RuntimeError, match="out of resource"), open_peer("flash-triton", CPU):
        raise RuntimeError("out of resource: shared memory")  # ours is a mistake, not a reason
    with pytest.raises(torch.OutOfMemoryError), open_peer("naive-compiled", CPU, lambda function: function):
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_kernels_alone_need_a_gpu():
    with pytest.raises(ValueError, match=r"timed=.?kernels.*device is cpu"):
        FlashCell("naive", "fp32", head_dim=8, length=33, timed="kernels")


def test_calls_are_timed_for_the_time_asked_and_gradients_dropped_before_each(clock):
    x = torch.ones(3, requires_grad=True)
    seen = []

    def call():
        (2 * x).sum().backward()
        seen.append(x.grad[0].item())
        time.sleep(0.002)

    times = time_calls(call, warmup_ms=4, rep_ms=40, device=CPU, grad_to_none=[x])
    assert times == pytest.approx([2] * 20, abs=1e-6)
    assert seen[-len(times) :] == [2.0] * len(times)
    for name, value in (("warmup_ms", -1), ("rep_ms", 0)):
        with pytest.raises(ValueError, match=f"{name}={value}"):
            time_calls(call, **{"warmup_ms": 1, "rep_ms": 1, name: value}, device=CPU)


def test_calls_in_a_row_share_their_time(clock):
    x = torch.ones(3, requires_grad=True)
    seen = []

    def call():
        (2 * x).sum().backward()
        seen.append(x.grad[0].item())
        time.sleep(0.004 if len(seen) % 2 else 0)

    times = time_in_a_row(call, warmup_ms=8, rep_ms=120, device=CPU, grad_to_none=[x])
    assert times == pytest.approx([2, 2])  # the mean of 4 ms and nothing
    assert seen == [2.0] * len(seen)
    assert len(seen) == 1 + 2 + 2 * 50  # one look at the clock for several calls
    with pytest.raises(ValueError, match="rep_ms=0"):
        time_in_a_row(call, warmup_ms=1, rep_ms=0, device=CPU)


def test_a_slow_first_call_leaves_others_in_a_row(clock):
    calls_ms = []

    def call():
        calls_ms.append(1 if calls_ms else 100)
        time.sleep(calls_ms[-1] / 1e3)

    times = time_in_a_row(call, warmup_ms=1, rep_ms=60, device=CPU)
    assert times == pytest.approx([1.0, 1.0])
    assert len(calls_ms) == 2 + 2 * 50


def test_an_error_is_seen_in_the_output_and_in_each_gradient():
    cell = FlashCell("naive", "fp32", head_dim=8, length=33, heads=2)

    def slightly_wrong(q, k, v, is_causal):
        return attention_reference(q, k * 1.01, v, is_causal)[0]

    def wrong_backward_only(q, k, v, is_causal):
        o = attention_reference(q, k, v, is_causal)[0]
        return o + 0.1 * (k - k.detach()) * v.detach()

    def error(attention, **changes):
        return flash_benchmark._relative_error(replace(cell, **changes), attention)

    def right(q, k, v, is_causal):
        return attention_reference(q, k, v, is_causal)[0]

    assert error(right, phase="forward") < 1e-6
    assert error(right, phase="backward") < 1e-6
    assert error(right, phase="forward", precision="bf16") > 1e-4
    assert error(slightly_wrong, phase="forward") > 1e-4
    assert error(wrong_backward_only, phase="forward") < 1e-6
    assert error(wrong_backward_only, phase="backward") > 1e-2
    assert error(right, phase="both") is None
    assert error(right, phase="forward", length=4097, heads=1) is None


def test_what_took_too_long_is_skipped_at_longer_lengths_only_for_that_pass(clock, monkeypatch):
    cells = flash_cells(
        implementation="naive", precision="fp32", head_dim=8, length=(16, 32), phase=("forward", "both"), rep_ms=1,
        max_call_ms=1000,
    )  # fmt: skip
    measured = []

    def slow_forward(cell):
        measured.append((cell.length, cell.phase))

        def attention(q, k, v, is_causal):
            time.sleep(1.1 if cell.phase == "both" else 0.01)
            return attention_reference(q, k, v, is_causal)[0]

        return attention

    class Peer:
        is_compiled, needs_cuda, backend = False, False, None

    measure = FlashMeasure()
    statuses = []
    for cell in cells:
        peer = Peer()
        peer.build = lambda compiler, cell=cell: slow_forward(cell)
        monkeypatch.setitem(PEERS, "naive", peer)
        try:
            statuses.append((cell.length, cell.phase, measure(cell)["repetitions"] >= 1))
        except Skipped as reason:
            statuses.append((cell.length, cell.phase, str(reason)))
    assert [(length, phase) for length, phase, _ in statuses] == [
        (16, "forward"), (16, "both"), (32, "forward"), (32, "both"),
    ]  # fmt: skip
    assert statuses[0][2] is True
    assert statuses[2][2] is True
    assert statuses[1][2] == "one call took 1100 ms, more than 1000"
    assert statuses[3][2] == f"at length 16, {statuses[1][2]}"
    assert (32, "both") not in measured


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", ["naive", "flash-pytorch", "sdpa-flash"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_memory_formula_is_what_autograd_keeps(name, precision, is_causal):
    cell = AttentionBenchmarkCell(name, precision, head_dim=16, length=48, is_causal=is_causal, batch_size=2)
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor  # keeps it alive, so that no address comes twice
        return tensor

    *inputs, do = make_inputs(cell, cell.batch_size)
    with (
        open_peer(name, CPU) as attention,
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        o = attention(*inputs, is_causal)
    for tensor in (*inputs, do, o):
        keep(tensor)
    kept_bytes = sum(tensor.untyped_storage().nbytes() for tensor in kept.values() if tensor.device.type == "cpu")
    scalars = 64 if name.startswith("sdpa") else 8  # SDPA keeps seeds, plain attention the scale
    assert sum(memory_formula_bytes(cell).values()) == pytest.approx(kept_bytes, abs=scalars)
    assert formulas(cell)["formula_gib"] * 2**30 == pytest.approx(kept_bytes, abs=scalars)


@pytest.mark.slow
def test_a_compiled_peer_is_compiled_once_for_all_lengths(annotations_unchecked):
    measure = FlashMeasure()
    cells = flash_cells(
        implementation="naive-compiled", precision="fp32", head_dim=16, length=(32, 64, 96), rep_ms=1, warmup_ms=0,
        phase=("forward", "backward", "both"),
    )  # fmt: skip
    for cell in cells:
        assert (measure(cell)["relative_error"] or 0) < 1e-5
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    measure(replace(cells[0], compiled_shapes="static"))
    measure(replace(cells[3], compiled_shapes="static"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", get_args(PeerName))
def test_each_peer_on_a_gpu_is_right_and_needs_little_more_than_its_tensors(name, annotations_unchecked):
    measure = FlashMeasure()
    cell = FlashCell(name, "bf16", head_dim=64, length=1024, heads=2, device="cuda", rep_ms=5, warmup_ms=1)
    for phase in ("forward", "backward"):
        assert measure(replace(cell, phase=phase))["relative_error"] < 0.03
    results = measure(cell)
    tensor_gib = 2 * 1024 * 64 * 2 / 2**30
    assert results["tflops"] > 0
    # q, k, v, dO, O and three gradients; float32 partial sums, or all scores, beside them
    assert 8 * tensor_gib <= results["peak_memory_gib"] < (500 if "naive" in name else 20) * tensor_gib


@pytest.mark.gpu
def test_the_memory_before_backward_on_a_gpu_is_the_formulas():
    cell = AttentionBenchmarkCell("naive", "fp32", head_dim=64, length=1024, device="cuda", steps=3)
    measured = measure_attention(cell)["memory_before_backward_gib"]
    assert measured == pytest.approx(formulas(cell)["formula_gib"], rel=1e-3)


@pytest.mark.gpu
def test_sdpa_says_why_a_backend_refuses():
    with pytest.raises(Unsupported, match=r"[Hh]alf|[Ff]loat|dtype"):
        FlashMeasure()(FlashCell("sdpa-flash", "fp32", head_dim=64, length=128, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["flash-triton", "sdpa-flash", "naive"])
def test_kernels_alone_take_no_longer_than_calls(name):
    cell = FlashCell(name, "bf16", head_dim=64, length=8192, heads=8, device="cuda", rep_ms=30, warmup_ms=5)
    for phase in ("forward", "backward", "both"):
        calls, kernels = (
            FlashMeasure()(replace(cell, phase=phase, timed=timed))["median_ms"] for timed in ("calls", "kernels")
        )
        assert 0.5 * calls < kernels < 1.1 * calls
