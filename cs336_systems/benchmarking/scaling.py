"""Scaling: the rows of one benchmark at several numbers of ranks, set against one rank that communicates nothing.

Weak scaling gives each rank the same batch, so that a perfect step takes as long on any number of ranks; strong scaling
divides one batch, so that it takes 1/n of the time on n.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cs336_systems.files import write_atomically
from cs336_systems.reasons import measured_first
from cs336_systems.records import format_value

Rows = Sequence[Any]  # of DataParallelRow or ShardingRow


def efficiency(row: Any, rows: Rows) -> float | None:
    """Tokens a second and rank over those of the step without communication on the fewest ranks, of this precision:
    1 if communication cost nothing. None where that step, or this one, has no time."""
    alone = [r for r in rows if (r.implementation, r.precision, r.status) == ("none", row.precision, "ok")]
    if not alone or row.status != "ok":
        return None
    baseline = min(alone, key=lambda r: r.world_size)
    return (row.tokens_per_s / row.world_size) / (baseline.tokens_per_s / baseline.world_size)


def scaling_table(rows: Rows, label: Callable[[Any], str] = lambda row: row.implementation, title: str = "") -> str:
    """Markdown: a line for each precision and scheme, and by number of ranks the step in ms, the efficiency, and the
    peak in GiB where it was measured, e.g. "757.6 (98%), 57.3", under `title`; schemes without any come last. Empty
    where all rows have one number of ranks."""
    ranks = sorted({row.world_size for row in rows})
    if len(ranks) < 2:
        return ""
    values = "median step ms (efficiency), peak GiB"
    lines = [[f"{title}: {values}" if title else values, *(f"{n} rank{'s' * (n > 1)}" for n in ranks)]]
    lines.append([":--", *["--:"] * len(ranks)])
    by_scheme: dict[str, dict[int, str]] = {}
    for row in measured_first(rows):
        by_scheme.setdefault(f"{label(row)}, {row.precision}", {})[row.world_size] = _cell(row, rows)
    lines += [[scheme, *(cells.get(n, "–") for n in ranks)] for scheme, cells in by_scheme.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(row: Any, rows: Rows) -> str:
    if row.status != "ok":
        return row.status.upper()
    share = efficiency(row, rows)
    text = format_value(row.step_median_ms) + ("" if share is None else f" ({share:.0%})")
    return text if row.peak_memory_gib is None else f"{text}, {row.peak_memory_gib:.1f}"


def write_scaling(rows: Rows, path: Path, label: Callable[[Any], str] = lambda row: row.implementation) -> str:
    """Writes `path`.md, and `path`.png if there are efficiencies to show, and returns the table; does nothing for rows
    of one number of ranks."""
    table = scaling_table(rows, label)
    if table:
        write_atomically(path.with_name(f"{path.name}.md"), f"{table}\n\n{NOTE}\n")
    if table and any(row.implementation != "none" and efficiency(row, rows) is not None for row in rows):
        plot_scaling(rows, path.with_name(f"{path.name}.png"), label)
    return table


NOTE = (
    "Efficiency: tokens a second and rank, over those of the step without communication (none) on the fewest ranks, if "
    "that was measured. Steps are "
    "the slowest rank's medians, peaks the fullest rank's."
)


def plot_scaling(rows: Rows, path: Path, label: Callable[[Any], str] = lambda row: row.implementation) -> None:
    """Efficiency over the number of ranks, a panel for each precision that has one."""
    from cs336_systems.figures import COLOURS, new_figure, save_figure

    shares = [(row, efficiency(row, rows)) for row in rows if row.implementation != "none"]
    shown = [(row, share) for row, share in shares if share is not None]
    precisions = list(dict.fromkeys(row.precision for row, _ in shown))
    schemes = list(dict.fromkeys(label(row) for row, _ in shown))
    figure, axes = new_figure(columns=len(precisions))
    for axis, precision in zip(axes[0], precisions, strict=True):
        for index, scheme in enumerate(schemes):
            points = sorted(
                (row.world_size, share) for row, share in shown if (label(row), row.precision) == (scheme, precision)
            )
            colour, style = COLOURS[index % len(COLOURS)], "o-" if index < len(COLOURS) else "s--"
            axis.plot([n for n, _ in points], [share for _, share in points], style, color=colour, label=scheme)
        axis.axhline(1.0, color="#999999", linestyle=":")
        axis.set_xscale("log", base=2)
        axis.set_xticks(ranks := sorted({row.world_size for row in rows}), [str(n) for n in ranks])
        axis.set_xlabel("ranks")
        axis.set_ylabel("efficiency")
        axis.set_title(precision)
    axes[0][-1].legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    save_figure(figure, path)
