"""The README's tables, made from the committed rows: a block `<!-- begin NAME -->` … `<!-- end NAME -->` each.

A table whose rows are not there yet is empty.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cs336_systems.benchmarking.fused_tables import FUSED_BLOCKS
from cs336_systems.benchmarking.kernel_tables import KERNEL_BLOCKS
from cs336_systems.benchmarking.parallel_tables import PARALLEL_BLOCKS, Block
from cs336_systems.benchmarking.profile_tables import PROFILE_BLOCKS
from cs336_systems.benchmarking.report_rows import (
    Table,
    markdown_table,
    read_published,
    read_rows,
    status_or,
    with_spread,
)
from cs336_systems.configs import MODEL_SIZES
from cs336_systems.records import format_value


def in_order(rows: Sequence[Any]) -> list[str]:
    """The sizes that have rows, small to large."""
    return [name for name in MODEL_SIZES if any(row.size == name for row in rows)]


# ---- The model -------------------------------------------------------------------------------------------------------


def _step_at_256(results: Path) -> str:
    """Each size at context 256: the phases in fp32 beside the published ones, and the step in bf16."""
    rows, _ = read_rows(results / SIZES)
    published = read_published(results, "rtx4090")
    body = []
    for size in in_order(rows):
        cells = {row.precision: row for row in rows if (row.size, row.ctx) == (size, 256)}
        public = next((row for row in published if row["size"] == size), None)
        body.append(
            [
                size,
                *(status_or(cells.get("fp32"), f"{phase}_mean_ms") for phase in ("forward", "backward", "optimizer")),
                " / ".join(str(public[f"{phase}_ms"]) for phase in ("forward", "backward", "optimizer"))
                if public
                else None,
                status_or(cells.get("fp32"), "step_mean_ms"),
                status_or(cells.get("bf16"), "step_mean_ms"),
                status_or(cells.get("fp32"), "peak_memory_gib"),
            ]
        )
    headings = ["size", "forward ms", "backward ms", "optimizer ms", "RTX 4090, published", "step ms", "bf16 step ms"]
    if not published:
        headings.pop(4)
        body = [[*line[:4], *line[5:]] for line in body]
    return markdown_table([*headings, "peak GiB"], body)


def _step_by_context(results: Path) -> str:
    """The train step over context lengths, fp32 / bf16."""
    rows, _ = read_rows(results / SIZES)
    contexts = sorted({row.ctx for row in rows})
    by_cell = {(row.size, row.ctx, row.precision): row for row in rows}
    body = [
        [size]
        + [
            " / ".join(
                format_value(status_or(by_cell.get((size, ctx, precision)), "step_mean_ms"))
                for precision in ("fp32", "bf16")
            )
            for ctx in contexts
        ]
        for size in in_order(rows)
    ]
    return markdown_table(["fp32 / bf16 step ms", *(f"ctx {ctx}" for ctx in contexts)], body)


def two_ways(path: str, field: str, ways: dict[str, str]) -> Block:
    """The train step with either value of a field (value: how the table calls it), by size and precision."""

    def make(results: Path) -> str:
        rows, _ = read_rows(results / path)
        by_cell = {(row.size, row.precision, row[field]): row for row in rows}
        body = []
        for size in in_order(rows):
            for precision in dict.fromkeys(row.precision for row in rows if row.size == size):
                cells = [by_cell.get((size, precision, way)) for way in ways]
                times = [status_or(cell, "step_mean_ms") for cell in cells]
                body.append([size, precision, *times, *(status_or(cell, "peak_memory_gib") for cell in cells)])
        headings = [f"{word} {what}" for what in ("step ms", "peak GiB") for word in ways.values()]
        return markdown_table(["size", "precision", *headings], body)

    return make


def _warmup_at_256(results: Path) -> str:
    """The mean step and its deviation after 0, 1, 2 and 5 warm-up steps, each in a fresh process."""
    rows, _ = read_rows(results / WARMUP)
    counts = sorted({row.warmup for row in rows})
    by_cell = {(row.size, row.warmup): row for row in rows}
    body = [
        [size, *(with_spread(by_cell.get((size, count)), "step_mean_ms") for count in counts)]
        for size in in_order(rows)
    ]
    return markdown_table(["fp32 step ms", *(f"warm-up {count}" for count in counts)], body)


# ---- Attention -------------------------------------------------------------------------------------------------------


def _leaderboard(results: Path) -> str:
    """The 2025 leaderboard's timing of each implementation."""
    rows = [row for row in read_rows(results / LEADERBOARD)[0] if row.mean_ms]
    flash = next((row.mean_ms for row in rows if row.implementation == "sdpa-flash"), None)
    body = [
        [row.implementation, row.mean_ms, row.std_ms, row.tflops, row.mean_ms / flash if flash else None]
        for row in rows
    ]
    headings = ["implementation", "mean ms", "± ms", "TFLOP/s", "of SDPA FlashAttention-2's time"]
    return markdown_table(headings, body)


def _shapes(*files: str) -> Block:
    """Each implementation by shape, length and pass; of two runs the mean of their medians ± half their difference."""

    def make(results: Path) -> str:
        rows = [row for file in files for row in read_rows(results / file)[0]]
        names = list(dict.fromkeys(row.implementation for row in rows))
        body = []
        for shape, of_shape in _by_shape(rows).items():
            heads, head_dim, length, batch_size, phase = shape
            cells = [_times([row for row in of_shape if row.implementation == name]) for name in names]
            tokens = f"{length:,}" if batch_size == 1 else f"{batch_size} sequences of {length:,}"
            body.append([f"{heads} × {head_dim}, {tokens}, {phase}", *cells])
        kind = f"{rows[0].precision}, {'causal' if rows[0].is_causal else 'not causal'}" if rows else ""
        return markdown_table([f"{kind}: heads × head_dim, length, pass", *names], body)

    return make


