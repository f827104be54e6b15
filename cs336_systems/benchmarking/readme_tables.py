"""The README's tables, made from the committed rows: a block `<!-- begin NAME -->` … `<!-- end NAME -->` each.

A table whose rows are not there yet is empty.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cs336_systems.benchmarking.profile_tables import PROFILE_BLOCKS, memory
from cs336_systems.benchmarking.rank_arguments import nccl_label
from cs336_systems.benchmarking.report_rows import Table, markdown_table, percent, provenance, read_rows, status_or
from cs336_systems.benchmarking.scaling import scaling_table
from cs336_systems.configs import MODEL_SIZES
from cs336_systems.records import format_value

Block = Callable[[Path], str]


def in_order(rows: Sequence[Any]) -> list[str]:
    """The sizes that have rows, small to large."""
    return [name for name in MODEL_SIZES if any(row.size == name for row in rows)]


# ---- The model -------------------------------------------------------------------------------------------------------


def _step_at_256(results: Path) -> str:
    """Each size at context 256: the phases in fp32 beside the published ones, and the step in bf16."""
    rows, _ = read_rows(results / SIZES)
    path = results / "published" / "rtx4090.json"
    published = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
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


def _compile_at_256(results: Path) -> str:
    """The train step with and without torch.compile."""
    rows, _ = read_rows(results / COMPILE)
    by_cell = {(row.size, row.precision, row.compile): row for row in rows}
    body = []
    for size in in_order(rows):
        for precision in dict.fromkeys(row.precision for row in rows if row.size == size):
            cells = [by_cell.get((size, precision, how)) for how in ("off", "on")]
            times = [status_or(cell, "step_mean_ms") for cell in cells]
            body.append([size, precision, *times, *(status_or(cell, "peak_memory_gib") for cell in cells)])
    headings = ["size", "precision", "eager step ms", "compiled step ms", "eager peak GiB", "compiled peak GiB"]
    return markdown_table(headings, body)


def _warmup_at_256(results: Path) -> str:
    """The mean step and its deviation after 0, 1, 2 and 5 warm-up steps, each in a fresh process."""
    rows, _ = read_rows(results / WARMUP)
    counts = sorted({row.warmup for row in rows})
    by_cell = {(row.size, row.warmup): row for row in rows}

    def cell(size: str, count: int) -> str:
        row = by_cell.get((size, count))
        mean = format_value(status_or(row, "step_mean_ms"))
        return f"{mean} ± {format_value(row.step_std_ms)}" if row is not None and row.ok else mean

    body = [[size, *(cell(size, count) for count in counts)] for size in in_order(rows)]
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
        for shape in dict.fromkeys((row.heads, row.head_dim, row.length, row.phase) for row in rows):
            heads, head_dim, length, phase = shape
            of_shape = [row for row in rows if (row.heads, row.head_dim, row.length, row.phase) == shape]
            cells = [_times([row for row in of_shape if row.implementation == name]) for name in names]
            body.append([f"{heads} × {head_dim}, {length:,}, {phase}", *cells])
        kind = f"{rows[0].precision}, {'causal' if rows[0].is_causal else 'not causal'}" if rows else ""
        return markdown_table([f"{kind}: heads × head_dim, length, pass", *names], body)

    return make


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
        what = "kernels" if rows[0].timed == "kernels" else "calls"
        heading = f"{what}, {precision}, `{ours}` over `{theirs}`: head_dim, pass"
        return markdown_table([heading, *map(str, lengths)], body)

    return make


def _by_head_dim_and_phase(key: tuple[int, str]) -> tuple[int, int]:
    return key[0], ("forward", "backward", "both").index(key[1])


# ---- Several GPUs ----------------------------------------------------------------------------------------------------


def _all_reduce(results: Path) -> str:
    """Time and bus bandwidth by buffer size and number of ranks, and the line through the times."""
    rows, _ = read_rows(results / ALL_REDUCE)
    fits = [fit for fit in read_rows(results / ALL_REDUCE_FIT)[0] if fit.bandwidth_gb_per_s is not None]
    ranks = list(dict.fromkeys(row.world_size for row in rows))
    cells = {
        (row.size_mb, row.world_size): f"{format_value(row.median_ms)} ms ({row.bus_gb_per_s:.0f} GB/s)"
        for row in rows
        if row.bus_gb_per_s is not None
    }
    body = [[f"{mb:g} MB", *(cells.get((mb, n)) for n in ranks)] for mb in dict.fromkeys(row.size_mb for row in rows)]
    lines = {fit.world_size: f"{fit.call_cost_us:.0f} µs + s / {fit.bandwidth_gb_per_s:.0f} GB/s" for fit in fits}
    if lines:
        body.append(["line through the times of s bytes, without the bus's factor", *(lines.get(n) for n in ranks)])
    return markdown_table(["float32 buffer: time (bus bandwidth)", *(f"{n} ranks" for n in ranks)], body)


def _schemes(folder: str) -> Block:
    """Each implementation's step, by how much it is longer than the one without communication, and its memory."""

    def make(results: Path) -> str:
        rows, _ = read_rows(results / "ddp" / folder / "ddp.json")
        order = list(dict.fromkeys(row.implementation for row in rows))
        alone = next((row.step_median_ms for row in rows if row.implementation == "none"), None)
        body = [
            [
                row.implementation + nccl_label(row) + (f", {row.bucket_size_mb:g} MB" if row.bucket_size_mb else ""),
                status_or(row, "step_median_ms"),
                f"{row.exposed_ms / alone:.1%}" if row.exposed_ms is not None and alone else None,
                row.predicted_overhead_ms,
                row.communication_ms,
                percent(row.covered_share),
                row.peak_memory_gib,
            ]
            for row in sorted(rows, key=lambda row: (order.index(row.implementation), row.bucket_size_mb or 0))
        ]
        headings = [f"{rows[0].precision if rows else ''} step ms", "longer by", "predicted ms"]
        headings += ["communication alone ms", "hidden by backward", "peak GiB"]
        return markdown_table(["implementation", *headings], body)

    return make


