"""What is refused or told before any work: an attention that cannot run here, and models too large for a CPU."""

import re
import signal
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from cs336_systems import feasibility
from cs336_systems.accounting.memory_plan import predict_memory
from cs336_systems.accounting.training_memory import step_peak_bytes, training_memory
from cs336_systems.attention import implementations
from cs336_systems.benchmarking import rank_sweep
from cs336_systems.benchmarking.before_work import does_not_fit
from cs336_systems.benchmarking.data_parallel import DataParallelCell
from cs336_systems.benchmarking.leaderboard_cells import LeaderboardCell
from cs336_systems.benchmarking.model_benchmark import BenchmarkRow
from cs336_systems.benchmarking.run_data_parallel import run_data_parallel_benchmark
from cs336_systems.benchmarking.run_leaderboard_step import run_leaderboard_step
from cs336_systems.benchmarking.run_sharding import run_sharding_benchmark
from cs336_systems.benchmarking.sharding_cells import ShardingCell, ShardingRow
from cs336_systems.benchmarking.sweep import run_sweep
from cs336_systems.configs import MODEL_SIZES, BenchmarkCell, named_cell
from cs336_systems.distributed.spawn import RankFailedError
from cs336_systems.feasibility import GIB, Memory, check_memory, machine_memory, memory_shortage, missing_here, shortage
from cs336_systems.provenance import collect_provenance
from cs336_systems.records import ResultsFile
from cs336_systems.sweep_cells import named_cells
from cs336_systems.training.metrics import METRICS
from cs336_systems.training.run import run_training
from cs336_systems.training.run_checks import check_run, tell_if_near
from tests.training_helpers import make_config


@pytest.fixture
def eight_gib(monkeypatch):
    monkeypatch.setattr(feasibility, "machine_memory", lambda: Memory(8 * GIB, 8 * GIB))


def test_what_a_cpu_lacks_is_named_with_what_runs_there():
    cells = named_cells(["tiny"], ctx=16, attention=("naive", "flash-hopper"))
    assert missing_here(cells[0]) == ""
    message = missing_here(cells[1])
    assert message.startswith("attention='flash-hopper': its kernels are for")
    assert message.endswith("On cpu these run: naive, sdpa, flash-pytorch") or "flash-triton" in message


def test_the_precision_in_which_an_attention_runs_is_asked_for(monkeypatch, tmp_path):
    monkeypatch.setattr(implementations, "_TRITON_IS_INSTALLED", True)
    monkeypatch.setattr(implementations, "_TRITON_IS_INTERPRETED", True)
    said = r"attention='flash-triton': Triton's interpreter multiplies bfloat16 wrongly"
    assert missing_here(named_cell("tiny", 16, precision="fp16", attention="flash-triton")) == ""
    assert re.match(said, missing_here(named_cell("tiny", 16, precision="bf16", attention="flash-triton")))
    with pytest.raises(ValueError, match=said):
        rank_sweep.check_attention("flash-triton", "cpu", ("fp32", "bf16"))
    with pytest.raises(ValueError, match=said):
        check_run(make_config(tmp_path, precision="bf16", attention="flash-triton", device="cpu"))


def test_a_model_that_takes_more_than_the_machine_has_is_told_by_formula(eight_gib):
    shortage = memory_shortage(named_cell("xl", 256))
    assert shortage.startswith(
        "a train-step of batch 4 and context 256 takes 33.6 GiB by formula, and this machine has"
    )
    assert memory_shortage(named_cell("small", 256)) == ""
    assert memory_shortage(named_cell("xl", 256, device="cuda")) == ""  # a card says so itself
    assert memory_shortage(named_cell("xl", 256, mode="forward")) == ""  # 7.5 GiB of weights, and little beside


def test_ranks_need_their_memory_each(eight_gib):
    shortage = memory_shortage(DataParallelCell(**asdict(named_cell("medium", 128)), world_size=2, bucket_size_mb=25.0))
    assert "of batch 4 and context 128 on each of 2 ranks takes" in shortage
    assert "a smaller --size, --ctx or --batch-size, fewer --processes, or a GPU" in shortage
    assert memory_shortage(named_cell("medium", 128)) == ""


