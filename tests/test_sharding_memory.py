"""The table of what ranks hold: a row a configuration, of the fullest rank; every rank stays in the CSV."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from cs336_systems.benchmarking.sharding_cells import MOMENTS, ShardingMemoryRow
from cs336_systems.benchmarking.sharding_memory import summarize_memory, write_memory
from cs336_systems.records import ResultsFile
from tests.example_rows import RUN


def _row(implementation: str, rank: int, moment: str, gib: float | None, **changes: Any) -> ShardingMemoryRow:
    cell: dict[str, Any] = {"size": "xl", "ctx": 512, "world_size": 2, "implementation": implementation}
    held: dict[str, Any] = {"total_gib": gib, "peak_since_gib": None if gib is None else gib + 1}
    return ShardingMemoryRow(**cell, rank=rank, moment=moment, **held | changes)


def _rows(is_on_gpu: bool) -> list[ShardingMemoryRow]:
    def total(gib: float) -> float | None:
        return gib if is_on_gpu else None

    build, before, after = MOMENTS
    return [
        _row("ddp", 0, build, total(7.0)),
        _row("ddp", 0, before, total(30.0), gradients_gib=7.25, optimizer_state_gib=3.0),
        _row("ddp", 0, after, total(20.0), gradients_gib=9.0),
        _row("ddp", 1, build, total(8.0)),
        _row("ddp", 1, before, total(29.0), gradients_gib=7.0, optimizer_state_gib=4.0),
        _row("ddp", 1, after, total(22.0)),
        _row("ddp", 0, build, total(1.0), max_ctas=4),
        _row("fsdp", 0, build, total(2.0)),
    ]


def test_each_number_is_that_of_the_rank_with_the_most_of_it() -> None:
    first, capped, other = summarize_memory(_rows(is_on_gpu=True))
    assert (first.implementation, first.world_size, first.max_ctas) == ("ddp", 2, None)
    assert (first.gradients_gib, first.optimizer_state_gib) == (7.25, 4.0)  # before the step
    assert (first.after_build_gib, first.before_step_gib, first.after_step_gib, first.peak_gib) == (8, 30, 22, 31)
    assert (capped.max_ctas, capped.after_build_gib) == (4, 1.0)
    assert (other.implementation, other.before_step_gib, other.parameters_gib) == ("fsdp", None, None)


def test_the_table_has_a_row_a_configuration_and_the_csv_every_rank(tmp_path: Path) -> None:
    for is_on_gpu in (True, False):
        results = ResultsFile(tmp_path / str(is_on_gpu), "fsdp_memory", ShardingMemoryRow, RUN)
        results.replace(_rows(is_on_gpu), lambda _: False)
        markdown = write_memory(results)
        assert len([line for line in markdown.splitlines() if line.startswith("|")]) == 2 + 3
        assert ("total after build GiB" in markdown) == is_on_gpu
        assert "| gradients GiB |" in " ".join(markdown.split())
        assert results.path.with_suffix(".tex").read_text().count("& ddp &") == 2
        with open(results.path.with_suffix(".csv")) as file:
            assert [row["rank"] for row in csv.DictReader(file)] == list("00011100")


def test_there_may_be_no_rows(tmp_path: Path) -> None:
    assert write_memory(ResultsFile(tmp_path, "fsdp_memory", ShardingMemoryRow, RUN)) == ""
