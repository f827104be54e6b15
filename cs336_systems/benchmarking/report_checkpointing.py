"""The report's item on activation checkpointing: blocks in a segment, and nested checkpoints."""

from __future__ import annotations

from pathlib import Path

from cs336_systems.benchmarking.profile_tables import CHECKPOINTING, PROFILE_BLOCKS
from cs336_systems.benchmarking.report_model import columns_of
from cs336_systems.benchmarking.report_parts import Item, Part
from cs336_systems.benchmarking.report_rows import Sentence, fine_percent, largest, ratio, read_rows, say


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
    return [*answers, say("The formula is off by at most {off} ({of}).", off=fine_percent(off["high"]), of=off["of"])]


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


NESTED = "checkpointing/nested.json"

CHECKPOINTING_ITEM = Item(
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
)