def _sharding(*files: str) -> Block:
    """Steps and peaks with the optimizer's state, and with everything, divided over the ranks."""

    def make(results: Path) -> str:
        body = [
            [
                f"{row.implementation}, {row.precision}",
                f"{format_value(row.step_median_ms)} ± {format_value(row.step_std_ms)}"
                if row.ok
                else status_or(row, "status"),
                row.optimizer_ms,
                row.peak_memory_gib,
                row.predicted_peak_gib,
                None if row.n_gathers is None else f"{row.n_late} of {row.n_gathers}",
            ]
            for name in files
            for row in read_rows(results / name)[0]
        ]
        headings = ["implementation", "step ms", "optimizer ms", "peak GiB", "predicted GiB", "gathers that came late"]
        return markdown_table(headings, body)

    return make


def _sharding_memory(*files: str) -> Block:
    """What a rank's memory holds at three moments, of the rank with the most."""

    def make(results: Path) -> str:
        body = []
        for name in files:
            rows, _ = read_rows(results / name)
            for cell in dict.fromkeys((row.implementation, row.precision, row.moment) for row in rows):
                ranks = [row for row in rows if (row.implementation, row.precision, row.moment) == cell]
                row = max(ranks, key=lambda row: row.total_gib or 0.0)
                held = (row.parameters_gib, row.gradients_gib, row.optimizer_state_gib, row.rest_gib, row.total_gib)
                body.append([f"{cell[0]}, {cell[1]}", cell[2], *held, row.peak_since_gib])
        headings = ["GiB", "moment", "parameters", "gradients", "optimizer state", "rest", "total", "peak since"]
        return markdown_table(headings, body)

    return make


def scaling_by_kind(kind: str, results: Path) -> str:
    """Weak or strong scaling, a table a size; runs on machines of one, two, four and eight GPUs share it."""
    rows = [row for path in _scaling_files(results, kind) for row in read_rows(path)[0]]
    parts = []
    for size, ctx in dict.fromkeys((row.size, row.ctx) for row in rows):
        these = [row for row in rows if (row.size, row.ctx) == (size, ctx)]
        total = f"{these[0].world_size * these[0].batch_size} sequences over all ranks"
        batch = f"{these[0].batch_size} sequences a rank" if kind == "weak" else total
        parts += [f"{kind.capitalize()} scaling, {size} at context {ctx}, {batch}:", scaling_table(these)]
    return "\n\n".join(parts)


