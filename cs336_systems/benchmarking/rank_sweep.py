"""Measures cells that need several ranks: a fresh process group for each cell, and a row of each on disk.

The counterpart of sweep.py, whose cells need one process.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from cs336_systems.benchmarking.into_files import Look, resolve_device
from cs336_systems.benchmarking.isolation import Outcome, is_out_of_memory
from cs336_systems.benchmarking.rank_arguments import RankArguments
from cs336_systems.benchmarking.sweep import make_row, unmeasured
from cs336_systems.configs import check, named_shape
from cs336_systems.cpu_cores import usable_cores
from cs336_systems.defaults import fill_in
from cs336_systems.distributed.launcher import launched_rank, launched_world_size
from cs336_systems.distributed.meeting import from_rank_0
from cs336_systems.distributed.process_group import (
    DEFAULT_TIMEOUT_S,
    NEEDS_NCCL,
    GroupOptions,
    RankContext,
    run_ranks,
)
from cs336_systems.distributed.spawn import RankFailedError, start_fork_server
from cs336_systems.files import NotWritten, check_writable
from cs336_systems.progress import progress
from cs336_systems.provenance import Provenance, collect_provenance, count_gpus
from cs336_systems.records import ResultsFile
from cs336_systems.sweep_cells import COMPILED_ATTENTION

_MODEL: dict[str, tuple[Any, Any]] = {"size": ("xl", "tiny"), "ctx": (512, 64)}


def run_rank_sweep(
    cells: Sequence[Any],
    measure: Callable[[RankContext, Any], dict[str, Any]],
    results: ResultsFile | None,
    label: Callable[[Any], str] = str,
    complete: Callable[[Any, dict[str, Any]], dict[str, Any]] = lambda cell, measured: measured,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    known: Callable[[Any], Outcome | None] = lambda cell: None,
) -> None:
    """Add to `results` one row a cell, in order, skipping cells whose row is there already (`unmeasured`).

    Args:
        cells: frozen dataclasses with `device` ("cpu" or "cuda"), `world_size`, `max_ctas` and
            `high_priority`.
        measure: a top-level function `measure(context, cell)`, run on every rank; rank 0's dict is the row's results.
        results: None on the ranks other than 0 of a launched job (torchrun, srun), which keep no rows.
        label: what the progress bar calls a cell.
        complete: called as `complete(cell, measured)` in this process; returns the row's results, e.g. with those that
            need earlier rows.
        timeout_s: the limit of one collective, in seconds.
        known: what becomes of a cell, where that can be said without measuring it; asked where `results` are, for all
            cells before the first is measured.

    Raises:
        RankFailedError: a spawned rank failed otherwise than by memory; the rows so far are on disk. In a launched job
            a rank that runs out of memory ends the job too.
        OSError: a row could not be written; the rows before it are on disk.
    """
    missing = None
    if results is not None:
        outcomes = {cell: known(cell) for cell in unmeasured(cells, results, label)}
        missing = [cell for cell, outcome in outcomes.items() if outcome is None]
        for cell, outcome in outcomes.items():
            if outcome is not None:
                results.append(make_row(results.row_type, cell, outcome, {}))
        if missing:
            results.timing_begins()
    to_measure = from_rank_0(missing, timeout_s)
    with progress(len(cells), len(cells) - len(to_measure), disable=results is None) as bar:
        for cell in to_measure:
            bar.set_description(label(cell))
            outcome = _measure_on_ranks(measure, cell, timeout_s)
            if results is not None:
                values = complete(cell, outcome.value) if outcome.status == "ok" else {}
                results.append(make_row(results.row_type, cell, outcome, values))
            bar.update()


def _measure_on_ranks(measure: Callable[[RankContext, Any], dict[str, Any]], cell: Any, timeout_s: float) -> Outcome:
    """Rank 0's results (None on the other ranks of a launched job), or what became of a rank."""
    options = GroupOptions(cell.device, timeout_s, max_ctas=cell.max_ctas, high_priority=cell.high_priority)
    return outcome_of_ranks(lambda: run_ranks(measure, cell, world_size=cell.world_size, options=options))


def outcome_of_ranks(run: Callable[[], Sequence[Any] | None]) -> Outcome:
    """The first of what `run` returns, or that a rank of it ran out of memory or was killed; other errors of a rank
    pass, and that it could not write a file is this process's NotWritten."""
    try:
        values = run()
    except RankFailedError as error:
        reason = str(error).splitlines()[0]
        if error.exit_code == -signal.SIGKILL:
            return Outcome("killed", reason=reason)
        if error.__cause__ is not None and is_out_of_memory(error.__cause__):
            return Outcome("oom", reason=reason)
        if isinstance(error.__cause__, NotWritten):
            raise error.__cause__ from None
        raise
    return Outcome("ok", value=None if values is None else values[0])


def resolve_ranks_device(device: str) -> str:
    """ "cpu" or "cuda" for "auto", "cpu" or "cuda".

    Raises:
        ValueError: "cuda" on a machine without a GPU.
    """
    if device == "cpu":
        return device
    n_gpus = count_gpus()
    if device == "cuda" and n_gpus == 0:
        raise ValueError(f"device={device!r}: is not on this machine; it has cpu")
    return "cuda" if n_gpus else "cpu"


