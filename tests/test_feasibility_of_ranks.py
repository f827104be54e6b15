"""Ranks, and training, that take more memory than this machine has are refused or told before one is started."""

import signal
import sys
from dataclasses import asdict, replace
from typing import Any

import pytest

from cs336_systems.accounting.memory_plan import predict_memory
from cs336_systems.benchmarking import rank_sweep
from cs336_systems.benchmarking.before_work import does_not_fit
from cs336_systems.benchmarking.leaderboard_cells import LeaderboardCell
from cs336_systems.benchmarking.run_data_parallel import run_data_parallel_benchmark
from cs336_systems.benchmarking.run_leaderboard_step import run_leaderboard_step
from cs336_systems.benchmarking.run_sharding import run_sharding_benchmark
from cs336_systems.benchmarking.sharding_cells import ShardingRow
from cs336_systems.configs import MODEL_SIZES, named_cell
from cs336_systems.distributed.spawn import RankFailedError
from cs336_systems.feasibility import GIB, check_memory, memory_shortage
from cs336_systems.provenance import collect_provenance
from cs336_systems.records import ResultsFile
from cs336_systems.training.metrics import METRICS
from cs336_systems.training.run import run_training
from cs336_systems.training.run_checks import check_run, tell_if_near
from tests.memory_helpers import limit_memory, on_ranks
from tests.training_helpers import make_config


def test_a_run_of_training_that_may_be_killed_is_told(monkeypatch, capsys, tmp_path):
    custom = dict.fromkeys(("d_model", "d_ff", "num_layers", "num_heads"))
    config = make_config(tmp_path, **custom, size="small", device="cpu")  # 1.7 GiB
    for gib, is_told in ((2.7, True), (3.0, False)):
        limit_memory(monkeypatch, gib)
        tell_if_near(config, *check_run(config)[:2])
        told = "A train-step of batch 4 and context 8 takes 1.7 GiB in all by formula. A process has been seen to take"
        assert capsys.readouterr().err.startswith(told) == is_told


@pytest.mark.parametrize(
    ("gib", "refused"),
    [(2.0, {"ddp", "sharded-optimizer", "fsdp"}), (3.0, {"ddp", "sharded-optimizer"}), (6.0, {"ddp"}), (8.0, set())],
)
def test_a_rank_that_holds_a_part_needs_less(monkeypatch, gib, refused):
    # Weights, gradients and two moments are 1.917 GiB: on 4 ranks 7.7 if whole, 4.8 with moments divided, 1.9 with all.
    limit_memory(monkeypatch, gib)
    assert {name for name in ("ddp", "sharded-optimizer", "fsdp") if memory_shortage(on_ranks(name, 4))} == refused


def test_a_run_goes_on_while_one_of_its_cells_fits(monkeypatch):
    limit_memory(monkeypatch, 3.0)
    check_memory([on_ranks("ddp", 4), on_ranks("fsdp", 4)])
    with pytest.raises(ValueError, match=r"size='small': a train-step of batch 1 .* on each of 4 ranks takes 7.8 GiB"):
        check_memory([on_ranks("ddp", 4)])


def test_every_rank_builds_the_whole_model_before_it_is_divided(monkeypatch):
    limit_memory(monkeypatch, 3.8)  # 8 times 0.479 GiB of weights are 3.83, and a step takes 8 times 0.29
    assert "on each of 8 ranks takes 3.8 GiB" in memory_shortage(on_ranks("fsdp", 8))
    limit_memory(monkeypatch, 3.9)
    assert memory_shortage(on_ranks("fsdp", 8)) == ""


def test_of_a_job_on_several_nodes_a_nodes_ranks_count(monkeypatch):
    limit_memory(monkeypatch, 5.0)
    assert memory_shortage(on_ranks("fsdp", 16))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert memory_shortage(on_ranks("fsdp", 16)) == ""
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    slurm = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "16"}
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "8(x2)")
    assert memory_shortage(on_ranks("fsdp", 16)) == ""


def test_the_leaderboards_step_asks_its_plan(monkeypatch):
    shape = asdict(named_cell("small", 32, batch_size=1))
    cell = LeaderboardCell(**shape, world_size=2, implementation="torch", kept_blocks=12)
    fused, plan = (
        predict_memory(MODEL_SIZES["small"], 32, 2, 12, precision="fp32", recomputes=recomputes)
        for recomputes in (True, False)
    )
    assert cell.rank_peak_bytes() == plan.peak_bytes
    assert replace(cell, implementation="fused").rank_peak_bytes() == fused.peak_bytes != plan.peak_bytes
    limit_memory(monkeypatch, 2 * plan.peak_bytes / GIB)
    assert memory_shortage(cell) == ""
    assert memory_shortage(replace(cell, batch_size=2))


