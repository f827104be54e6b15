"""The CUDA allocator's own history: phases, categories and lines on a card, and a snapshot where memory runs out."""

import pytest
import torch

from cs336_systems.accounting.memory import autocast_weight_bytes, saved_activation_bytes
from cs336_systems.benchmarking.isolation import run_isolated
from cs336_systems.configs import named_cell
from cs336_systems.profiling.memory_profile import file_name, measure_memory
from cs336_systems.profiling.memory_recording import load_snapshot
from cs336_systems.profiling.memory_timeline import read_timeline
from cs336_systems.profiling.saved_tensors import measure_block

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("every", [0, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_steps_history_agrees_with_formulas_and_with_the_allocator(precision, every, tmp_path):
    cell = named_cell("small", 256, precision=precision, checkpoint_every=every, warmup=1, device="cuda")
    results = run_isolated(measure_memory, cell, tmp_path).value
    config = cell.model_config()
    kept = saved_activation_bytes(config, 4, 256, precision, "naive", every or None)
    kept += autocast_weight_bytes(config, precision, every or None)
    assert results["kept_gib"] * 2**30 == pytest.approx(kept, rel=0.001)
    assert results["peak_predicted_gib"] == pytest.approx(results["peak_gib"], rel=0.05)
    # The allocator rounds up, and may leave a rest of a block of more than 1 MiB unsplit.
    assert results["peak_gib"] <= results["allocated_peak_gib"] <= results["peak_gib"] * 1.05
    timeline = read_timeline(load_snapshot(tmp_path / "snapshots" / f"{file_name(cell)}.pickle"))
    names = [phase.name for phase in timeline.phases]
    assert names == ["before forward", "forward", "loss", "backward", "optimizer"]
    made = {a.phase for a in timeline.allocations if a.category == "gradients" and a.start >= 0}
    assert made == {"backward"}
    lines = {a.line for a in timeline.allocations if a.phase == "backward"}
    assert any(line.startswith("MmBackward0 of cs336_basics/model.py") for line in lines)


def test_running_out_of_memory_leaves_a_snapshot_of_that_moment(tmp_path):
    outcome = run_isolated(_measure_in_little_memory, str(tmp_path))
    results = outcome.value
    assert results["status"] == "oom"
    assert "out of memory" in results["reason"]
    assert results["oom_gib"] > 0
    assert results["activations_gib"] > 0
    assert list((tmp_path / "snapshots").iterdir())
    assert list((tmp_path / "pictures").iterdir())


def _measure_in_little_memory(out):
    from pathlib import Path

    # 2 GiB: small's parameters fit (0.5 GiB), and not what 12 blocks keep at context 1024.
    torch.cuda.set_per_process_memory_fraction(2 * 2**30 / torch.cuda.get_device_properties(0).total_memory)
    return measure_memory(named_cell("small", 1024, mode="forward-backward", warmup=1, device="cuda"), Path(out))


@pytest.mark.parametrize("attention", ["naive", "flash-triton"])
def test_a_block_on_a_card(attention):
    cell = named_cell("small", 256, mode="forward-backward", attention=attention, num_layers=1, device="cuda")
    results = run_isolated(measure_block, cell).value
    assert results["activations_mib"] == pytest.approx(results["predicted_mib"], rel=0.001)
    assert results["backward_peak_mib"] > 0
