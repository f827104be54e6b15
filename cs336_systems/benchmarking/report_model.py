"""The report's item on the model from end to end: sizes, contexts, modes, warm-up and torch.compile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cs336_systems.benchmarking.readme_tables import BLOCKS, COMPILE, MODES, SIZES, WARMUP, Block, in_order
from cs336_systems.benchmarking.report_fused import FUSED_PARTS
from cs336_systems.benchmarking.report_parts import Answer, Item, Part
from cs336_systems.benchmarking.report_rows import (
    Sentence,
    failures,
    from_to,
    largest,
    markdown_table,
    percent,
    ratio,
    read_rows,
    say,
    status_or,
)


def bare(name: str) -> Block:
    """A block of the README without the lines under it that say where it is from."""
    return BLOCKS[name].make  # ty: ignore[missing-attribute]


def columns_of(path: str, columns: dict[str, str]) -> Block:
    """All rows of a file, by the given columns (field to heading)."""
    return lambda results: markdown_table(
        list(columns.values()), [[row[name] for name in columns] for row in read_rows(results / path)[0]]
    )


def _answer_sizes(results: Path) -> list[Sentence | None]:
    rows = read_rows(results / SIZES)[0]
    done = [row for row in rows if row.ok and row.mode == "train-step"]
    if not done:
        return [failures(rows)]
    contexts = sorted({row.ctx for row in done})
    ctx = 256 if 256 in contexts else contexts[0]
    at = {row.size: row for row in done if row.ctx == ctx and row.precision == "fp32"}
    sizes = [size for size in in_order(done) if size in at]
    answers: list[Sentence | None] = []
    if sizes:
        first, last = at[sizes[0]], at[sizes[-1]]
        phases = {name: percent(ratio(last[f"{name}_mean_ms"], last.step_mean_ms))
                  for name in ("forward", "backward", "optimizer")}  # fmt: skip
        answers += [
            say("A training step at context {ctx} in fp32 takes {ms} ± {std} ms for {size}.", ctx=ctx,
                ms=first.step_mean_ms, std=first.step_std_ms, size=first.size),
            say("For {size} it takes {ms} ± {std} ms: forward {forward}, backward {backward}, optimizer {optimizer}.",
                size=last.size, ms=last.step_mean_ms, std=last.step_std_ms, **phases) if last is not first else None,
            say("Backward takes {range} times as long as forward.",
                range=from_to([(ratio(at[size].backward_mean_ms, at[size].forward_mean_ms), size) for size in sizes])),
        ]  # fmt: skip
    spread = largest([(ratio(row.step_std_ms, row.step_mean_ms), f"{row.size}, {row.ctx}, {row.precision}")
                   for row in done])  # fmt: skip
    answers += [
        say("Over all cells the deviation is at most {high} of the mean ({of}).", high=percent(spread["high"]),
            of=spread["of"]),
        *precision_speed(done),
        failures(rows),
    ]  # fmt: skip
    return answers


def precision_speed(rows: Sequence[Any]) -> list[Sentence | None]:
    """How much faster bf16 is than fp32, by cells that differ in nothing else."""
    fp32 = {(row.size, row.ctx, row.attention): row for row in rows if row.precision == "fp32"}
    pairs = [
        (ratio(base.step_mean_ms, row.step_mean_ms), f"{row.size} at context {row.ctx}")
        for row in rows
        if row.precision == "bf16" and (base := fp32.get((row.size, row.ctx, row.attention)))
    ]
    slower = sum(value is not None and value < 1 for value, _ in pairs)
    return [
        say("In bf16 the step is {range} times as fast.", range=from_to(pairs)),
        say("In {n} of {all} cells bf16 is slower than fp32.", n=slower, all=len(pairs)) if slower else None,
    ]


def _modes_table(results: Path) -> str:
    rows = read_rows(results / MODES)[0]
    by_cell = {(row.size, row.precision, row.mode): row for row in rows}
    body = [
        [size, precision]
        + [
            status_or(by_cell.get((size, precision, mode)), name)
            for mode in ("forward", "forward-backward")
            for name in ("step_mean_ms", "step_std_ms", "peak_memory_gib")
        ]
        for size in in_order(rows)
        for precision in dict.fromkeys(row.precision for row in rows)
    ]
    headings = ["size", "precision", "forward ms", "± ms", "peak GiB", "with backward ms", "± ms", "peak GiB"]
    return markdown_table(headings, body)


def _answer_modes(results: Path) -> list[Sentence | None]:
    rows = [row for row in read_rows(results / MODES)[0] if row.precision == "fp32"]
    size = (in_order([row for row in rows if row.ok]) or [None])[-1]
    cells = {row.mode: row for row in rows if row.size == size}
    if not {"forward", "forward-backward"} <= set(cells):
        return []
    forward, both = cells["forward"], cells["forward-backward"]
    return [
        say("Without autograd, forward alone takes {ms} ms for {size} and peaks at {gib} GiB.", ms=forward.step_mean_ms,
            size=size, gib=forward.peak_memory_gib),
        say("With loss and backward it is {ms} ms and {gib} GiB, for what forward keeps and the gradients.",
            ms=both.step_mean_ms, gib=both.peak_memory_gib),
    ]  # fmt: skip


def _answer_warmup(results: Path) -> list[Sentence | None]:
    rows = [row for row in read_rows(results / WARMUP)[0] if row.ok]
    counts = sorted({row.warmup for row in rows})
    by_cell = {(row.size, row.warmup): row for row in rows}
    if len(counts) < 2:
        return []
    first, second, last = counts[0], counts[1], counts[-1]
    size = in_order(rows)[-1]
    cold, warm = by_cell.get((size, first)), by_cell.get((size, second))
    off = [(abs(change - 1), name) for name in in_order(rows)
           if (a := by_cell.get((name, second))) and (b := by_cell.get((name, last)))
           and (change := ratio(a.step_mean_ms, b.step_mean_ms)) is not None]  # fmt: skip
    furthest = largest(off)
    return [
        say("With {first} warm-up steps the mean of {steps} steps of {size} is {a} ± {b} ms, with {second} it is "
            "{c} ± {d} ms.", first=first, steps=cold.steps, size=size, a=cold.step_mean_ms, b=cold.step_std_ms,
            second=second, c=warm.step_mean_ms, d=warm.step_std_ms) if cold and warm else None,
        say("The first step of a process pays once for loading kernels, for the libraries' handles and workspaces, and "
            "for the allocator's first requests; averaged in, it moves the mean and hides the deviation."),
        say("With {second} the means are within {off} of those with {last} (furthest: {of}).", second=second, last=last,
            off=percent(furthest["high"]), of=furthest["of"]),
    ]  # fmt: skip


def _answer_two_ways(path: str, field: str, before: str, after: str, words: str) -> Answer:
    """How much faster the step is `after` than `before`, by precision; `words` begin the sentence."""

    def answer(results: Path) -> list[Sentence | None]:
        rows = [row for row in read_rows(results / path)[0] if row.ok]
        base = {(row.size, row.precision): row for row in rows if row[field] == before}
        answers = []
        for precision in dict.fromkeys(row.precision for row in rows):
            pairs = [(ratio(other.step_mean_ms, row.step_mean_ms), row.size) for row in rows
                     if (row[field], row.precision) == (after, precision)
                     and (other := base.get((row.size, precision)))]  # fmt: skip
            answers.append(say("{words} the {precision} step is {range} times as fast.", words=words,
                               precision=precision, range=from_to(pairs)))  # fmt: skip
        return answers

    return answer


BENCHMARK_ITEM = Item(
    1,
    "End-to-end benchmark",
    ("benchmarking_script",),
    "how long do the forward pass, the backward pass and the optimizer step of each size take, on average and "
    "with what deviation; what does leaving out warm-up steps change; what do torch.compile, bfloat16 and (beyond "
    "the assignment) FlashAttention, fused kernels and CUDA graphs bring?",
    (
        Part(
            "Sizes, contexts and precisions",
            "benchmark/sizes",
            (SIZES,),
            (bare("step-at-256"), bare("step-by-context")),
            (("Phases by size, context and precision", "benchmark/sizes/benchmark.png"),),
            _answer_sizes,
        ),
        Part("Forward alone, and with backward", "benchmark/modes", (MODES,), (_modes_table,), (), _answer_modes),
        Part(
            "Warm-up",
            "benchmark/warmup",
            (WARMUP,),
            (bare("warmup-at-256"),),
            (("Steps by warm-up", "benchmark/warmup/benchmark.png"),),
            _answer_warmup,
        ),
        Part(
            "torch.compile",
            "benchmark/compile",
            (COMPILE,),
            (bare("compile-at-256"),),
            (),
            _answer_two_ways(COMPILE, "compile", "off", "on", "Compiled,"),
        ),
        *FUSED_PARTS,
    ),
)
