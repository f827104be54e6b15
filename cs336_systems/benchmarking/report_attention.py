"""The report's items on attention: alone, FlashAttention-2 beside the others, and the teaching kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cs336_systems.benchmarking.readme_tables import (
    ANCHORS,
    BY_LENGTH,
    FLASH,
    FLASH_KERNELS,
    FLASH_SHORT,
    LEADERBOARD,
    Block,
)
from cs336_systems.benchmarking.report_model import bare
from cs336_systems.benchmarking.report_parts import Item, Part, captioned
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


def _attention_table(results: Path) -> str:
    """Eager and compiled side by side, by head_dim and length."""
    rows = read_rows(results / ALONE)[0]
    kinds = list(dict.fromkeys((row.implementation, row.precision, row.compile) for row in rows))
    by_cell = {(row.implementation, row.precision, row.compile, row.head_dim, row.length): row for row in rows}
    body = []
    for head_dim, length in dict.fromkeys((row.head_dim, row.length) for row in rows):
        cells = [by_cell.get((*kind, head_dim, length)) for kind in kinds]
        line: list[object] = [f"{head_dim}, {length:,}"]
        for row in cells:
            line += [status_or(row, "forward_mean_ms"), status_or(row, "backward_mean_ms")]
            line.append(status_or(row, "memory_before_backward_gib"))
        body.append([*line, next((row.formula_gib for row in cells if row is not None), None)])
    labels = [f"{name} {precision}{', compiled' if how == 'on' else ''}" for name, precision, how in kinds]
    headings = [f"{label}: {what}" for label in labels for what in ("forward ms", "backward ms", "GiB before backward")]
    return markdown_table(["head_dim, length", *headings, "by formula, eager"], body)


def _answer_alone(results: Path) -> list[Sentence | None]:
    rows = read_rows(results / ALONE)[0]
    done = [row for row in rows if row.ok]
    eager = {(row.implementation, row.precision, row.head_dim, row.length): row for row in done if row.compile == "off"}
    if not eager:
        return [failures(rows)]
    longest = max(eager.values(), key=lambda row: (row.length, row.head_dim))
    half = eager.get((longest.implementation, longest.precision, longest.head_dim, longest.length // 2))
    compiled = [
        (ratio(base.forward_mean_ms + base.backward_mean_ms, row.forward_mean_ms + row.backward_mean_ms),
         f"head_dim {row.head_dim}, length {row.length:,}")
        for row in done if row.compile == "on"
        and (base := eager.get((row.implementation, row.precision, row.head_dim, row.length)))
    ]  # fmt: skip
    lost = [row for row in rows if row.status == "oom"]
    return [
        say("At length {length} and head_dim {head_dim}, eager {name} attention takes {forward} ms forward and "
            "{backward} ms backward.", length=longest.length, head_dim=longest.head_dim, name=longest.implementation,
            forward=longest.forward_mean_ms, backward=longest.backward_mean_ms),
        say("It keeps {gib} GiB for backward, {formula} by formula, of which {scores} are the scores.",
            gib=longest.memory_before_backward_gib, formula=longest.formula_gib, scores=longest.scores_formula_gib),
        say("That is {times} times what it keeps at half the length: memory grows with the square, since every pair of "
            "tokens has a score, and FlashAttention-2 keeps no scores.",
            times=ratio(longest.memory_before_backward_gib, half.memory_before_backward_gib)) if half else None,
        say("Compiled, forward and backward together are {range} times as fast.", range=from_to(compiled)),
        *(say("{name} at length {length} and head_dim {head_dim} runs out of memory: it would keep {formula} GiB.",
              name=row.implementation, length=row.length, head_dim=row.head_dim, formula=row.formula_gib)
          for row in lost[:1]),
        failures(rows),
    ]  # fmt: skip


# ---- 7: FlashAttention-2 ---------------------------------------------------------------------------------------------


def _ratios(name: str) -> Block:
    return captioned("A time over another, below one where this project's is faster:", BY_LENGTH[name].make)


def _flash_table(results: Path) -> str:
    """Median ms of each implementation over lengths, at one head_dim."""
    rows = [row for row in read_rows(results / FLASH)[0] if row.phase == "both"]
    if not rows:
        return ""
    head_dims, precision = sorted({row.head_dim for row in rows}), rows[0].precision
    head_dim = 64 if 64 in head_dims else head_dims[-1]
    rows = [row for row in rows if (row.head_dim, row.precision) == (head_dim, precision)]
    lengths = sorted({row.length for row in rows})
    cells = {(row.implementation, row.length): row for row in rows}
    body = [[name, *(status_or(cells.get((name, length)), "median_ms") for length in lengths)]
            for name in dict.fromkeys(row.implementation for row in rows)]  # fmt: skip
    heading = f"{precision}, head_dim {head_dim}: forward and backward, ms"
    return markdown_table([heading, *(f"{length:,}" for length in lengths)], body)


def _against(rows: Sequence[Any], ours: str, theirs: str) -> list[tuple[float | None, str]]:
    """How many times as fast `ours` is as `theirs`, by cell, labelled."""
    names = ("heads", "head_dim", "batch_size", "length", "phase", "precision")
    base = {tuple(row[name] for name in names): row.median_ms for row in rows if row.implementation == theirs}
    return [
        (ratio(base.get(tuple(row[name] for name in names)), row.median_ms), _where(row))
        for row in rows
        if row.implementation == ours
    ]


def _comparisons(results: Path, files: Sequence[str]) -> list[Sentence | None]:
    """Each of the project's kernels against each of the others that are there, run by run."""
    runs = [read_rows(results / file)[0] for file in files]
    names = list(dict.fromkeys(row.implementation for rows in runs for row in rows))
    own = [name for name in names if name.startswith("flash-")]
    answers = []
    for ours in own:
        for theirs in names:
            if theirs in own:
                continue
            pairs = [pair for rows in runs for pair in _against(rows, ours, theirs) if pair[0] is not None]
            faster = sum((value or 0) > 1 for value, _ in pairs)
            answers.append(
                say("`{ours}` is {range} times as fast as `{theirs}`, and faster in {n} of {all} cells.", ours=ours,
                    theirs=theirs, n=faster, all=len(pairs), range=from_to(pairs))
            )  # fmt: skip
    return answers


