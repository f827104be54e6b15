"""The report's parts on whole models with this project's kernels, and with each attention."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from cs336_systems.benchmarking.fused_tables import (
    FUSED,
    FUSED_AT_256,
    FUSED_BLOCKS,
    MODEL_ATTENTION,
    all_ways,
    attention_in_model,
    by_model,
    how,
)
from cs336_systems.benchmarking.report_parts import Part
from cs336_systems.benchmarking.report_rows import Sentence, failures, fastest, from_to, ratio, read_rows, say

# What PyTorch's parts are taken for: launched or replayed as ours are, and with either AdamW.
_PEERS: dict[str, Callable[[Any, Any], bool]] = {
    "PyTorch's parts, launched or replayed alike": lambda row, ours: row.cuda_graphs == ours.cuda_graphs,
    "torch.compile with SDPA and PyTorch's fused AdamW, launched one by one": lambda row, ours: (
        row.compile != "off" and row.optimizer == "adamw-fused" and row.cuda_graphs != "on"
    ),
    "torch.compile with SDPA and AdamW by a loop, launched one by one": lambda row, ours: (
        row.compile != "off" and row.optimizer == "adamw" and row.cuda_graphs != "on"
    ),
}

_SAME_BUT_FOR_GRAPHS = ("attention", "kernels", "compile", "optimizer", "master_weights")


def _answer_fused(results: Path) -> list[Sentence | None]:
    rows = read_rows(results / FUSED)[0]
    answers: list[Sentence | None] = []
    for (size, ctx), these in by_model(rows).items():
        ours = fastest(row for row in these if row.kernels != "plain")
        if ours is None:
            continue
        answers.append(
            say("For {size} at context {ctx} the fastest step takes {ms} ± {std} ms ({how}).", size=size, ctx=ctx,
                ms=ours.step_median_ms, std=ours.step_std_ms, how=f"{how(ours)}, {ours.attention}")
        )  # fmt: skip
        parts = [row for row in these if row.kernels == "plain" and row.attention == "sdpa"]
        for name, is_peer in _PEERS.items():
            peer = fastest(row for row in parts if is_peer(row, ours))
            answers.append(
                say("That is {times} times as fast as {name} ({ms} ± {std} ms).", name=name,
                    times=ratio(peer.step_median_ms, ours.step_median_ms), ms=peer.step_median_ms,
                    std=peer.step_std_ms)
                if peer else None
            )  # fmt: skip
        pairs = [
            (ratio(launched.step_median_ms, row.step_median_ms), f"{how(launched)}, {row.attention}")
            for row in these
            if row.ok and row.cuda_graphs == "on"
            and (launched := next((other for other in these if other.ok and other.cuda_graphs != "on" and all(
                other[name] == row[name] for name in _SAME_BUT_FOR_GRAPHS)), None))
        ]  # fmt: skip
        answers.append(say("Replayed as CUDA graphs the same step is {range} times as fast.", range=from_to(pairs)))
    return [*answers, failures(rows)]


def _answer_at_256(results: Path) -> list[Sentence | None]:
    rows = read_rows(results / FUSED_AT_256)[0]
    answers: list[Sentence | None] = []
    for (size, ctx), these in by_model(rows).items():
        ours = fastest(row for row in these if row.kernels != "plain")
        eager = fastest(row for row in these if (row.precision, row.kernels, row.compile) == ("fp32", "plain", "off"))
        if ours is not None and eager is not None:
            answers.append(
                say("{size} at context {ctx}: {ms} ms in bf16 with kernels of this project ({how}), {times} times as "
                    "fast as the eager model in float32 with plain attention, {eager} ms.", size=size, ctx=ctx,
                    ms=ours.step_median_ms, how=how(ours), times=ratio(eager.step_median_ms, ours.step_median_ms),
                    eager=eager.step_median_ms)
            )  # fmt: skip
    return [*answers, failures(rows)]


def _answer_attention(results: Path) -> list[Sentence | None]:
    rows = read_rows(results / MODEL_ATTENTION)[0]
    cells = {(row.size, row.ctx, row.compile, row.attention): row for row in rows if row.ok}

    def times(over: str, under: str, name: str = "step_median_ms") -> list[tuple[float | None, str]]:
        return [
            (
                ratio(row[name], cells[(*key[:3], under)][name]),
                f"{key[0]}, {'eager' if key[2] == 'off' else 'compiled'}",
            )
            for key, row in cells.items()
            if key[3] == over and (*key[:3], under) in cells
        ]

    return [
        say("With plain attention the step takes {range} times as long as with `flash-triton`.",
            range=from_to(times("naive", "flash-triton"))),
        say("`flash-triton`'s step takes {range} of that with SDPA.", range=from_to(times("flash-triton", "sdpa"))),
        say("Its peak is {range} of SDPA's.", range=from_to(times("flash-triton", "sdpa", "peak_memory_gib"))),
        failures(rows),
    ]  # fmt: skip


FUSED_PARTS = (
    Part(
        "Each attention in the model",
        "model_attention",
        (MODEL_ATTENTION,),
        (attention_in_model,),
        (("Phases with each attention", "model_attention/benchmark.png"),),
        _answer_attention,
    ),
    Part(
        "Fused kernels, torch.compile and CUDA graphs",
        "benchmark/kernels",
        (FUSED,),
        (FUSED_BLOCKS["fused-model"].make, all_ways(FUSED)),
        (),
        _answer_fused,
    ),
    Part(
        "Fused kernels at context 256, beside the eager model in float32",
        "benchmark/kernels_256",
        (FUSED_AT_256,),
        (all_ways(FUSED_AT_256),),
        (),
        _answer_at_256,
    ),
)
