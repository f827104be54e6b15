"""The report's items on what is divided over GPUs, the sharded optimizer and FSDP, on scaling, and on paper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cs336_systems.accounting.xxl import derivation
from cs336_systems.benchmarking.parallel_tables import (
    FSDP,
    FSDP_TABLES,
    SHARDED,
    SHARDED_TABLES,
    of_memory,
    scaling_by_kind,
)
from cs336_systems.benchmarking.report_parts import Item, Part
from cs336_systems.benchmarking.report_rows import (
    Sentence,
    failures,
    from_to,
    largest,
    percent,
    ratio,
    read_rows,
    say,
)
from cs336_systems.benchmarking.scaling import efficiency
from cs336_systems.records import format_value


def _pair(rows: Sequence[Any], ours: str, theirs: str) -> list[Sentence | None]:
    """Steps and peaks of two implementations, for each precision that both have."""
    done = {(row.implementation, row.precision): row for row in rows if row.ok}
    answers: list[Sentence | None] = []
    for precision in dict.fromkeys(row.precision for row in rows):
        a, b = done.get((ours, precision)), done.get((theirs, precision))
        if a is not None and b is not None:
            answers.append(
                say("In {precision}, `{ours}` takes {a} ms a step, `{theirs}` {b} ms{peaks}.", precision=precision,
                    ours=ours, theirs=theirs, a=a.step_median_ms, b=b.step_median_ms, peaks=_peaks(a, b))
            )  # fmt: skip
    return answers


def _peaks(a: Any, b: Any) -> str:
    """Their peaks, where memory is counted: on a GPU."""
    if a.peak_memory_gib is None or b.peak_memory_gib is None:
        return ""
    return f"; at their peaks they hold {format_value(a.peak_memory_gib)} and {format_value(b.peak_memory_gib)} GiB"


def _held(results: Path, files: Sequence[str], name: str, moment: str) -> Any:
    """What the fullest rank holds at a moment, or None."""
    rows = [row for file in of_memory(files) for row in read_rows(results / file)[0]]
    chosen = [row for row in rows if (row.implementation, row.moment) == (name, moment)]
    return max(chosen, key=lambda row: row.total_gib or 0.0, default=None)


def _formula_off(rows: Sequence[Any]) -> Sentence | None:
    off = largest([(abs(times - 1), f"{row.implementation}, {row.precision}") for row in rows
                if row.ok and (times := ratio(row.peak_memory_gib, row.predicted_peak_gib)) is not None])  # fmt: skip
    share = None if off["high"] is None else f"{off['high']:.1%}"
    return say("The predicted peaks are off by at most {off} ({of}).", off=share, of=off["of"])


def _answer_sharded(results: Path) -> list[Sentence | None]:
    rows = [row for name in SHARDED for row in read_rows(results / name)[0]]
    moment = "before optimizer step"
    whole, divided = (_held(results, SHARDED, name, moment) for name in ("ddp", "sharded-optimizer"))
    return [
        say("Before the optimizer's step a rank holds {a} GiB of parameters and {b} of gradients either way, and {c} "
            "GiB of optimizer state divided instead of {d}.", a=divided.parameters_gib, b=divided.gradients_gib,
            c=divided.optimizer_state_gib, d=whole.optimizer_state_gib) if whole and divided else None,
        *_pair(rows, "sharded-optimizer", "ddp"),
        *_pair(rows, "sharded-optimizer", "torch-zero"),
        _formula_off(rows),
        say("From ZeRO-1 it differs in three ways: gradients are averaged whole and not scattered, which sends half as "
            "much again; it needs nothing of the training loop but an optimizer; and it divides whole parameters, not "
            "one flat buffer. docs/sharding.md counts the bytes."),
        failures(rows, "implementation"),
    ]  # fmt: skip


def _answer_fsdp(results: Path) -> list[Sentence | None]:
    rows = [row for name in FSDP for row in read_rows(results / name)[0]]
    late = [
        say("In {precision} {share} of the gathers are there when their layer could begin; {late} of {n} end later.",
            precision=row.precision, share=percent(ratio(row.n_gathers - row.n_late, row.n_gathers)),
            late=row.n_late, n=row.n_gathers)
        for row in rows if row.implementation == "fsdp" and row.ok and row.n_gathers is not None
    ]  # fmt: skip
    return [
        *_pair(rows, "fsdp", "torch-fsdp2"),
        *_pair(rows, "fsdp", "ddp"),
        _formula_off(rows),
        *late,
        failures(rows, "implementation"),
    ]


def _answer_scaling(kind: str):
    def answer(results: Path) -> list[Sentence | None]:
        rows = [row for path in sorted(results.glob(SCALING[kind])) for row in read_rows(path)[0]]
        most = max((row.world_size for row in rows if row.ok), default=None)
        shares = [
            (efficiency(row, [r for r in rows if (r.size, r.ctx) == (row.size, row.ctx)]),
             f"`{row.implementation}`, {row.precision}, {row.size}")
            for row in rows if row.world_size == most and row.implementation != "none"
        ]  # fmt: skip
        return [
            say("On {n} ranks the efficiency is {range}.", n=most, range=from_to(shares, percent)),
            failures(rows),
        ]  # fmt: skip

    return answer


SCALING = {kind: f"scaling/{kind}/**/scaling.json" for kind in ("weak", "strong")}  # runs of several machines


def _paper(link: Callable[[str], str]) -> str:
    return (
        "```sh\npython scripts/accounting.py --handout\n```\n\n**Answer.** Worked out by that command, from the "
        f"formulas of [docs/accounting.md]({link('docs/accounting.md')}):\n\n```text\n{derivation()}\n```"
    )


ITEMS = (
    Item(
        10,
        "Sharded optimizer",
        ("optimizer_state_sharding", "optimizer_state_sharding_accounting"),
        "what does a rank hold after the model is built and before and after the optimizer's step, with the "
        "optimizer's state whole and divided; how long is a step either way; how does it differ from ZeRO's first "
        "stage?",
        (
            Part(
                "Two ranks",
                "sharded_optimizer",
                (*SHARDED, *of_memory(SHARDED)),
                tuple(SHARDED_TABLES),
                (("Kernels of a step", "sharded_optimizer/sharded_optimizer_timeline.png"),),
                _answer_sharded,
            ),
        ),
    ),
    Item(
        11,
        "FSDP",
        (),
        "with every weight divided over the ranks, gathered ahead of its use and freed after it: what is the memory, "
        "beside the prediction, and does communication finish in time?",
        (
            Part(
                "Two ranks",
                "fsdp",
                (*FSDP, *of_memory(FSDP)),
                tuple(FSDP_TABLES),
                (
                    ("Kernels of a step", "fsdp/fsdp_timeline.png"),
                    ("Gathers beside their layers", "fsdp/*gathers*.png"),
                ),
                _answer_fsdp,
            ),
            *(
                Part(
                    f"{kind.capitalize()} scaling of data parallelism and sharding",
                    f"scaling/{kind}",
                    (SCALING[kind],),
                    (partial(scaling_by_kind, kind),),
                    (("Efficiency over ranks", f"scaling/{kind}/**/scaling*.png"),),
                    _answer_scaling(kind),
                )
                for kind in ("weak", "strong")
            ),
        ),
    ),
    Item(
        12,
        "Accounting on paper",
        ("communication_accounting",),
        "for a model of feed-forward layers alone: memory on one device; memory and the least number of devices when "
        "sharded; the batch at which forward is bound by arithmetic on a mesh; ring collectives, and when each scheme "
        "is bound by communication.",
        fixed=_paper,
    ),
)
