"""The report's items on several GPUs: all-reduce, data parallelism, sharding, and the accounting on paper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cs336_systems.accounting.communication import best_bucket_bytes, fit_linear_cost
from cs336_systems.accounting.xxl import derivation
from cs336_systems.benchmarking.parallel_tables import (
    ALL_REDUCE,
    ALL_REDUCE_FIT,
    FSDP,
    FSDP_TABLES,
    SCHEMES,
    SHARDED,
    SHARDED_TABLES,
    of_memory,
    scaling_by_kind,
)
from cs336_systems.benchmarking.report_model import bare
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


def _answer_all_reduce(results: Path) -> list[Sentence | None]:
    rows = read_rows(results / ALL_REDUCE)[0]
    done = [row for row in rows if row.ok]
    if not done:
        return [failures(rows)]
    ranks = min(row.world_size for row in done)
    these = sorted((row for row in done if row.world_size == ranks), key=lambda row: row.size_mb)
    small, large = these[0], these[-1]
    fits = [fit for fit in read_rows(results / ALL_REDUCE_FIT)[0] if fit.world_size == ranks]
    most = max((row for row in done if row.size_mb == large.size_mb), key=lambda row: row.world_size)
    return [
        say("Between {ranks} ranks over {backend}, {small} MB take {a} ms and {large} MB {b} ms: {times} times as long "
            "for {more} times the bytes.", ranks=ranks, backend=small.backend, small=f"{small.size_mb:g}",
            a=small.median_ms, large=f"{large.size_mb:g}", b=large.median_ms,
            times=ratio(large.median_ms, small.median_ms), more=ratio(large.size_mb, small.size_mb))
        if small is not large else None,
        *(say("The line through the times is a cost of {call} µs a call and a bandwidth of {bandwidth} GB/s, off by at "
              "most {off}.", call=fit.call_cost_us, bandwidth=fit.bandwidth_gb_per_s,
              off=percent(fit.worst_relative_error))
          for fit in fits[:1]),
        say("On {n} ranks {large} MB take {ms} ms, at {bus} GB/s over each link.", n=most.world_size,
            large=f"{large.size_mb:g}", ms=most.median_ms, bus=most.bus_gb_per_s) if most.world_size != ranks else None,
        failures(rows),
    ]  # fmt: skip


# ---- 9: data parallelism ---------------------------------------------------------------------------------------------


def _label(row: Any) -> str:
    return row.implementation + ("" if row.bucket_size_mb is None else f" at {row.bucket_size_mb:g} MB")


def _answer_schemes(folder: str):
    def answer(results: Path) -> list[Sentence | None]:
        rows = read_rows(results / "ddp" / folder / "ddp.json")[0]
        alone = next((row.step_median_ms for row in rows if row.implementation == "none"), None)
        done = [row for row in rows if row.ok and row.exposed_ms is not None]
        cost = {_label(row): f"{share:.1%}" for row in done if (share := ratio(row.exposed_ms, alone)) is not None}
        own = [row for row in done if row.implementation != "torch-ddp"]
        best = min(own, key=lambda row: row.step_median_ms, default=None)
        theirs = min((row for row in done if row.implementation == "torch-ddp"), default=None,
                     key=lambda row: row.step_median_ms)  # fmt: skip
        naive = [_label(row) for row in done if row.implementation in ("naive", "flat", "overlapped")]
        share = next((ratio(row.communication_ms, row.step_median_ms) for row in done if row.implementation == "naive"),
                     None)  # fmt: skip
        sizes = [row for row in done if row.implementation == "bucketed"]
        off = from_to([(row.exposed_ms - row.predicted_overhead_ms, f"{row.bucket_size_mb:g} MB") for row in sizes
                    if row.predicted_overhead_ms is not None])  # fmt: skip
        best_mb = _best_bucket_mb(results / "ddp" / folder / "all_reduce.json", sizes)
        return [
            say("Without communication the step takes {ms} ms; communication makes it longer by {listed}.", ms=alone,
                listed=", ".join(f"{cost[name]} ({name})" for name in naive if name in cost) or None),
            say("By itself, the naive scheme's communication would be {share} of its step.", share=percent(share)),
            say("The fastest is {name}, at {ms} ms ({cost}), with {covered} of its communication behind backward.",
                name=_label(best), ms=best.step_median_ms, cost=cost.get(_label(best)),
                covered=percent(best.covered_share)) if best else None,
            say("PyTorch's, at its best bucket size, takes {ms} ms ({cost}).", ms=theirs.step_median_ms,
                cost=cost.get(_label(theirs))) if theirs else None,
            say("The overhead of the bucketed scheme differs from what the model predicts by {range} ms; by the "
                "model, buckets of {best} MB are best.", best=best_mb, range=off),
            failures(rows, "scheme"),
        ]  # fmt: skip

    return answer


def _best_bucket_mb(path: Path, rows: Sequence[Any]) -> float | None:
    """The bucket size at which the model's overhead is least, from the all-reduces of the same run."""
    times = [(row.size_mb * 1e6, row.median_ms / 1e3) for row in read_rows(path)[0] if row.ok]
    if not rows or len(times) < 2:
        return None
    cost = fit_linear_cost([size for size, _ in times], [time for _, time in times])
    return best_bucket_bytes(rows[0].gradient_mb * 1e6, cost) / 1e6


