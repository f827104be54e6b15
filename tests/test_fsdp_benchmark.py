"""The sharding benchmarks at tiny settings on the CPU, and what is read of a profiled step's kernels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cs336_systems.accounting.flops import num_parameters
from cs336_systems.benchmarking.gather_picture import plot_gathers, shown_uses
from cs336_systems.benchmarking.run_sharding import run_sharding_benchmark
from cs336_systems.benchmarking.sharding import storage_bytes
from cs336_systems.benchmarking.sharding_cells import MOMENTS, ShardingCell, ShardingMemoryRow
from cs336_systems.configs import MODEL_SIZES
from cs336_systems.profiling.gather_timing import profile_sharded_step, read_gathers
from cs336_systems.records import read_results

TINY: dict[str, Any] = {
    "name": "fsdp",
    "size": "tiny",
    "ctx": 8,
    "batch_size": 1,
    "processes": (2,),
    "precision": ("fp32",),
    "device": "cpu",
    "optimizer": "adamw",
    "attention": "naive",
    "total_batch_size": None,
    "max_ctas": (0,),
    "high_priority": ("off",),
    "warmup": 0,
    "steps": 2,
    "seed": 0,
}


def test_the_sharding_benchmark_on_the_cpu(tmp_path: Path) -> None:
    implementations = ("ddp", "sharded-optimizer", "fsdp")
    rows = run_sharding_benchmark(
        "python scripts/fsdp_benchmark.py",
        profile_sharded_step,
        implementation=implementations,
        out=tmp_path,
        **TINY,
    )
    assert [(row.implementation, row.status) for row in rows] == [(name, "ok") for name in implementations]
    for row in rows:
        assert row.step_median_ms is not None
        assert row.optimizer_ms is not None
        assert row.optimizer_ms > 0
        assert row.collective_ms is not None
        assert row.collective_ms > 0
        assert row.n_gathers is None  # no kernels here
        assert row.tokens_per_s == pytest.approx(2 * 8 / row.step_median_ms * 1e3)
    _, memory, _ = read_results(tmp_path / "fsdp_memory.json", ShardingMemoryRow)
    assert len(memory) == 3 * 2 * len(MOMENTS)
    whole_gib = 4 * num_parameters(MODEL_SIZES["tiny"]) / 2**30
    for row in memory:
        parameters = whole_gib / (2 if row.implementation == "fsdp" else 1)
        state = 2 * whole_gib / (1 if row.implementation == "ddp" else 2)
        made = row.moment != MOMENTS[0]
        for kind, expected in (
            ("parameters", parameters),
            ("gradients", parameters if made else 0.0),
            ("optimizer_state", state if made else 0.0),
        ):
            assert getattr(row, f"{kind}_gib") == pytest.approx(expected, rel=0.02), (row.implementation, kind)
            assert getattr(row, f"predicted_{kind}_gib") == pytest.approx(expected, rel=0.02)
        assert row.total_gib is None
    for name in ("fsdp.md", "fsdp.csv", "fsdp_memory.md", "fsdp_timeline.png", "fsdp_timelines.json"):
        assert (tmp_path / name).stat().st_size > 0
    assert len(json.loads((tmp_path / "fsdp_timelines.json").read_text())) == 3


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"size": "huge"}, "--size huge: must be one of"),
        ({"implementation": ("zero-9",)}, "--implementation zero-9: must be one of none, ddp"),
        ({"precision": ("fp16",)}, "--precision fp16: must be fp32, tf32 or bf16"),
        ({"processes": (0,)}, "--processes 0: must be at least 1"),
        ({"implementation": ()}, "--implementation"),
    ],
)
def test_bad_input_is_refused(
    changed: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        run_sharding_benchmark("", None, **{"implementation": ("fsdp",), "out": tmp_path, **TINY, **changed})
    assert error.value.code == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_fsdp_is_not_compiled() -> None:
    with pytest.raises(ValueError, match="compile='blocks': must be off for fsdp"):
        ShardingCell(size="tiny", ctx=8, implementation="fsdp", compile="blocks")


def test_storage_bytes_count_a_shared_buffer_once() -> None:
    buffer = torch.empty(100)
    assert storage_bytes([buffer[:10], buffer[10:], torch.empty(5, dtype=torch.float16)]) == 400 + 10


def kernel(name: str, launched: float, start: float, duration: float, correlation: int) -> list[dict[str, Any]]:
    arguments = {"correlation": correlation}
    return [
        {"ph": "X", "cat": "cuda_runtime", "name": "launch", "ts": launched, "dur": 1.0, "args": arguments},
        {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": duration, "args": arguments},
    ]


def annotation(name: str, start: float, duration: float) -> dict[str, Any]:
    return {"ph": "X", "cat": "user_annotation", "name": name, "ts": start, "dur": duration}


def test_read_gathers() -> None:
    """Layer a's gather ends before the kernel ahead of it does; b's after; c needs none; d's before its own launch;
    e and f are gathered by one kernel, which ends after e could have begun."""
    gather = "ncclDevKernel_AllGather_RING_LL(args)"
    events = [
        annotation("fsdp gather a", 0.0, 10.0),
        *kernel("cast", 1.0, 2.0, 3.0, 1),
        *kernel(gather, 4.0, 5.0, 1000.0, 2),
        annotation("fsdp gather b", 10.0, 10.0),
        *kernel(gather, 12.0, 1005.0, 1000.0, 3),
        *kernel("before", 30.0, 40.0, 1960.0, 4),  # ends at 2000
        annotation("fsdp use a", 50.0, 1.0),
        *kernel("layer a", 60.0, 2000.0, 0.0, 5),
        annotation("fsdp use b", 70.0, 1.0),
        *kernel("layer b", 80.0, 2005.0, 100.0, 6),
        *kernel("ncclDevKernel_ReduceScatter_Sum(args)", 85.0, 2005.0, 5000.0, 7),
        annotation("fsdp use c", 90.0, 1.0),
        annotation("fsdp gather d", 95.0, 10.0),
        *kernel(gather, 96.0, 2105.0, 100.0, 8),
        annotation("fsdp use d", 110.0, 1.0),
        *kernel("layer d", 9000.0, 9001.0, 100.0, 9),
        annotation("fsdp gather e", 9010.0, 10.0),
        annotation("fsdp gather f", 9011.0, 8.0),
        *kernel(gather, 9015.0, 9110.0, 90.0, 10),
        annotation("fsdp use e", 9030.0, 1.0),
        *kernel("layer e", 9040.0, 9200.0, 50.0, 11),
        annotation("fsdp use f", 9050.0, 1.0),
        *kernel("layer f", 9060.0, 9250.0, 50.0, 12),
    ]
    timings = read_gathers({"traceEvents": events})
    assert [timing.weight for timing in timings] == ["a", "b", "d", "e", "f"]
    assert [timing.late_ms for timing in timings] == pytest.approx([0.0, 0.005, 0.0, 0.099, 0.0])
    # b's layer lasts until c's begins; its reduce-scatter is no kernel of the layer.
    gathers = [(0.005, 1.005), (1.005, 2.005), (2.105, 2.205), (9.11, 9.2), (9.11, 9.2)]
    assert [(t.gather_start_ms, t.gather_end_ms) for t in timings] == gathers
    layers = [(2.0, 2.0), (2.005, 2.105), (9.001, 9.101), (9.2, 9.25), (9.25, 9.3)]
    assert [(t.layer_start_ms, t.layer_end_ms) for t in timings] == layers
    assert read_gathers({"traceEvents": [annotation("fsdp use a", 0.0, 1.0)]}) == []


def test_the_picture_of_gathers_shows_the_middles_of_forward_and_backward(tmp_path: Path) -> None:
    gathers = [
        {
            "weight": f"layers.{i}.weight",
            "gather_start_ms": i - 1.0,
            "gather_end_ms": i - 0.1,
            "could_begin_ms": float(i),
            "layer_start_ms": float(i),
            "layer_end_ms": i + 1.0,
        }
        for i in range(100)
    ]
    shown = {part: [use["weight"] for use in uses] for part, uses in shown_uses(gathers).items()}
    assert shown["forward"] == [f"layers.{i}.weight" for i in range(17, 33)]
    assert shown["backward"] == [f"layers.{i}.weight" for i in range(67, 83)]
    assert shown_uses(gathers[:4]) == {"forward": gathers[:4], "backward": gathers[:4]}
    plot_gathers({"fsdp": gathers, "short": gathers[:3]}, tmp_path / "gathers.png")
    assert (tmp_path / "gathers.png").stat().st_size > 0
