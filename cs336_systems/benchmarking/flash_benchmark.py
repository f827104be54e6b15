"""FlashAttention-2 beside its peers over lengths, head_dims and dtypes: forward, backward and both, timed and weighed.

Handout, item FlashAttention-2 against the plain implementation. Each pass of each shape is a cell and a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from cs336_systems.accounting.flops import attention_flops
from cs336_systems.benchmarking.attention_cells import (
    AttentionCell,
    check_not_empty,
    make_inputs,
    prepare_device,
    without_leftovers,
)
from cs336_systems.benchmarking.grouped_sweep import Skipped
from cs336_systems.configs import check, check_together
from cs336_systems.sweep_cells import cells_of, combinations

if TYPE_CHECKING:
    from torch import Tensor

    from cs336_systems.benchmarking.call_timing import Work

Phase = Literal["forward", "backward", "both"]
CompiledShapes = Literal["dynamic", "static"]
Timed = Literal["calls", "in-a-row", "kernels"]

# The float64 reference keeps every score; with more of them (one head, length 4,096) it would cost more than the rest.
MAX_CHECKED_SCORES = 2**24


@dataclass(frozen=True)
class FlashCell(AttentionCell):
    """One pass of one peer on (batch_size, heads, length, head_dim) inputs, and how long it is timed.

    `timed` is "calls", each by itself and from a cold L2 cache; "in-a-row", as a loop makes them, one after another; or
    "kernels": what a call launches, recorded once in a CUDA graph and replayed, so that no time of the host is in it.
    """

    batch_size: int = 1
    heads: int = 1
    phase: Phase = "both"
    compiled_shapes: CompiledShapes = "dynamic"
    warmup_ms: int = 25
    rep_ms: int = 100
    max_call_ms: int = 1000
    timed: Timed = "calls"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("batch_size", "heads", "rep_ms", "max_call_ms"):
            check(getattr(self, name) >= 1, name, getattr(self, name), "must be at least 1")
        check(self.warmup_ms >= 0, "warmup_ms", self.warmup_ms, "must be 0 or more")
        replays = self.timed != "kernels" or self.device.startswith("cuda")
        needs = f"needs a GPU, where CUDA graphs are, and the device is {self.device}"
        check_together(self, replays, "timed", self.timed, needs)


@dataclass(frozen=True)
class FlashRow(FlashCell):
    """A cell and what it measured; results are None where the status is not "ok".

    `tflops` is `attention_flops` over the median; `peak_share` sets it beside the card's dense peak in that precision.
    `peak_memory_gib` is the allocator's peak during one call, with q, k, v, dO and, for backward, the output and what
    forward kept (None without a GPU). `relative_error`, up to `MAX_CHECKED_SCORES`, is the largest difference
    from a float64 reference over the reference's largest value: of the output after forward, of the worst gradient
    after backward.
    """

    status: str = "ok"
    reason: str = ""
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    min_ms: float | None = None
    repetitions: int | None = None
    tflops: float | None = None
    peak_share: float | None = None
    peak_memory_gib: float | None = None
    relative_error: float | None = None


class FlashMeasure:
    """Measures cells one after another in a process; remembers what took too long, and skips it at longer lengths."""

    def __init__(self) -> None:
        from torch._functorch import config

        # Backward is timed many times over one forward, and a compiled one may not reuse what it is given for that.
        config.donated_buffer = False  # ty: ignore[invalid-assignment]
        self._too_slow: dict[tuple, str] = {}

    def __call__(self, cell: FlashCell) -> dict[str, Any]:
        """The row's results. Raises `Unsupported` with the peer's reason, and `Skipped` where it took too long."""
        from cs336_systems.benchmarking.attention_peers import open_peer
        from cs336_systems.benchmarking.call_timing import measure_work

        everything_but_length = (cell.precision, cell.head_dim, cell.is_causal, cell.batch_size, cell.heads, cell.phase)
        if everything_but_length in self._too_slow:
            raise Skipped(self._too_slow[everything_but_length])
        device = prepare_device(cell)
        try:
            with open_peer(cell.implementation, device, _compiler(cell)) as attention:
                results = without_leftovers(
                    lambda: measure_work(lambda: _work_of(cell, attention), cell, device, cell.max_call_ms)[1], device
                )
                results["relative_error"] = _relative_error(cell, attention)
                return results
        except Skipped as error:
            self._too_slow[everything_but_length] = f"at length {cell.length}, {error}"
            raise


def _compiler(cell: FlashCell) -> Callable[[Callable], Callable]:
    from cs336_systems.benchmarking.attention_peers import compile_once

    dynamic = cell.compiled_shapes == "dynamic"
    key = (
        cell.precision,
        cell.head_dim,
        cell.is_causal,
        None if dynamic else (cell.batch_size, cell.heads, cell.length),
    )
    return lambda function: compile_once(function, dynamic, key)


def _work_of(cell: FlashCell, attention: Callable[..., Tensor]) -> Work:
    """The call to time. Backward is the same pass over one forward's graph, again and again; it is timed by itself, not
    as a difference."""
    from cs336_systems.benchmarking.call_timing import Work

    q, k, v, do = make_inputs(cell, cell.batch_size, cell.heads)
    flops = attention_flops(cell.batch_size, cell.heads, cell.length, cell.head_dim, cell.is_causal)[cell.phase]
    work = partial(Work, inputs=(q, k, v), flops=flops)
    if cell.phase == "forward":
        return work(lambda: attention(q, k, v, cell.is_causal))
    if cell.phase == "backward":
        o = attention(q, k, v, cell.is_causal)
        return work(lambda: o.backward(do, retain_graph=True))
    return work(lambda: attention(q, k, v, cell.is_causal).backward(do))


def _relative_error(cell: FlashCell, attention: Callable[..., Tensor]) -> float | None:
    import torch

    from cs336_systems.attention.reference import attention_reference

    if cell.phase == "both" or cell.batch_size * cell.heads * cell.length**2 > MAX_CHECKED_SCORES:
        return None
    *inputs, do = make_inputs(cell, cell.batch_size, cell.heads)
    exact_inputs = q, k, v = [x.detach().double().requires_grad_() for x in inputs]
    results: tuple[Tensor, ...] = (attention(*inputs, cell.is_causal),)
    exact: tuple[Tensor, ...] = (attention_reference(q, k, v, cell.is_causal)[0],)
    if cell.phase == "backward":
        results = torch.autograd.grad(results, inputs, do)
        exact = torch.autograd.grad(exact, exact_inputs, do.double())
    errors = [(x - y).abs().max() / y.abs().max() for x, y in zip(results, exact, strict=True)]
    return max(error.item() for error in errors)


def flash_cells(**parameters: Any) -> list[Any]:
    """A cell, or what stands for it, for each of the parameters' `combinations`.

    Raises ValueError as `cells_of`, and for a parameter of no values.
    """
    check_not_empty(**parameters)
    return cells_of(FlashCell, combinations(**parameters))