def _answer_flash(*files: str):
    def answer(results: Path) -> list[Sentence | None]:
        rows = [row for file in files for row in read_rows(results / file)[0]]
        own = [row for row in rows if str(row.implementation).startswith("flash-")]
        top = max((row for row in own if row.tflops), key=lambda row: row.tflops, default=None)
        share = top.peak_share if top else None
        within = None if share is None or share > 1 else f", {share:.0%} of the card's peak in this precision,"
        worst = largest(
            [(row.relative_error, f"`{row.implementation}`, {row.precision}, {_where(row)}") for row in own]
        )
        return [
            say("The most that one of this project's kernels reaches is {tflops} TFLOP/s{within} by `{name}` ({of}).",
                tflops=top.tflops, within=within or "", name=top.implementation, of=_where(top)) if top else None,
            *_comparisons(results, files),
            say("The largest error against float64, relative to the largest value, is {error} ({of}).",
                error=worst["high"], of=worst["of"]),
            failures(rows),
        ]  # fmt: skip

    return answer


def _where(row: Any) -> str:
    return f"{row.phase}, head_dim {row.head_dim}, length {row.length:,}"


def _answer_leaderboard(results: Path) -> list[Sentence | None]:
    rows = {row.implementation: row for row in read_rows(results / LEADERBOARD)[0] if row.ok}
    ours, theirs = rows.get("flash-triton"), rows.get("sdpa-flash")
    if ours is None:
        return []
    fastest = min(rows.values(), key=lambda row: row.mean_ms)
    return [
        say("`flash-triton` takes {ms} ± {std} ms: {tflops} TFLOP/s, {share} of the card's peak.", ms=ours.mean_ms,
            std=ours.std_ms, tflops=ours.tflops, share=percent(ours.peak_share)),
        say("That is {times} times as fast as SDPA's FlashAttention-2.", times=ratio(theirs.mean_ms, ours.mean_ms))
        if theirs else None,
        say("The fastest here is `{name}`, at {ms} ms.", name=fastest.implementation, ms=fastest.mean_ms),
    ]  # fmt: skip


