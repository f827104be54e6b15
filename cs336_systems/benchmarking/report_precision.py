"""The report's item on what low precision does: to sums, dtypes and LayerNorm, to speed, and to losses."""

from __future__ import annotations

from pathlib import Path

from cs336_systems.benchmarking.layer_norm_precision import LAYER_NORM_COLUMNS
from cs336_systems.benchmarking.mixed_precision import ACCUMULATION_COLUMNS, DTYPE_COLUMNS
from cs336_systems.benchmarking.profile_tables import CONVERGENCE, PRECISIONS, PROFILE_BLOCKS
from cs336_systems.benchmarking.report_model import columns_of, precision_speed
from cs336_systems.benchmarking.report_parts import Item, Part
from cs336_systems.benchmarking.report_rows import Sentence, enumerate_words, failures, largest, read_rows, say


def _answer_sums(results: Path) -> list[Sentence | None]:
    rows = {(row.sum_dtype, row.term_dtype, row.is_cast_first): row for row in read_rows(results / ACCUMULATION)[0]}
    wanted = [("float32", "float32", False), ("float16", "float16", False), ("float32", "float16", False),
              ("float32", "float16", True)]  # fmt: skip
    if not set(wanted) <= set(rows):
        return []
    full, half, mixed, cast = (rows[key] for key in wanted)
    return [
        say("{n} terms add up to {full} in float32 and to {half} in float16: a float16 sum rounds at every addition.",
            n=full.n_terms, full=full.result_to_4_places, half=half.result_to_4_places),
        say("float16 terms in a float32 sum give {mixed}, and {cast} if each is cast first: what is wrong was lost as "
            "the term was rounded, and casting does not bring it back.", mixed=mixed.result_to_4_places,
            cast=cast.result_to_4_places),
    ]  # fmt: skip


def _answer_dtypes(results: Path) -> list[Sentence | None]:
    rows = {row.tensor: row for row in read_rows(results / DTYPES)[0]}
    names = ("parameters", "first layer's output", "LayerNorm's output", "logits", "loss",
             "gradients of the parameters")  # fmt: skip
    listed = [f"{name} {rows[name].float16}" for name in names if name in rows]
    return [say("Under float16 autocast: {listed}.", listed=enumerate_words(listed) or None)]


def _answer_precisions(results: Path) -> list[Sentence | None]:
    rows = read_rows(results / PRECISIONS)[0]
    return [*precision_speed([row for row in rows if row.ok]), failures(rows)]


def _answer_convergence(results: Path) -> list[Sentence | None]:
    rows = read_rows(results / CONVERGENCE)[0]
    done = [row for row in rows if row.ok and row.validation_loss is not None]
    if not done:
        return [failures(rows, "run")]
    losses: dict[str, dict[int, float]] = {}
    for row in done:
        losses.setdefault(row.variant, {})[row.seed] = row.validation_loss
    first = done[0].variant
    off = {}
    for variant, by_seed in losses.items():
        shared = [loss - losses[first][seed] for seed, loss in by_seed.items() if seed in losses[first]]
        if variant != first and shared:
            off[variant] = sum(shared) / len(shared)
    close = largest([(abs(value), variant) for variant, value in off.items() if variant != "fp16-unscaled"])
    seeds = losses[first].values()
    zeros = [row.zero_gradient_share for row in done if row.variant == "fp16-unscaled"]
    return [
        say("Over the same seeds the mean validation loss differs from {first}'s by at most {off} nats ({of}); from "
            "seed to seed it differs by {seeds}.", first=first, off=_fixed(close["high"]), of=close["of"],
            seeds=_fixed(max(seeds) - min(seeds)) if len(seeds) > 1 else None),
        say("float16 without loss scaling ends {off} nats from {first}: up to {zeros} of its gradients are zero.",
            off=_fixed(off.get("fp16-unscaled"), signed=True), first=first,
            zeros=None if not zeros or None in zeros else f"{max(zeros):.2%}"),
        failures(rows, "run"),
    ]  # fmt: skip


def _fixed(loss: float | None, signed: bool = False) -> str | None:
    return None if loss is None else f"{loss:+.4f}" if signed else f"{loss:.4f}"


ACCUMULATION, DTYPES, LAYER_NORM = (f"mixed_precision/{name}.json" for name in ("accumulation", "dtypes", "layer_norm"))

PRECISION_ITEM = Item(
    3,
    "Precision",
    ("mixed_precision_accumulation", "benchmarking_mixed_precision"),
    "what becomes of a thousand small terms summed in float32 and float16; which dtypes does a toy model have "
    "under autocast, and which parts of LayerNorm need float32; how fast is the model in low precision?",
    (
        Part(
            "Sums",
            "mixed_precision",
            (ACCUMULATION,),
            (columns_of(ACCUMULATION, ACCUMULATION_COLUMNS),),
            (),
            _answer_sums,
        ),
        Part("Dtypes under autocast", None, (DTYPES,), (columns_of(DTYPES, DTYPE_COLUMNS),), (), _answer_dtypes),
        Part("LayerNorm's parts", None, (LAYER_NORM,), (columns_of(LAYER_NORM, LAYER_NORM_COLUMNS),)),
        Part(
            "The benchmark in each precision",
            None,
            (PRECISIONS,),
            (PROFILE_BLOCKS["mixed-precision"].make,),
            (("Phases in each precision", "mixed_precision/benchmark.png"),),
            _answer_precisions,
        ),
        Part(
            "Losses in each precision, and under each technique",
            "convergence",
            (CONVERGENCE,),
            (PROFILE_BLOCKS["convergence"].make,),
            (("Loss curves", "convergence/convergence.png"),),
            _answer_convergence,
        ),
    ),
)
