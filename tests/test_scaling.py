"""Scaling: efficiency by hand, the table, and weak and strong scaling run on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cs336_systems.benchmarking import parallel_tables
from cs336_systems.benchmarking.run_sharding import run_sharding_benchmark
from cs336_systems.benchmarking.scaling import efficiency, plot_scaling, scaling_table, write_scaling
from cs336_systems.benchmarking.sharding_cells import ShardingRow
from cs336_systems.provenance import collect_provenance
from cs336_systems.records import ResultsFile
from tests.test_fsdp_benchmark import TINY


def _row(implementation: str, world_size: int, step_ms: float, batch_size: int = 4, **fields: Any) -> ShardingRow:
    tokens_per_s = world_size * batch_size * 512 / step_ms * 1e3
    return ShardingRow(
        size="xl",
        ctx=512,
        implementation=implementation,  # ty: ignore[invalid-argument-type]
        world_size=world_size,
        batch_size=batch_size,
        step_median_ms=step_ms,
        tokens_per_s=tokens_per_s,
        **fields,
    )


def test_efficiency_by_hand() -> None:
    weak = [_row("none", 1, 700.0), _row("ddp", 1, 707.0), _row("ddp", 4, 750.0), _row("ddp", 2, 1.0, precision="bf16")]
    assert efficiency(weak[0], weak) == 1.0
    assert efficiency(weak[1], weak) == pytest.approx(700 / 707)
    assert efficiency(weak[2], weak) == pytest.approx(700 / 750)
    assert efficiency(weak[3], weak) is None  # no step without communication in bf16
    # Strong: a quarter of the batch on four ranks, in 250 ms for the 800 ms of one: 80% of four times as fast.
    strong = [_row("none", 1, 800.0, batch_size=8), _row("fsdp", 4, 250.0, batch_size=2)]
    assert efficiency(strong[1], strong) == pytest.approx(0.8)
    assert efficiency(_row("fsdp", 8, 1.0, status="oom"), strong) is None


def test_the_table_has_a_column_for_each_number_of_ranks(tmp_path: Path) -> None:
    rows = [
        _row("none", 1, 700.0, peak_memory_gib=49.9),
        _row("ddp", 1, 714.0),
        _row("ddp", 2, 750.0, peak_memory_gib=57.3),
        ShardingRow(size="xl", ctx=512, implementation="fsdp", world_size=2, status="oom"),
    ]
    assert scaling_table(rows).splitlines() == [
        "| median step ms (efficiency), peak GiB | 1 rank | 2 ranks |",
        "| :-- | --: | --: |",
        "| none, fp32 | 700 (100%), 49.9 | – |",
        "| ddp, fp32 | 714 (98%) | 750 (93%), 57.3 |",
        "| fsdp, fp32 | – | OOM |",
    ]
    assert scaling_table(rows[:2]) == ""
    plot_scaling(rows, tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").stat().st_size > 0


def test_without_a_step_to_compare_with_there_is_a_table_and_no_picture(tmp_path: Path) -> None:
    rows = [_row("fsdp", 1, 700.0), _row("fsdp", 2, 750.0)]
    assert "| fsdp, fp32 | 700 | 750 |" in write_scaling(rows, tmp_path / "by_ranks")
    assert [path.name for path in tmp_path.iterdir()] == ["by_ranks.md"]


def test_a_precision_without_numbers_has_no_panel(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"size": "xl", "ctx": 512, "implementation": "ddp", "status": "oom", "device": "cuda"}
    lost = [ShardingRow(precision=kind, world_size=n, **shape) for kind in ("bf16", "tf32") for n in (1, 2)]
    alone = _row("none", 1, 700.0, precision="tf32", device="cuda")
    rows = [_row("none", 1, 700.0), _row("ddp", 1, 714.0), _row("ddp", 2, 750.0), alone, *lost]
    assert "| ddp, bf16 | OOM | OOM |" in write_scaling(rows, tmp_path / "by_ranks")
    assert (tmp_path / "by_ranks.png").stat().st_size > 0


@pytest.mark.slow
def test_strong_scaling_on_the_cpu(tmp_path: Path) -> None:
    settings: dict[str, Any] = {**TINY, "name": "scaling", "processes": (1, 2), "batch_size": 4, "total_batch_size": 2}
    implementations = ("none", "ddp", "sharded-optimizer", "fsdp")
    rows = run_sharding_benchmark("", None, implementation=implementations, out=tmp_path, **settings)
    assert [(row.implementation, row.world_size, row.batch_size, row.status) for row in rows] == [
        *((name, 1, 2, "ok") for name in implementations),
        *((name, 2, 1, "ok") for name in implementations[1:]),
    ]
    assert all(row.tokens_per_s == pytest.approx(2 * 8 / row.step_median_ms * 1e3) for row in rows)
    table = (tmp_path / "scaling_by_ranks.md").read_text()
    assert len(table.splitlines()) == 2 + 4 + 2
    assert (tmp_path / "scaling_by_ranks.png").stat().st_size > 0


def test_the_readme_joins_runs_of_several_machines(tmp_path: Path) -> None:
    assert parallel_tables.scaling(tmp_path) == ""
    for folder, rows in (
        ("weak/two", [_row("none", 1, 700.0), _row("ddp", 1, 707.0), _row("ddp", 2, 714.0)]),
        ("weak/eight", [_row("none", 8, 710.0), _row("ddp", 8, 875.0)]),
        ("strong", [_row("none", 1, 1400.0, batch_size=8), _row("fsdp", 8, 350.0, batch_size=1)]),
    ):
        results = ResultsFile(tmp_path / "scaling" / folder, "scaling", ShardingRow, collect_provenance("x", "cpu"))
        for row in rows:
            results.append(row)
    text = parallel_tables.scaling(tmp_path)
    assert (
        "| weak scaling, xl at context 512, 4 sequences a rank: median step ms (efficiency), peak GiB | 1 rank |"
        in text
    )
    assert "| ddp, fp32 | 707 (99%) | 714 (98%) | 875 (80%) |" in text
    assert "| strong scaling, xl at context 512, 8 sequences over all ranks: median step ms" in text
    assert "| fsdp, fp32 | – | 350 (50%) |" in text
    assert text.count("; `x`*") == 3


def test_a_batch_that_does_not_divide_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings: dict[str, Any] = {**TINY, "processes": (1, 2), "batch_size": 4, "total_batch_size": 3}
    with pytest.raises(SystemExit) as error:
        run_sharding_benchmark("", None, implementation=("ddp",), out=tmp_path, **settings)
    assert error.value.code == 2
    assert "--total-batch-size 3: must be a multiple of 2" in capsys.readouterr().err


def test_schemes_without_a_time_come_last() -> None:
    rows = [_row("fsdp", 2, 1.0, status="oom"), _row("none", 1, 700.0), _row("ddp", 2, 750.0)]
    assert [line.split(",")[0] for line in scaling_table(rows).splitlines()[2:]] == ["| none", "| ddp", "| fsdp"]
