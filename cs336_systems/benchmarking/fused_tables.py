"""Tables of whole models: this project's kernels beside torch.compile, launched one by one or as CUDA graphs; and each
attention inside the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cs336_systems.benchmarking.report_rows import (
    Table,
    fastest,
    markdown_table,
    percent,
    read_rows,
    status_or,
)

FUSED = "benchmark/kernels/benchmark.json"
FUSED_AT_256 = "benchmark/kernels_256/benchmark.json"
MODEL_ATTENTION = "model_attention/benchmark.json"

_KERNELS = {"plain": "PyTorch's", "loss": "fused loss and AdamW", "fused": "all fused"}
_COMPILED = {"off": "", "blocks": ", blocks compiled", "on": ", compiled"}


def by_model(rows: Sequence[Any]) -> dict[tuple[str, int], list[Any]]:
    """Rows by size and context, as they come."""
    models = dict.fromkeys((row.size, row.ctx) for row in rows)
    return {model: [row for row in rows if (row.size, row.ctx) == model] for model in models}


def how(row: Any) -> str:
    """What a row's model is made of, e.g. "all fused, blocks compiled, CUDA graphs"."""
    optimizer = ", PyTorch's AdamW" if row.optimizer == "adamw-fused" else ", AdamW by a loop"
    graphs = ", CUDA graphs" if row.cuda_graphs == "on" else ""
    masters = ", master weights" if row.master_weights == "on" else ""
    kernels = f"{_KERNELS[row.kernels]}{optimizer if row.kernels == 'plain' else ''}"
    return f"{kernels}{masters}{_COMPILED[row.compile]}{graphs}"


def _kind(
    kernels: str, compiled: str, graphs: str = "off", optimizer: str = "adamw", masters: str = "off"
) -> dict[str, str]:
    how = {"kernels": kernels, "compile": compiled, "cuda_graphs": graphs, "optimizer": optimizer}
    return {"attention": "sdpa", **how, "master_weights": masters}


# What the short table sets beside each other, all with SDPA.
IN_SHORT = {
    "eager, AdamW by a loop": _kind("plain", "off"),
    "`--compile blocks`, AdamW by a loop": _kind("plain", "blocks"),
    "`--compile blocks`, PyTorch's AdamW": _kind("plain", "blocks", optimizer="adamw-fused"),
    "`--compile on`, PyTorch's AdamW": _kind("plain", "on", optimizer="adamw-fused"),
    "`--compile blocks --cuda-graphs on`, PyTorch's AdamW": _kind("plain", "blocks", "on", "adamw-fused"),
    "`--kernels fused`": _kind("fused", "off"),
    "`--kernels fused --cuda-graphs on`": _kind("fused", "off", "on"),
    "`--kernels fused --compile blocks`": _kind("fused", "blocks"),
    "`--kernels loss --compile blocks`": _kind("loss", "blocks"),
    "`--kernels fused --compile blocks --cuda-graphs on`": _kind("fused", "blocks", "on"),
    "`--kernels fused --master-weights on --compile blocks`": _kind("fused", "blocks", masters="on"),
    "`--kernels fused --master-weights on --compile blocks --cuda-graphs on`": _kind(
        "fused", "blocks", "on", masters="on"
    ),
}


def _headings(rows: Sequence[Any], *others: str) -> list[str]:
    """Each model's median step, and what stands behind it."""
    return [text for size, ctx in by_model(rows) for text in (f"{size}, ctx {ctx:,}: median step ms", *others)]


def _fused_in_short(results: Path) -> str:
    rows = read_rows(results / FUSED)[0]
    body = []
    for name, kind in IN_SHORT.items():
        line: list[object] = [name]
        for these in by_model(rows).values():
            row = fastest(row for row in these if all((row[field] or "off") == value for field, value in kind.items()))
            line += [row and row.step_median_ms, row and percent(row.peak_share), row and row.peak_memory_gib]
        if any(cell is not None for cell in line[1:]):
            body.append(line)
    return markdown_table(["bf16, SDPA", *_headings(rows, "of peak", "peak GiB")], body)


def all_ways(file: str) -> Callable[[Path], str]:
    """A line for each way to make and launch the model: the step, and its memory, by size."""

    def make(results: Path) -> str:
        rows = read_rows(results / file)[0]
        cells = {(row.precision, row.attention, how(row), row.size, row.ctx): row for row in rows}
        body = []
        for way in dict.fromkeys(key[:3] for key in cells):
            line: list[object] = [*way]
            for model in by_model(rows):
                row = cells.get((*way, *model))
                line += [status_or(row, "step_median_ms"), row and row.step_std_ms, row and row.peak_memory_gib]
            body.append(line)
        return markdown_table(["precision", "attention", "kernels", *_headings(rows, "± ms", "peak GiB")], body)

    return make


def attention_in_model(results: Path) -> str:
    """A line for each size and way to compile: the step, and its memory, by attention."""
    rows = read_rows(results / MODEL_ATTENTION)[0]
    names = list(dict.fromkeys(row.attention for row in rows))
    cells = {(row.size, row.ctx, row.compile, row.attention): row for row in rows}
    body = []
    for size, ctx, compiled in dict.fromkeys(key[:3] for key in cells):
        these = [cells.get((size, ctx, compiled, name)) for name in names]
        how_compiled = {"off": "eager"}.get(compiled, f"compiled {compiled}")
        body.append(
            [
                f"{size}, ctx {ctx:,}, {how_compiled}",
                *(status_or(row, "step_median_ms") for row in these),
                *(row and row.peak_memory_gib for row in these),
            ]
        )
    headings = [f"{name} {what}" for what in ("median step ms", "peak GiB") for name in names]
    return markdown_table(["bf16", *headings], body)


FUSED_BLOCKS: dict[str, Table] = {"fused-model": Table(_fused_in_short, (FUSED,))}