def _scaling_files(results: Path, kind: str) -> list[Path]:
    return sorted((results / "scaling" / kind).rglob("scaling.json"))


def scaling(results: Path) -> str:
    """Both kinds of scaling, and all runs that they are from."""
    parts = []
    for kind in ("weak", "strong"):
        parts += [scaling_by_kind(kind, results)]
        parts += [provenance(read_rows(path)[1]) for path in _scaling_files(results, kind)]
    return "\n\n".join(filter(None, parts))


SIZES, MODES, WARMUP, COMPILE = (f"benchmark/{name}/benchmark.json" for name in ("sizes", "modes", "warmup", "compile"))
LEADERBOARD = "leaderboard_attention/leaderboard_attention.json"
FLASH, FLASH_KERNELS = "flash_benchmark/flash_benchmark.json", "flash_kernels/flash_benchmark.json"
ALL_REDUCE, ALL_REDUCE_FIT = "all_reduce/all_reduce.json", "all_reduce/all_reduce_fit.json"
# With those of runs of their own for bf16.
SHARDED = ("sharded_optimizer/sharded_optimizer.json", "sharded_optimizer/bf16/sharded_optimizer.json")
FSDP = ("fsdp/fsdp.json", "fsdp/bf16/fsdp.json")


def of_memory(files: Sequence[str]) -> tuple[str, ...]:
    """The files of what memory holds that lie beside `files`."""
    return tuple(name.replace(".json", "_memory.json") for name in files)


ANCHORS = {
    name: Table(_shapes(*files), files)
    for name in ("flash_anchors", "flash_anchors_not_causal", "flash_anchors_fp32")
    if (files := (f"{name}/flash_benchmark.json", f"{name}_repeat/flash_benchmark.json"))
}
BY_LENGTH = {
    "kernels": Table(_by_length(FLASH_KERNELS, "bf16", "flash-triton", "sdpa-flash"), (FLASH_KERNELS,)),
    "bf16": Table(_by_length(FLASH, "bf16", "flash-triton", "sdpa-flash"), (FLASH,)),
    "fp32": Table(_by_length(FLASH, "fp32", "flash-triton", "sdpa-efficient"), (FLASH,)),
}
SCHEMES = {name: Table(_schemes(name), (f"ddp/{name}/ddp.json",)) for name in ("in_place", "fp32", "bf16")}


def _joined(tables: Sequence[Table]) -> Block:
    return lambda results: "\n\n".join(filter(None, (table(results) for table in tables)))


BLOCKS: dict[str, Block] = {
    "step-at-256": Table(_step_at_256, (SIZES,)),
    "step-by-context": Table(_step_by_context),
    "compile-at-256": Table(_compile_at_256, (COMPILE,)),
    "warmup-at-256": Table(_warmup_at_256),
    "leaderboard": Table(_leaderboard, (LEADERBOARD,)),
    "flash-anchors": _joined([*ANCHORS.values()]),
    "flash-by-length": _joined([*BY_LENGTH.values()]),
    "all-reduce": Table(_all_reduce, (ALL_REDUCE,)),
    "data-parallel": _joined([*SCHEMES.values()]),
    "scaling": scaling,
    "sharding": Table(_sharding(*SHARDED, *FSDP), (*SHARDED, *FSDP)),
    "sharding-memory": Table(_sharding_memory(*of_memory(SHARDED + FSDP))),
    "memory": memory,
    **PROFILE_BLOCKS,
}
# The sharded optimizer and FSDP apart, as the report has them.
SHARDED_TABLES = [_sharding(*SHARDED), _sharding_memory(*of_memory(SHARDED))]
FSDP_TABLES = [_sharding(*FSDP), _sharding_memory(*of_memory(FSDP))]


def fill_blocks(text: str, results: Path) -> str:
    """`text` with the content of each block it has made anew. Raises ValueError for a block of an unknown name."""

    def fill(match: re.Match[str]) -> str:
        name = match[1]
        if name not in BLOCKS:
            raise ValueError(f"block={name!r}: must be one of {', '.join(BLOCKS)}")
        return f"<!-- begin {name} -->\n{BLOCKS[name](results)}\n<!-- end {name} -->"

    return re.sub(r"<!-- begin ([\w-]+) -->\n.*?<!-- end \1 -->", fill, text, flags=re.DOTALL)