def limit(monkeypatch: pytest.MonkeyPatch, gib: float, whole_gib: float = 0.0) -> None:
    memory = Memory(int((whole_gib or gib) * GIB), int(gib * GIB))
    monkeypatch.setattr(feasibility, "machine_memory", lambda: memory)


@pytest.mark.parametrize(
    ("free_gib", "whole_gib", "said"),
    [
        (16.0, 23.5, "this machine has 16.0 free of 23.5; free more, or take a smaller --size, --ctx or"),
        (16.0, 17.0, "this machine has 16.0 free of 17.0; take a smaller --size, --ctx or"),
        (17.0, 17.0, "this machine has 17.0; take a smaller --size, --ctx or"),
        (18.0, 23.5, ""),
    ],
)
def test_what_others_hold_of_the_memory_is_not_there(monkeypatch, free_gib, whole_gib, said):
    limit(monkeypatch, free_gib, whole_gib)
    told = memory_shortage(named_cell("large", 256))
    if said:
        said = f"a train-step of batch 4 and context 256 takes 17.7 GiB by formula, and {said}"
    assert told[: len(said) or None] == said


@pytest.mark.parametrize(("free_gib", "is_told"), [(17.8, True), (29.4, True), (29.6, False)])  # 60% of 29.5 are 17.7
def test_a_model_that_may_take_more_than_is_free_is_told_and_not_refused(monkeypatch, capsys, free_gib, is_told):
    limit(monkeypatch, free_gib, 64.0)
    monkeypatch.setattr(feasibility, "_WORTH_TELLING_S", 1e9)
    check_memory([named_cell("large", 256)])
    told = capsys.readouterr().err
    assert (f"take up to 17.7 of {free_gib} free GiB by formula" in told) == is_told
    assert ("small at context 256: 4.15 GiB, where it says 2.94), and may be killed" in told) == is_told


def test_a_run_of_training_that_may_be_killed_is_told(monkeypatch, capsys, tmp_path):
    custom = dict.fromkeys(("d_model", "d_ff", "num_layers", "num_heads"))
    config = make_config(tmp_path, **custom, size="small", device="cpu")  # 1.7 GiB
    for gib, is_told in ((2.7, True), (3.0, False)):
        limit(monkeypatch, gib)
        tell_if_near(config, *check_run(config)[:2])
        told = "A train-step of batch 4 and context 8 takes 1.7 GiB in all by formula. A process has been seen to take"
        assert capsys.readouterr().err.startswith(told) == is_told


def on_ranks(implementation: Any, world_size: int, device: str = "cpu") -> ShardingCell:
    shape = asdict(named_cell("small", 32, batch_size=1, device=device))
    return ShardingCell(**shape, world_size=world_size, implementation=implementation)


@pytest.mark.parametrize(
    ("gib", "refused"),
    [(2.0, {"ddp", "sharded-optimizer", "fsdp"}), (3.0, {"ddp", "sharded-optimizer"}), (6.0, {"ddp"}), (8.0, set())],
)
def test_a_rank_that_holds_a_part_needs_less(monkeypatch, gib, refused):
    # Weights, gradients and two moments are 1.917 GiB: on 4 ranks 7.7 if whole, 4.8 with moments divided, 1.9 with all.
    limit(monkeypatch, gib)
    assert {name for name in ("ddp", "sharded-optimizer", "fsdp") if memory_shortage(on_ranks(name, 4))} == refused


def test_a_run_goes_on_while_one_of_its_cells_fits(monkeypatch):
    limit(monkeypatch, 3.0)
    check_memory([on_ranks("ddp", 4), on_ranks("fsdp", 4)])
    with pytest.raises(ValueError, match=r"size='small': a train-step of batch 1 .* on each of 4 ranks takes 7.8 GiB"):
        check_memory([on_ranks("ddp", 4)])


def test_every_rank_builds_the_whole_model_before_it_is_divided(monkeypatch):
    limit(monkeypatch, 3.8)  # 8 times 0.479 GiB of weights are 3.83, and a step takes 8 times 0.29
    assert "on each of 8 ranks takes 3.8 GiB" in memory_shortage(on_ranks("fsdp", 8))
    limit(monkeypatch, 3.9)
    assert memory_shortage(on_ranks("fsdp", 8)) == ""


