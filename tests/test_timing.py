"""The one timer: right against known durations, CUDA events and the profiler's kernel times."""

import time

import pytest
import torch

from cs336_systems.benchmarking import timing
from cs336_systems.benchmarking.timing import PhaseTimer, time_step


def test_each_phase_and_the_whole_step_are_timed(clock):
    def step(phase):
        with phase("forward"):
            time.sleep(0.02)
        time.sleep(0.01)
        with phase("backward"):
            time.sleep(0.03)

    times = time_step(step, warmup=1, steps=3, device="cpu")
    assert set(times) == {"forward", "backward", "step"}
    assert times["forward"] == pytest.approx([20] * 3)
    assert times["backward"] == pytest.approx([30] * 3)
    assert times["step"] == pytest.approx([60] * 3)


def test_warmup_steps_run_and_are_not_measured(clock):
    calls = []

    def step(phase):
        calls.append("slow" if len(calls) < 2 else "fast")
        with phase("forward"):
            time.sleep(0.05 if calls[-1] == "slow" else 0.0)

    warm = []
    times = time_step(step, warmup=2, steps=4, device="cpu", on_warm=lambda: warm.append(len(calls)))
    assert calls == ["slow"] * 2 + ["fast"] * 4
    assert warm == [2]
    assert times["forward"] == [0] * 4


def test_work_that_was_queued_counts_where_it_was_queued(clock, monkeypatch):
    """A device that works only when it is waited for stands for one that works while the host goes on."""
    queue = []

    def wait_for(device):
        assert device == "cpu"
        while queue:
            time.sleep(queue.pop())

    monkeypatch.setattr(timing, "synchronize", wait_for)

    def step(phase):
        queue.append(0.03)  # before the phase, and none of its business
        with phase("forward"):
            queue.append(0.02)

    times = time_step(step, warmup=0, steps=2, device="cpu")
    assert times["forward"] == pytest.approx([20] * 2)
    assert times["step"] == pytest.approx([50] * 2)


@pytest.mark.parametrize(("arguments", "message"), [((-1, 1), "warmup=-1"), ((0, 0), "steps=0")])
def test_counts_out_of_range(arguments, message):
    with pytest.raises(ValueError, match=message):
        time_step(lambda phase: None, *arguments, device="cpu")


@pytest.mark.gpu
def test_a_phase_waits_for_its_kernels_and_for_none_before():
    """Unsynchronised, the launch of this product takes microseconds and the product many milliseconds."""
    matrix = torch.randn(8192, 8192, device="cuda")
    torch.cuda.synchronize()
    timer = PhaseTimer("cuda")
    matrix @ matrix  # queued before the phase: not the phase's
    with timer("nothing"):
        pass
    with timer("product"):
        matrix @ matrix
    assert timer.ms["nothing"][0] < 1
    assert timer.ms["product"][0] > 10


@pytest.mark.gpu
def test_host_time_agrees_with_cuda_events_and_with_the_profilers_kernels():
    """Within 2% for a step over 20 ms that kernels fill."""
    matrix = torch.randn(8192, 8192, device="cuda")
    events = []

    def step(phase):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with phase("forward"):
            start.record()
            product = matrix @ matrix
            for _ in range(3):
                product = matrix @ product.clamp(-1, 1)
            end.record()
        events.append((start, end))

    host = time_step(step, warmup=2, steps=5, device="cuda")["forward"]
    device = [start.elapsed_time(end) for start, end in events[2:]]
    assert min(host) > 20
    assert sum(host) == pytest.approx(sum(device), rel=0.02)

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        profiled = time_step(step, warmup=0, steps=5, device="cuda")["forward"]
    kernels_ms = sum(event.device_time_total for event in profile.events() if "memset" not in event.name.lower()) / 1e3
    assert kernels_ms == pytest.approx(sum(profiled), rel=0.02)
