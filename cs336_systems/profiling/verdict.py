"""What binds a step, with the evidence, and for each part of its time the options that shorten it.

An option is named only where the numbers show the time that it could save, and where the cell does not have it already.
"""

from __future__ import annotations

from dataclasses import dataclass

from cs336_systems.accounting.flops import peak_tflops
from cs336_systems.configs import BenchmarkCell
from cs336_systems.profiling.kernel_classes import COMPUTES, MOVES_BYTES
from cs336_systems.profiling.kernel_tables import of_classes, total_ms
from cs336_systems.profiling.step_time import PARTS, StepTime, cell_of
from cs336_systems.profiling.trace import FINAL_MATMUL, SCORES, SOFTMAX, Trace

NOTABLE = 0.1  # of the step: parts below it get no advice
_SMALL = 0.05  # of the step: what an option would have to save at least
_NEAR_PEAK = 0.6  # large matrix products reach 60 to 80% of a card's peak

_NAMES = {
    "computing": "matrix products",
    "moving": "kernels that move bytes",
    "unknown": "kernels whose names tell nothing, or CUDA graphs recorded whole",
    "communicating": "exposed communication",
    "waiting": "kernel launches: the GPU waits for the host",
    "idle": "gaps between kernels that were launched in time",
}


@dataclass(frozen=True)
class Verdict:
    """What binds the step (a part of `StepTime`), a line of evidence for each part, and options with their reasons."""

    binding: str
    evidence: list[str]
    options: list[str]

    def to_markdown(self) -> str:
        options = self.options or ["None: no part that an option here would shorten takes a tenth of the step."]
        lines = [
            f"**Bound by {_NAMES[self.binding]}.**",
            *(f"- {line}" for line in self.evidence),
            "",
            "What would help:",
        ]
        return "\n".join([*lines, *(f"- {line}" for line in options)])


def judge(trace: Trace, time: StepTime) -> Verdict:
    """The verdict on a GPU's trace, of which `time` is `step_time(trace)`."""
    evidence = [
        f"{_NAMES[part]}: {_ms(time, part)}{detail}"
        for part, detail in zip(PARTS, _details(time), strict=True)
        if getattr(time, f"{part}_ms") > 0
    ]
    cell = cell_of(trace)
    options = []
    if time.share("waiting") >= NOTABLE:
        options += _against_launches(time, cell)
    if time.share("moving") >= NOTABLE:
        options += _against_bytes(trace, time, cell)
    if time.share("computing") >= NOTABLE:
        options += _against_matmul(trace, time, cell)
    if time.share("communicating") >= _SMALL:
        options.append(
            f"communication is exposed for {_ms(time, 'communicating')}: overlapped or bucketed data parallelism "
            "(scripts/ddp_benchmark.py) hides it behind backward; FSDP gathers weights ahead; a low-precision "
            "`--comm-dtype` halves it"
        )
    return Verdict(max(PARTS, key=time.share), evidence, options)


def _details(time: StepTime) -> list[str]:
    reached = "" if time.matmul_tflops is None else f", at {time.matmul_tflops:.0f} TFLOP/s"
    if time.matmul_peak_share is not None:
        reached += f" ({time.matmul_peak_share:.0%} of the card's peak)"
    phases = sorted(time.waiting_by_phase.items(), key=lambda item: -item[1])
    waits = ", ".join(f"{phase} {ms:.1f} ms" for phase, ms in phases if ms >= 0.05 * time.waiting_ms)
    launches = f"; {time.kernels:.0f} kernels a step of {time.mean_kernel_us:.0f} µs on average; for {waits}"
    if time.profiler_ms is None:
        launches += "; at most, since the profiler slows launches, and the step's time without it is not known"
    elif time.profiler_ms > 0:
        launches += f"; without {time.profiler_ms:.1f} ms that the profiler adds"
    return [reached, "", "", "", launches, ""]


