"""What is refused or told before any work: an attention that cannot run here, and models too large for a CPU."""

from dataclasses import asdict

import pytest

from cs336_systems import feasibility
from cs336_systems.accounting.training_memory import step_peak_bytes, training_memory
from cs336_systems.benchmarking.data_parallel import DataParallelCell
from cs336_systems.benchmarking.model_benchmark import BenchmarkRow
from cs336_systems.benchmarking.sweep import run_sweep
from cs336_systems.configs import MODEL_SIZES, named_cell, named_cells
from cs336_systems.feasibility import GIB, check_memory, memory_shortage, missing_here
from cs336_systems.provenance import collect_provenance, machine_memory_bytes
from cs336_systems.records import ResultsFile


@pytest.fixture
def eight_gib(monkeypatch):
    monkeypatch.setattr(feasibility, "machine_memory_bytes", lambda: 8 * GIB)


def test_what_a_cpu_lacks_is_named_with_what_runs_there():
    cells = named_cells(["tiny"], ctx=16, attention=("naive", "flash-hopper"))
    assert missing_here(cells[:1]) == ""
    message = missing_here(cells)
    assert message.startswith("attention='flash-hopper': its kernels are for")
    assert message.endswith("On cpu these run: naive, sdpa, flash-pytorch") or "flash-triton" in message


def test_a_model_that_takes_more_than_the_machine_has_is_told_by_formula(eight_gib):
    shortage = memory_shortage(named_cell("xl", 256))
    assert shortage.startswith(
        "a train-step of batch 4 and context 256 takes 45.4 GiB by formula, and this machine has"
    )
    assert memory_shortage(named_cell("small", 256)) == ""
    assert memory_shortage(named_cell("xl", 256, device="cuda")) == ""  # a card says so itself
    assert memory_shortage(named_cell("xl", 256, mode="forward")) == ""  # 7.5 GiB of weights, and little beside


def test_ranks_need_their_memory_each(eight_gib):
    shortage = memory_shortage(DataParallelCell(**asdict(named_cell("medium", 128)), world_size=2, bucket_size_mb=25.0))
    assert "of batch 4 and context 128 on each of 2 ranks takes" in shortage
    assert memory_shortage(named_cell("small", 128)) == ""


def test_a_run_of_which_nothing_fits_is_refused_and_a_long_one_told(eight_gib, monkeypatch, capsys):
    with pytest.raises(ValueError, match=r"size='xl': a train-step .* takes .* GiB by formula"):
        check_memory(named_cells(["2.7b", "xl"], ctx=256))
    check_memory(named_cells(["tiny"], ctx=16))
    check_memory([])
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    check_memory(named_cells(["small", "xl"], ctx=256))  # 15 steps of 0.78 TFLOP
    told = capsys.readouterr().err
    assert "take up to 4.0 of 8.0 GiB by formula, and about 5 min if a core does 20 GFLOP/s" in told
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


def test_this_machine_has_memory():
    assert 2**28 < machine_memory_bytes() < 2**63
