"""The README's and the report's tables of fused kernels alone, and of the 2026 leaderboard's step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cs336_systems.accounting.flops import model_flops_utilization, peak_tflops, train_step_flops
from cs336_systems.benchmarking.rank_cells import nccl_label
from cs336_systems.benchmarking.report_rows import (
    Table,
    markdown_table,
    percent,
    ratio,
    read_published,
    read_rows,
    status_or,
    with_spread,
)
from cs336_systems.configs import MODEL_SIZES

Block = Callable[[Path], str]

# ---- Fused kernels ---------------------------------------------------------------------------------------------------

_IMPLEMENTATIONS = ("fused", "eager", "compiled", "torch")


def by_pass(rows: Sequence[Any]) -> dict[tuple[str, str, str, str], dict[str, Any]]:
    """The rows of each (size, precision, kernel, pass), by implementation."""
    passes: dict[tuple[str, str, str, str], dict[str, Any]] = {}
    for row in rows:
        key = row.size, row.precision, row.kernel, row.phase
        passes.setdefault(key, {})[row.implementation] = row
    return passes


def over_best_other(cells: Mapping[str, Any]) -> float | None:
    """The fused kernel's time over that of the fastest other implementation: below 1 it is faster."""
    others = [row.median_ms for name, row in cells.items() if name != "fused" and row.median_ms]
    return ratio(cells["fused"].median_ms, min(others)) if "fused" in cells and others else None


def _implementations(rows: Sequence[Any]) -> list[str]:
    return [name for name in _IMPLEMENTATIONS if any(row.implementation == name for row in rows)]


def _quotient(cells: Mapping[str, Any]) -> str | None:
    over = over_best_other(cells)
    return None if over is None else f"{over:.2f}"


def _kernels_by_size(file: str) -> Block:
    """A table a size: each pass of each kernel in ms, and the rate of the fused one."""

    def make(results: Path) -> str:
        rows = read_rows(results / file)[0]
        return "\n\n".join(
            _of_shapes([row for row in rows if (row.size, row.tokens, row.precision) == shapes], *shapes)
            for shapes in dict.fromkeys((row.size, row.tokens, row.precision) for row in rows)
        )

    return make


def _of_shapes(rows: Sequence[Any], size: str, tokens: int, precision: str) -> str:
    passes = by_pass(rows)
    columns: dict[str, list[object]] = {
        f"{name} ms": [status_or(cells.get(name), "median_ms") for cells in passes.values()]
        for name in _implementations(rows)
    }
    fused = [cells.get("fused") for cells in passes.values()]
    columns |= {
        "fused over the best other": [_quotient(cells) for cells in passes.values()],
        "fused GB/s": [row and row.gb_per_s for row in fused],
        "fused TFLOP/s": [row and row.tflops for row in fused],
    }
    shown = {heading: cells for heading, cells in columns.items() if any(cell is not None for cell in cells)}
    labels = [f"{kernel}, {phase}" for _, _, kernel, phase in passes]
    heading = f"{size}, {tokens:,} tokens, {precision}: kernel, pass"
    return markdown_table([heading, *shown], list(zip(labels, *shown.values(), strict=True)))


def _kernels_in_short(results: Path) -> str:
    """One line a size and kernel: its forward and backward together, or the optimizer's step."""
    rows = [row for row in read_rows(results / CALLS)[0] if row.phase in ("both", "step")]
    names = _implementations(rows)
    body = [
        [
            f"{size}, {precision}, {kernel}",
            *(status_or(cells.get(name), "median_ms") for name in names),
            _quotient(cells),
        ]
        for (size, precision, kernel, _), cells in by_pass(rows).items()
    ]
    headings = ["forward and backward, or AdamW's step", *(f"{name} ms" for name in names)]
    return markdown_table([*headings, "fused over the best other"], body)


# ---- The 2026 leaderboard's step -------------------------------------------------------------------------------------


def published_peak_share(entry: Any) -> float | None:
    """The share of its cards' peak that an entry reaches, by the count of the model's FLOPs that our rows have."""
    peak = peak_tflops(entry.gpu, entry.precision)
    flops = train_step_flops(MODEL_SIZES[entry.size], entry.batch_size, entry.ctx, attention="causal")
    return model_flops_utilization(flops, entry.step_ms / 1e3, peak) if peak else None


def comparable_entries(results: Path, rows: Sequence[Any]) -> list[Any]:
    """What others measured of a step that is among the rows: the same model, tokens and ranks."""
    steps = {tuple(row[name] for name in _SAME_STEP) for row in rows}
    return [entry for entry in read_published(results, PUBLISHED) if tuple(entry[n] for n in _SAME_STEP) in steps]


def _leaderboard_step(results: Path) -> str:
    """Each implementation's step by phase, its rate and memory; beneath them what others measured."""
    rows = read_rows(results / STEP)[0]
    body = [
        [
            row.implementation + nccl_label(row),
            row.world_size,
            row.attention,
            _kept(row),
            with_spread(row, "step_median_ms"),
            row.forward_ms,
            row.backward_ms,
            row.optimizer_ms,
            row.tokens_per_s,
            percent(row.peak_share),
            row.peak_memory_gib,
            row.predicted_gib,
        ]
        for row in rows
    ]
    body += [
        [
            f"{entry.name}, {entry.world_size} × {entry.gpu.removeprefix('NVIDIA ')} ({entry.origin})",
            entry.world_size,
            entry.attention,
            _kept(entry),
            entry.step_ms,
            *[None] * 4,
            percent(published_peak_share(entry)),
            entry.peak_memory_gib,
            None,
        ]
        for entry in comparable_entries(results, rows)
    ]
    headings = ["implementation", "ranks", "attention", "blocks kept", "median step ms", "forward ms", "backward ms"]
    return markdown_table(
        [*headings, "optimizer ms", "tokens/s", "share of peak", "peak GiB", "predicted peak GiB"], body
    )


def _kept(row: Any) -> str | None:
    """How many blocks keep all that backward needs."""
    return None if row.kept_blocks is None else f"{row.kept_blocks} of {row.num_layers}"


CALLS, KERNELS = (f"kernel_benchmark/{timed}/kernel_benchmark.json" for timed in ("calls", "kernels"))
STEP, PUBLISHED = "leaderboard_step/leaderboard_step.json", "leaderboard_2026"
_SAME_STEP = ("size", "ctx", "batch_size", "world_size", "precision")

KERNEL_TABLES = {file: Table(_kernels_by_size(file), (file,)) for file in (CALLS, KERNELS)}
KERNEL_BLOCKS: dict[str, Table] = {
    "kernel-benchmark": Table(_kernels_in_short, (CALLS,)),
    "leaderboard-step": Table(_leaderboard_step, (STEP,)),
}
