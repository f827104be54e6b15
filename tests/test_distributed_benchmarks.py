"""The all-reduce and data-parallel benchmarks, at tiny settings on the CPU, and what they make of their rows."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cs336_systems.accounting.communication import LinearCost, ddp_overhead_s
from cs336_systems.benchmarking import data_parallel_report as report
from cs336_systems.benchmarking import rank_sweep
from cs336_systems.benchmarking.all_reduce import AllReduceCell, AllReduceRow, fit_rows
from cs336_systems.benchmarking.data_parallel import (
    DataParallelCell,
    DataParallelRow,
    cell_label,
    data_parallel_cells,
    measure_data_parallel,
    scheme_label,
)
from cs336_systems.benchmarking.rank_sweep import batch_sizes, nccl_settings, run_rank_sweep, world_sizes
from cs336_systems.benchmarking.run_all_reduce import run_all_reduce_benchmark
from cs336_systems.benchmarking.run_data_parallel import run_data_parallel_benchmark
from cs336_systems.benchmarking.run_sharding import COLUMNS as SHARDING_COLUMNS
from cs336_systems.benchmarking.sharding_memory import COLUMNS as MEMORY_COLUMNS
from cs336_systems.distributed.process_group import RankContext
from cs336_systems.distributed.spawn import RankFailedError
from cs336_systems.profiling.overlap import profile_step
from cs336_systems.provenance import collect_provenance
from cs336_systems.records import ResultsFile
from tests.distributed_helpers import run_gloo

TINY: dict[str, Any] = {
    "ctx": 16,
    "batch_size": 2,
    "optimizer": "adamw",
    "attention": "naive",
    "compile": "off",
    "warmup": 1,
    "steps": 2,
    "seed": 0,
}

NCCL_OWN: dict[str, Any] = {"max_ctas": (0,), "high_priority": ("off",)}


def test_the_all_reduce_benchmark_on_the_cpu(tmp_path: Path) -> None:
    rows = run_all_reduce_benchmark(
        "python scripts/all_reduce_benchmark.py",
        processes=(2, 3),
        sizes_mb=(0.01, 1.0),
        warmup=1,
        repeats=3,
        device="cpu",
        max_ctas=None,
        high_priority=False,
        out=tmp_path,
    )
    assert [(row.world_size, row.size_mb, row.status, row.backend) for row in rows] == [
        (n, mb, "ok", "gloo") for n in (2, 3) for mb in (0.01, 1.0)
    ]
    for row in rows:
        assert row.median_ms is not None
        assert row.algorithm_gb_per_s == pytest.approx(row.n_bytes / row.median_ms / 1e6)
        assert row.bus_gb_per_s == pytest.approx(row.algorithm_gb_per_s * 2 * (row.world_size - 1) / row.world_size)
    for name in ("all_reduce.json", "all_reduce.md", "all_reduce.png"):
        assert (tmp_path / name).stat().st_size > 0


def test_fits_are_made_for_each_number_of_ranks() -> None:
    cost = LinearCost(5e-5, 2e10)
    rows = [
        AllReduceRow("cuda", n, mb, backend="nccl", median_ms=1e3 * n * cost.time_s(mb * 1e6))
        for n in (2, 4)
        for mb in (1.0, 10.0, 100.0)
    ]
    rows.append(AllReduceRow("cuda", 6, 1.0, backend="nccl", median_ms=1.0))  # one size makes no line
    rows.append(AllReduceRow("cuda", 2, 1000.0, backend="nccl", status="oom"))
    # Nor do times that fall as the size grows, which noise can make.
    rows += [AllReduceRow("cuda", 8, mb, backend="nccl", median_ms=9.0 / mb) for mb in (1.0, 2.0)]
    fits = fit_rows(rows)
    assert [fit.world_size for fit in fits] == [2, 4]
    assert fits[0].call_cost_us == pytest.approx(100.0)
    assert fits[1].bandwidth_gb_per_s == pytest.approx(5.0)
    assert fits[0].worst_relative_error < 1e-9


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("device", "mps"),
        ("world_size", 0),
        *(("size_mb", value) for value in (0.0, 1e30, float("inf"), float("nan"))),
        ("warmup", -1),
        ("repeats", 0),
    ],
)
def test_all_reduce_cells_that_cannot_be_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{field}="):
        replace(AllReduceCell("cpu", 2, 1.0), **{field: value})


def test_the_data_parallel_benchmark_on_the_cpu(tmp_path: Path) -> None:
    rows = run_data_parallel_benchmark(
        "python scripts/ddp_benchmark.py",
        profile_step,
        size="tiny",
        processes=(2,),
        precision=("fp32",),
        implementation=("naive", "overlapped", "bucketed"),
        bucket_size_mb=(1.0, 50.0),
        device="cpu",
        out=tmp_path,
        **NCCL_OWN,
        total_batch_size=None,
        comm_dtype=None,
        **TINY,
    )
    labels = [(row.implementation, row.bucket_size_mb) for row in rows]
    assert labels == [("none", None), ("naive", None), ("overlapped", None), ("bucketed", 1.0), ("bucketed", 50.0)]
    by_label = dict(zip(labels, rows, strict=True))
    n_parameters = by_label["naive", None].n_collectives
    assert n_parameters == by_label["overlapped", None].n_collectives == 21  # 2 blocks of 9, and 3
    assert by_label["none", None].n_collectives == 0
    assert by_label["bucketed", 50.0].n_collectives == 1
    assert by_label["none", None].exposed_ms is None
    baseline = by_label["none", None].step_median_ms
    assert baseline is not None
    for row in rows[1:]:
        assert row.step_median_ms is not None
        assert row.step_min_ms is not None
        assert row.exposed_ms == pytest.approx(row.step_median_ms - baseline)
        assert row.communication_ms is not None
        assert row.communication_ms > 0
        assert row.collective_ms is not None
        assert row.collective_ms > 0
        assert row.predicted_overhead_ms is None or row.implementation == "bucketed"
    # What one all-reduce after backward sends, backward cannot cover.
    assert by_label["naive", None].covered_share == 0
    timelines = json.loads((tmp_path / "ddp_timelines.json").read_text())
    assert len(timelines) == 4
    for name in ("ddp.json", "ddp.md", "ddp.csv", "all_reduce.json", "ddp_timeline.png", "ddp_bucket_sizes.png"):
        assert (tmp_path / name).stat().st_size > 0


IMPLEMENTATIONS = ("naive", "flat", "overlapped", "bucketed", "bucketed-zeroed", "bucketed-in-place", "torch-ddp")


def _train_each(context: RankContext) -> dict[str, tuple[list[float], list[float]]]:
    """By implementation: some of the weights after two steps, and of the tokens."""
    from cs336_systems.benchmarking.data_parallel import BUCKETED, DataParallelStep

    trained = {}
    for implementation in IMPLEMENTATIONS:
        cell = _cell(implementation, bucket_size_mb=1.0 if implementation in BUCKETED else None)
        step = DataParallelStep(context, cell)
        for _ in range(2):
            step(nullcontext)
        tensors = step.workload.model.lm_head.weight, step.workload.inputs
        trained[implementation] = tuple(tensor.flatten()[:5].tolist() for tensor in tensors)
    return trained


def _cell(implementation: str, **fields: Any) -> DataParallelCell:
    model = {"d_model": 32, "d_ff": 64, "num_layers": 1, "num_heads": 2, "vocab_size": 100}
    return DataParallelCell(size="custom", implementation=implementation, **model, **TINY, **fields)


def test_every_implementation_trains_the_same_weights() -> None:
    first, second = run_gloo(_train_each)
    for name in IMPLEMENTATIONS:
        weights, expected = torch.tensor(first[name][0]), torch.tensor(first["naive"][0])
        torch.testing.assert_close(
            weights, expected, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
        assert first[name][0] == second[name][0], name
        assert first[name][1] != second[name][1], name  # each rank has its own part of the batch


def _fail_for(_: RankContext, cell: AllReduceCell) -> dict[str, Any]:
    if cell.size_mb == 2:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
    if cell.size_mb == 3:
        raise ArithmeticError("no such gradient")
    return {"median_ms": cell.size_mb}


@pytest.mark.slow
def test_running_out_of_memory_is_a_row_and_another_error_ends_the_run(tmp_path: Path) -> None:
    results = ResultsFile(tmp_path, "rows", AllReduceRow, collect_provenance("test", "cpu"))
    cells = [AllReduceCell("cpu", 2, float(mb)) for mb in (1, 2, 4, 3, 5)]
    with pytest.raises(RankFailedError, match="ArithmeticError: no such gradient"):
        run_rank_sweep(cells, _fail_for, results, complete=lambda cell, measured: measured | {"mean_ms": 7.0})
    assert [(row.size_mb, row.status, row.median_ms, row.mean_ms) for row in results.rows] == [
        (1, "ok", 1, 7.0),
        (2, "oom", None, None),
        (4, "ok", 4, 7.0),
    ]
    assert results.rows[1].reason.endswith("OutOfMemoryError: CUDA out of memory. Tried to allocate")


def test_world_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert world_sizes((3, 5), "cpu", (2, 4)) == (3, 5)
    for n_cores, fit in ((1, (2,)), (5, (2, 4)), (8, (2, 4, 6))):
        monkeypatch.setattr(rank_sweep, "usable_cores", lambda n_cores=n_cores: n_cores)
        assert world_sizes((), "cpu", (2, 4, 6)) == fit
    monkeypatch.setattr(rank_sweep, "count_gpus", lambda: 4)
    assert world_sizes((), "cuda", (2, 4, 6)) == (2, 4)
    with pytest.raises(ValueError, match=r"processes=6: must be at most 4, this machine's GPUs"):
        world_sizes((6,), "cuda", (2,))
    with pytest.raises(ValueError, match=r"processes=0: must be at least 1"):
        world_sizes((0,), "cpu", (2,))
    monkeypatch.setattr(rank_sweep, "count_gpus", lambda: 1)
    with pytest.raises(ValueError, match=r"processes=\(\): 2, 4 are the default, and this machine has 1 GPU"):
        world_sizes((), "cuda", (2, 4))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert world_sizes((), "cuda", (2, 4)) == (8,)
    with pytest.raises(ValueError, match=r"processes=2: must be 8, as many as the launcher started"):
        world_sizes((2,), "cuda", (2,))


def test_cells_multiply_bucket_sizes_only_where_there_are_buckets() -> None:
    cells = data_parallel_cells(
        _cell("none", comm_dtype="bf16"),
        precision=("fp32", "bf16"),
        batch_sizes={1: 4, 2: 2},
        implementation=("flat", "bucketed", "none", "torch-ddp"),
        bucket_size_mb=(1.0, 10.0),
    )
    assert len(cells) == 2 * 2 * (1 + 1 + 2 + 2)
    assert [cell_label(cell) for cell in cells[:4]] == [
        "1 ranks, fp32, none",
        "1 ranks, fp32, flat",
        "1 ranks, fp32, bucketed, sent in bf16, 1 MB",
        "1 ranks, fp32, bucketed, sent in bf16, 10 MB",
    ]
    assert {cell.implementation for cell in cells if cell.comm_dtype == "bf16"} == {"bucketed"}
    assert {(cell.world_size, cell.batch_size) for cell in cells} == {(1, 4), (2, 2)}


def test_nccl_settings_multiply_only_what_communicates() -> None:
    settings = nccl_settings("cuda", (0, 4), ("off", "on"))
    cells = data_parallel_cells(
        _cell("none"),
        precision=("fp32",),
        batch_sizes={2: 4},
        implementation=("bucketed",),
        bucket_size_mb=(100.0,),
        nccl=settings,
    )
    assert [scheme_label(cell) for cell in cells] == [
        "none",
        "bucketed, 100 MB",
        "bucketed, high priority, 100 MB",
        "bucketed, 4 CTAs, 100 MB",
        "bucketed, 4 CTAs, high priority, 100 MB",
    ]
    with pytest.raises(ValueError, match="max_ctas=4: is an option of NCCL's, and so needs GPUs"):
        nccl_settings("cpu", (0, 4), ("off",))
    with pytest.raises(ValueError, match="high_priority='on': is an option of NCCL's, and so needs GPUs"):
        nccl_settings("cpu", (0,), ("off", "on"))
    with pytest.raises(ValueError, match="max_ctas='': needs at least one value"):
        nccl_settings("cuda", (), ("off",))


def test_batch_sizes() -> None:
    assert batch_sizes((1, 2, 4), 4, None) == {1: 4, 2: 4, 4: 4}
    assert batch_sizes((1, 2, 4), 4, 8) == {1: 8, 2: 4, 4: 2}
    for total in (6, 0):
        with pytest.raises(ValueError, match=f"total_batch_size={total}: must be (a multiple of|at least 1)"):
            batch_sizes((1, 4), 4, total)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"implementation": "magic"}, "implementation"),
        ({"implementation": "naive", "bucket_size_mb": 1.0}, "bucket_size_mb"),
        ({"implementation": "bucketed"}, "bucket_size_mb"),
        *(
            ({"implementation": "bucketed", "bucket_size_mb": value}, "bucket_size_mb")
            for value in (0.0, 1e30, float("inf"), float("nan"))
        ),
        ({"implementation": "naive", "world_size": 0}, "world_size"),
        ({"implementation": "naive", "comm_dtype": "int8"}, "comm_dtype"),
        ({"implementation": "naive", "precision": "fp16"}, "precision"),
        ({"implementation": "naive", "mode": "forward"}, "mode"),
    ],
)
def test_data_parallel_cells_that_cannot_be_are_refused(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}="):
        _cell(**fields)


def _row(implementation: str, step_ms: float, **fields: Any) -> DataParallelRow:
    model = {"d_model": 32, "d_ff": 64, "num_layers": 1, "num_heads": 2, "vocab_size": 100}
    return DataParallelRow(
        size="custom",
        implementation=implementation,
        step_median_ms=step_ms,
        gradient_mb=8000.0,
        **model,
        **TINY,
        **fields,
    )


def test_one_heading_is_one_thing_in_the_tables_of_ranks() -> None:
    named: dict[str, set[str]] = {}
    for columns in (report.COLUMNS, SHARDING_COLUMNS, MEMORY_COLUMNS):
        for field, heading in columns.items():
            named.setdefault(heading, set()).add(field)
    assert {heading: fields for heading, fields in named.items() if len(fields) > 1} == {}


def test_prediction_beside_measurement_by_hand() -> None:
    cost = LinearCost(50e-6, 100e9)
    rows = [_row("none", 700.0), _row("none", 300.0, precision="bf16")]
    cell = _cell("bucketed", bucket_size_mb=100.0)
    measured = {"step_median_ms": 714.0, "gradient_mb": 8000.0, "n_collectives": 80}
    results = report.derived(cell, measured, rows, {(2, None): cost})
    assert results["exposed_ms"] == pytest.approx(14.0)
    assert results["exposed_share"] == pytest.approx(14.0 / 714.0)
    assert results["predicted_overhead_ms"] == pytest.approx(5.0)  # 1 ms for the last bucket, 4 for the calls
    half = report.derived(replace(cell, comm_dtype="bf16"), measured, rows, {(2, None): cost})
    assert half["predicted_overhead_ms"] == pytest.approx(1e3 * ddp_overhead_s(4e9, 80, cost))
    assert report.derived(_cell("naive"), measured, [], {}) == {}
    assert report.derived(_cell("none"), measured, rows, {(2, None): cost}) == {}


def test_the_best_bucket_sizes_by_both() -> None:
    rows = [
        _row("none", 700.0),
        _row("bucketed", 730.0, bucket_size_mb=1.0, predicted_overhead_ms=30.0),
        _row("bucketed", 714.0, bucket_size_mb=10.0, predicted_overhead_ms=6.0),
        _row("bucketed", 712.0, bucket_size_mb=100.0, predicted_overhead_ms=8.0),
    ]
    text = report.best_sizes(rows, {(2, None): LinearCost(50e-6, 100e9)})
    assert text == (
        "fp32, 2 ranks, bucketed: fastest with 100 MB buckets; the model's best of these is 10 MB, and of all 200 MB "
        "(o = 50 µs, w = 100 GB/s, s = 8000 MB)."
    )
    capped = [replace(row, max_ctas=4) for row in rows[1:2]]
    assert report.best_sizes(capped, {}) == "fp32, 2 ranks, bucketed, 4 CTAs: fastest with 1 MB buckets."
    timelines = {cell_label(row): index for index, row in enumerate(rows)}
    assert report.timelines_to_show(rows, timelines) == {cell_label(rows[0]): 0, cell_label(rows[3]): 3}


def test_a_measurement_without_a_profiler(tmp_path: Path) -> None:
    (results, _) = run_gloo(measure_data_parallel, _cell("flat"))
    assert results["covered_share"] is results["collective_ms"] is results["intervals"] is None
    assert results["n_collectives"] == 1
