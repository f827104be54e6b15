"""What is refused or told before any work: an attention that cannot run here, and models too large for a CPU."""

import re
from dataclasses import asdict

import pytest

from cs336_systems import feasibility
from cs336_systems.accounting.training_memory import step_peak_bytes, training_memory
from cs336_systems.attention import implementations
from cs336_systems.benchmarking import rank_sweep
from cs336_systems.benchmarking.data_parallel import DataParallelCell
from cs336_systems.benchmarking.leaderboard_cells import LeaderboardCell
from cs336_systems.benchmarking.model_benchmark import BenchmarkRow
from cs336_systems.benchmarking.sweep import run_sweep
from cs336_systems.configs import MODEL_SIZES, BenchmarkCell, named_cell
from cs336_systems.feasibility import GIB, Memory, check_memory, memory_shortage, missing_here, shortage
from cs336_systems.provenance import collect_provenance
from cs336_systems.records import ResultsFile
from cs336_systems.sweep_cells import named_cells
from cs336_systems.training.run_checks import check_run
from tests.memory_helpers import limit_memory, on_ranks
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
    limit_memory(monkeypatch, free_gib, whole_gib)
    told = memory_shortage(named_cell("large", 256))
    if said:
        said = f"a train-step of batch 4 and context 256 takes 17.7 GiB by formula, and {said}"
    assert told[: len(said) or None] == said


@pytest.mark.parametrize(("free_gib", "is_told"), [(17.8, True), (29.4, True), (29.6, False)])  # 60% of 29.5 are 17.7
def test_a_model_that_may_take_more_than_is_free_is_told_and_not_refused(monkeypatch, capsys, free_gib, is_told):
    limit_memory(monkeypatch, free_gib, 64.0)
    monkeypatch.setattr(feasibility, "_WORTH_TELLING_S", 1e9)
    check_memory([named_cell("large", 256)])
    told = capsys.readouterr().err
    assert (f"take up to 17.7 of {free_gib} free GiB by formula" in told) == is_told
    assert ("small at context 256: 4.15 GiB, where it says 2.94), and may be killed" in told) == is_told


def test_a_kind_of_cell_names_options_of_its_own(eight_gib):
    class _WithOptions(BenchmarkCell):
        def memory_options(self):
            return "a smaller --cache"

    plain, own = (memory_shortage(kind(**asdict(named_cell("xl", 256)))) for kind in (BenchmarkCell, _WithOptions))
    assert plain.endswith("take a smaller --size, --ctx or --batch-size, or a GPU")
    assert own.endswith("take a smaller --size, --ctx or --batch-size, a smaller --cache, or a GPU")


def test_nothing_is_refused_on_a_gpu(monkeypatch):
    limit_memory(monkeypatch, 0.001)
    cells = [named_cell("xl", 512, device="cuda"), on_ranks("ddp", 8, "cuda")]
    cells += [LeaderboardCell(**asdict(named_cell("8b", 32_768, device="cuda", precision="bf16")))]
    assert [memory_shortage(cell) for cell in cells] == ["", "", ""]
    check_memory(cells)
    assert shortage("mps", "a step", 1e12) == ""


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
