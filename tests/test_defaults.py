"""Scripts without arguments: on a GPU the assignment's sizes, and on a CPU what ends within a minute or so."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cs336_systems import provenance
from cs336_systems.benchmarking import (
    attention_benchmark,
    before_work,
    checkpointing,
    convergence,
    detailed_sweep,
    into_files,
    rank_sweep,
    run_all_reduce,
    run_benchmark,
    run_data_parallel,
    run_flash_benchmark,
    run_leaderboard_step,
    run_mixed_precision,
    run_sharding,
)
from cs336_systems.benchmarking.attention_peers import PEERS
from cs336_systems.benchmarking.isolation import Outcome
from cs336_systems.defaults import fill_in
from cs336_systems.profiling import run_kernels
from tests.example_rows import RUN

HEAD_DIMS = {16, 32, 64, 128}
# Where a script's cells can be had from, and for each column the values that they have on a GPU, and on a CPU.
SWEEPS: dict[str, tuple[Any, str, dict[str, tuple[set, set]]]] = {
    "attention_benchmark": (
        attention_benchmark,
        "run_grouped_sweep",
        {"length": ({256, 1024, 4096, 8192, 16384}, {256, 1024}), "compile": ({"off", "on"}, {"off"}),
         "steps": ({100}, {10}), "head_dim": (HEAD_DIMS, HEAD_DIMS), "batch_size": ({8}, {8})},
    ),
    "flash_benchmark": (
        run_flash_benchmark,
        "run_grouped_sweep",
        {"length": ({2**n for n in range(7, 17)}, {128, 256, 512, 1024}), "precision": ({"bf16", "fp32"}, {"fp32"}),
         "implementation": (set(PEERS), {"naive", "flash-pytorch", "sdpa-flash"}), "head_dim": (HEAD_DIMS, HEAD_DIMS),
         "batch_size": ({1}, {1}), "is_causal": ({True}, {True})},
    ),
    "benchmark": (run_benchmark, "run_sweep", {"size": ({"small"}, {"tiny"})}),
    "checkpointing": (checkpointing, "run_sweep", {"size": ({"small"}, {"tiny"})}),
    "profile_memory": (detailed_sweep, "run_sweep", {"size": ({"small"}, {"tiny"})}),
    "saved_tensors": (detailed_sweep, "run_sweep", {"size": ({"small"}, {"tiny"})}),
    "mixed_precision": (
        run_mixed_precision,
        "check_models",
        {"size": ({"small", "medium", "large", "xl", "2.7b"}, {"tiny"}),
         "precision": ({"fp32", "bf16", "fp16"}, {"fp32", "bf16"})},
    ),
    "profile_kernels": (run_kernels, "check_memory", {"size": ({"small"}, {"tiny"})}),
    "ddp_benchmark": (
        run_data_parallel,
        "run_rank_sweep",
        {"size": ({"xl"}, {"tiny"}), "ctx": ({512}, {64}),
         "bucket_size_mb": ({None, 1.0, 10.0, 100.0, 1000.0}, {None, 0.1, 1.0})},
    ),
    "fsdp_benchmark": (run_sharding, "run_rank_sweep", {"size": ({"xl"}, {"tiny"}), "ctx": ({512}, {64})}),
    "sharded_optimizer_benchmark": (run_sharding, "run_rank_sweep", {"size": ({"xl"}, {"tiny"})}),
    "leaderboard_step": (
        run_leaderboard_step,
        "run_rank_sweep",
        {"size": ({"8b"}, {"tiny"}), "ctx": ({32_768}, {16}), "precision": ({"bf16"}, {"fp32"}),
         "implementation": ({"fused", "torch"}, {"torch"})},
    ),
    "scaling_benchmark": (run_sharding, "run_rank_sweep", {"world_size": ({1, 2, 4, 8}, {1, 2, 4})}),
    "all_reduce_benchmark": (run_all_reduce, "run_rank_sweep", {"world_size": ({2, 4, 6}, {2, 4})}),
    "convergence": (
        convergence,
        "unmeasured",
        {"variant": (set(convergence.VARIANTS) - {"tf32", "bf16-fsdp"}, {"fp32", "bf16", "ddp"}),
         "seed": ({0, 1, 2}, {0})},
    ),
}  # fmt: skip


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("script", SWEEPS)
def test_without_arguments_a_cpu_gets_less(
    script: str, device: str, monkeypatch: pytest.MonkeyPatch, run_script: Callable[..., Any], tmp_path: Any
) -> None:
    module, name, expected = SWEEPS[script]
    swept: list[Any] = []

    def sweep(cells: Any, *_: Any, **__: Any) -> list[Any]:
        swept[:] = cells
        if name.startswith("check_"):  # before this script runs the rest
            raise ValueError("x=1: measures nothing here")
        return []

    monkeypatch.setattr(module, name, sweep)
    monkeypatch.setattr(rank_sweep, "usable_cores", lambda: 4)
    monkeypatch.setattr(convergence, "usable_cores", lambda: 4)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8 if device == "cuda" else 0)
    monkeypatch.setattr(provenance, "may_have_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device == "cuda")
    for place in (into_files, rank_sweep, convergence, run_mixed_precision):
        monkeypatch.setattr(place, "resolve_device", lambda *_, **__: (device, RUN, None))
    monkeypatch.setattr(convergence, "check_run", lambda config: (device, 1, None))
    monkeypatch.setattr(before_work, "run_isolated", lambda *_: Outcome("ok"))
    monkeypatch.setattr(rank_sweep, "start_fork_server", lambda *_: None)
    monkeypatch.setattr(run_leaderboard_step, "_why_not_fused", lambda *_: None)
    monkeypatch.setattr(run_leaderboard_step, "_card", lambda *_: (None, "flash-pytorch"))
    arguments = ["--part", "model"] if script == "checkpointing" else []
    run_script(script, *arguments, "--device", device, "--out", tmp_path)
    found = {column: {getattr(cell, column) for cell in swept} for column in expected}
    assert found == {column: values[device == "cpu"] for column, values in expected.items()}


def test_what_is_given_is_kept():
    defaults = {"size": ("xl", "tiny"), "ctx": (512, 64)}
    given = {"size": None, "ctx": 0, "other": None}
    assert fill_in(given, defaults, "cuda:1") == {"size": "xl", "ctx": 0, "other": None}
    assert fill_in(given, defaults, "mps") == {"size": "tiny", "ctx": 0, "other": None}
