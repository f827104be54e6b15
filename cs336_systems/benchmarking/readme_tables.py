"""The README's tables, made from the committed rows: a block `<!-- begin NAME -->` … `<!-- end NAME -->` each."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from cs336_systems.benchmarking.all_reduce import AllReduceFit, AllReduceRow
from cs336_systems.benchmarking.data_parallel import DataParallelRow, scheme_label
from cs336_systems.benchmarking.flash_benchmark import FlashRow
from cs336_systems.benchmarking.leaderboard_attention import LeaderboardRow
from cs336_systems.benchmarking.model_benchmark import BenchmarkRow
from cs336_systems.benchmarking.profile_tables import PROFILE_BLOCKS
from cs336_systems.benchmarking.scaling import scaling_table
from cs336_systems.benchmarking.sharding_cells import ShardingMemoryRow, ShardingRow
from cs336_systems.configs import MODEL_SIZES
from cs336_systems.provenance import Provenance
from cs336_systems.records import format_value, read_results

Block = Callable[[Path], str]


def _benchmark_rows(results: Path, name: str) -> tuple[list[BenchmarkRow], str]:
    runs, rows, run_of_row = read_results(results / "benchmark" / name / "benchmark.json", BenchmarkRow)
    used = [run for index, run in enumerate(runs) if index in run_of_row]
    return rows, "\n\n".join(f"*{run.summary()}*" for run in used[:1])


def _table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [headings, [":--", *["--:"] * (len(headings) - 1)], *[[format_value(cell) for cell in row] for row in rows]]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _sizes(rows: Sequence[BenchmarkRow]) -> list[str]:
    """The sizes that have rows, small to large."""
    return [name for name in MODEL_SIZES if any(row.size == name for row in rows)]


def _time(row: BenchmarkRow | None, name: str) -> object:
    """A time, or why there is none."""
    return None if row is None else row.status.upper() if row.status != "ok" else getattr(row, name)


def step_at_256(results: Path) -> str:
    """Each size at context 256: the phases in fp32 beside the published ones, and the step in bf16."""
    rows, provenance = _benchmark_rows(results, "sizes")
    published = json.loads((results / "published" / "rtx4090.json").read_text(encoding="utf-8"))["rows"]
    body = []
    for size in _sizes(rows):
        cells = {row.precision: row for row in rows if (row.size, row.ctx) == (size, 256)}
        public = next((row for row in published if row["size"] == size), None)
        body.append(
            [
                size,
                *(_time(cells.get("fp32"), f"{phase}_mean_ms") for phase in ("forward", "backward", "optimizer")),
                " / ".join(str(public[f"{phase}_ms"]) for phase in ("forward", "backward", "optimizer"))
                if public
                else None,
                _time(cells.get("fp32"), "step_mean_ms"),
                _time(cells.get("bf16"), "step_mean_ms"),
                _time(cells.get("fp32"), "peak_memory_gib"),
            ]
        )
    headings = ["size", "forward ms", "backward ms", "optimizer ms", "RTX 4090, published", "step ms", "bf16 step ms"]
    return f"{_table([*headings, 'peak GiB'], body)}\n\n{provenance}"


def step_by_context(results: Path) -> str:
    """The train step over context lengths, fp32 / bf16."""
    rows, _ = _benchmark_rows(results, "sizes")
    contexts = sorted({row.ctx for row in rows})
    by_cell = {(row.size, row.ctx, row.precision): row for row in rows}
    body = [
        [size]
        + [
            " / ".join(
                format_value(_time(by_cell.get((size, ctx, precision)), "step_mean_ms"))
                for precision in ("fp32", "bf16")
            )
            for ctx in contexts
        ]
        for size in _sizes(rows)
    ]
    return _table(["fp32 / bf16 step ms", *(f"ctx {ctx}" for ctx in contexts)], body)


def compile_at_256(results: Path) -> str:
    """The train step with and without torch.compile."""
    rows, provenance = _benchmark_rows(results, "compile")
    by_cell = {(row.size, row.precision, row.compile): row for row in rows}
    body = []
    for size in _sizes(rows):
        for precision in dict.fromkeys(row.precision for row in rows if row.size == size):
            cells = [by_cell.get((size, precision, how)) for how in ("off", "on")]
            times = [_time(cell, "step_mean_ms") for cell in cells]
            memory = [_time(cell, "peak_memory_gib") for cell in cells]
            body.append([size, precision, *times, *memory])
    headings = ["size", "precision", "eager step ms", "compiled step ms", "eager peak GiB", "compiled peak GiB"]
    return f"{_table(headings, body)}\n\n{provenance}"


def warmup_at_256(results: Path) -> str:
    """The mean step and its deviation after 0, 1, 2 and 5 warm-up steps, each in a fresh process."""
    rows, _ = _benchmark_rows(results, "warmup")
    counts = sorted({row.warmup for row in rows})
    by_cell = {(row.size, row.warmup): row for row in rows}

    def cell(size: str, count: int) -> str:
        row = by_cell.get((size, count))
        mean = format_value(_time(row, "step_mean_ms"))
        return mean if row is None or row.status != "ok" else f"{mean} ± {format_value(row.step_std_ms)}"

    body = [[size, *(cell(size, count) for count in counts)] for size in _sizes(rows)]
    return _table(["fp32 step ms", *(f"warm-up {count}" for count in counts)], body)


def leaderboard(results: Path) -> str:
    """The 2025 leaderboard's timing of each implementation."""
    path = results / "leaderboard_attention" / "leaderboard_attention.json"
    runs, rows, _ = read_results(path, LeaderboardRow)
    flash = next(row.mean_ms for row in rows if row.implementation == "sdpa-flash" and row.mean_ms)
    body = [
        [row.implementation, row.mean_ms, row.std_ms, row.tflops, row.mean_ms / flash] for row in rows if row.mean_ms
    ]
    headings = ["implementation", "mean ms", "± ms", "TFLOP/s", "of SDPA FlashAttention-2's time"]
    return f"{_table(headings, body)}\n\n*{runs[0].summary()}*"