def test_of_a_job_on_several_nodes_a_nodes_ranks_count(monkeypatch):
    limit(monkeypatch, 5.0)
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
    limit(monkeypatch, 2 * plan.peak_bytes / GIB)
    assert memory_shortage(cell) == ""
    assert memory_shortage(replace(cell, batch_size=2))


def test_a_kind_of_cell_names_options_of_its_own(eight_gib):
    class _WithOptions(BenchmarkCell):
        def memory_options(self):
            return "a smaller --cache"

    plain, own = (memory_shortage(kind(**asdict(named_cell("xl", 256)))) for kind in (BenchmarkCell, _WithOptions))
    assert plain.endswith("take a smaller --size, --ctx or --batch-size, or a GPU")
    assert own.endswith("take a smaller --size, --ctx or --batch-size, a smaller --cache, or a GPU")


def test_nothing_is_refused_on_a_gpu(monkeypatch):
    limit(monkeypatch, 0.001)
    cells = [named_cell("xl", 512, device="cuda"), on_ranks("ddp", 8, "cuda")]
    cells += [LeaderboardCell(**asdict(named_cell("8b", 32_768, device="cuda", precision="bf16")))]
    assert [memory_shortage(cell) for cell in cells] == ["", "", ""]
    check_memory(cells)
    assert shortage("mps", "a step", 1e12) == ""


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
        limit(monkeypatch, limit_gib)
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
    limit(monkeypatch, float(needed_gib) - 0.1)
    given = (None,) if "total_batch_size" in arguments else ()
    with pytest.raises(SystemExit) as refused:
        run("a test", *given, **ON_RANKS, **arguments, out=tmp_path)
    assert refused.value.code == 2
    message = f"error: --size small: a train-step of batch 1 and context 32 on each of 4 ranks takes {needed_gib} GiB"
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    limit(monkeypatch, float(needed_gib) + 0.1)
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
    limit(monkeypatch, 5.0)
    given = (None,) if "total_batch_size" in arguments else ()
    run("a test", *given, **ON_RANKS | {"processes": (16, 2)}, **arguments, out=tmp_path)
    assert {cell.world_size for cell in measured[-1]} == {2}


def test_cells_on_ranks_that_cannot_fit_are_rows_and_are_not_measured(monkeypatch, tmp_path):
    limit(monkeypatch, 3.0)
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


def test_a_run_of_which_nothing_fits_is_refused_and_a_long_one_told(eight_gib, monkeypatch, capsys):
    with pytest.raises(ValueError, match=r"size='xl': a train-step .* takes .* GiB by formula"):
        check_memory(named_cells(["2.7b", "xl"], ctx=256))
    check_memory(named_cells(["tiny"], ctx=16))
    check_memory([])
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(feasibility, "usable_cores", lambda: 2)
    check_memory(named_cells(["small", "xl"], ctx=256))  # 15 steps of 0.78 TFLOP
    told = capsys.readouterr().err
    assert "take up to 2.9 of 8.0 free GiB by formula, and about 5 min if a core does 20 GFLOP/s" in told
    assert told.endswith("1 of 2 combinations take more memory than is free, and become rows that say so.\n")
    check_memory(named_cells(["tiny"], ctx=16, compile="blocks"))
    assert capsys.readouterr().err.startswith("torch.compile makes C++ for a CPU")


def test_a_cell_that_cannot_fit_is_a_row_as_on_a_gpu(eight_gib, tmp_path):
    results = ResultsFile(tmp_path, "rows", BenchmarkRow, collect_provenance("a test", "cpu"))
    cell = named_cell("xl", 256)

    def measure(cell):
        raise AssertionError("was measured")

    run_sweep([cell], measure, results)
    (row,) = results.rows
    assert (row.status, row.step_mean_ms) == ("oom", None)
    assert "GiB by formula" in row.reason
    assert asdict(cell).items() <= asdict(row).items()


