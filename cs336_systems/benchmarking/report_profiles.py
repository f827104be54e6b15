"""The report's item on profiles of a step's kernels: nsys's, and torch.profiler's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cs336_systems.benchmarking.profile_tables import AGREEMENT, PROFILE_BLOCKS, STEPS, profiled_steps
from cs336_systems.benchmarking.readme_tables import Block
from cs336_systems.benchmarking.report_parts import Answer, Item, Part
from cs336_systems.benchmarking.report_rows import Sentence, failures, markdown_table, percent, read_rows, say


def _leaders(path: str) -> Block:
    """The kernels with the most time in forward and in the whole step, of each profiled step."""

    def make(results: Path) -> str:
        body = [
            [f"{row.size}, {row.ctx}", _short(row.forward_leader), percent(row.forward_leader_share),
             row.forward_leader_count, _short(row.step_leader), percent(row.step_leader_share), row.forward_others]
            for row in read_rows(results / path)[0] if row.ok
        ]  # fmt: skip
        headings = ["size, ctx", "leads in forward", "share", "launches", "leads in the step", "share"]
        return markdown_table([*headings, "besides products, in forward"], body)

    return make


def _short(name: str | None) -> str | None:
    """A kernel's name, the middle of a long one left out."""
    return name if name is None or len(name) <= 48 else f"{name[:30]}…{name[-16:]}"


def _answer_steps(path: str, profiler: str) -> Answer:
    def answer(results: Path) -> list[Sentence | None]:
        rows = read_rows(results / path)[0]
        done = [row for row in rows if row.ok]
        chosen = dict.fromkeys(source for row in (done[:1] + done[-1:]) if (source := row.source))
        by_source = {row.source: row for row in done}
        return [sentence for source in chosen for sentence in _one_step(by_source[source], profiler)] + [failures(rows)]

    return answer


def _one_step(row: Any, profiler: str) -> list[Sentence | None]:
    same = {True: "it leads in the whole step too", False: "in the whole step another one leads"}.get(row.same_leader)
    return [
        say("{size} at context {ctx}, {mode} in {precision}:", size=row.size, ctx=row.ctx, mode=row.mode,
            precision=row.precision),
        say("(a) forward takes {ms} ms under {profiler}, and {bench} ms in the benchmark.", ms=row.forward_ms,
            profiler=profiler, bench=row.forward_benchmark_ms)
        or say("(a) forward takes {ms} ms under {profiler}, and its kernels run for {kernels} ms of that.",
               ms=row.forward_ms, kernels=row.forward_kernel_ms, profiler=profiler),
        say("(b) In forward most time goes to `{leader}`: {share}, in {count} launches; {same}.",
            leader=row.forward_leader, share=percent(row.forward_leader_share),
            count=None if row.forward_leader_count is None else f"{row.forward_leader_count:g}", same=same),
        say("(c) Besides matrix products, forward spends its kernel time on {others}.", others=row.forward_others or
            None),
        say("(d) Matrix products take {forward} of forward's kernel time and {step} of the step's.",
            forward=percent(row.forward_matmul_share), step=percent(row.step_matmul_share)),
        say("(e) Softmax takes {time} times as long as attention's two matrix products, for {flops} times their FLOPs: "
            "it goes over the same scores, and computes little with them.", time=row.softmax_time_ratio,
            flops=row.softmax_flop_ratio),
        say("What binds the step is {binding}; for {waiting} of it the card waits for launches.", binding=row.binding,
            waiting=percent(row.waiting_share)),
    ]  # fmt: skip


KERNELS = "kernels/steps.json"

ITEM = Item(
    2,
    "Profiling with nsys",
    ("nsys_profile",),
    "from a profiler's report of a step: (a) how long is forward, against the benchmark; (b) which kernel takes "
    "the most time in forward, and how often does it run; (c) which kernels besides matrix products matter; (d) "
    "what share do matrix products have in forward and in a whole step; (e) how does softmax compare with "
    "attention's matrix products, in time and in FLOPs?",
    (
        Part(
            "Under Nsight Systems",
            "nsys",
            (STEPS,),
            (profiled_steps(STEPS), _leaders(STEPS)),
            (("Kernels of one step over time", "nsys/*.png"),),
            _answer_steps(STEPS, "nsys"),
        ),
        Part(
            "Without nsys: torch.profiler",
            "kernels",
            (KERNELS,),
            (profiled_steps(KERNELS, "it"), _leaders(KERNELS)),
            (("Kernels of one step over time", "kernels/*.png"),),
            _answer_steps(KERNELS, "torch.profiler"),
        ),
        Part("The two profilers side by side", None, (AGREEMENT,), (PROFILE_BLOCKS["agreement"].make,)),
    ),
)
