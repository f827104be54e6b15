"""What the runs of the convergence comparison say together: a row a run, a table by technique, and the loss curves."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cs336_systems.benchmarking.report_rows import markdown_table, why_not_measured
from cs336_systems.figures import COLOURS, new_figure, save_figure
from cs336_systems.records import format_value
from cs336_systems.training.metrics import METRICS, read_metrics


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


def run_folder(out: Path, variant: str, seed: int) -> Path:
    """Where a run of one variant and seed is trained."""
    return out / variant / f"seed-{seed}"


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


def variants_table(rows: Sequence[ConvergenceRow]) -> str:
    """Markdown: a row a variant."""
    body = [[_shown(name, getattr(row, name)) for name in TABLE_COLUMNS] for row in summarize(rows)]
    return markdown_table(list(TABLE_COLUMNS.values()), body)


def convergence_table(rows: Sequence[ConvergenceRow]) -> str:
    """Markdown: a row a variant, and beneath it why runs did not end."""
    reasons = why_not_measured(rows, lambda row: f"{row.variant}, seed {row.seed}")
    return "\n\n".join(filter(None, [variants_table(rows), reasons]))


def _shown(name: str, value: Any) -> str:
    if isinstance(value, float) and name in ("validation_loss", "std", "least", "largest", "difference", "train_loss"):
        return f"{value:+.4f}" if name == "difference" else f"{value:.4f}"
    return format_value(value)


def plot_convergence(rows: Sequence[ConvergenceRow], out: Path, path: Path) -> None:
    """Validation losses over steps, a colour a variant: the mean over seeds and a band from least to largest; and
    beside them each variant's mean difference from the first, over the same seeds."""
    curves: dict[str, dict[int, dict[int, float]]] = {}  # variant, seed, step
    for row in rows:
        metrics = run_folder(out, row.variant, row.seed) / METRICS
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