def _against_launches(time: StepTime, cell: BenchmarkCell | None) -> list[str]:
    options = []
    if cell is None or cell.compile == "off":
        options.append(
            f"`--compile blocks` (torch.compile) fuses small kernels: {time.kernels:.0f} launches a step keep the GPU "
            f"waiting for {_ms(time, 'waiting')}"
        )
    waits = time.waiting_by_phase.get("optimizer", 0.0)
    if waits >= _SMALL * time.step_ms and (cell is None or cell.optimizer == "adamw"):
        options.append(
            f"`--optimizer adamw-fused` updates all parameters in a few kernels: the optimizer launches "
            f"{time.kernels_by_phase['optimizer']:.0f}, and the GPU waits {waits:.1f} ms for them"
        )
    options.append(
        "CUDA graphs (`torch.cuda.graph`, or `torch.compile(mode='reduce-overhead')`) launch a whole step at once"
    )
    options.append("a larger batch or context gives each launch more to do")
    return options


def _against_bytes(trace: Trace, time: StepTime, cell: BenchmarkCell | None) -> list[str]:
    options = []
    in_attention = [k for k in trace.within(None) if any(k.is_in(part) for part in (SCORES, SOFTMAX, FINAL_MATMUL))]
    attention_ms = total_ms(of_classes(in_attention, MOVES_BYTES)) / trace.n_steps
    if attention_ms >= _SMALL * time.step_ms:
        options.append(
            f"`--attention flash-triton` (or sdpa) keeps the scores on the chip: forward's attention alone spends "
            f"{attention_ms:.1f} ms a step in kernels that write and read them"
        )
    optimizer_ms = total_ms(of_classes(trace.within("optimizer"), MOVES_BYTES)) / trace.n_steps
    if optimizer_ms >= _SMALL * time.step_ms and (cell is None or cell.optimizer == "adamw"):
        options.append(
            f"`--optimizer adamw-fused` reads and writes each value once: the optimizer's kernels take "
            f"{optimizer_ms:.1f} ms"
        )
    rest_ms = time.moving_ms - attention_ms - optimizer_ms
    if rest_ms >= _SMALL * time.step_ms and (cell is None or cell.compile == "off"):
        options.append(
            "`--compile blocks` (torch.compile) fuses kernels that follow each other, so that values stay on the chip: "
            f"{rest_ms:.1f} ms outside of forward's attention and the optimizer"
        )
    if rest_ms >= _SMALL * time.step_ms and cell is not None and cell.precision in ("fp32", "tf32"):
        options.append(f"`--precision bf16` halves the bytes of activations ({rest_ms:.1f} ms as above)")
    return options


def _against_matmul(trace: Trace, time: StepTime, cell: BenchmarkCell | None) -> list[str]:
    if cell is None or time.matmul_peak_share is None or trace.gpu is None:
        return []
    takes = f"matrix products take {_ms(time, 'computing')}"
    if cell.precision == "fp32":
        faster = {name: peak_tflops(trace.gpu, name) for name in ("tf32", "bf16")}
        names = ", ".join(f"{name} {peak:.0f}" for name, peak in faster.items() if peak)
        at = f"{time.matmul_tflops:.0f} TFLOP/s without tensor cores"
        return (
            [f"`--precision bf16` or `tf32` use the tensor cores (peaks: {names} TFLOP/s): {takes}, at {at}"]
            if names
            else []
        )
    if time.matmul_peak_share >= _NEAR_PEAK:
        return [
            f"more GPUs (scripts/ddp_benchmark.py, scripts/fsdp_benchmark.py): {takes}, and run near the card's peak"
        ]
    kernels = of_classes(trace.within(None), COMPUTES)
    mean_us = total_ms(kernels) * 1e3 / len(kernels)
    return [
        f"a larger batch, context or model: {takes} at {time.matmul_peak_share:.0%} of the peak, {mean_us:.0f} µs a "
        "kernel; products that small do not fill the card"
    ]


def _ms(time: StepTime, part: str) -> str:
    return f"{getattr(time, f'{part}_ms'):.1f} ms, {time.share(part):.0%} of the step"
