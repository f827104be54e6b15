"""Whether the techniques train the same model: one run a technique and seed, their losses in one picture and table.

Every run sees the same batches in the same order; those of one seed also start from the same weights.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import statistics
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from cs336_systems.benchmarking.convergence_report import (
    ROW_COLUMNS,
    ConvergenceRow,
    convergence_table,
    plot_convergence,
    run_folder,
    variants_table,
)
from cs336_systems.benchmarking.convergence_variants import DEFAULTS, ON_RANKS, VARIANTS, check_convergence
from cs336_systems.benchmarking.into_files import check_any_measured, resolve_device, sweep_into_files
from cs336_systems.benchmarking.isolation import run_isolated
from cs336_systems.benchmarking.rank_sweep import outcome_of_ranks
from cs336_systems.benchmarking.sweep import unmeasured
from cs336_systems.cli import refusing_bad_input, tell
from cs336_systems.cpu_cores import usable_cores
from cs336_systems.defaults import fill_in
from cs336_systems.distributed.process_group import GroupOptions, spawn_ranks
from cs336_systems.feasibility import TooLittleMemory, tell_if_crowded
from cs336_systems.progress import progress
from cs336_systems.records import ResultsFile
from cs336_systems.signals import signals_waiting, stopped_by
from cs336_systems.training.config import TrainConfig
from cs336_systems.training.data import TokenFile
from cs336_systems.training.loop import Summary, train_rank
from cs336_systems.training.metrics import METRICS, last_step, read_metrics
from cs336_systems.training.run_checks import check_run, check_same_run, tell_if_near

_LAST = 20  # steps over which the training loss at the end is averaged


@dataclasses.dataclass(frozen=True)
class _Run:
    """What tells the runs of a comparison apart."""

    variant: str
    seed: int

    def __str__(self) -> str:
        return f"{self.variant}, seed {self.seed}"


def run_convergence(
    command: str,
    *,
    variant: tuple[str, ...] | None,
    seed: tuple[int, ...] | None,
    processes: int | None,
    at_once: int,
    out: Path,
    resume: bool,
    device: str,
    **base: Any,
) -> list[ConvergenceRow]:
    """Trains every variant with every seed, in folders of their own under `out`, and writes rows, table and picture.

    `at_once` runs share the machine; 0 stands for one on a CPU, and beside a GPU half the CPU's cores, 8 at most.

    What is None of `DEFAULTS` is all of it on a GPU, and a minute's work elsewhere. Bad input ends the program with
    status 2 before anything is built. A variant that this machine cannot run is a row.
    """
    with refusing_bad_input():
        check_convergence(
            variant=variant, seed=seed, processes=processes, at_once=at_once, device=device, out=out, **base
        )
        n_ranks = processes or 2
        device, provenance, look = resolve_device(device, command)
        base = fill_in({**base, "variant": variant, "seed": seed}, DEFAULTS, device)
        variants, seeds = base.pop("variant"), base.pop("seed")
        base_config = TrainConfig(**base, device=device, out=out)
        base_config = dataclasses.replace(base_config, warmup_steps=base_config.rising_steps)
        _, _, tokens = check_run(base_config)
        results = ResultsFile(out, "convergence", ConvergenceRow, provenance, resume, look)
        for row in results.rows:  # kept ones stand in one table with what is to come
            if row.variant in VARIANTS and row.status != "unsupported":
                check_same_run(_config(base_config, row.variant, row.seed, row.processes, out, resume=True), tokens)

    tell_if_crowded(device, [n_ranks for name in variants if name in ON_RANKS])

    def sweep() -> None:
        runs = unmeasured([_Run(name, value) for value in seeds for name in variants], results)
        if any(_can_run(base_config, run, n_ranks, out) for run in runs):
            results.timing_begins()  # what that tells is told before there is a bar
        follow = partial(_steps_done, results, base_config.steps, out, time.time())
        n_steps = len(results.asked) * base_config.steps
        with (
            progress(n_steps, follow()[0], unit="step", follow=follow),
            ThreadPoolExecutor(at_once or _runs_at_once(device)) as pool,  # each thread waits for a run's processes
        ):
            futures: dict[Future, _Run] = {}
            try:
                with signals_waiting():  # or one that has begun would not be known here, and nobody would end it
                    for run in runs:
                        begun = pool.submit(_train, base_config, run, n_ranks, out, resume, tokens, results)
                        futures[begun] = run
                for future in futures:
                    results.append(future.result())
            except BaseException as error:
                try:
                    if stopped_by(error) is not None:
                        _let_save(futures)
                finally:
                    _end(futures)
                raise

    sweep_into_files(results, sweep, _write_files)
    check_any_measured(results)
    return results.rows


def _steps_done(results: ResultsFile, steps: int, out: Path, since_s: float) -> tuple[int, str]:
    """The optimizer steps of all runs that are done, those of runs with a row being `steps` each, and which runs are at
    work: those whose metrics are younger than `since_s`."""
    left = results.cells_left()
    done, at_work = (len(results.asked) - len(left)) * steps, []
    for run in left:
        path = run_folder(out, run.variant, run.seed) / METRICS
        with suppress(OSError, ValueError):  # there is none yet, or it is being replaced
            if path.stat().st_mtime >= since_s:
                step = last_step(path)
                done += step
                at_work += [str(run)] * (step < steps)
    more = f" and {len(at_work) - 1} more" if len(at_work) > 1 else ""
    return done, f"{at_work[0]}{more}" if at_work else ""


def _runs_at_once(device: str) -> int:
    return max(1, min(8, usable_cores() // 2)) if device.startswith("cuda") else 1


def _let_save(runs: Mapping[Future, _Run]) -> None:
    """Waits until the runs in one process that have begun have finished their step and saved it; a second signal ends
    that. Those on several ranks have no step in which all of them would know of it.

    Raises what a run had raised, as where the disk was full and its step could not be saved.
    """
    running = {future: run for future, run in runs.items() if not future.cancel() and not future.done()}
    alone = [future for future, run in running.items() if "parallel" not in VARIANTS[run.variant]]
    on_ranks = [str(run) for future, run in running.items() if future not in alone]
    if on_ranks:
        names = "; ".join(on_ranks)
        tell(f"\n{names}: ended now; --resume begins at the last checkpoint (--checkpoint-every), if any.")
    if alone:
        names = "; ".join(str(running[future]) for future in alone)
        tell(f"\n{names}: this step is finished and saved first. Once more ends at once, without.")
    while wait(alone, timeout=0.1).not_done:  # again, as a run may just be starting
        for child in multiprocessing.active_children():  # ranks ignore it
            if child.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGINT)
    for future, run in runs.items():
        if future.done() and not future.cancelled() and (row := future.result()).status == "killed":
            tell(f"\n{run}: {row.reason}; --resume begins at its last checkpoint, if any.")


def _end(futures: Iterable[Future]) -> None:
    """Drops the runs that have not begun, and kills the processes of those that have."""
    running = [future for future in futures if not future.cancel()]
    while wait(running, timeout=0.1).not_done:  # again, as a run may just be starting its next rank
        for child in multiprocessing.active_children():
            child.kill()


def _write_files(results: ResultsFile) -> str:
    results.write_tables(ROW_COLUMNS, variants_table(results.rows))
    plot_convergence(results.rows, results.directory, results.path.with_suffix(".png"))
    return "\n\n".join([convergence_table(results.rows), *results.measured()])


def _config(base: TrainConfig, variant: str, seed: int, processes: int, out: Path, resume: bool) -> TrainConfig:
    """Raises ValueError where the base run does not allow what the variant changes."""
    changes = dict(VARIANTS[variant])
    if "parallel" in changes:
        changes["processes"] = processes
    return dataclasses.replace(base, **changes, seed=seed, out=run_folder(out, variant, seed), resume=resume)


def _can_run(base: TrainConfig, run: _Run, processes: int, out: Path) -> bool:
    try:
        check_run(_config(base, run.variant, run.seed, processes, out, resume=False))
    except ValueError:
        return False
    return True


def _train(
    base: TrainConfig,
    run: _Run,
    processes: int,
    out: Path,
    resume: bool,
    tokens: TokenFile,
    results: ResultsFile,
) -> ConvergenceRow:
    row: dict[str, Any] = {**dataclasses.asdict(run), "processes": 1, "steps": base.steps}
    if "parallel" in VARIANTS[run.variant]:
        row["processes"] = processes
    try:
        config = _config(base, run.variant, run.seed, processes, out, resume=False)
        _, world_size, _ = check_run(config)
    except ValueError as error:
        status = "oom" if isinstance(error, TooLittleMemory) else "unsupported"
        return ConvergenceRow(**row, status=status, reason=str(error))
    if resume:
        config = dataclasses.replace(config, resume=True)
        with refusing_bad_input():  # another run than the one that is there
            check_run(config)
    tell_if_near(config, config.device, world_size)
    results.timing_begins()
    arguments = (config, tokens, config.device, results.runs[-1], False)
    if config.parallel == "none":
        outcome = run_isolated(train_rank, None, *arguments)
    else:
        options = GroupOptions("cuda" if config.device.startswith("cuda") else "cpu")
        outcome = outcome_of_ranks(lambda: spawn_ranks(train_rank, *arguments, world_size=world_size, options=options))
    if outcome.status != "ok":
        return ConvergenceRow(**row, status=outcome.status, reason=outcome.reason)
    return ConvergenceRow(**row, **_results(outcome.value, run_folder(out, run.variant, run.seed)))


def _results(summary: Summary, folder: Path) -> dict[str, Any]:
    metrics = read_metrics(folder / METRICS)
    lines = [line for line in metrics if line["kind"] == "train"]
    # Not the summary's: a run that had ended before it was resumed does not validate again.
    validations = [float(line["loss"]) for line in metrics if line["kind"] == "validation"]
    shares = [line["zero_gradient_share"] for line in lines if line["zero_gradient_share"] is not None]
    is_finished = summary.status == "finished"
    return {
        "status": "ok" if is_finished else summary.status,
        "reason": summary.reason,
        "train_loss": statistics.fmean([line["loss"] for line in lines[-_LAST:]]) if is_finished and lines else None,
        "validation_loss": validations[-1] if is_finished and validations else None,
        "skipped_steps": summary.skipped_steps,
        "zero_gradient_share": max(shares, default=None),
        "tokens_per_s": statistics.median(line["tokens_per_s"] for line in lines) if lines else None,
    }
