"""Times one call over and over, as `triton.testing.do_bench` does: for a time, not a count, and from a cold L2 cache.

On a GPU it is do_bench itself. Elsewhere the host's clock stands in for the GPU's events, and no cache is emptied.

do_bench empties the cache by a kernel of some 60 µs, behind which the host's work for a short call hides, or, on a
slower host, does not: near that edge its times are chance. `time_in_a_row` tells what such calls take in a loop.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cs336_systems.accounting.flops import peak_tflops
from cs336_systems.benchmarking.attention_cells import peak_allocated_gib, reset_peak
from cs336_systems.benchmarking.grouped_sweep import Skipped
from cs336_systems.benchmarking.timing import synchronize

_IN_A_ROW = 50


@dataclass
class Work:
    """A call to time. `inputs` are the tensors whose gradients it writes; `n_bytes` is the memory traffic if each
    tensor is read and written once, `flops` the operations of its matrix products; 0 for what does not count."""

    call: Callable[[], Any]
    inputs: Sequence[Tensor] = ()
    n_bytes: int = 0
    flops: int = 0


def time_calls(
    call: Callable[[], object],
    warmup_ms: float,
    rep_ms: float,
    device: torch.device,
    grad_to_none: Sequence[Tensor] = (),
) -> list[float]:
    """Calls `call` for about `warmup_ms`, then for about `rep_ms`, and returns each of the latter calls' milliseconds.

    What the call queues on the GPU is timed from its first kernel's turn to its last one's end, so that a call whose
    host work takes longer than its kernels counts the waiting too, as its user would. Before each timed call the
    gradients of `grad_to_none` are dropped, so that a backward pass never adds to the last one's.

    Raises:
        ValueError: `warmup_ms` below 0, or `rep_ms` not above 0.
    """
    _check_times(warmup_ms, rep_ms)
    if device.type == "cuda":
        from triton.testing import do_bench

        return do_bench(call, warmup=warmup_ms, rep=rep_ms, grad_to_none=grad_to_none, return_mode="all")
    warm_until = time.perf_counter() + warmup_ms / 1e3
    call()
    while time.perf_counter() < warm_until:
        call()
    times: list[float] = []
    while not times or sum(times) < rep_ms:
        drop_gradients(grad_to_none)
        times.append(time_once(call, device))
    return times


def time_in_a_row(
    call: Callable[[], object],
    warmup_ms: float,
    rep_ms: float,
    device: torch.device,
    grad_to_none: Sequence[Tensor] = (),
) -> list[float]:
    """Milliseconds a call of calls made one after another, as a training loop makes them: the time of some 50 (fewer of
    long ones) from an idle device to an idle device, divided by their number, over and over for about `rep_ms`.

    That is what the host needs for a call or the device, whichever is slower. Gradients are dropped and errors raised
    as in `time_calls`.
    """

    def many(n: int) -> float:
        start = time.perf_counter()
        for _ in range(n):
            drop_gradients(grad_to_none)
            call()
        synchronize(device)
        return (time.perf_counter() - start) * 1e3 / n

    _check_times(warmup_ms, rep_ms)
    drop_gradients(grad_to_none)
    call_ms = many(max(1, round(warmup_ms / time_once(call, device))))  # the first one alone may have been slow
    n = max(1, min(_IN_A_ROW, int(rep_ms / call_ms)))
    times: list[float] = []
    while not times or n * sum(times) < rep_ms:
        times.append(many(n))
    return times


def time_once(call: Callable[[], object], device: torch.device) -> float:
    """One call's milliseconds on the host's clock, from an idle device to an idle device."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return (time.perf_counter() - start) * 1e3


def recorded(call: Callable[[], object], stream: torch.cuda.Stream) -> Callable[[], None]:
    """Records what `call` launches on `stream` in a CUDA graph; what is returned launches it all again at once.

    `call` must have run before, on that stream, and what it needs of earlier calls must have been made on it too.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph.replay


def _check_times(warmup_ms: float, rep_ms: float) -> None:
    if warmup_ms < 0:
        raise ValueError(f"warmup_ms={warmup_ms}: must be 0 or more")
    if rep_ms <= 0:
        raise ValueError(f"rep_ms={rep_ms}: must be above 0")


def drop_gradients(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        tensor.grad = None


def measure_work(
    make: Callable[[], Work], cell: Any, device: torch.device, max_call_ms: float = math.inf
) -> tuple[Work, dict[str, Any]]:
    """What `make()` returns, and a row's fields of its time, rate and memory.

    The cell says for how long the call is repeated (`warmup_ms`, `rep_ms`), whether all of it is `timed`, each by
    itself or many in a row, or its kernels alone, and by its `precision` what peak the rate is compared with.

    Raises:
        Skipped: one call takes longer than `max_call_ms`.
    """
    stream = torch.cuda.Stream(device) if cell.timed == "kernels" else None
    with torch.cuda.stream(stream):  # autograd runs backward on forward's stream, which is then the one recorded
        work = make()
        work.call()  # compiles, and tunes
    drop_gradients(work.inputs)
    reset_peak(device)
    call_ms = time_once(work.call, device)
    peak_memory_gib = peak_allocated_gib(device)
    if call_ms > max_call_ms:
        raise Skipped(f"one call took {call_ms:.0f} ms, more than {max_call_ms}")
    call = work.call
    if stream is not None:
        drop_gradients(work.inputs)
        call = recorded(call, stream)
    repeat = time_in_a_row if cell.timed == "in-a-row" else time_calls
    times = repeat(call, cell.warmup_ms, cell.rep_ms, device, grad_to_none=work.inputs)
    median, p20, p80 = np.quantile(times, (0.5, 0.2, 0.8)).tolist()
    tflops = work.flops / median / 1e9 if work.flops else None
    peak = peak_tflops(torch.cuda.get_device_name(device), cell.precision) if device.type == "cuda" else None
    return work, {
        "median_ms": median,
        "p20_ms": p20,
        "p80_ms": p80,
        "min_ms": min(times),
        "repetitions": len(times),
        "tflops": tflops,
        "peak_share": tflops / peak if tflops and peak else None,
        "peak_memory_gib": peak_memory_gib,
    }
