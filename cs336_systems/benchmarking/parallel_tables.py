"""The README's and the report's tables of several GPUs: all-reduce, data parallelism, sharding and scaling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cs336_systems.benchmarking.rank_cells import nccl_label
from cs336_systems.benchmarking.report_rows import (
    Table,
    fine_percent,
    markdown_table,
    percent,
    provenance,
    ratio,
    read_rows,
    with_spread,
)
from cs336_systems.benchmarking.scaling import scaling_table
from cs336_systems.records import format_value

Block = Callable[[Path], str]


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
                _scheme(row),
                with_spread(row, "step_median_ms"),
                fine_percent(ratio(row.exposed_ms, alone)),
                row.predicted_overhead_ms,
                row.communication_ms,
                percent(row.covered_share),
                row.peak_memory_gib,
            ]
            for row in sorted(rows, key=lambda row: (order.index(row.implementation), row.bucket_size_mb or 0))
        ]
        headings = [f"{rows[0].precision if rows else ''} median step ms", "longer by", "predicted over none, ms"]
        headings += ["communication alone ms", "hidden by backward", "peak GiB"]
        return markdown_table(["implementation", *headings], body)

    return make


def _scheme(row: Any) -> str:
    return row.implementation + nccl_label(row) + (f", {row.bucket_size_mb:g} MB" if row.bucket_size_mb else "")


def _in_bf16(results: Path) -> str:
    """The median step of the first run's implementations in each of the runs in bfloat16."""
    runs = {heading: read_rows(results / name)[0] for name, heading in IN_BF16.items()}
    columns = {heading: {_scheme(row): row for row in rows} for heading, rows in runs.items()}
    body = [
        [scheme, *(with_spread(column.get(scheme), "step_median_ms") for column in columns.values())]
        for scheme in next(iter(columns.values()))
    ]
    return markdown_table(["implementation: bf16 median step ms", *columns], body)


def _sharding(*files: str) -> Block:
    """Steps and peaks with the optimizer's state, and with everything, divided over the ranks."""

    def make(results: Path) -> str:
        body = [
            [
                f"{row.implementation}, {row.precision}",
                with_spread(row, "step_median_ms"),
                row.optimizer_ms,
                row.peak_memory_gib,
                row.predicted_peak_gib,
                None if row.n_gathers is None else f"{row.n_late} of {row.n_gathers}",
            ]
            for name in files
            for row in read_rows(results / name)[0]
        ]
        headings = [
            "implementation",
            "median step ms",
            "optimizer ms",
            "peak GiB",
            "predicted peak GiB",
            "gathers that came late",
        ]
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
        parts.append(scaling_table(these, title=f"{kind} scaling, {size} at context {ctx}, {batch}"))
    return "\n\n".join(filter(None, parts))


def _scaling_files(results: Path, kind: str) -> list[Path]:
    return sorted((results / "scaling" / kind).rglob("scaling.json"))


def scaling(results: Path) -> str:
    """Both kinds of scaling, and all runs that they are from."""
    parts = []
    for kind in ("weak", "strong"):
        parts += [scaling_by_kind(kind, results)]
        parts += [provenance(read_rows(path)[1]) for path in _scaling_files(results, kind)]
    return "\n\n".join(filter(None, parts))


ALL_REDUCE, ALL_REDUCE_FIT = "all_reduce/all_reduce.json", "all_reduce/all_reduce_fit.json"
SHARDED = ("sharded_optimizer/sharded_optimizer.json",)
FSDP = ("fsdp/fsdp.json",)


def of_memory(files: Sequence[str]) -> tuple[str, ...]:
    """The files of what memory holds that lie beside `files`."""
    return tuple(name.replace(".json", "_memory.json") for name in files)


IN_BF16 = {
    "ddp/bf16_compiled/ddp.json": "batch 4, compiled blocks",
    "ddp/bf16_batch_8/ddp.json": "batch 8",
    "ddp/bf16/ddp.json": "batch 4",
    "ddp/bf16_repeat/ddp.json": "batch 4, in another order",
}
_RUNS = ("fp32", "bf16", "bf16_repeat", "bf16_batch_8", "bf16_compiled", "nccl_options")
SCHEMES = {name: Table(_schemes(name), (f"ddp/{name}/ddp.json",)) for name in _RUNS}

PARALLEL_BLOCKS: dict[str, Block] = {
    "all-reduce": Table(_all_reduce, (ALL_REDUCE,)),
    "data-parallel": SCHEMES["fp32"],
    "data-parallel-bf16": Table(_in_bf16, tuple(IN_BF16)),
    "scaling": scaling,
    "sharding": Table(_sharding(*SHARDED, *FSDP), (*SHARDED, *FSDP)),
}
# The sharded optimizer and FSDP apart, as the report has them.
SHARDED_TABLES = [_sharding(*SHARDED), _sharding_memory(*of_memory(SHARDED))]
FSDP_TABLES = [_sharding(*FSDP), _sharding_memory(*of_memory(FSDP))]
