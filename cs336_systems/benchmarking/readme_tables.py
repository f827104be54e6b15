"""The README's tables, made from the committed rows: a block `<!-- begin NAME -->` … `<!-- end NAME -->` each."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from cs336_systems.benchmarking.flash_benchmark import FlashRow
from cs336_systems.benchmarking.leaderboard_attention import LeaderboardRow
from cs336_systems.benchmarking.model_benchmark import BenchmarkRow
from cs336_systems.configs import MODEL_SIZES
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
    """The train step with and without torch.compile, of the whole model or of each block."""
    rows, provenance = _benchmark_rows(results, "compile")
    by_cell = {(row.size, row.precision, row.compile): row for row in rows}
    body = [
        [
            size,
            precision,
            *(_time(by_cell.get((size, precision, how)), "step_mean_ms") for how in ("off", "on", "blocks")),
        ]
        for size in _sizes(rows)
        for precision in dict.fromkeys(row.precision for row in rows if row.size == size)
    ]
    table = _table(["size", "precision", "eager step ms", "model compiled", "blocks compiled"], body)
    return f"{table}\n\n{provenance}"


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
    best = min(row.mean_ms for row in rows if row.implementation.startswith("sdpa") and row.mean_ms is not None)
    body = [
        [row.implementation, row.mean_ms, row.std_ms, row.tflops, row.mean_ms / best] for row in rows if row.mean_ms
    ]
    headings = ["implementation", "mean ms", "± ms", "TFLOP/s", "of SDPA FlashAttention-2's time"]
    return f"{_table(headings, body)}\n\n*{runs[0].summary()}*"


def flash_anchors(results: Path) -> str:
    """Each implementation at length 16,384, by shape and pass."""
    runs, rows, _ = read_results(results / "flash_anchors" / "flash_benchmark.json", FlashRow)
    names = list(dict.fromkeys(row.implementation for row in rows))
    body = []
    for shape in dict.fromkeys((row.heads, row.head_dim, row.is_causal, row.phase) for row in rows):
        heads, head_dim, is_causal, phase = shape
        cells = {
            row.implementation: f"{format_value(row.median_ms)} ({row.tflops:.0f})"
            for row in rows
            if (row.heads, row.head_dim, row.is_causal, row.phase) == shape and row.tflops is not None
        }
        label = f"{heads} × {head_dim}{'' if is_causal else ', not causal'}, {phase}"
        body.append([label, *(cells.get(name) for name in names)])
    return f"{_table(['heads × head_dim, pass', *names], body)}\n\n*{runs[0].summary()}*"


BLOCKS: dict[str, Block] = {
    "step-at-256": step_at_256,
    "step-by-context": step_by_context,
    "compile-at-256": compile_at_256,
    "warmup-at-256": warmup_at_256,
    "leaderboard": leaderboard,
    "flash-anchors": flash_anchors,
}


def fill_blocks(text: str, results: Path) -> str:
    """`text` with the content of each block it has made anew. Raises ValueError for a block of an unknown name."""

    def fill(match: re.Match[str]) -> str:
        name = match[1]
        if name not in BLOCKS:
            raise ValueError(f"block={name!r}: must be one of {', '.join(BLOCKS)}")
        return f"<!-- begin {name} -->\n{BLOCKS[name](results)}\n<!-- end {name} -->"

    return re.sub(r"<!-- begin ([\w-]+) -->\n.*?<!-- end \1 -->", fill, text, flags=re.DOTALL)