ALONE = "attention_benchmark/attention_benchmark.json"

ATTENTION_ITEMS = (
    Item(
        6,
        "Attention alone",
        ("pytorch_attention", "torch_compile"),
        "without heads and batched, how long do a hundred forward and backward passes of plain attention take by "
        "width and length, eager and compiled; how much memory is in use before backward, how does it grow, and where "
        "does memory run out?",
        (
            Part(
                "Plain attention, eager and compiled",
                "attention_benchmark",
                (ALONE,),
                (_attention_table,),
                (("Time and memory of attention alone", "attention_benchmark/attention_benchmark.png"),),
                _answer_alone,
            ),
        ),
    ),
    Item(
        7,
        "FlashAttention-2 against the others",
        ("flash_forward", "flash_backward", "flash_benchmarking", "leaderboard"),
        "causal, over lengths, widths and precisions: how fast are forward, backward and both, beside plain attention "
        "and PyTorch's own kernels; and how fast by the leaderboard's rules?",
        (
            Part(
                "Over lengths, one head",
                "flash_benchmark",
                (FLASH,),
                (_flash_table, _ratios("bf16"), _ratios("fp32")),
                (
                    ("TFLOP/s over length", "flash_benchmark/flash_benchmark_tflops_*.png"),
                    ("Memory over length", "flash_benchmark/flash_benchmark_memory.png"),
                ),
                _answer_flash(FLASH),
            ),
            Part(
                "Short calls, one after another",
                "flash_short",
                (FLASH_SHORT,),
                (_ratios("in a row"),),
                (),
                _answer_flash(FLASH_SHORT),
            ),
            Part(
                "Over lengths, kernels alone",
                "flash_kernels",
                (FLASH_KERNELS,),
                (_ratios("kernels"),),
                (("TFLOP/s over length", "flash_kernels/flash_benchmark_tflops_*.png"),),
                _answer_flash(FLASH_KERNELS),
            ),
            *(
                Part(
                    f"Many heads, {what}: ms (TFLOP/s)",
                    name,
                    ANCHORS[name].files,
                    (ANCHORS[name].make,),
                    (),
                    _answer_flash(*ANCHORS[name].files),
                )
                for name, what in (
                    ("flash_anchors", "bfloat16, causal"),
                    ("flash_anchors_not_causal", "bfloat16, not causal"),
                    ("flash_anchors_fp32", "float32, causal"),
                )
            ),
            Part(
                "By the leaderboard's rules",
                "leaderboard_attention",
                (LEADERBOARD,),
                (bare("leaderboard"),),
                (),
                _answer_leaderboard,
            ),
        ),
    ),
)


def _weighted_sum(link: Callable[[str], str]) -> str:
    return (
        "**Answer.** Nothing is measured: the kernel is there to be read. "
        f"[weighted_sum.py]({link('cs336_systems/kernels/weighted_sum.py')}) is its forward and backward pass in "
        f"Triton, and [its tests]({link('tests/test_weighted_sum.py')}) hold both to a reference, for shapes that no "
        "tile divides."
    )


KERNEL_ITEM = Item(
    13,
    "Weighted sum",
    ("weighted_sum",),
    "a first Triton kernel: the sum of each row's products with a vector of weights, forward and backward, tiled over "
    "rows and columns, for any shape.",
    fixed=_weighted_sum,
)
