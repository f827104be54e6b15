"""Whether the techniques train the same model: one run a technique and seed, their losses in one picture and table.

Every run sees the same batches in the same order; those of one seed also start from the same weights.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cs336_systems.benchmarking.into_files import resolve_device, sweep_into_files
from cs336_systems.benchmarking.isolation import run_isolated
from cs336_systems.benchmarking.rank_sweep import outcome_of_ranks
from cs336_systems.cli import refusing_bad_input
from cs336_systems.configs import check
from cs336_systems.distributed.process_group import GroupOptions, spawn_ranks
from cs336_systems.figures import COLOURS, new_figure, save_figure
from cs336_systems.provenance import Provenance
from cs336_systems.records import ResultsFile, check_writable, format_value
from cs336_systems.training.config import TrainConfig
from cs336_systems.training.data import TokenFile
from cs336_systems.training.loop import Summary, train_rank
from cs336_systems.training.metrics import METRICS, read_metrics
from cs336_systems.training.run import check_run

# What differs from the base run, which is fp32 with plain attention on one device.
VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "tf32": {"precision": "tf32"},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "fp16-unscaled": {"precision": "fp16", "loss_scaling": False},
    "fp32-flash": {"attention": "flash-triton"},
    "bf16-flash": {"precision": "bf16", "attention": "flash-triton"},
    "ddp": {"parallel": "ddp"},
    "bucketed": {"parallel": "bucketed"},
    "ddp-sharded-optimizer": {"parallel": "ddp", "sharded_optimizer": True},
    "fsdp": {"parallel": "fsdp"},
    "bf16-fsdp": {"precision": "bf16", "parallel": "fsdp"},
}
_LAST = 20  # steps over which the training loss at the end is averaged


@dataclass(frozen=True)
class ConvergenceRow:
    """One run. `status` is "ok", "stopped" (`reason` says why), "unsupported", "oom" or "killed". Losses are in nats a
    token: the mean training loss of the last 20 steps, and the validation loss at the end. `zero_gradient_share` is the
    largest that was counted."""

    variant: str
    seed: int
    processes: int
    steps: int
    status: str
    reason: str
    train_loss: float | None = None
    validation_loss: float | None = None
    skipped_steps: int | None = None
    zero_gradient_share: float | None = None
    tokens_per_s: float | None = None


@dataclass(frozen=True)
class ConvergenceTableRow:
    """One variant over its seeds: mean, sample deviation, least and largest validation loss of the runs that ended, and
    by how much the mean differs from the first variant's over the same seeds."""

    variant: str
    processes: int
    runs: str  # e.g. "3 of 3"
    validation_loss: float | None
    std: float | None
    least: float | None
    largest: float | None
    difference: float | None
    train_loss: float | None
    skipped_steps: int
    zero_gradient_share: float | None
    tokens_per_s: float | None


ROW_COLUMNS = {
    "variant": "variant",
    "seed": "seed",
    "status": "status",
    "validation_loss": "validation loss",
    "train_loss": "train loss",
    "skipped_steps": "steps skipped",
    "zero_gradient_share": "zero gradients",
    "tokens_per_s": "tokens/s",
}
TABLE_COLUMNS = {
    "variant": "variant",
    "processes": "processes",
    "runs": "runs",
    "validation_loss": "validation loss",
    "std": "± over seeds",
    "least": "least",
    "largest": "largest",
    "difference": "against the first",
    "train_loss": "train loss",
    "skipped_steps": "steps skipped",
    "zero_gradient_share": "zero gradients",
    "tokens_per_s": "tokens/s",
}