def _by_shape(rows: Sequence[Any]) -> dict[tuple, list[Any]]:
    """Rows by shape and pass, in their order, and of a width the shorter lengths first."""
    shapes: dict[tuple, list[Any]] = {}
    for row in rows:
        shapes.setdefault((row.heads, row.head_dim, row.length, row.batch_size, row.phase), []).append(row)
    widths = list(dict.fromkeys(shape[:2] for shape in shapes))
    return {shape: shapes[shape] for shape in sorted(shapes, key=lambda shape: (widths.index(shape[:2]), shape[2]))}


def _times(rows: Sequence[Any]) -> str | None:
    """Milliseconds and, in brackets, TFLOP/s of one shape's rows, one a run."""
    times = [row.median_ms for row in rows if row.median_ms]
    if not times:
        return None
    mean = statistics.fmean(times)
    tflops = statistics.fmean([row.median_ms * row.tflops for row in rows if row.median_ms]) / mean
    spread = f" ± {(max(times) - min(times)) / 2:.2g}" if len(times) > 1 else ""
    return f"{format_value(mean)}{spread} ({tflops:.0f})"


def _by_length(file: str, precision: str, ours: str, theirs: str) -> Block:
    """One implementation's time over another's, one head, over lengths: below 1 the former is faster."""

    def make(results: Path) -> str:
        rows = [row for row in read_rows(results / file)[0] if row.precision == precision]
        if not {ours, theirs} <= {row.implementation for row in rows}:
            return ""
        times = {(row.implementation, row.head_dim, row.phase, row.length): row.median_ms for row in rows}
        lengths = sorted({row.length for row in rows})
        body = []
        for head_dim, phase in sorted({(row.head_dim, row.phase) for row in rows}, key=_by_head_dim_and_phase):
            pairs = [[times.get((name, head_dim, phase, n)) for name in (ours, theirs)] for n in lengths]
            quotients = [f"{first / second:.2f}" if first and second else None for first, second in pairs]
            body.append([f"{head_dim}, {phase}", *quotients])
        what = {"in-a-row": "calls in a row"}.get(rows[0].timed, rows[0].timed)
        heading = f"{what}, {precision}, `{ours}` over `{theirs}`: head_dim, pass"
        return markdown_table([heading, *map(str, lengths)], body)

    return make


def _by_head_dim_and_phase(key: tuple[int, str]) -> tuple[int, int]:
    return key[0], ("forward", "backward", "both").index(key[1])


SIZES, MODES, WARMUP, COMPILE = (f"benchmark/{name}/benchmark.json" for name in ("sizes", "modes", "warmup", "compile"))
LEADERBOARD = "leaderboard_attention/leaderboard_attention.json"
FLASH, FLASH_KERNELS, FLASH_SHORT = (
    f"{name}/flash_benchmark.json" for name in ("flash_benchmark", "flash_kernels", "flash_short")
)
ANCHORS = {
    name: Table(_shapes(*files), files)
    for name in ("flash_anchors", "flash_anchors_not_causal", "flash_anchors_fp32")
    if (files := (f"{name}/flash_benchmark.json", f"{name}_repeat/flash_benchmark.json"))
}
BY_LENGTH = {
    "kernels": Table(_by_length(FLASH_KERNELS, "bf16", "flash-triton", "sdpa-flash"), (FLASH_KERNELS,)),
    "in a row": Table(_by_length(FLASH_SHORT, "bf16", "flash-triton", "sdpa-flash"), (FLASH_SHORT,)),
    "bf16": Table(_by_length(FLASH, "bf16", "flash-triton", "sdpa-flash"), (FLASH,)),
    "fp32": Table(_by_length(FLASH, "fp32", "flash-triton", "sdpa-efficient"), (FLASH,)),
}


BLOCKS: dict[str, Block] = {
    "step-at-256": Table(_step_at_256, (SIZES,)),
    "step-by-context": Table(_step_by_context),
    "compile-at-256": Table(two_ways(COMPILE, "compile", {"off": "eager", "on": "compiled"}), (COMPILE,)),
    "warmup-at-256": Table(_warmup_at_256),
    "leaderboard": Table(_leaderboard, (LEADERBOARD,)),
    "flash-kernels": BY_LENGTH["kernels"],
    **FUSED_BLOCKS,
    **KERNEL_BLOCKS,
    **PARALLEL_BLOCKS,
    **PROFILE_BLOCKS,
}


def fill_blocks(text: str, results: Path) -> str:
    """`text` with the content of each block it has made anew. Raises ValueError for a block of an unknown name."""

    def fill(match: re.Match[str]) -> str:
        name = match[1]
        if name not in BLOCKS:
            raise ValueError(f"block={name!r}: must be one of {', '.join(BLOCKS)}")
        return f"<!-- begin {name} -->\n{BLOCKS[name](results)}\n<!-- end {name} -->"

    return re.sub(r"<!-- begin ([\w-]+) -->\n.*?<!-- end \1 -->", fill, text, flags=re.DOTALL)