def _scheme_part(folder: str, title: str) -> Part:
    pictures = (
        ("Kernels of a step under each scheme: compute above, communication below", f"ddp/{folder}/ddp_timeline.png"),
        ("The step over bucket sizes, beside the prediction", f"ddp/{folder}/ddp_bucket_sizes.png"),
    )
    table = SCHEMES[folder]
    return Part(title, f"ddp/{folder}", table.files, (table.make,), pictures, _answer_schemes(folder))


def _answer_options(results: Path) -> list[Sentence | None]:
    """What it does to a scheme's step to give NCCL fewer multiprocessors."""
    rows = [row for row in read_rows(results / SCHEMES["nccl_options"].files[0])[0] if row.ok]
    free = {row.implementation: row for row in rows if row.max_ctas is None}
    return [
        say("`{name}` with at most {n} CTAs takes {ms} ms, and {free} ms with as many as NCCL likes.",
            name=row.implementation, n=row.max_ctas, ms=row.step_median_ms,
            free=free[row.implementation].step_median_ms)
        for row in rows if row.max_ctas is not None and row.implementation in free
    ]  # fmt: skip


# ---- 10, 11: sharding ------------------------------------------------------------------------------------------------


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
        8,
        "All-reduce",
        ("distributed_communication_single_node",),
        "how long does an all-reduce of float32 buffers take, by size and number of processes, over gloo on a CPU and "
        "NCCL on GPUs?",
        (
            Part(
                "All-reduce by size and ranks",
                "all_reduce",
                (ALL_REDUCE, ALL_REDUCE_FIT),
                (bare("all-reduce"),),
                (("All-reduce by size and number of ranks", "all_reduce/all_reduce.png"),),
                _answer_all_reduce,
            ),
        ),
    ),
    Item(
        9,
        "Data parallelism",
        (
            "naive_ddp_benchmarking",
            "minimal_ddp_flat_benchmarking",
            "ddp_overlap_individual_parameters_benchmarking",
            "ddp_bucketed_benchmarking",
        ),
        "on one node with two GPUs, how long are a step and its communication if gradients are averaged one by one "
        "after backward, all at once, each as it is ready, and in buckets of several sizes; is the overlap seen in a "
        "timeline; and how far does the model of the overhead hold?",
        (
            _scheme_part("fp32", "In fp32"),
            _scheme_part("bf16", "In bf16"),
            Part(
                "NCCL's CTAs",
                "ddp/nccl_options",
                SCHEMES["nccl_options"].files,
                (SCHEMES["nccl_options"].make,),
                (),
                _answer_options,
            ),
        ),
    ),
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
