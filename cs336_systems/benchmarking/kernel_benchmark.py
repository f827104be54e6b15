"""The fused kernels beside eager PyTorch, torch.compile and PyTorch's own fused functions, at the models' shapes.

Each pass of each implementation is a cell and a row: time, GB/s or TFLOP/s, and peak memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

from cs336_systems.benchmarking.attention_cells import (
    check_not_empty,
    prepare_device,
    without_leftovers,
)
from cs336_systems.benchmarking.flash_benchmark import Timed
from cs336_systems.benchmarking.grouped_sweep import run_grouped_sweep
from cs336_systems.benchmarking.into_files import measure_into_files
from cs336_systems.configs import (
    MODEL_SIZES,
    ModelConfig,
    Precision,
    check,
    check_choices,
    check_device,
    check_together,
    named_shape,
)
from cs336_systems.records import ResultsFile, format_value
from cs336_systems.sweep_cells import cells_of

KernelName = Literal["linear-cross-entropy", "adamw", "rms-norm", "add-rms-norm", "swiglu", "rope"]
ImplementationName = Literal["fused", "eager", "compiled", "torch"]
Phase = Literal["forward", "backward", "both", "step"]

_ELEMENTWISE = ("forward", "backward", "both")
# The loss's gradients are made in forward: its backward alone says nothing.
PHASES: dict[str, tuple[str, ...]] = {"linear-cross-entropy": ("forward", "both"), "adamw": ("step",)}
WITHOUT_PEER = ("add-rms-norm", "swiglu", "rope")  # PyTorch has no function of its own for these


def phases_of(kernel: str) -> tuple[str, ...]:
    """The passes that a kernel is timed in."""
    return PHASES.get(kernel, _ELEMENTWISE)


@dataclass(frozen=True)
class KernelCell:
    """One pass of one implementation of a kernel's work, and how long it is timed.

    `timed` is "calls", each by itself; "in-a-row", as a loop makes them; or "kernels": what a call launches, recorded
    once in a CUDA graph and replayed, so that no time of the host is in it (elementwise kernels only, which it can
    hide).

    `precision` is the dtype of all tensors (tf32: float32, products with tensor cores). `size` is a label; what counts
    is beside it. `num_layers` is read by adamw only, which updates the parameters of that many blocks and of the rest
    of the model.

    Raises:
        ValueError: a value out of its range, or a combination that does not exist.
    """

    kernel: KernelName
    implementation: ImplementationName
    phase: Phase
    precision: Precision
    size: str
    tokens: int
    d_model: int
    d_ff: int
    num_heads: int
    vocab_size: int
    num_layers: int
    device: str = "cpu"
    seed: int = 0
    warmup_ms: int = 25
    rep_ms: int = 200
    timed: Timed = "calls"

    def missing_here(self) -> str:
        """As `AttentionCell.missing_here`."""
        from cs336_systems.kernels import support

        missing = support.why_not(self.device) if self.implementation == "fused" else None
        return f"implementation={self.implementation!r}: {missing}" if missing else ""

    def __post_init__(self) -> None:
        check_choices(self)
        phases = phases_of(self.kernel)
        check(self.phase in phases, "phase", self.phase, f"must be one of {', '.join(phases)} for {self.kernel}")
        check(
            self.implementation != "torch" or self.kernel not in WITHOUT_PEER,
            "implementation",
            self.implementation,
            f"PyTorch has no fused function for {self.kernel}",
        )
        if self.timed == "kernels":
            check_together(
                self,
                self.device.startswith("cuda") and self.kernel not in PHASES,
                "timed",
                self.timed,
                f"needs a GPU and an elementwise kernel, got device={self.device!r} and kernel={self.kernel!r}",
            )
        for name in ("tokens", "rep_ms"):
            check(getattr(self, name) >= 1, name, getattr(self, name), "must be at least 1")
        check(self.warmup_ms >= 0, "warmup_ms", self.warmup_ms, "must be 0 or more")
        check(0 <= self.seed < 2**63, "seed", self.seed, "must be between 0 and 2**63 - 1")
        check_device(self)
        ModelConfig(self.d_model, self.d_ff, self.num_layers, self.num_heads, self.vocab_size)

    @property
    def what(self) -> str:
        """E.g. "rms-norm backward"."""
        return f"{self.kernel} {self.phase}"


@dataclass(frozen=True)
class KernelRow(KernelCell):
    """A cell and what it measured; results are None where the status is not "ok".

    `gb_per_s` (1e9 bytes) is the memory traffic that the work needs at least, each tensor read and written once, over
    the median; `tflops` that of its matrix products, and `peak_share` beside the card's dense peak. Each kernel has the
    one or the other. `peak_memory_gib` is the allocator's peak during one call, inputs, gradients and an optimizer's
    state included (None without a GPU).
    """

    status: str = "ok"
    reason: str = ""
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    min_ms: float | None = None
    repetitions: int | None = None
    gb_per_s: float | None = None
    tflops: float | None = None
    peak_share: float | None = None
    peak_memory_gib: float | None = None

    @property
    def rate(self) -> str:
        """GB/s or TFLOP/s, as a person reads it."""
        if self.gb_per_s is not None:
            return f"{format_value(self.gb_per_s)} GB/s"
        return f"{format_value(self.tflops)} TFLOP/s"


class KernelMeasure:
    """Measures cells one after another in a process."""

    def __init__(self) -> None:
        from torch._functorch import config

        # Backward is timed many times over one forward, and a compiled one may not reuse what it is given for that.
        config.donated_buffer = False  # ty: ignore[invalid-assignment]

    def __call__(self, cell: KernelCell) -> dict[str, Any]:
        """The row's results. Raises `Unsupported` where the fused kernels cannot run."""
        device = prepare_device(cell)  # ty: ignore[invalid-argument-type]  no attention, but the same three settings
        return without_leftovers(lambda: _measure(cell, device), device)


