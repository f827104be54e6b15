"""FSDP's timeline: each weight's gather beside the layer that needs it, in a part of forward and one of backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

USES_SHOWN = 16  # a little more than two Transformer blocks


def shown_uses(gathers: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The uses around the middle of forward, which is the first half of a step's, and of backward, in order of use."""
    parts = {}
    for part, share in (("forward", 1), ("backward", 3)):
        first = max(0, len(gathers) * share // 4 - USES_SHOWN // 2)
        parts[part] = list(gathers[first : first + USES_SHOWN])
    return parts


def plot_gathers(gathers_of: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """A row of panels for each label: a line a use, its gather's bar and its layer's kernels' bar. A gather that ends
    after its layer could have begun is drawn in orange.

    `gathers_of` has, by label, `GatherTiming`'s fields and `weight`, in order of use.
    """
    from cs336_systems.figures import PHASE_COLOURS, new_figure, save_figure

    figure, axes = new_figure(2, len(gathers_of), width=5.5, height=0.6 + 0.19 * USES_SHOWN)
    for line, (label, gathers) in zip(axes, gathers_of.items(), strict=True):
        for axis, (part, uses) in zip(line, shown_uses(gathers).items(), strict=True):
            start = min(use["gather_start_ms"] for use in uses)
            for y, use in enumerate(uses):
                late = use["gather_end_ms"] > use["could_begin_ms"]
                for name, colour in (
                    ("gather", PHASE_COLOURS["backward" if late else "forward"]),
                    ("layer", "#777777"),
                ):
                    begin, end = use[f"{name}_start_ms"], use[f"{name}_end_ms"]
                    axis.barh(y, end - begin, 0.7, left=begin - start, color=colour)
            axis.set_yticks(range(len(uses)), [use["weight"].removesuffix(".weight") for use in uses], fontsize=6)
            axis.invert_yaxis()
            axis.set_xlabel("ms")
            axis.set_title(f"{label}, {part}: gather (blue; orange if late) and layer (grey)", fontsize=8)
    save_figure(figure, path)
