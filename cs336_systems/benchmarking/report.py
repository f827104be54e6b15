"""REPORT.md: the assignment item by item, from the rows of a results folder."""

from __future__ import annotations

from pathlib import Path

from cs336_systems.benchmarking import (
    report_checkpointing,
    report_kernels,
    report_memory,
    report_model,
    report_parallel,
    report_precision,
    report_profiles,
    report_sharding,
)
from cs336_systems.benchmarking.report_attention import ATTENTION_ITEMS, KERNEL_ITEM
from cs336_systems.benchmarking.report_parts import Item, item_markdown, link

ITEMS: tuple[Item, ...] = (
    report_model.BENCHMARK_ITEM,
    report_profiles.ITEM,
    report_precision.PRECISION_ITEM,
    report_memory.MEMORY_ITEM,
    report_checkpointing.CHECKPOINTING_ITEM,
    *ATTENTION_ITEMS,
    *report_parallel.ITEMS,
    *report_sharding.ITEMS,
    KERNEL_ITEM,
    *report_kernels.ITEMS,
)

_HEAD = """# Report

What the assignment asks to be measured, item by item, and what was found. `python scripts/report.py` writes this file
from the rows under {results}: tables, pictures, and every number in a sentence. Under each part stand the
commands that made its rows, as they were typed, and the machines that ran them; a run that was stopped leaves the rows
that it has. For a report of your own machine, `python scripts/reproduce.py` runs what fits it."""


def report(results: Path, folder: Path) -> str:
    """The report's Markdown from the rows under `results`, with links that hold in a file in `folder`.

    Raises ValueError where `results` is no folder, or a file in it is no results file.
    """
    if not results.is_dir():
        raise ValueError(
            f"results={str(results)!r}: must be a folder of measurements, as scripts/reproduce.py makes it"
        )
    shown = "this folder" if results == folder else f"[{results.name}]({link(results, folder)})"
    items = [item_markdown(item, results, folder) for item in ITEMS]
    return "\n\n".join([_HEAD.format(results=shown), *items]) + "\n"