def flash_anchors(results: Path) -> str:
    """Each implementation by shape, length and pass: bfloat16, then float32."""
    return "\n\n".join(_shapes(results / name) for name in ("flash_anchors", "flash_anchors_fp32"))


def _shapes(directory: Path) -> str:
    runs, rows, _ = read_results(directory / "flash_benchmark.json", FlashRow)
    names = list(dict.fromkeys(row.implementation for row in rows))
    body = []
    for shape in dict.fromkeys((row.heads, row.head_dim, row.length, row.phase) for row in rows):
        heads, head_dim, length, phase = shape
        cells = {
            row.implementation: f"{format_value(row.median_ms)} ({row.tflops:.0f})"
            for row in rows
            if (row.heads, row.head_dim, row.length, row.phase) == shape and row.tflops is not None
        }
        body.append([f"{heads} × {head_dim}, {length:,}, {phase}", *(cells.get(name) for name in names)])
    heading = f"{rows[0].precision}: heads × head_dim, length, pass"
    return f"{_table([heading, *names], body)}\n\n*{runs[0].summary()}*"


def flash_by_length(results: Path) -> str:
    """FlashAttention-2's time over SDPA's, one head, over lengths: below 1 the project's is faster."""
    runs, rows, _ = read_results(results / "flash_benchmark" / "flash_benchmark.json", FlashRow)
    times = {(row.implementation, row.head_dim, row.phase, row.length): row.median_ms for row in rows}
    lengths = sorted({row.length for row in rows})
    body = []
    for head_dim in sorted({row.head_dim for row in rows}):
        for phase in ("forward", "backward", "both"):
            pairs = [
                [times.get((name, head_dim, phase, n)) for name in ("flash-triton", "sdpa-flash")] for n in lengths
            ]
            body.append([f"{head_dim}, {phase}", *(f"{ours / theirs:.2f}" if ours and theirs else None
                                                    for ours, theirs in pairs)])  # fmt: skip
    return f"{_table(['head_dim, pass', *map(str, lengths)], body)}\n\n*{runs[0].summary()}*"


def all_reduce(results: Path) -> str:
    """Time and bus bandwidth by buffer size and number of ranks, and the line through the times."""
    runs, rows, _ = read_results(results / "all_reduce" / "all_reduce.json", AllReduceRow)
    _, fits, _ = read_results(results / "all_reduce" / "all_reduce_fit.json", AllReduceFit)
    ranks = list(dict.fromkeys(row.world_size for row in rows))
    cells = {
        (row.size_mb, row.world_size): f"{format_value(row.median_ms)} ms ({row.bus_gb_per_s:.0f} GB/s)"
        for row in rows
        if row.bus_gb_per_s is not None
    }
    body = [[f"{mb:g} MB", *(cells.get((mb, n)) for n in ranks)] for mb in dict.fromkeys(row.size_mb for row in rows)]
    lines = {fit.world_size: f"{fit.call_cost_us:.0f} µs + s / {fit.bandwidth_gb_per_s:.0f} GB/s" for fit in fits}
    body.append(["line through the times of s bytes, without the bus's factor", *(lines.get(n) for n in ranks)])
    headings = ["float32 buffer: time (bus bandwidth)", *(f"{n} ranks" for n in ranks)]
    return f"{_table(headings, body)}\n\n*{runs[0].summary()}*"


def data_parallel(results: Path) -> str:
    """Each implementation's step, by how much it is longer than the one without communication, and its memory."""
    parts = [_schemes(results / "ddp" / name / "ddp.json") for name in ("in_place", "fp32", "bf16")]
    return "\n\n".join(parts)


def _schemes(path: Path) -> str:
    runs, rows, _ = read_results(path, DataParallelRow)
    order = list(dict.fromkeys(row.implementation for row in rows))
    alone = next(row.step_median_ms for row in rows if row.implementation == "none" and row.step_median_ms)
    body = [
        [
            scheme_label(row),
            row.step_median_ms,
            None if row.exposed_ms is None else f"{row.exposed_ms / alone:.1%}",
            row.predicted_overhead_ms,
            row.communication_ms,
            None if row.covered_share is None else f"{row.covered_share:.0%}",
            row.peak_memory_gib,
        ]
        for row in sorted(rows, key=lambda row: (order.index(row.implementation), row.bucket_size_mb or 0))
    ]
    headings = ["implementation", f"{rows[0].precision} step ms", "longer by", "predicted ms", "communication alone ms"]
    return f"{_table([*headings, 'hidden by backward', 'peak GiB'], body)}\n\n*{runs[0].summary()}*"