# small with 256 tokens in its vocabulary: weights are 0.42 GiB. On 4 ranks fsdp's steps take 1.8 GiB, those with a
# sharded optimizer 4.2 and ddp's 6.8; and rank 0 gathers 1.3 and 0.8 GiB more when it saves, beside 1.7 and 4.2.
@pytest.mark.parametrize(
    ("options", "needed_gib"),
    [
        ({}, "1.7"),
        ({"parallel": "ddp"}, "6.8"),
        ({"parallel": "bucketed"}, "6.8"),
        ({"parallel": "ddp", "sharded_optimizer": True}, "5.1"),
        ({"parallel": "fsdp"}, "3.0"),
    ],
)
def test_training_is_refused_before_anything_is_written(monkeypatch, tmp_path, capsys, options, needed_gib):
    processes = {"processes": 4} if options else {}
    custom = dict.fromkeys(("d_model", "d_ff", "num_layers", "num_heads"))
    config = make_config(tmp_path, **custom, **options, **processes, size="small", device="cpu")
    for limit_gib in (float(needed_gib) - 0.06, float(needed_gib) + 0.06):
        limit_memory(monkeypatch, limit_gib)
        if limit_gib > float(needed_gib):
            assert check_run(config)[:2] == ("cpu", 4 if options else 1)
            continue
        with pytest.raises(SystemExit) as refused:
            run_training("a test", config)
        assert refused.value.code == 2
        message = capsys.readouterr().err
        assert message.startswith("error: --size small: ")
        assert f"takes {needed_gib} GiB {'in all ' if options else ''}by formula, and this machine has" in message
        assert not (tmp_path / "out" / METRICS).exists()


class WentOn(Exception):
    """The checks of the arguments are done."""


def go_on(*arguments: Any, **keywords: Any) -> None:
    raise WentOn


ON_RANKS: dict[str, Any] = {
    "size": "small",
    "ctx": 32,
    "batch_size": 1,
    "processes": (4,),
    "device": "cpu",
    "warmup": 0,
    "steps": 1,
    "max_ctas": (0,),
    "high_priority": ("off",),
}
MEASURED: dict[str, Any] = {"attention": "naive", "precision": ("fp32",), "total_batch_size": None}
STEP: dict[str, Any] = {"implementation": ("torch",), "precision": "fp32", "memory_gib": None, "kept_blocks": ()}


@pytest.mark.parametrize(
    ("run", "arguments", "needed_gib"),
    [
        (run_data_parallel_benchmark, MEASURED | {"implementation": ("naive",), "bucket_size_mb": None}, "7.7"),
        (run_sharding_benchmark, MEASURED | {"implementation": ("ddp",), "name": "fsdp"}, "7.8"),
        (run_sharding_benchmark, MEASURED | {"implementation": ("sharded-optimizer",), "name": "sharded"}, "4.9"),
        (run_sharding_benchmark, MEASURED | {"implementation": ("fsdp",), "name": "fsdp"}, "2.1"),
        (run_leaderboard_step, STEP, "2.3"),
    ],
)
def test_ranks_are_refused_before_one_is_started(monkeypatch, tmp_path, capsys, run, arguments, needed_gib):
    monkeypatch.setattr(sys.modules[run.__module__], "open_results", go_on)
    limit_memory(monkeypatch, float(needed_gib) - 0.1)
    given = (None,) if "total_batch_size" in arguments else ()
    with pytest.raises(SystemExit) as refused:
        run("a test", *given, **ON_RANKS, **arguments, out=tmp_path)
    assert refused.value.code == 2
    message = f"error: --size small: a train-step of batch 1 and context 32 on each of 4 ranks takes {needed_gib} GiB"
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    limit_memory(monkeypatch, float(needed_gib) + 0.1)
    with pytest.raises(WentOn):
        run("a test", *given, **ON_RANKS, **arguments, out=tmp_path)


@pytest.mark.parametrize(
    ("run", "arguments"),
    [
        (run_data_parallel_benchmark, MEASURED | {"implementation": ("naive",), "bucket_size_mb": None}),
        (run_sharding_benchmark, MEASURED | {"implementation": ("ddp",), "name": "ddp"}),
        (run_leaderboard_step, STEP),
    ],
)
def test_of_the_numbers_of_ranks_those_that_fit_are_measured(monkeypatch, tmp_path, run, arguments):
    module = sys.modules[run.__module__]
    monkeypatch.setattr(module, "open_results", lambda *arguments: None)
    if run is run_data_parallel_benchmark:
        monkeypatch.setattr(module, "open_all_reduce", lambda *arguments: (None, None))
    measured = []

    def sweep(cells, *arguments, known=lambda cell: None, **keywords):
        measured.append([cell for cell in cells if known(cell) is None])

    monkeypatch.setattr(module, "run_rank_sweep", sweep)
    limit_memory(monkeypatch, 5.0)
    given = (None,) if "total_batch_size" in arguments else ()
    run("a test", *given, **ON_RANKS | {"processes": (16, 2)}, **arguments, out=tmp_path)
    assert {cell.world_size for cell in measured[-1]} == {2}


def test_cells_on_ranks_that_cannot_fit_are_rows_and_are_not_measured(monkeypatch, tmp_path):
    limit_memory(monkeypatch, 3.0)
    whole, divided = on_ranks("ddp", 4), on_ranks("fsdp", 4)
    results = ResultsFile(tmp_path, "rows", ShardingRow, collect_provenance("a test", "cpu"))
    measured = []

    def killed(measure, cell, **options):
        measured.append(cell)
        raise RankFailedError("rank 0 was killed", 0, "", -signal.SIGKILL)

    monkeypatch.setattr(rank_sweep, "run_ranks", killed)
    for n_runs in (1, 2):  # resumed the second time, when only the killed one is tried again
        rank_sweep.run_rank_sweep([whole, divided], str, results, known=does_not_fit)
        assert measured == [divided] * n_runs
        row, other = results.rows
        assert (row.implementation, row.status, row.step_median_ms) == ("ddp", "oom", None)
        assert "on each of 4 ranks takes 7.8 GiB in all by formula" in row.reason
        assert (other.implementation, other.status) == ("fsdp", "killed")
