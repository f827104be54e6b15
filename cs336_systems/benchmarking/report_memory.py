"""The report's items on memory: what holds it over a step, and activation checkpointing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cs336_systems.benchmarking.profile_tables import (
    CHECKPOINTING,
    MEMORY,
    MEMORY_2048,
    MEMORY_CHECK,
    PROFILE_BLOCKS,
    memory_rows,
)
from cs336_systems.benchmarking.report_model import columns_of
from cs336_systems.benchmarking.report_parts import Item, Part
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
        say("The formula of the step's peak is off by at most {off} ({of}).", off=_percent(largest(off)["high"]),
            of=largest(off)["of"]),
        failures(rows),
    ]  # fmt: skip


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{share:.1%}"


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
        say("What is kept for backward is off by at most {off} ({of}).", off=_percent(kept["high"]), of=kept["of"]),
        say("The peak is off by at most {off} ({of}).", off=_percent(peak["high"]), of=peak["of"]),
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


# ---- 5: activation checkpointing -------------------------------------------------------------------------------------


def _answer_checkpoints(results: Path) -> list[Sentence | None]:
    rows = read_rows(results / CHECKPOINTING)[0]
    answers: list[Sentence | None] = []
    for precision, attention in dict.fromkeys((row.precision, row.attention) for row in rows):
        these = [row for row in rows if (row.precision, row.attention) == (precision, attention)]
        plain = next((row for row in these if not row.checkpoint_every), None)
        best = min((row for row in these if row.checkpoint_every and row.peak_memory_gib), default=None,
                   key=lambda row: row.peak_memory_gib)  # fmt: skip
        if best is None:
            continue
        every = f"{best.checkpoint_every} block{'s' * (best.checkpoint_every > 1)}"
        common = {"attention": attention, "precision": precision, "every": every, "gib": best.peak_memory_gib}
        if plain is not None and plain.ok:
            answers.append(
                say("With {attention} attention in {precision}, segments of {every} bring the peak from "
                    "{before} to {gib} GiB, the least of the sizes tried, and make the step {slower} times as long.",
                    before=plain.peak_memory_gib, slower=best.step_over_none, **common)
            )  # fmt: skip
        elif plain is not None:
            answers.append(
                say("With {attention} attention in {precision} the step does not run without checkpoints (by formula "
                    "it needs {need} GiB); in segments of {every} it peaks at {gib} GiB, the least of those tried.",
                    need=plain.peak_predicted_gib, **common)
            )  # fmt: skip
    measured = [row for row in rows if row.ok and row.peak_memory_gib]
    off = largest([(abs(times - 1), f"{row.attention}, every {row.checkpoint_every}") for row in measured
                if (times := ratio(row.peak_memory_gib, row.peak_predicted_gib)) is not None])  # fmt: skip
    return [*answers, say("The formula is off by at most {off} ({of}).", off=_percent(off["high"]), of=off["of"])]


NESTED_COLUMNS = {
    "scheme": "scheme", "n_layers": "layers L", "every": "segments of", "kept_activations": "kept",
    "peak_activations": "peak", "forwards_per_layer": "forwards a layer", "growth": "should grow with",
    "peak_over_growth": "peak over that",
}  # fmt: skip


def _answer_nested(results: Path) -> list[Sentence | None]:
    rows = read_rows(results / NESTED)[0]
    if not rows:
        return []
    deepest = max(row.n_layers for row in rows)
    shallowest = min(row.n_layers for row in rows)
    at, before = ({row.scheme: row for row in rows if row.n_layers == depth} for depth in (deepest, shallowest))
    if not {"none", "segments", "nested"} <= set(at):
        return []
    growth = {
        scheme: ratio(row.peak_over_growth, before[scheme].peak_over_growth if scheme in before else None)
        for scheme, row in at.items()
    }
    return [
        say("At {n} layers the peak is {a} activations without checkpoints, {b} with segments and {c} nested; each "
            "layer's forward runs {d}, {e} and {f} times.", n=deepest, a=at["none"].peak_activations,
            b=at["segments"].peak_activations, c=at["nested"].peak_activations, d=at["none"].forwards_per_layer,
            e=at["segments"].forwards_per_layer, f=at["nested"].forwards_per_layer),
        say("Over what it should grow with (L, √L, log2 L), the peak changes by factors of {a}, {b} and {c} from "
            "{least} to {most} layers.", a=growth["none"], b=growth["segments"], c=growth["nested"],
            least=shallowest, most=deepest),
    ]  # fmt: skip


ALLOCATIONS = "memory/memory_allocations.json"
SAVED, SAVED_LIST = "saved_tensors/saved_tensors.json", "saved_tensors/saved_tensors_list.json"
NESTED = "checkpointing/nested.json"

ITEMS = (
    Item(
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
    ),
    Item(
        5,
        "Activation checkpointing",
        (),
        "how does the largest model's peak memory depend on the number of blocks in a checkpointed segment, and which "
        "is best; how do memory and work grow with depth if checkpoints are nested?",
        (
            Part(
                "Blocks in a segment",
                "checkpointing_model",
                (CHECKPOINTING,),
                (PROFILE_BLOCKS["checkpointing"].make,),
                (("Peak memory over the blocks in a segment", "checkpointing_model/checkpointing.png"),),
                _answer_checkpoints,
            ),
            Part(
                "Nested checkpoints",
                "checkpointing",
                (NESTED,),
                (columns_of(NESTED, NESTED_COLUMNS),),
                (("Peak memory and forward passes over depth", "checkpointing/nested.png"),),
                _answer_nested,
            ),
        ),
    ),
)