def run_convergence(
    command: str,
    *,
    variant: tuple[str, ...],
    seed: tuple[int, ...],
    processes: int,
    at_once: int,
    out: Path,
    resume: bool,
    device: str,
    **base: Any,
) -> list[ConvergenceRow]:
    """Trains every variant with every seed, in folders of their own under `out`, and writes rows, table and picture.

    `at_once` runs share the machine; 0 stands for one on a CPU, and beside a GPU half the CPU's cores, 8 at most.

    Bad input ends the program with status 2 before anything is built. A variant that this machine cannot run is a row.
    """
    with refusing_bad_input():
        for flag, values in (("variant", variant), ("seed", seed)):
            check(len(values) > 0, flag, "", "needs at least one value")
            check(len(set(values)) == len(values), flag, " ".join(map(str, values)), "must name each once")
        check(at_once >= 0, "at_once", at_once, "must be 0 or more")
        check(processes >= 1, "processes", processes, "must be at least 1")
        for name in variant:
            check(name in VARIANTS, "variant", name, f"must be one of {', '.join(VARIANTS)}")
        for value in seed:
            check(0 <= value < 2**63, "seed", value, "must be 0 or more, and less than 2**63")
        check_writable(out)
        device, provenance = resolve_device(device, command)
        base_config = TrainConfig(**base, device=device, out=out)
        _, _, tokens = check_run(base_config)
        results = ResultsFile(out, "convergence", ConvergenceRow, provenance, resume)
        for row in results.rows:  # kept ones stand in one table with what is to come
            if row.variant in VARIANTS and row.status != "unsupported":
                check_run(_config(base_config, row.variant, row.seed, row.processes, out, resume=True))

    def sweep() -> None:
        done = {(row.variant, row.seed) for row in results.rows}
        runs = [(name, value) for value in seed for name in variant if (name, value) not in done]
        with ThreadPoolExecutor(at_once or _runs_at_once(device)) as pool:  # each thread waits for a run's processes
            futures = [
                pool.submit(
                    _train,
                    base_config,
                    name,
                    value,
                    processes,
                    out,
                    resume,
                    tokens,
                    provenance,
                )
                for name, value in runs
            ]
            try:
                for future in futures:
                    results.append(future.result())
            except BaseException:
                _end(futures)
                raise

    sweep_into_files(results, sweep, _write_files)
    return results.rows


