"""What binds a step, on made traces whose parts are known: each moment counts once, and advice follows the numbers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from cs336_systems.accounting.flops import matmul_flops_by_part, matmul_flops_forward
from cs336_systems.configs import named_cell
from cs336_systems.profiling.kernel_tables import class_table, kernel_table, range_table
from cs336_systems.profiling.step_answers import answer
from cs336_systems.profiling.step_time import PARTS, StepTime, step_time
from cs336_systems.profiling.trace import Kernel, Range, Trace
from cs336_systems.profiling.verdict import Verdict, judge

GEMM, ADD, NCCL, OWN = (
    "ampere_sgemm_128x64_tn",
    "vectorized_elementwise_kernel<4>",
    "ncclDevKernel_AllReduce",
    "mystery",
)
MS = 1_000_000


class MadeTrace:
    """Ranges and kernels in milliseconds, of one process and GPU unless said."""

    def __init__(self, **cell: Any) -> None:
        self.ranges: list[Range] = []
        self.kernels: list[Kernel] = []
        self.cell = asdict(named_cell("small", 256, device="cuda", **cell)) if cell else None

    def range(self, name: str, start: float, end: float, process: int = 1) -> Range:
        self.ranges.append(Range(name, round(start * MS), round(end * MS), process, process))
        return self.ranges[-1]

    def kernel(
        self, name: str, start: float, end: float, ranges: tuple[Range, ...], launch: float = 0.0, process: int = 1
    ) -> None:
        times = (round(start * MS), round(end * MS))
        self.kernels.append(Kernel(name, *times, 7, process - 1, process, round(launch * MS), ranges))

    def trace(self, gpu: str | None = "NVIDIA H100 80GB HBM3") -> Trace:
        ranges = sorted(self.ranges, key=lambda r: (r.start_ns, -r.end_ns))
        return Trace(sorted(self.kernels, key=lambda k: k.start_ns), ranges, "made", gpu=gpu, cell=self.cell)


def _verdict(made: MadeTrace) -> tuple[StepTime, Verdict]:
    trace = made.trace()
    time = step_time(trace)
    assert sum(time.share(part) for part in PARTS) == pytest.approx(1)
    return time, judge(trace, time)


def test_each_moment_of_a_step_counts_once() -> None:
    made = MadeTrace()
    step = made.range("step", 0, 100)
    forward, backward = made.range("forward", 1, 40), made.range("backward", 40, 99)
    made.kernel(GEMM, 10, 30, (step, forward), launch=2)  # waited for from 0 to 10
    made.kernel(ADD, 20, 40, (step, forward), launch=3)  # half of it beside the product
    made.kernel(NCCL, 35, 60, (step, backward), launch=4)  # 5 of it hidden
    made.kernel(ADD, 65, 70, (step, backward), launch=50)  # launched before the last one ended
    made.kernel(OWN, 80, 90, (step, backward), launch=75)  # launched after
    time, verdict = _verdict(made)
    assert time.step_ms == 100
    assert time.computing_ms == 20
    assert time.moving_ms == 10 + 5
    assert time.communicating_ms == 20
    assert time.unknown_ms == 10
    assert time.idle_ms == 5
    assert time.waiting_ms == 10 + 10 + 10
    assert time.waiting_by_phase == {"forward": 10, "backward": 10, "between phases": 10}
    assert verdict.binding == "waiting"
    assert "exposed communication: 20.0 ms, 20% of the step" in verdict.evidence


def test_steps_processes_and_gpus_are_averaged() -> None:
    made = MadeTrace()
    for process, busy in ((1, 60), (2, 20)):
        for start in (0, 100):
            step = made.range("step", start, start + 100, process)
            made.kernel(GEMM, start, start + busy, (step,), launch=start - 1, process=process)
    time, _ = _verdict(made)
    assert (time.step_ms, time.computing_ms, time.waiting_ms, time.kernels) == (100, 40, 60, 1)


def test_a_step_that_does_not_wait_for_its_kernels_ends_with_them() -> None:
    made = MadeTrace()
    step = made.range("step", 0, 10)
    made.kernel(GEMM, 5, 25, (step,), launch=1)
    time, _ = _verdict(made)
    assert (time.step_ms, time.computing_ms, time.waiting_ms) == (25, 20, 5)


def test_a_trace_without_steps_is_judged_as_a_whole() -> None:
    made = MadeTrace()
    made.kernel(GEMM, 5, 25, ())
    made.kernel(ADD, 25, 30, ())
    time, verdict = _verdict(made)
    assert (time.step_ms, time.computing_ms, time.moving_ms) == (25, 20, 5)
    assert verdict.binding == "computing"
    assert [option.partition(" fuses")[0] for option in verdict.options] == ["`--compile blocks` (torch.compile)"]


def _bound_by_launches(**cell: Any) -> MadeTrace:
    made = MadeTrace(**cell)
    step = made.range("step", 0, 100)
    optimizer = made.range("optimizer", 50, 100)
    for index in range(20):
        made.kernel(ADD, index * 5 + 4, index * 5 + 5, (step, optimizer) if index >= 10 else (step,), index * 5 + 3)
    return made


def test_launches_that_bind_are_answered_with_fewer_of_them() -> None:
    time, verdict = _verdict(_bound_by_launches(precision="bf16"))
    assert verdict.binding == "waiting"
    assert time.share("waiting") == pytest.approx(0.8)
    text = verdict.to_markdown()
    assert "20 kernels a step of 1000 µs on average" in text
    assert "`--compile blocks` (torch.compile) fuses small kernels: 20 launches a step" in text
    assert "`--optimizer adamw-fused` updates all parameters in a few kernels: the optimizer launches 10" in text


def test_what_the_profiler_adds_is_not_held_against_the_step() -> None:
    trace = _bound_by_launches(precision="bf16").trace()
    profiled, known = step_time(trace), step_time(trace, unprofiled_ms=60)
    assert (profiled.step_ms, profiled.waiting_ms, profiled.profiler_ms) == (100, 80, None)
    assert (known.step_ms, known.waiting_ms, known.profiler_ms) == (60, pytest.approx(40), 40)
    assert known.waiting_by_phase["optimizer"] == pytest.approx(profiled.waiting_by_phase["optimizer"] / 2)
    assert sum(known.share(part) for part in PARTS) == pytest.approx(1)
    assert "at most, since the profiler slows launches" in judge(trace, profiled).to_markdown()
    assert "without 40.0 ms that the profiler adds" in judge(trace, known).to_markdown()
    # A step that would be faster than its kernels keeps them, and one that is slower than profiled gains nothing.
    assert step_time(trace, unprofiled_ms=5).waiting_ms == 0
    assert step_time(trace, unprofiled_ms=120).step_ms == 100


def test_no_option_that_the_cell_has_already() -> None:
    _, verdict = _verdict(_bound_by_launches(precision="bf16", compile="on", optimizer="adamw-fused"))
    assert not any("--compile" in option or "adamw-fused" in option for option in verdict.options)
    assert any("CUDA graphs" in option for option in verdict.options)


def _bound_by_products(precision: str, ms: float, **cell: Any) -> tuple[StepTime, Verdict]:
    made = MadeTrace(precision=precision, **cell)
    step = made.range("step", 0, ms)
    made.kernel(GEMM, 0, ms * 0.96, (step,), launch=-1)
    made.kernel(ADD, ms * 0.96, ms, (step,), launch=-1)
    return _verdict(made)


def test_products_are_set_beside_the_cards_peak() -> None:
    flops = 3 * matmul_flops_forward(named_cell("small", 256).model_config(), 4, 256)
    ms = flops / (0.5 * 66.9e12) * 1e3 / 0.96  # at half of the H100's float32
    time, verdict = _bound_by_products("fp32", ms)
    assert verdict.binding == "computing"
    assert time.matmul_peak_share == pytest.approx(0.5, rel=1e-3)
    assert "33 TFLOP/s (50% of the card's peak)" in verdict.evidence[0]
    assert len(verdict.options) == 1
    assert "tensor cores (peaks: tf32 495, bf16 989 TFLOP/s)" in verdict.options[0]

    near_peak = flops / (0.7 * 989.4e12) * 1e3 / 0.96
    assert "more GPUs" in _bound_by_products("bf16", near_peak)[1].options[0]
    far_from_it = flops / (0.2 * 989.4e12) * 1e3 / 0.96
    assert "a larger batch, context or model" in _bound_by_products("bf16", far_from_it)[1].options[0]


def test_products_that_are_computed_twice_have_no_rate() -> None:
    """The formula counts them once, and would give too low a figure."""
    time, _ = _bound_by_products("fp32", 100.0, checkpoint_every=2)
    assert time.matmul_tflops is None


def test_products_within_attentions_own_kernels_are_not_counted() -> None:
    naive, _ = _bound_by_products("bf16", 100.0)
    flash, _ = _bound_by_products("bf16", 100.0, attention="sdpa")
    parts = matmul_flops_by_part(named_cell("small", 256).model_config(), 4, 256)
    in_attention = (parts["attention_scores"] + parts["attention_values"]) / sum(parts.values())
    assert naive.matmul_tflops is not None
    assert flash.matmul_tflops == pytest.approx(naive.matmul_tflops * (1 - in_attention))


def test_without_the_cell_or_the_card_no_share_of_peak_and_no_advice_on_products() -> None:
    made = MadeTrace()
    step = made.range("step", 0, 10)
    made.kernel(GEMM, 0, 10, (step,), launch=-1)
    time, verdict = _verdict(made)
    assert time.matmul_tflops is None
    assert time.matmul_peak_share is None
    assert verdict.options == []
    assert "None: no part" in verdict.to_markdown()


def test_bytes_that_bind_are_answered_by_where_they_are_moved() -> None:
    made = MadeTrace(precision="fp32")
    step = made.range("step", 0, 100)
    forward, optimizer = made.range("forward", 0, 40), made.range("optimizer", 60, 100)
    softmax = made.range("softmax", 10, 20)
    made.kernel(ADD, 0, 20, (step, forward, softmax), launch=-1)
    made.kernel(ADD, 20, 21, (step, forward), launch=-1)
    made.kernel(ADD, 21, 100, (step, optimizer), launch=-1)
    _, verdict = _verdict(made)
    assert verdict.binding == "moving"
    assert [option.split(" ")[1] for option in verdict.options] == ["flash-triton`", "adamw-fused`"]
    assert "20.0 ms a step" in verdict.options[0]
    assert "79.0 ms" in verdict.options[1]


def test_exposed_communication_is_answered_with_overlap() -> None:
    made = MadeTrace()
    step = made.range("step", 0, 100)
    made.kernel(GEMM, 0, 40, (step,), launch=-1)
    made.kernel(NCCL, 30, 100, (step,), launch=-1)
    _, verdict = _verdict(made)
    assert verdict.binding == "communicating"
    (option,) = verdict.options
    assert "exposed for 60.0 ms, 60% of the step" in option


def test_a_cpus_trace_has_no_step_time() -> None:
    trace = Trace([Kernel("aten::mm", 0, 5, 1, 0, 1, 0, ())], [], "made", unit="operator")
    with pytest.raises(ValueError, match="made: no kernel was launched in a step"):
        step_time(trace)


def _attention_step() -> MadeTrace:
    made = MadeTrace(precision="fp32")
    for start in (0, 100):
        step = made.range("step", start, start + 100)
        forward, backward = made.range("forward", start + 1, start + 40), made.range("backward", start + 41, start + 90)
        for index, offset in enumerate((2, 20)):
            block = made.range(f"block {index}", start + offset, start + offset + 15)
            parts = [
                made.range(n, start + offset + i, start + offset + i + 1)
                for i, n in enumerate(("scores", "softmax", "final matmul"))
            ]
            for part, name, length in zip(parts, (GEMM, "reduce_kernel<512>", GEMM), (2, 6, 2), strict=True):
                made.kernel(name, part.start_ns / MS, part.start_ns / MS + length, (step, forward, block, part))
            made.kernel(ADD, start + offset, start + offset + 1, (step, forward, block, parts[0]))
        made.kernel("flash_bwd_kernel", start + 50, start + 80, (step, backward))
        made.kernel(GEMM, start + 80, start + 85, (step, backward))
    return made


def test_the_tables_of_a_step() -> None:
    trace = _attention_step().trace()
    by_name = {row.range: row for row in range_table(trace)}
    assert list(by_name) == ["step", "forward", "block", "scores", "softmax", "final matmul", "backward"]
    assert (by_name["block"].count, by_name["step"].count) == (2, 1)
    assert by_name["forward"].host_ms == 39
    assert by_name["forward"].kernel_ms == 2 * (2 + 6 + 2 + 1)
    assert by_name["scores"].kernels == 4
    assert by_name["forward"].matmul_share == pytest.approx(8 / 22)
    assert by_name["backward"].leading_kernel == "flash_bwd_kernel"
    (first, second, third) = kernel_table(trace, "forward")
    assert (first.kernel, first.total_ms, first.count, first.mean_us) == ("reduce_kernel<512>", 12, 2, 6000)
    assert first.share == pytest.approx(12 / 22)
    assert (second.kernel, second.total_ms, second.count, second.mean_us) == (GEMM, 8, 4, 2000)
    assert third.kernel == ADD
    assert [row.kernel for row in class_table(trace)] == ["attention", "matmul", "reduction", "elementwise"]
    assert sum(row.share for row in class_table(trace)) == pytest.approx(1)
    assert kernel_table(trace, "block 1")[0].count == 1
    assert kernel_table(trace, "no such range") == []


def test_the_handouts_answers() -> None:
    trace = _attention_step().trace()
    benchmark = {"forward_mean_ms": 36.0, "step_mean_ms": 96.0}
    row = answer(trace, step_time(trace), "moving", benchmark)
    assert (row.forward_ms, row.forward_benchmark_ms, row.forward_kernel_ms) == (39, 36, 22)
    assert row.slowdown == pytest.approx(100 / 96 - 1)
    assert (row.forward_leader, row.forward_leader_count) == ("reduce_kernel<512>", 2)
    assert (row.backward_leader, row.step_leader, row.same_leader) == ("flash_bwd_kernel", "flash_bwd_kernel", False)
    assert row.forward_matmul_share == pytest.approx(8 / 22)
    assert row.step_matmul_share == pytest.approx(13 / 57)
    assert row.forward_others == "reduction 55%, elementwise 9%"
    assert (row.softmax_ms, row.attention_matmul_ms, row.softmax_time_ratio) == (12, 8, 1.5)
    # 5 operations a score against 4 · head_dim.
    assert row.softmax_flop_ratio == pytest.approx(5 / (4 * 64))
    assert sum(getattr(row, f"{part}_share") for part in PARTS) == pytest.approx(1)


def test_answers_of_a_trace_that_says_nothing_are_empty() -> None:
    made = MadeTrace()
    made.kernel(ADD, 5, 25, ())
    row = answer(made.trace(), None, None)
    assert (row.size, row.forward_ms, row.slowdown, row.softmax_ms, row.forward_leader) == (None,) * 5
    assert (row.step_leader, row.step_matmul_share, row.kernels) == (ADD, 0, 1)
