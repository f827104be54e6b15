"""The course's 2025 FlashAttention leaderboard, its timing to the letter, for any of the implementations.

Rules: 16 heads, length 16,384, head_dim 64, causal, bfloat16; q, k and v are the parts of one tensor that requires
grad; the function is wrapped in torch.compile; one call is forward and `o.sum().backward()`; the score is the mean of
`triton.testing.do_bench(call, rep=10_000, warmup=1_000)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cs336_systems.accounting.flops import attention_flops, peak_tflops
from cs336_systems.benchmarking.attention_cells import AttentionCell, check_not_empty, prepare_device, torch_dtype
from cs336_systems.benchmarking.into_files import measure_into_files
from cs336_systems.benchmarking.sweep import run_sweep
from cs336_systems.configs import check
from cs336_systems.defaults import fill_in
from cs336_systems.feasibility import tell_if_compiled_on_cpu
from cs336_systems.records import ResultsFile, Statistics
from cs336_systems.sweep_cells import cells_of, combinations

# On a GPU, where the rules hold, and elsewhere.
_DEFAULTS: dict[str, tuple[Any, Any]] = {
    "implementation": (("flash-triton", "sdpa-flash", "sdpa-cudnn", "flex"), ("flash-pytorch", "sdpa-flash")),
    "length": (16_384, 1_024),
    "warmup_ms": (1_000, 100),
    "rep_ms": (10_000, 1_000),
}


@dataclass(frozen=True)
class LeaderboardCell(AttentionCell):
    """One implementation on (heads, length, head_dim) inputs: heads take the place of a batch."""

    heads: int = 16
    warmup_ms: int = 1_000
    rep_ms: int = 10_000

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.heads >= 1, "heads", self.heads, "must be at least 1")
        check(self.warmup_ms >= 0, "warmup_ms", self.warmup_ms, "must be 0 or more")
        check(self.rep_ms >= 1, "rep_ms", self.rep_ms, "must be at least 1")


@dataclass(frozen=True)
class LeaderboardRow(LeaderboardCell):
    """A cell and its times; the leaderboard's score is `mean_ms`, and `tflops` counts forward and backward over it."""

    status: str = "ok"
    reason: str = ""
    mean_ms: float | None = None
    std_ms: float | None = None
    median_ms: float | None = None
    min_ms: float | None = None
    repetitions: int | None = None
    tflops: float | None = None
    peak_share: float | None = None


def measure_leaderboard(cell: LeaderboardCell) -> dict[str, Any]:
    """The row's results. Raises `Unsupported` with the implementation's reason."""
    import torch
    from torch._functorch import config as functorch_config

    from cs336_systems.benchmarking.attention_peers import open_peer
    from cs336_systems.benchmarking.call_timing import time_calls
    from cs336_systems.workload import hide_compiler_search

    def as_it_is(function: Callable) -> Callable:
        return function

    device = prepare_device(cell)
    hide_compiler_search()
    shape = (3, cell.heads, cell.length, cell.head_dim)
    q, k, v = torch.randn(shape, device=device, dtype=torch_dtype(cell.precision), requires_grad=True)
    # AOTAutograd's cache on disk knows a graph by its calls to scaled_dot_product_attention, not by the backend that
    # they may use: with it, every SDPA peer would run the kernels of the first one that was ever compiled here.
    own_graph = functorch_config.patch(enable_autograd_cache=False)
    # What the peer would compile itself is left to the compilation of the whole.
    with own_graph, open_peer(cell.implementation, device, compiler=as_it_is) as attention:
        compiled = torch.compile(attention)

        def forward_and_backward() -> None:
            o = compiled(q, k, v, cell.is_causal)
            o.sum().backward()

        times = time_calls(forward_and_backward, cell.warmup_ms, cell.rep_ms, device)
    statistics = Statistics.of(times)
    flops = attention_flops(1, cell.heads, cell.length, cell.head_dim, cell.is_causal)["both"]
    tflops = flops / statistics.mean / 1e9
    peak = peak_tflops(torch.cuda.get_device_name(device), cell.precision) if device.type == "cuda" else None
    return {
        "mean_ms": statistics.mean,
        "std_ms": statistics.std,
        "median_ms": statistics.median,
        "min_ms": statistics.min,
        "repetitions": len(times),
        "tflops": tflops,
        "peak_share": tflops / peak if peak else None,
    }


def leaderboard_cells(causal: bool, device: str, **settings: Any) -> list[Any]:
    """A cell an implementation. What is None of `_DEFAULTS` is the leaderboard's on a GPU, and seconds' work elsewhere.

    Raises ValueError as `cells_of`, and for no implementation.
    """
    settings = fill_in(settings, _DEFAULTS, device)
    implementation = settings.pop("implementation")
    check_not_empty(implementation=implementation)
    return cells_of(
        LeaderboardCell, combinations(implementation=implementation, is_causal=causal, device=device, **settings)
    )


def run_leaderboard(command: str, *, device: str, out: Path, resume: bool, **parameters: Any) -> list[LeaderboardRow]:
    """Measures `leaderboard_cells`, a process each, and leaves the files under `out`; see
    scripts/leaderboard_attention.py."""

    def sweep(cells: list[LeaderboardCell], results: ResultsFile) -> None:
        run_sweep(cells, measure_leaderboard, results, lambda cell: cell.implementation)

    return measure_into_files(
        command,
        "leaderboard_attention",
        LeaderboardRow,
        lambda device: leaderboard_cells(device=device, **parameters),
        sweep,
        write_leaderboard_files,
        device=device,
        out=out,
        resume=resume,
        check_cells=tell_if_compiled_on_cpu,
    )


_PARAMETERS = {
    "implementation": "implementation",
    "heads": "heads",
    "length": "length",
    "head_dim": "head_dim",
    "precision": "precision",
    "is_causal": "causal",
    "warmup_ms": "warm-up ms",
    "rep_ms": "measured ms",
}
_RESULTS = {
    "status": "status",
    "mean_ms": "mean ms",
    "std_ms": "± ms",
    "median_ms": "median ms",
    "min_ms": "min ms",
    "tflops": "TFLOP/s",
    "peak_share": "of peak",
}


def write_leaderboard_files(results: ResultsFile[LeaderboardRow]) -> str:
    """Writes CSV, LaTeX and Markdown; returns the Markdown."""
    from cs336_systems.benchmarking.attention_tables import constants_note, varying

    rows = results.rows
    columns = varying(rows, _PARAMETERS, always=("implementation",)) | _RESULTS
    return results.write_tables(columns, constants_note(rows, _PARAMETERS))