def model_on_ranks(
    size: str | None,
    ctx: int | None,
    device: str,
    attention: str,
    defaults: Mapping[str, tuple[Any, Any]] = _MODEL,
    **several: tuple[Any, ...],
) -> dict[str, Any]:
    """The fields that all cells of a model on ranks share: its size and shape, context, the attention, and the device.

    Size and context that are None are those of `defaults` (`fill_in`): a node's work on GPUs, and seconds' on a CPU.

    Raises:
        ValueError: no such size or device, or one of `several` without a value.
    """
    if size is not None:
        named_shape(size)  # refused before torch is imported
    for flag, values in several.items():
        check(values != (), flag, "", "needs at least one value")
    device = resolve_ranks_device(device)
    chosen = fill_in({"size": size, "ctx": ctx}, defaults, device)
    return {**named_shape(chosen["size"]), "ctx": chosen["ctx"], "attention": attention, "device": device}


def check_attention(attention: str, device: str, precision: Sequence[str]) -> None:
    """Raises ValueError for an attention that does not run on the device in each precision; imports torch, but for one
    that runs on all."""
    if attention not in COMPILED_ATTENTION:
        return
    from cs336_systems.workload import why_attention_not

    for kind in precision:
        missing = why_attention_not(attention, device, kind)
        check(missing is None, "attention", attention, str(missing))


def nccl_settings(device: str, max_ctas: Sequence[int], high_priority: Sequence[str]) -> list[dict[str, Any]]:
    """A cell's fields `max_ctas` and `high_priority` for each pair, NCCL's own number of CTAs (0) being None.

    Raises:
        ValueError: a cap that cannot be, an option without NCCL, or no value.
    """
    check(len(max_ctas) > 0, "max_ctas", "", "needs at least one value")
    check(len(high_priority) > 0, "high_priority", "", "needs at least one value")
    check(device == "cuda" or "on" not in high_priority, "high_priority", "on", NEEDS_NCCL)
    groups = [
        GroupOptions(device, max_ctas=n or None, high_priority=on == "on") for n, on in product(max_ctas, high_priority)
    ]
    return [{"max_ctas": group.max_ctas, "high_priority": group.high_priority} for group in groups]


def present(columns: dict[str, str], rows: Sequence[Any]) -> dict[str, str]:
    """The columns in which a row says anything."""
    return {name: heading for name, heading in columns.items() if {getattr(row, name) for row in rows} - {None, False}}


def batch_sizes(world_sizes: Sequence[int], batch_size: int, total_batch_size: int | None) -> dict[int, int]:
    """Sequences on each rank by number of ranks: `batch_size`, or an equal part of `total_batch_size`.

    Raises:
        ValueError: `total_batch_size` is no multiple of a number of ranks, or both are given (`RankArguments`).
    """
    if total_batch_size is None:
        return dict.fromkeys(world_sizes, batch_size)
    is_default = batch_size == RankArguments.batch_size
    check(is_default, "batch_size", batch_size, "goes without --total-batch-size, which is divided among the ranks")
    for world_size in world_sizes:
        check(total_batch_size >= 1, "total_batch_size", total_batch_size, "must be at least 1")
        fits = total_batch_size % world_size == 0
        check(fits, "total_batch_size", total_batch_size, f"must be a multiple of {world_size}, a number of processes")
    return {world_size: total_batch_size // world_size for world_size in world_sizes}


def open_results(
    out: Path,
    name: str,
    row_type: type,
    command: str,
    device: str,
    resume: bool = False,
    beside: ResultsFile | None = None,
) -> ResultsFile | None:
    """The file for the rows; None on the ranks other than 0 of a launched job. `beside` is another of the run's files,
    where there is one already.

    Raises:
        ValueError: `out` cannot be written to, or has rows to go on from that do not fit.
    """
    if launched_rank() not in (None, 0):
        return None
    check_writable(out)
    run, look = (beside.runs[-1], beside.look) if beside is not None else _run_here(command, device)
    return ResultsFile(out, name, row_type, run, resume, look)


def _run_here(command: str, device: str) -> tuple[Provenance, Look | None]:
    if launched_rank() is not None:
        return collect_provenance(command, device), None  # others' load is not looked at: the other ranks are at work
    # Not before all has been checked that can be without torch: the server imports for seconds, even when this process
    # has ended.
    start_fork_server("torch._dynamo", "cs336_systems.workload")  # every optimizer imports torch._dynamo
    import torch  # noqa: F401  which the ranks' store needs here: while the server imports it, too

    # A process that starts ranks must leave the cards to them: it asks another one. Ranks on a CPU share all its cores.
    return resolve_device(device, command, n_threads=usable_cores())[1:]


def world_sizes(processes: Sequence[int], device: str, default: Sequence[int]) -> tuple[int, ...]:
    """The world sizes to measure: those asked for, or the launcher's, or those of `default` for which this machine has
    GPUs or, on a CPU, cores (two ranks run on one).

    Raises:
        ValueError: one that was asked for is larger than the number of GPUs, or is not the launcher's.
    """
    launched = launched_world_size()
    n_gpus = count_gpus() if device == "cuda" else 0
    fits = [n for n in default if n <= (max(2, usable_cores()) if device == "cpu" else n_gpus)]
    chosen = tuple(dict.fromkeys(processes)) or ((launched,) if launched else tuple(fits))
    for world_size in chosen:
        if world_size < 1:
            raise ValueError(f"processes={world_size}: must be at least 1")
        if launched and world_size != launched:
            raise ValueError(f"processes={world_size}: must be {launched}, as many as the launcher started")
        if not launched and device == "cuda" and world_size > n_gpus:
            raise ValueError(f"processes={world_size}: must be at most {n_gpus}, this machine's GPUs, one a process")
    if not chosen:
        raise ValueError(
            f"processes=(): {', '.join(map(str, default))} are the default, and this machine has {n_gpus} GPU"
        )
    return chosen