def _runs_at_once(device: str) -> int:
    return max(1, min(8, (os.cpu_count() or 1) // 2)) if device.startswith("cuda") else 1


def _end(futures: Sequence[Future]) -> None:
    """Drops the runs that have not begun, and kills the processes of those that have: checkpoints are theirs."""
    running = [future for future in futures if not future.cancel()]
    while wait(running, timeout=0.1).not_done:  # again, as a run may just be starting its next rank
        for child in multiprocessing.active_children():
            child.kill()


def _write_files(results: ResultsFile) -> str:
    note = convergence_table(results.rows)
    results.write_tables(ROW_COLUMNS, note)
    plot_convergence(results.rows, results.directory, results.path.with_suffix(".png"))
    return note


def _folder(out: Path, variant: str, seed: int) -> Path:
    return out / variant / f"seed-{seed}"


def _config(base: TrainConfig, variant: str, seed: int, processes: int, out: Path, resume: bool) -> TrainConfig:
    """Raises ValueError where the base run does not allow what the variant changes."""
    changes = dict(VARIANTS[variant])
    if "parallel" in changes:
        changes["processes"] = processes
    return dataclasses.replace(base, **changes, seed=seed, out=_folder(out, variant, seed), resume=resume)


def _train(
    base: TrainConfig,
    variant: str,
    seed: int,
    processes: int,
    out: Path,
    resume: bool,
    tokens: TokenFile,
    provenance: Provenance,
) -> ConvergenceRow:
    row: dict[str, Any] = {"variant": variant, "seed": seed, "processes": 1, "steps": base.steps}
    if "parallel" in VARIANTS[variant]:
        row["processes"] = processes
    try:
        config = _config(base, variant, seed, processes, out, resume=False)
        _, world_size, _ = check_run(config)
    except ValueError as error:
        return ConvergenceRow(**row, status="unsupported", reason=str(error))
    if resume:
        config = dataclasses.replace(config, resume=True)
        with refusing_bad_input():  # another run than the one that is there
            check_run(config)
    print(f"{variant}, seed {seed}", file=sys.stderr)
    arguments = (config, tokens, config.device, provenance)
    if config.parallel == "none":
        outcome = run_isolated(train_rank, None, *arguments)
    else:
        options = GroupOptions("cuda" if config.device.startswith("cuda") else "cpu")
        outcome = outcome_of_ranks(lambda: spawn_ranks(train_rank, *arguments, world_size=world_size, options=options))
    if outcome.status != "ok":
        return ConvergenceRow(**row, status=outcome.status, reason=outcome.reason)
    return ConvergenceRow(**row, **_results(outcome.value, _folder(out, variant, seed)))


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
        "train_loss": _mean([line["loss"] for line in lines[-_LAST:]]) if is_finished else None,
        "validation_loss": validations[-1] if is_finished and validations else None,
        "skipped_steps": summary.skipped_steps,
        "zero_gradient_share": max(shares, default=None),
        "tokens_per_s": statistics.median(line["tokens_per_s"] for line in lines) if lines else None,
    }


def summarize(rows: Sequence[ConvergenceRow]) -> list[ConvergenceTableRow]:
    """A row a variant, in the order of the first run of each."""
    losses = {(row.variant, row.seed): row.validation_loss for row in rows if row.validation_loss is not None}
    first = rows[0].variant
    table = []
    for variant in dict.fromkeys(row.variant for row in rows):
        mine = [row for row in rows if row.variant == variant]
        ended = [row for row in mine if row.validation_loss is not None]
        found = [losses[variant, row.seed] for row in ended]
        pairs = [losses[variant, row.seed] - losses[first, row.seed] for row in ended if (first, row.seed) in losses]
        shares = [row.zero_gradient_share for row in mine if row.zero_gradient_share is not None]
        table.append(
            ConvergenceTableRow(
                variant=variant,
                processes=mine[0].processes,
                runs=f"{len(ended)} of {len(mine)}",
                validation_loss=_mean(found),
                std=statistics.stdev(found) if len(found) > 1 else None,
                least=min(found, default=None),
                largest=max(found, default=None),
                difference=_mean(pairs),
                train_loss=_mean([row.train_loss for row in ended]),
                skipped_steps=sum(row.skipped_steps or 0 for row in mine),
                zero_gradient_share=max(shares, default=None),
                tokens_per_s=_mean([row.tokens_per_s for row in ended]),
            )
        )
    return table


def _mean(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return statistics.fmean(present) if present else None


def convergence_table(rows: Sequence[ConvergenceRow]) -> str:
    """Markdown: a row a variant, and beneath it why runs did not end."""
    table = [list(TABLE_COLUMNS.values()), [":--"] + ["--:"] * (len(TABLE_COLUMNS) - 1)]
    for row in summarize(rows):
        table.append([_shown(name, getattr(row, name)) for name in TABLE_COLUMNS])
    lines = ["| " + " | ".join(cells) + " |" for cells in table]
    seeds: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        if row.status != "ok":
            seeds.setdefault((row.variant, row.status, row.reason), []).append(str(row.seed))
    for (variant, status, reason), which in seeds.items():
        lines.append(f"\n{variant}, seed {', '.join(which)}: {status}. {reason}")
    return "\n".join(lines)


def _shown(name: str, value: Any) -> str:
    if isinstance(value, float) and name in ("validation_loss", "std", "least", "largest", "difference", "train_loss"):
        return f"{value:+.4f}" if name == "difference" else f"{value:.4f}"
    return format_value(value)


def plot_convergence(rows: Sequence[ConvergenceRow], out: Path, path: Path) -> None:
    """Validation losses over steps, a colour a variant: the mean over seeds and a band from least to largest; and
    beside them each variant's mean difference from the first, over the same seeds."""
    curves: dict[str, dict[int, dict[int, float]]] = {}  # variant, seed, step
    for row in rows:
        metrics = _folder(out, row.variant, row.seed) / METRICS
        if metrics.exists():
            lines = [line for line in read_metrics(metrics) if line["kind"] == "validation"]
            curve = {line["step"]: float(line["loss"]) for line in lines}
            curves.setdefault(row.variant, {})[row.seed] = curve
    figure, axes = new_figure(columns=2, width=5.5, height=4.2)
    loss_axis, difference_axis = axes[0]
    first = rows[0].variant
    for index, (variant, by_seed) in enumerate(curves.items()):
        style = {"color": COLOURS[index % len(COLOURS)], "linestyle": "-" if index < len(COLOURS) else "--"}
        at = _by_step(list(by_seed.values()))
        loss_axis.plot(list(at), [statistics.fmean(v) for v in at.values()], label=variant, linewidth=1, **style)
        least, largest = [min(v) for v in at.values()], [max(v) for v in at.values()]
        loss_axis.fill_between(list(at), least, largest, color=style["color"], alpha=0.12)
        base = curves.get(first, {})
        differences = [
            {step: loss - base[seed][step] for step, loss in curve.items() if step in base[seed]}
            for seed, curve in by_seed.items()
            if seed in base
        ]
        at = _by_step(differences)
        difference_axis.plot(list(at), [statistics.fmean(v) for v in at.values()], linewidth=1, **style)
    loss_axis.set_ylabel("validation loss, nats a token")
    difference_axis.set_ylabel(f"difference from {first}, same seeds")
    for axis in (loss_axis, difference_axis):
        axis.set_xlabel("step")
    if curves:
        loss_axis.legend(frameon=False, fontsize=8)
    save_figure(figure, path)


def _by_step(curves: Sequence[dict[int, float]]) -> dict[int, list[float]]:
    steps = sorted(set[int]().union(*curves))
    return {step: [curve[step] for curve in curves if step in curve] for step in steps}
