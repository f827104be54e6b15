"""From the leaderboard step's arguments to its files: check, plan the memory, show the plan, measure, write rows."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from cs336_systems.accounting.memory_plan import MemoryPlan, plan_memory, predict_memory
from cs336_systems.accounting.report import markdown_table
from cs336_systems.benchmarking.before_work import does_not_fit
from cs336_systems.benchmarking.isolation import run_isolated
from cs336_systems.benchmarking.leaderboard_cells import LeaderboardCell, LeaderboardRow, cell_label
from cs336_systems.benchmarking.rank_files import (
    check_same_workload,
    check_timeout,
    ranks_into_files,
)
from cs336_systems.benchmarking.rank_sweep import (
    model_on_ranks,
    nccl_settings,
    open_results,
    present,
    run_rank_sweep,
    world_sizes,
)
from cs336_systems.cli import refusing_bad_input, show, tell
from cs336_systems.configs import check
from cs336_systems.defaults import fill_in
from cs336_systems.distributed.launcher import launched_rank, launcher
from cs336_systems.distributed.process_group import DEFAULT_TIMEOUT_S, RankContext
from cs336_systems.feasibility import check_memory, tell_if_crowded
from cs336_systems.records import ResultsFile
from cs336_systems.sweep_cells import Impossible, possible

# Of a card, by default: the rest is for the CUDA context, NCCL's buffers and the allocator's rounding.
USED_SHARE = 0.95
# At most what the process that asks for a card's free memory takes of it by asking.
_ASKING_BYTES = 2**30
# What is measured by default: the leaderboard's step on GPUs, and what a CPU does in seconds.
_MODEL: dict[str, tuple[Any, Any]] = {"size": ("8b", "tiny"), "ctx": (32_768, 16)}
_DEFAULTS: dict[str, tuple[Any, Any]] = {
    "precision": ("bf16", "fp32"),
    "implementation": (("fused", "torch"), ("torch",)),
}
ON_A_CPU = "--size tiny --ctx 16 --precision fp32 --implementation torch"
# PyTorch's parts hold more than the formula, which is for this project's: 112 GiB where it says 105.7 (17 of 8b's 34
# blocks kept), and with 24 kept they asked for 138.7 where it says 130.4.
TORCH_OVER_FORMULA = 1.08

# What tells the cells of one run apart, and what follows from it.
VARIED = (
    *("world_size", "implementation", "kept_blocks", "max_ctas", "high_priority"),
    *("attention", "kernels", "optimizer", "compile", "checkpoint_every", "memory_gib", "predicted_gib"),
)

COLUMNS = {
    "implementation": "implementation",
    "world_size": "ranks",
    "attention": "attention",
    "kept_blocks": "blocks that keep all",
    "max_ctas": "CTAs at most",
    "high_priority": "high priority",
    "status": "status",
    "step_median_ms": "median step ms",
    "step_std_ms": "± ms",
    "step_min_ms": "fastest ms",
    "forward_ms": "forward ms",
    "backward_ms": "backward ms",
    "synchronization_ms": "synchronization ms",
    "optimizer_ms": "optimizer ms",
    "tokens_per_s": "tokens/s",
    "tflops": "TFLOP/s a rank",
    "peak_share": "share of peak",
    "peak_memory_gib": "peak GiB",
    "predicted_gib": "predicted peak GiB",
}


def run_leaderboard_step(
    command: str,
    *,
    size: str | None,
    ctx: int | None,
    processes: tuple[int, ...],
    implementation: tuple[str, ...] | None,
    precision: str | None,
    memory_gib: float | None,
    kept_blocks: tuple[int, ...],
    max_ctas: tuple[int, ...],
    high_priority: tuple[str, ...],
    device: str,
    out: Path,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    resume: bool = False,
    **parameters: Any,
) -> list[LeaderboardRow]:
    """Prints the plan, measures every implementation, and leaves the files leaderboard_step* under `out`
    (scripts/leaderboard_step.py).

    `parameters` are other fields of `LeaderboardCell`, the same for all. What is None of `_MODEL` and `_DEFAULTS` is
    the leaderboard's on GPUs, and seconds' work on a CPU. Bad input ends the program with status 2 before anything
    runs; whatever else ends it, the tables of the rows so far are written.
    """
    with refusing_bad_input():
        check_timeout(timeout_s)
        check(implementation != (), "implementation", "", "needs at least one value")
        common = model_on_ranks(size, ctx, device, "sdpa", _MODEL)
        device = common["device"]
        chosen = fill_in({"precision": precision, "implementation": implementation}, _DEFAULTS, device)
        implementation = chosen["implementation"]
        settings = nccl_settings(device, max_ctas, high_priority)
        ranks = world_sizes(processes, device, (2,))
        base = LeaderboardCell(**common, precision=chosen["precision"], **parameters)
        asked = [
            replace(base, implementation=name, kept_blocks=n)
            for name, n in product(implementation, kept_blocks or (0,))
        ]
        missing = _why_not_fused(device) if "fused" in implementation else None
        if missing:
            runs = f"On {device} this runs: torch" if device != "cpu" else f"For a look: {ON_A_CPU}"
            missing = f"implementation='fused': {missing}. {runs}"
            if all(cell.implementation == "fused" for cell in asked):
                raise ValueError(missing)
        check(memory_gib is None or memory_gib > 0, "memory_gib", memory_gib, "must be above 0")
        card_gib, attention = _card(device, max(ranks))
        memory_gib = memory_gib or (card_gib and USED_SHARE * card_gib)
        planned = [replace(base, implementation=name, world_size=n) for n, name in product(ranks, implementation)]
        plans = [(cell, plan) for cell in planned for plan in _plans(cell, memory_gib, kept_blocks)]
        several = (
            replace(
                cell,
                **_parts(cell.implementation, attention, device),
                **setting,
                kept_blocks=plan.n_kept,
                checkpoint_every=int(plan.n_checkpointed > 0),
                memory_gib=memory_gib,
                predicted_gib=plan.peak_bytes / 2**30 if cell.implementation == "fused" else None,
            )
            for (cell, plan), setting in product(plans, settings)
        )
        cells: list[Any] = list(dict.fromkeys(several))  # one that is there twice is one
        if missing:
            cells = [Impossible.of(cell, missing) if cell.implementation == "fused" else cell for cell in cells]
            plans = [(cell, plan) for cell, plan in plans if cell.implementation != "fused"]
        check_memory(possible(cells), ON_A_CPU)
        results = open_results(out, "leaderboard_step", LeaderboardRow, command, device, resume)
        check_same_workload(results, possible(cells), VARIED)
    if results is not None:
        tell_if_crowded(device, ranks)
        show("\n".join(dict.fromkeys(_plan_table(cell, plan) for cell, plan in plans)))

    def write_files(results: ResultsFile[LeaderboardRow]) -> str:
        return results.write_tables(present(COLUMNS, results.rows))

    ranks_into_files(
        results,
        lambda: run_rank_sweep(cells, _measure, results, cell_label, timeout_s=timeout_s, known=does_not_fit),
        write_files,
    )
    return results.rows if results is not None else []


def _measure(context: RankContext, cell: LeaderboardCell) -> dict[str, Any]:
    """On a rank, which has torch; here its import would keep a refusal waiting."""
    from cs336_systems.benchmarking.leaderboard_step import measure_leaderboard_step

    return measure_leaderboard_step(context, cell)


def _why_not_fused(device: str) -> str | None:
    from cs336_systems.workload import why_kernels_not

    return why_kernels_not("fused", device)


def _plans(cell: LeaderboardCell, memory_gib: float | None, kept_blocks: tuple[int, ...]) -> list[MemoryPlan]:
    """A cell's plan for the memory, or those of the numbers of blocks that were asked for; without a limit all is
    kept."""
    model = cell.model_config(), cell.batch_size * cell.ctx, cell.world_size
    limit = math.inf if memory_gib is None else memory_gib
    if cell.implementation == "torch":
        limit /= TORCH_OVER_FORMULA
    if not kept_blocks:
        return [plan_memory(*model, limit, cell.precision, cell.recomputes)]
    return [predict_memory(*model, n, limit, cell.precision, cell.recomputes) for n in kept_blocks]


def _parts(implementation: str, attention: str, device: str) -> dict[str, Any]:
    """The fields of a cell that name what it is built of."""
    if implementation == "fused":
        return {"implementation": "fused", "attention": attention, "kernels": "fused", "optimizer": "adamw"}
    compiled = "blocks" if device == "cuda" else "off"
    return {"implementation": "torch", "attention": "sdpa", "optimizer": "adamw-fused", "compile": compiled}


def _card(device: str, n_cards: int) -> tuple[float | None, str]:
    """GiB of the card, or of the fullest of `n_cards`, that no other process holds, None for a CPU; and the fastest
    attention there. Asked in a process of its own, as a parent must leave the cards to its ranks, unless this is a
    launched rank: then of rank 0's card, and by rank 0, whose plan is every rank's."""
    if device == "cpu":
        return None, "flash-pytorch"
    if launcher() is None:
        outcome = run_isolated(_ask_card, n_cards)
        check(outcome.status == "ok", "device", device, f"cannot be looked at ({outcome.reason})")
        total_gib, left_gib, attention = outcome.value
    else:
        total_gib, left_gib, attention = _ask_card(1 if launched_rank() == 0 else 0)
    if left_gib < total_gib:
        tell(f"Other processes hold {total_gib - left_gib:.1f} of the card's {total_gib:.1f} GiB: the plan leaves it.")
    return left_gib, attention


def _ask_card(n_cards: int) -> tuple[float, float, str]:
    """GiB of a card, those that other processes leave of the fullest of the first `n_cards` (on which this one is then,
    too), and the fastest attention."""
    import torch

    from cs336_systems.attention.model_attention import why_not

    total = torch.cuda.get_device_properties(0).total_memory
    free = [torch.cuda.mem_get_info(index)[0] + _ASKING_BYTES for index in range(n_cards)]
    attention = next(name for name in ("flash-hopper", "flash-triton") if why_not(name, "cuda") is None)
    return round(total / 2**30, 1), round(min([total, *free]) / 2**30, 1), attention


def _plan_table(cell: LeaderboardCell, plan: MemoryPlan) -> str:
    memory_gib = plan.memory_bytes / 2**30
    if cell.implementation == "fused":
        checkpointed, kept = "their input and attention's output", "all but what elementwise kernels make again"
        what = "That is"
    else:
        checkpointed, kept = "their input", "everything"
        memory_gib *= TORCH_OVER_FORMULA
        what = f"With the {TORCH_OVER_FORMULA - 1:.0%} that PyTorch's parts may hold beyond it, that is"
    fits = f"\n\n{what} more than the {memory_gib:.2f} GiB that it may use, and is tried all the same."
    return (
        f"The plan of {cell.implementation} for each of {cell.world_size} ranks: {plan.n_checkpointed} blocks keep "
        f"{checkpointed}, the last {plan.n_kept} {kept}.\n\n"
        + markdown_table(("held at the peak", "GiB"), plan.rows())
        + ("\n" if plan.fits else f"{fits}\n")
    )
