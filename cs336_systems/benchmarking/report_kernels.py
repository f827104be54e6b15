"""The report's items beyond single problems: the fused kernels alone, and the 2026 leaderboard's step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cs336_systems.benchmarking.kernel_tables import (
    CALLS,
    KERNEL_BLOCKS,
    KERNEL_TABLES,
    KERNELS,
    STEP,
    by_pass,
    comparable_entries,
    over_best_other,
    published_peak_share,
)
from cs336_systems.benchmarking.report_parts import Answer, Item, Part
from cs336_systems.benchmarking.report_rows import (
    Sentence,
    enumerate_words,
    failures,
    fastest,
    from_to,
    percent,
    ratio,
    read_rows,
    say,
)
from cs336_systems.records import format_value

# ---- 14: the fused kernels -------------------------------------------------------------------------------------------

_NOTED = 1.005  # times the fastest other's time: less is not seen in two decimals
Pass = tuple[str, str, str, str]  # size, precision, kernel, phase


def _where(key: Pass) -> str:
    size, _, kernel, phase = key
    return f"{kernel} {phase}, {size}"


def _times_as_fast(passes: Mapping[Pass, Mapping[str, Any]], name: str, what: str) -> Sentence | None:
    """How many times as fast the fused kernels are as an implementation, in the passes that it has too."""
    pairs = [
        (times, _where(key))
        for key, cells in passes.items()
        if {"fused", name} <= cells.keys()
        and (times := ratio(cells[name].median_ms, cells["fused"].median_ms)) is not None
    ]
    faster = sum(times > 1 for times, _ in pairs)
    return say("`fused` is {range} times as fast as {what}, and faster in {n} of {all} passes.", range=from_to(pairs),
               what=what, n=faster, all=len(pairs))  # fmt: skip


def _answer_kernels(file: str) -> Answer:
    def answer(results: Path) -> list[Sentence | None]:
        rows = read_rows(results / file)[0]
        passes = by_pass(rows)
        fused = {key: cells["fused"] for key, cells in passes.items() if "fused" in cells and cells["fused"].ok}
        counts = {name: sum(name in passes[key] for key in fused) for name in ("compiled", "torch")}
        slower = [f"{_where(key)} ({over:.2f} times its time)" for key, cells in passes.items()
                  if (over := over_best_other(cells)) is not None and over >= _NOTED]  # fmt: skip
        moves = max((item for item in fused.items() if item[1].gb_per_s), key=lambda item: item[1].gb_per_s,
                    default=None)  # fmt: skip
        computes = max((item for item in fused.items() if item[1].tflops), key=lambda item: item[1].tflops,
                       default=None)  # fmt: skip
        held = [(ratio(cells["eager"].peak_memory_gib, cells["fused"].peak_memory_gib), _where(key))
                for key, cells in passes.items() if {"eager", "fused"} <= cells.keys()]  # fmt: skip
        return [
            *(_times_as_fast({key: cells for key, cells in passes.items() if key[0] == size}, "eager",
                             f"eager PyTorch for {size}") for size in dict.fromkeys(row.size for row in rows)),
            say("Of the {all} passes {compiled} were timed compiled too, and {torch} with what PyTorch ships fused.",
                all=len(fused), **counts) if fused else None,
            _times_as_fast(passes, "compiled", "torch.compile's code"),
            _times_as_fast(passes, "torch", "PyTorch's own"),
            say("Slower than the fastest other: {listed}.", listed=enumerate_words(slower) or None),
            say("At best, {gb} GB/s are moved ({of}).", gb=moves[1].gb_per_s, of=_where(moves[0])) if moves else None,
            say("The matrix products of the last layer and the loss reach {tflops} TFLOP/s, {share} of the card's peak "
                "({of}).", tflops=computes[1].tflops, share=percent(computes[1].peak_share), of=_where(computes[0]))
            if computes else None,
            say("At their peak eager passes hold {range} times as much memory.", range=from_to(held)),
            *(_calls_over_kernels(results, fused) if file == KERNELS else []),
            failures(rows),
        ]  # fmt: skip

    return answer


def _calls_over_kernels(results: Path, kernels: Mapping[Pass, Any]) -> list[Sentence | None]:
    """What the host adds to a call, by size: where kernels are short, the time of a call is that of launching them."""
    calls = by_pass(read_rows(results / CALLS)[0])
    return [
        say("For {size} a call of `fused` takes {range} times as long as its kernels.", size=size,
            range=from_to([(ratio(calls[key]["fused"].median_ms, row.median_ms), f"{key[2]} {key[3]}")
                           for key, row in kernels.items() if key[0] == size and "fused" in calls.get(key, ())]))
        for size in dict.fromkeys(key[0] for key in kernels)
    ]  # fmt: skip


# ---- 15: the leaderboard's step --------------------------------------------------------------------------------------


def _answer_step(results: Path) -> list[Sentence | None]:
    rows = read_rows(results / STEP)[0]
    ours, theirs = (fastest(row for row in rows if row.implementation == name) for name in ("fused", "torch"))
    answers: list[Sentence | None] = []
    if ours is not None:
        answers += [
            say("With this project's parts a step of {size} at context {ctx} takes {ms} ± {std} ms on {n} ranks, which "
                "is {tokens} tokens/s.", size=ours.size, ctx=ours.ctx, ms=ours.step_median_ms, std=ours.step_std_ms,
                n=ours.world_size, tokens=ours.tokens_per_s),
            say("Of the model's FLOPs each rank does {tflops} TFLOP/s, {share} of the card's peak.",
                tflops=ours.tflops, share=percent(ours.peak_share)),
            say("Forward and loss take {forward} ms, backward {backward} ms, in which {n} of {all} blocks run forward "
                "again but for attention, and AdamW {optimizer} ms.", forward=ours.forward_ms,
                backward=ours.backward_ms, n=ours.num_layers - ours.kept_blocks, all=ours.num_layers,
                optimizer=ours.optimizer_ms),
            say("The others make again what elementwise kernels return, and keep the rest.")
            if ours.kept_blocks else None,
            say("At its peak a rank holds {gib} GiB, and the plan said {predicted}.", gib=ours.peak_memory_gib,
                predicted=ours.predicted_gib),
            *(say("With {n} of {all} blocks kept it takes {ms} ms and {gib} GiB.", n=row.kept_blocks,
                  all=row.num_layers, ms=row.step_median_ms, gib=row.peak_memory_gib)
              for row in rows if row.ok and row.implementation == "fused" and row is not ours),
        ]  # fmt: skip
    if theirs is not None:
        answers.append(
            say("PyTorch's parts take {ms} ms{held}.", ms=theirs.step_median_ms, held=_held(theirs.peak_memory_gib))
        )
    if ours is not None:
        answers += [_beside(entry, ours) for entry in comparable_entries(results, [ours])]
    return [*answers, failures(rows)]


def _beside(entry: Any, ours: Any) -> Sentence | None:
    """What others measured of the same step, whose cards may be others."""
    kept = "" if entry.kept_blocks is None else f", with {entry.kept_blocks} of {entry.num_layers} blocks kept whole"
    return say("{name} ({origin}), on {n} × {gpu}{kept}, took {ms} ms{held}: {times} times this step's time, and "
               "{share} of the cards' peak by the same count.", origin=entry.origin,
               name=entry.name[:1].upper() + entry.name[1:], n=entry.world_size, gpu=entry.gpu, kept=kept,
               ms=entry.step_ms, held=_held(entry.peak_memory_gib), share=percent(published_peak_share(entry)),
               times=ratio(entry.step_ms, ours.step_median_ms))  # fmt: skip


def _held(gib: float | None) -> str:
    return "" if gib is None else f" and {format_value(gib)} GiB"


ITEMS = (
    Item(
        14,
        "Fused kernels alone",
        (),
        "(beyond the assignment) at the shapes of two models, how long do the fused kernels take, forward, backward "
        "and both, beside eager PyTorch, torch.compile and what PyTorch ships fused; and how near do they come to what "
        "the card can do?",
        (
            Part(
                "As they are called",
                "kernel_benchmark/calls",
                (CALLS,),
                (KERNEL_TABLES[CALLS].make,),
                (),
                _answer_kernels(CALLS),
            ),
            Part(
                "Without the host's time",
                "kernel_benchmark/kernels",
                (KERNELS,),
                (KERNEL_TABLES[KERNELS].make,),
                (),
                _answer_kernels(KERNELS),
            ),
        ),
    ),
    Item(
        15,
        "The 2026 leaderboard's step",
        (),
        "how long is one training step of the leaderboard's model, forward, loss, backward and AdamW in bfloat16, a "
        "sequence of its whole context on each of two GPUs, and what memory does it need?",
        (
            Part(
                "Two ranks, one sequence each",
                "leaderboard_step",
                (STEP,),
                (KERNEL_BLOCKS["leaderboard-step"].make,),
                (),
                _answer_step,
            ),
        ),
    ),
)