def test_a_step_of_each_mode_takes_what_the_parts_say():
    config = MODEL_SIZES["small"]
    whole = training_memory(config, 4, 128)
    forward, backward, train = (
        step_peak_bytes(config, 4, 128, mode) for mode in ("forward", "forward-backward", "train-step")
    )
    assert train == whole.peak
    assert train - backward == whole.optimizer_state
    assert forward == whole.parameters + 4 * 4 * 128 * 10_000  # the logits
    assert step_peak_bytes(config, 4, 1024, "forward") == whole.parameters + 2 * 4 * 4 * 12 * 1024**2  # the scores


def write_groups(root: Path, groups: str, limits: dict[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": groups, **limits}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


V1, V2 = "memory.limit_in_bytes", "memory.max"


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/job/step", {f"job/{V2}": "5000", f"job/step/{V2}": "7000", V2: "9000"}, 5000),
        ("0::/job/step", {f"job/{V2}": "max", f"job/step/{V2}": "7000"}, 7000),
        ("0::/job/step", {f"job/{V2}": "5000", f"job/step/{V2}": "max", f"other/{V2}": "3"}, 5000),
        ("0::/", {V2: "4000"}, 4000),  # in a container
        ("0::/docker/0123", {V2: "4000"}, 4000),  # the same, with the host's name for the group
        ("0::/../../job", {V2: "4000"}, 4000),
        ("4:cpu,memory:/job/step\n0::/", {f"memory/job/{V1}": "5000", f"memory/job/step/{V1}": "7000"}, 5000),
        ("4:memory:/job\n0::/x", {f"unified/x/{V2}": "6000", f"memory/{V1}": "9223372036854771712"}, 6000),
        ("4:memory:/docker/0123", {f"memory/{V1}": "4000"}, 4000),
        ("4:cpu:/job\n5:memory:/", {f"memory/job/{V1}": "5000", f"memory/{V1}": "8000"}, 8000),
    ],
)
def test_a_control_group_has_what_those_above_it_leave(tmp_path, groups, limits, expected):
    root = write_groups(tmp_path, groups, {f"sys/fs/cgroup/{name}": text for name, text in limits.items()})
    assert machine_memory(root) == (expected, expected)


FILES = "anon 1\nactive_file 300\ninactive_file 200\n"
USED = {f"job/{V2}": "5000", "job/memory.current": "3000", "job/memory.stat": FILES}


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/job", USED, (5000, 2500)),  # files that were read are dropped where memory is short
        ("0::/job", USED | {f"job/{V2}": "max"}, None),
        ("0::/job/step", USED | {f"job/step/{V2}": "2600", "job/step/memory.current": "0"}, (2600, 2500)),
        ("0::/job", USED | {"job/memory.current": "9000"}, (5000, 0)),
        ("0::/job", {f"job/{V2}": "5000"}, (5000, 5000)),  # use is not told
        (
            "4:memory:/job",
            {
                f"memory/job/{V1}": "5000",
                "memory/job/memory.usage_in_bytes": "3000",
                "memory/job/memory.stat": f"{FILES}total_active_file 400\ntotal_inactive_file 500\n",
            },
            (5000, 2900),
        ),
    ],
)
def test_of_a_control_groups_limit_its_use_is_taken(tmp_path, groups, files, expected):
    root = write_groups(tmp_path, groups, {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    whole = machine_memory(tmp_path / "nothing").whole
    assert machine_memory(root) == (expected or (whole, whole))


def test_what_the_system_says_is_available_is_free(tmp_path):
    meminfo = "MemTotal:        9000 kB\nMemFree:          100 kB\nMemAvailable:    5000 kB\n"
    root = write_groups(tmp_path, "0::/job", {"proc/meminfo": meminfo})
    assert machine_memory(root) == (machine_memory(tmp_path / "nothing").whole, 5000 * 1024)
    write_groups(root, "0::/job", {f"sys/fs/cgroup/job/{V2}": "90000", "sys/fs/cgroup/job/memory.current": "80000"})
    assert machine_memory(root) == (90_000, 10_000)


def test_without_limits_there_is_the_machines_memory(tmp_path):
    whole = machine_memory(tmp_path)
    assert whole.free == whole.whole
    assert machine_memory(write_groups(tmp_path, "0::/a", {"sys/fs/cgroup/a/memory.max": "max"})) == whole
    assert 2**20 < machine_memory().free <= machine_memory().whole <= whole.whole < 2**63