def _measure(cell: KernelCell, device: Any) -> dict[str, Any]:
    from cs336_systems.benchmarking.call_timing import measure_work
    from cs336_systems.benchmarking.kernel_peers import make_work

    work, measured = measure_work(lambda: make_work(cell), cell, device)
    return measured | {"gb_per_s": work.n_bytes / measured["median_ms"] / 1e6 if work.n_bytes else None}


def kernel_cells(
    kernel: tuple[str, ...],
    implementation: tuple[str, ...],
    size: tuple[str, ...],
    precision: tuple[str, ...],
    tokens: int | None,
    adamw_layers: int,
    *,
    device: str,
    **settings: Any,
) -> list[Any]:
    """The product of the first four, each in all of the kernel's passes; what has no peer in PyTorch is left out.

    Without `size`: large and 8b on a GPU, tiny elsewhere. Without `tokens`: the size's own context where that is the
    leaderboard's (8b: 32,768), else 4 × 1,024. Raises ValueError as `cells_of`, and for another parameter of
    no values.
    """
    check_not_empty(kernel=kernel, implementation=implementation, precision=precision)
    check(adamw_layers >= 1, "adamw_layers", adamw_layers, "must be at least 1")
    default_sizes = ("large", "8b") if device.startswith("cuda") else ("tiny",)
    several = []
    for name, dtype, what, how in product(size or default_sizes, precision, kernel, implementation):
        if how == "torch" and what in WITHOUT_PEER:
            continue
        shape = named_shape(name)
        shape["num_layers"] = min(shape["num_layers"], adamw_layers)
        shape["tokens"] = max(4096, MODEL_SIZES[name].context_length) if tokens is None else tokens
        shape["device"] = device
        varied = {"kernel": what, "implementation": how, "precision": dtype}
        several += [{**varied, "phase": phase, **shape, **settings} for phase in phases_of(what)]
    return cells_of(KernelCell, several)


def run_kernel_benchmark(command: str, *, device: str, out: Path, resume: bool, **parameters: Any) -> list[KernelRow]:
    """Measures `kernel_cells` and leaves the files under `out`; see scripts/kernel_benchmark.py.

    All of an implementation's cells share a process.
    """

    def sweep(cells: list[KernelCell], results: ResultsFile) -> None:
        run_grouped_sweep(cells, lambda cell: cell.implementation, KernelMeasure, results, _label)

    return measure_into_files(
        command,
        "kernel_benchmark",
        KernelRow,
        lambda device: kernel_cells(device=device, **parameters),
        sweep,
        write_kernel_files,
        device=device,
        out=out,
        resume=resume,
    )


def _label(cell: KernelCell) -> str:
    return f"{cell.implementation} {cell.size} {cell.precision} {cell.what}"


_TABLES = {"size": "", "precision": "", "timed": "", "tokens": "tokens", "num_layers": "adamw's blocks"}
_COLUMNS = {
    "size": "size",
    "precision": "precision",
    "tokens": "tokens",
    "kernel": "kernel",
    "phase": "pass",
    "implementation": "implementation",
    "timed": "timed",
    "status": "status",
    "median_ms": "median ms",
    "p20_ms": "20 %",
    "p80_ms": "80 %",
    "gb_per_s": "GB/s",
    "tflops": "TFLOP/s",
    "peak_share": "of peak",
    "peak_memory_gib": "peak GiB",
}


def write_kernel_files(results: ResultsFile[KernelRow]) -> str:
    """Writes CSV, LaTeX and Markdown; returns the Markdown."""
    from cs336_systems.benchmarking.attention_tables import (
        SPREAD,
        pivot_markdown,
        time_or_status,
        value_or_status,
        why_not_run,
        write_pivoted,
    )

    rows = results.rows

    def pivot(show: Callable[[KernelRow], str | None]) -> str:
        return pivot_markdown(rows, _TABLES, "what", "implementation", show)

    weighed = any(row.peak_memory_gib is not None for row in rows)
    return write_pivoted(
        results,
        _COLUMNS,
        {
            f"Median ms {SPREAD} (least traffic, or matrix products, over it)": pivot(
                lambda row: time_or_status(row, "rate")
            ),
            "Peak memory, GiB": pivot(lambda row: value_or_status(row, "peak_memory_gib")) if weighed else "",
            "What could not run": why_not_run(rows, "kernel"),
        },
    )