def _sharding_files(results: Path, kind: str) -> list[Path]:
    """The rows of both benchmarks, those of a run of its own for bf16 behind the others'."""
    names = [f"{name}/{folder}{name}{kind}.json" for name in ("sharded_optimizer", "fsdp") for folder in ("", "bf16/")]
    return [results / name for name in names if (results / name).exists()]


def sharding(results: Path) -> str:
    """Steps and peaks with the optimizer's state, and with everything, divided over the ranks."""
    body, runs = [], []
    for path in _sharding_files(results, ""):
        runs_here, rows, _ = read_results(path, ShardingRow)
        runs.append(runs_here[0])
        body += [
            [
                f"{row.implementation}, {row.precision}",
                f"{format_value(row.step_median_ms)} ± {format_value(row.step_std_ms)}",
                row.optimizer_ms,
                row.peak_memory_gib,
                row.predicted_peak_gib,
                None if row.n_gathers is None else f"{row.n_late} of {row.n_gathers}",
            ]
            for row in rows
        ]
    headings = ["implementation", "step ms", "optimizer ms", "peak GiB", "predicted GiB", "gathers that came late"]
    return "\n\n".join([_table(headings, body), *(f"*{run.summary()}*" for run in runs)])


def scaling(results: Path) -> str:
    """Weak and strong scaling, a table a size; runs on machines of one, two, four and eight GPUs share it."""
    parts = []
    for kind in ("weak", "strong"):
        files = [read_results(path, ShardingRow) for path in sorted((results / "scaling" / kind).rglob("scaling.json"))]
        everything = [row for _, rows, _ in files for row in rows]
        for size, ctx in dict.fromkeys((row.size, row.ctx) for row in everything):
            rows = [row for row in everything if (row.size, row.ctx) == (size, ctx)]
            total = f"{rows[0].world_size * rows[0].batch_size} sequences over all ranks"
            batch = f"{rows[0].batch_size} sequences a rank" if kind == "weak" else total
            parts += [f"{kind.capitalize()} scaling, {size} at context {ctx}, {batch}:", scaling_table(rows)]
        parts += [f"*{run.summary()}*" for runs, _, _ in files for run in runs]
    return "\n\n".join(parts)


def sharding_memory(results: Path) -> str:
    """What a rank's memory holds at three moments, of the rank with the most."""
    body = []
    for path in _sharding_files(results, "_memory"):
        _, rows, _ = read_results(path, ShardingMemoryRow)
        for cell in dict.fromkeys((row.implementation, row.precision, row.moment) for row in rows):
            ranks = [row for row in rows if (row.implementation, row.precision, row.moment) == cell]
            row = max(ranks, key=lambda row: row.total_gib or 0.0)
            held = (row.parameters_gib, row.gradients_gib, row.optimizer_state_gib, row.rest_gib, row.total_gib)
            body.append([f"{cell[0]}, {cell[1]}", cell[2], *held, row.peak_since_gib])
    headings = ["GiB", "moment", "parameters", "gradients", "optimizer state", "rest", "total", "peak since"]
    return _table(headings, body)


def memory(results: Path) -> str:
    """A step's peak and what was held then, by mode, precision and context, beside the formula."""
    # As plain JSON: its rows are the profiler's, which the benchmarks do not import.
    document = json.loads((results / "memory" / "memory.json").read_text(encoding="utf-8"))
    held = ("parameters", "optimizer_state", "gradients", "weight_copies", "activations", "temporaries", "other")
    rows = sorted(document["rows"], key=lambda row: (row["mode"], row["precision"] != "fp32", row["ctx"]))
    body = [
        [
            f"{row['size']}, {row['mode']}, {row['precision']}, {row['ctx']}",
            row["peak_gib"] if row["status"] == "ok" else row["status"].upper(),
            row["peak_predicted_gib"],
            row["peak_phase"],
            *(round(row[f"{name}_gib"], 2) for name in held),
        ]
        for row in rows
    ]
    headings = ["GiB", "peak", "predicted", "in", *(name.replace("_", " ") for name in held)]
    runs = (Provenance(**run) for run in document["runs"])
    return "\n\n".join([_table(headings, body), *(f"*{run.summary()}*" for run in runs)])


BLOCKS: dict[str, Block] = {
    "step-at-256": step_at_256,
    "step-by-context": step_by_context,
    "compile-at-256": compile_at_256,
    "warmup-at-256": warmup_at_256,
    "leaderboard": leaderboard,
    "flash-anchors": flash_anchors,
    "flash-by-length": flash_by_length,
    "all-reduce": all_reduce,
    "data-parallel": data_parallel,
    "scaling": scaling,
    "sharding": sharding,
    "sharding-memory": sharding_memory,
    "memory": memory,
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
