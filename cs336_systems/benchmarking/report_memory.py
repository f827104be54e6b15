"""The report's item on memory: what holds it over a step, and what a block keeps for backward."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cs336_systems.benchmarking.profile_tables import MEMORY, MEMORY_2048, MEMORY_CHECK, PROFILE_BLOCKS, memory_rows
from cs336_systems.benchmarking.report_model import columns_of
from cs336_systems.benchmarking.report_parts import Item, Part
from cs336_systems.benchmarking.report_rows import (
    Sentence,
    failures,
    fine_percent,
    from_to,
    largest,
    markdown_table,
    percent,
    ratio,
    read_rows,
    say,
)


def _longest(rows: Sequence[Any], mode: str, precision: str) -> Any:
    """The measured row of the longest context, or None."""
    found = [row for row in rows if row.ok and (row.mode, row.precision) == (mode, precision)]
    return max(found, key=lambda row: row.ctx, default=None)


def _answer_memory(results: Path) -> list[Sentence | None]:
    rows = read_rows(results / MEMORY)[0]
    step, forward, low = (_longest(rows, *which) for which in (("train-step", "fp32"), ("forward", "fp32"),
                                                               ("train-step", "bf16")))  # fmt: skip
    off = [(abs(times - 1), f"{row.mode}, {row.precision}, context {row.ctx}") for row in rows
           if row.ok and (times := ratio(row.peak_gib, row.peak_predicted_gib)) is not None]  # fmt: skip
    return [
        say("A training step of {size} at context {ctx} in fp32 peaks at {gib} GiB, in the {phase} phase.",
            size=step.size, ctx=step.ctx, gib=step.peak_gib, phase=step.peak_phase) if step else None,
        say("A forward pass without autograd peaks at {gib} GiB, of which {weights} are the parameters.",
            gib=forward.peak_gib, weights=forward.parameters_gib) if forward else None,
        say("In bf16 the step peaks at {gib} GiB: activations take {activations} GiB instead of {full}, and copies of "
            "weights {copies}.", gib=low.peak_gib, activations=low.activations_gib, full=step.activations_gib,
            copies=low.weight_copies_gib) if low and step and low.ctx == step.ctx else None,
        say("An activation of the residual stream has {predicted} MiB by formula and {measured} as measured.",
            predicted=step.residual_predicted_mib, measured=step.residual_mib) if step else None,
        say("The formula of the step's peak is off by at most {off} ({of}).", off=fine_percent(largest(off)["high"]),
            of=largest(off)["of"]),
        failures(rows),
    ]  # fmt: skip


def _largest(results: Path) -> list[Any]:
    """The largest allocations of the fp32 training step of the longest context."""
    rows = read_rows(results / ALLOCATIONS)[0]
    step = _longest(rows, "train-step", "fp32")
    chosen = [
        row for row in rows if step and (row.mode, row.precision, row.ctx) == (step.mode, step.precision, step.ctx)
    ]
    return sorted(chosen, key=lambda row: row.rank)[:5]


def _allocations_table(results: Path) -> str:
    names = {"mib": "MiB each", "count": "of them", "phase": "made in", "category": "as", "line": "by"}
    body = [[f"{row.size}, {row.mode}, {row.precision}, {row.ctx}", *(row[name] for name in names)]
            for row in _largest(results)]  # fmt: skip
    return markdown_table(["the largest", *names.values()], body)


def _answer_allocations(results: Path) -> list[Sentence | None]:
    rows = _largest(results)
    lines = dict.fromkeys(row.line.rpartition(" ")[2] for row in rows)
    return [
        say("The largest have {mib} MiB each, and {count} of them come from `{line}`.", mib=rows[0].mib,
            count=rows[0].count, line=rows[0].line),
        say("The five largest kinds are made by {functions}.", functions=", ".join(f"`{name}`" for name in lines)),
    ] if rows else []  # fmt: skip


def _answer_2048(results: Path) -> list[Sentence | None]:
    rows = read_rows(results / MEMORY_2048)[0]
    lost = [row for row in rows if row.status == "oom"]
    peaks = [(row.peak_gib, f"{row.mode} in {row.precision}") for row in rows if row.ok]
    return [
        *(say("At context {ctx} a {mode} in {precision} runs out of memory in {phase}, with {held} GiB of activations "
              "there and {asked} GiB asked for; by formula it needs {predicted} GiB.", ctx=row.ctx, mode=row.mode,
              precision=row.precision, phase=row.peak_phase, held=row.activations_gib, asked=row.oom_gib,
              predicted=row.peak_predicted_gib) for row in lost),
        say("What could be measured peaks at {range} GiB.", range=from_to(peaks)),
    ]  # fmt: skip


def _answer_check(results: Path) -> list[Sentence | None]:
    rows = [row for row in read_rows(results / MEMORY_CHECK)[0] if row.ok and row.mode == "train-step"]
    kept, peak = (
        largest([(abs(times - 1), f"{row.size}, {row.precision}, {row.attention}") for row in rows
              if (times := ratio(row[f"{name}_gib"], row[f"{name}_predicted_gib"])) is not None])
        for name in ("kept", "peak")
    )  # fmt: skip
    return [
        say("What is kept for backward is off by at most {off} ({of}).", off=fine_percent(kept["high"]), of=kept["of"]),
        say("The peak is off by at most {off} ({of}).", off=fine_percent(peak["high"]), of=peak["of"]),
    ]


SAVED_COLUMNS = {
    "size": "size", "ctx": "ctx", "precision": "precision", "attention": "attention", "compile": "compile",
    "activations_mib": "activations MiB", "predicted_mib": "by formula", "weight_copies_mib": "weight copies MiB",
    "n_activations": "tensors", "largest_five_share": "share of the largest five",
    "gradients_mib": "gradients after backward MiB", "backward_peak_mib": "backward's peak MiB",
}  # fmt: skip


def _largest_saved(results: Path) -> list[Any]:
    rows = [row for row in read_rows(results / SAVED_LIST)[0] if row.kind == "activation"]
    if not rows:
        return []
    first = rows[0]
    names = ("size", "ctx", "precision", "attention", "compile")
    chosen = [row for row in rows if all(row[name] == first[name] for name in names)]
    return sorted(chosen, key=lambda row: row.rank)[:5]


def _saved_table(results: Path) -> str:
    names = {"dtype": "dtype", "mib": "MiB each", "count": "of them", "kept_by": "kept by", "line": "made by"}
    body = [[row.shape, *(row[name] for name in names)] for row in _largest_saved(results)]
    return markdown_table(["the five largest, shape", *names.values()], body)


def _answer_saved(results: Path) -> list[Sentence | None]:
    rows = [row for row in read_rows(results / SAVED)[0] if row.ok]
    if not rows:
        return []
    first = rows[0]
    compiled = next((row for row in rows if row.compile != "off" and row.precision == first.precision), None)
    low = next((row for row in rows if row.compile == "off" and row.precision == "bf16"), None)
    return [
        say("One block of {size} at context {ctx} keeps {mib} MiB of activations for backward in {precision}, "
            "{predicted} by formula; the five largest of {n} tensors are {share} of it.", size=first.size,
            ctx=first.ctx, mib=first.activations_mib, precision=first.precision, predicted=first.predicted_mib,
            n=first.n_activations, share=percent(first.largest_five_share)),
        say("In bf16 it keeps {mib} MiB, and copies of weights of {copies} MiB.", mib=low.activations_mib,
            copies=low.weight_copies_mib) if low and low is not first else None,
        say("Compiled, it keeps {mib} MiB.", mib=compiled.activations_mib) if compiled else None,
        say("Backward gives them back and leaves gradients of {gradients} MiB, with a peak of {peak} MiB above what "
            "was there as it began.", gradients=first.gradients_mib, peak=first.backward_peak_mib),
    ]  # fmt: skip


ALLOCATIONS = "memory/memory_allocations.json"
SAVED, SAVED_LIST = "saved_tensors/saved_tensors.json", "saved_tensors/saved_tensors_list.json"

MEMORY_ITEM = Item(
    4,
    "Memory",
    ("memory_profiling",),
    "what does memory look like over a forward pass and over a full training step; what are the peaks by context "
    "and precision; how large is an activation of the residual stream; which are the largest allocations, and "
    "what code makes them; what does one block keep for backward?",
    (
        Part(
            "Peaks by context and precision",
            "memory",
            (MEMORY,),
            (memory_rows([MEMORY]),),
            (
                ("What holds the memory over one step", "memory/pictures/*train-step*.png"),
                ("What holds the memory over one forward pass", "memory/pictures/*forward*.png"),
            ),
            _answer_memory,
        ),
        Part("The largest allocations", None, (ALLOCATIONS,), (_allocations_table,), (), _answer_allocations),
        Part(
            "The longest context",
            "memory_2048",
            (MEMORY_2048,),
            (memory_rows([MEMORY_2048]),),
            (("What held the memory", "memory_2048/pictures/*train-step*.png"),),
            _answer_2048,
        ),
        Part(
            "Beside the formulas",
            "memory_check",
            (MEMORY_CHECK,),
            (PROFILE_BLOCKS["memory-by-formula"].make,),
            (),
            _answer_check,
        ),
        Part(
            "What one block keeps for backward",
            "saved_tensors",
            (SAVED, SAVED_LIST),
            (columns_of(SAVED, SAVED_COLUMNS), _saved_table),
            (),
            _answer_saved,
        ),
    ),
)
