"""The report's items on all-reduce and on data parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cs336_systems.accounting.communication import best_bucket_bytes, fit_linear_cost
from cs336_systems.benchmarking.parallel_tables import ALL_REDUCE, ALL_REDUCE_FIT, SCHEMES
from cs336_systems.benchmarking.report_model import bare
from cs336_systems.benchmarking.report_parts import Item, Part
from cs336_systems.benchmarking.report_rows import Sentence, failures, from_to, percent, ratio, read_rows, say


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
        cost = {_label(row): percent(row.exposed_ms / alone, signed=True) for row in done if alone}
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
            say("Without communication the step takes {ms} ms; communication changes it by {listed}.", ms=alone,
                listed=", ".join(f"{cost[name]} ({name})" for name in naive if name in cost) or None),
            say("By itself, the naive scheme's communication would be {share} of its step.", share=percent(share)),
            say("The fastest is {name}, at {ms} ms ({cost}).", name=_label(best), ms=best.step_median_ms,
                cost=cost.get(_label(best))) if best else None,
            say("Of its communication, {covered} is behind backward.", covered=percent(best.covered_share))
            if best else None,
            say("PyTorch's, at its best bucket size, takes {ms} ms ({cost}).", ms=theirs.step_median_ms,
                cost=cost.get(_label(theirs))) if theirs else None,
            say("The overhead of the bucketed scheme differs from what the model predicts by {range} ms; by the "
                "model, buckets of {best} MB are best.", best=best_mb, range=off),
            say("In one run of a scheme, steps scatter by {range} ms (standard deviation).",
                range=from_to([(row.step_std_ms, _label(row)) for row in done])),
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
            _scheme_part("bf16_repeat", "In bf16, again, in another order"),
            _scheme_part("bf16_batch_8", "In bf16, at twice the batch"),
            _scheme_part("bf16_compiled", "In bf16, with compiled blocks"),
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
)
