"""Memory recorded from real steps: on a CPU, where every storage is seen, byte for byte what the formulas say."""

import errno
from contextlib import nullcontext
from itertools import product

import pytest
import torch

from cs336_systems.accounting import memory
from cs336_systems.accounting.training_memory import training_memory
from cs336_systems.configs import BenchmarkCell
from cs336_systems.profiling import memory_profile, memory_recording
from cs336_systems.profiling.memory_profile import file_name, measure_memory, report_snapshot
from cs336_systems.profiling.memory_recording import record_step
from cs336_systems.profiling.memory_timeline import read_timeline
from cs336_systems.profiling.storage_trace import StorageTrace
from cs336_systems.records import Unsupported
from cs336_systems.workload import Workload


def _cell(**parameters) -> BenchmarkCell:
    shape = {"d_model": 24, "d_ff": 56, "num_layers": 4, "num_heads": 3, "vocab_size": 37, "batch_size": 2}
    return BenchmarkCell(size="custom", ctx=40, **{**shape, "warmup": 1, **parameters})


def _record(cell: BenchmarkCell):
    workload = Workload(cell)
    if cell.warmup:
        workload.step(lambda name: nullcontext())
    snapshot, error = record_step(workload)
    assert error is None
    return read_timeline(snapshot)


# Every second one has each pair of values; the slow checks run the others.
@pytest.mark.parametrize(
    ("precision", "every", "attention"),
    [
        pytest.param(*case, marks=pytest.mark.slow if index % 2 else ())
        for index, case in enumerate(product(("fp32", "bf16"), (0, 1, 3), ("naive", "sdpa", "flash-pytorch")))
    ],
)
def test_what_a_step_holds_is_what_the_formulas_say(precision, every, attention):
    cell = _cell(precision=precision, checkpoint_every=every, attention=attention)
    timeline = _record(cell)
    how = (cell.model_config(), 2, 40, precision, attention, every or None)
    predicted = training_memory(*how)
    kept = timeline.kept_for_backward()
    assert kept["parameters"] == predicted.parameters
    assert kept["optimizer state"] == predicted.optimizer_state
    assert kept["gradients"] == 0
    assert kept["activations"] == memory.saved_activation_bytes(*how)
    assert kept["weight copies"] == memory.autocast_weight_bytes(cell.model_config(), precision, every or None)
    at_the_end = timeline.held_at(timeline.n_events)
    assert at_the_end["gradients"] == predicted.gradients
    assert at_the_end["activations"] == at_the_end["temporaries"] == at_the_end["weight copies"] == 0
    peak = timeline.total.max()
    # FlashAttention's own tiles, and the casts of a gradient, are temporaries that the formula leaves out.
    assert predicted.peak == pytest.approx(peak, rel=0.02 if attention == "naive" else 0.12)


def test_phases_are_in_order_and_without_gaps():
    timeline = _record(_cell())
    assert [phase.name for phase in timeline.phases] == ["before forward", "forward", "loss", "backward", "optimizer"]
    for before, after in zip(timeline.phases, timeline.phases[1:], strict=False):
        assert before.end == after.first
    # Old gradients go before forward; new ones come in backward; AdamW's temporaries are the optimizer's.
    assert {a.phase for a in timeline.allocations if a.category == "gradients" and a.start >= 0} == {"backward"}
    assert {a.category for a in timeline.allocations if a.phase == "optimizer"} == {"temporaries"}


def test_the_first_step_makes_the_optimizers_state():
    timeline = _record(_cell(warmup=0))
    assert timeline.held_at(0)["optimizer state"] == 0
    assert {a.phase for a in timeline.allocations if a.category == "optimizer state"} == {"optimizer"}


def test_lines_name_the_models_code():
    timeline = _record(_cell())
    lines = {a.line for a in timeline.allocations if a.start >= 0}
    assert any("cs336_basics/nn_utils.py" in line and line.endswith(" softmax") for line in lines)
    assert any(line.startswith("MmBackward0 of cs336_basics/model.py:") for line in lines)
    assert any(line.startswith("LogsumexpBackward0 of cs336_basics/nn_utils.py:") for line in lines)
    assert any("cs336_basics/optimizer.py:" in line for line in lines)
    assert not any("weight_copies" in line or "/profiling/" in line for line in lines)


def test_recording_leaves_the_step_as_it_was():
    plain, recorded = Workload(_cell()), Workload(_cell())
    for _ in range(2):
        plain.step(lambda name: nullcontext())
    recorded.step(lambda name: nullcontext())
    record_step(recorded)
    assert not torch.is_anomaly_enabled()
    for a, b in zip(plain.model.parameters(), recorded.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_forward_pass_is_temporaries_and_residuals_of_the_size_by_formula(tmp_path):
    results = measure_memory(_cell(mode="forward"), tmp_path)
    assert results["peak_phase"] == "forward"
    assert results["activations_gib"] == results["gradients_gib"] == 0
    assert results["temporaries_gib"] > 0
    assert results["residual_mib"] == results["residual_predicted_mib"] == 2 * 40 * 24 * 4 / 2**20
    assert "backward_peak_gib" not in results


def test_a_profile_leaves_its_snapshot_and_picture_and_is_read_again(tmp_path):
    cell = _cell(precision="bf16", checkpoint_every=2)
    results = measure_memory(cell, tmp_path)
    assert results["kept_gib"] == results["kept_predicted_gib"]
    assert results["peak_gib"] == max(v for k, v in results.items() if k.endswith("_peak_gib") and v is not None)
    parts = [f"{category.replace(' ', '_')}_gib" for category in memory_profile.CATEGORIES]
    assert sum(results[part] for part in parts) == pytest.approx(results["peak_gib"])
    name = file_name(cell)
    assert name == "custom_ctx40_train-step_bf16_every2"
    assert 5_000 < (tmp_path / "pictures" / f"{name}.png").stat().st_size < 150_000
    report = report_snapshot(tmp_path / "snapshots" / f"{name}.pickle", tmp_path / "again")
    assert f"| backward | {results['backward_peak_gib']:.3f} |" in report
    assert (tmp_path / "again" / f"{name}.png").exists()


def test_where_memory_runs_out_everything_is_of_that_moment(tmp_path, monkeypatch):
    calls = []
    plain = torch.Tensor.backward

    def out_of_memory(*args, **kwargs):
        calls.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore lines.")

    monkeypatch.setattr(torch.Tensor, "backward", out_of_memory)
    cell = _cell(precision="bf16")
    results = measure_memory(cell, tmp_path)
    monkeypatch.setattr(torch.Tensor, "backward", plain)
    assert len(calls) == 2  # in the warm-up, and again while it is recorded
    assert results["status"] == "oom"
    assert results["reason"] == "CUDA out of memory. Tried to allocate 2.00 GiB."
    config = cell.model_config()
    the_loss = 4
    assert results["activations_gib"] * 2**30 == memory.saved_activation_bytes(config, 2, 40, "bf16") + the_loss
    assert results["weight_copies_gib"] * 2**30 == memory.autocast_weight_bytes(config, "bf16")
    assert results["peak_phase"] in ("loss", "backward")
    assert list((tmp_path / "snapshots").iterdir())
    assert list((tmp_path / "pictures").iterdir())


def test_memory_that_runs_out_in_forward_is_told_apart_too(monkeypatch):
    workload = Workload(_cell(precision="bf16"))

    def out_of_memory(*args):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    workload.model.ln_final.register_forward_pre_hook(out_of_memory)
    snapshot, error = record_step(workload)
    assert isinstance(error, torch.OutOfMemoryError)
    timeline = read_timeline(snapshot)
    held = timeline.held_at(timeline.n_events)
    config = workload.cell.model_config()
    of_lm_head = 2 * 37 * 24
    assert held["weight copies"] == memory.autocast_weight_bytes(config, "bf16") - of_lm_head
    of_blocks = 4 * sum(memory.block_saved_tensors(config, 2, 40, "bf16").values())
    assert held["activations"] == of_blocks + memory.residual_stream_bytes(config, 2, 40)  # and the last block's output
    assert [phase.name for phase in timeline.phases] == ["before forward", "forward"]


def test_what_cannot_be_seen_is_said():
    workload = Workload(_cell())
    workload.cell = _cell(compile="blocks")  # in the place of one that is compiled, which takes seconds
    with pytest.raises(Unsupported, match="compile='blocks': on a CPU only eager code is seen"):
        record_step(workload)


def test_other_errors_are_not_taken_for_memory(tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("a fault of the code")

    monkeypatch.setattr(torch.Tensor, "backward", broken)
    with pytest.raises(RuntimeError, match="a fault of the code"):
        measure_memory(_cell(warmup=0), tmp_path)


def test_a_full_disk_costs_the_snapshot_and_not_the_numbers(tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(memory_recording, "write_atomically", full)
    results = measure_memory(_cell(), tmp_path)
    assert results["reason"] == "snapshot not kept: No space left on device"
    assert results["peak_gib"] > 0


def test_a_trace_sees_storages_once_and_their_end():
    known = torch.ones(100)
    with StorageTrace([known]) as trace:
        made = torch.zeros(1000)
        view = made[:10]
        made.add_(1)
        del made
        assert trace.live_bytes == 4400  # the view holds it
        del view
        del known
    assert [(entry["action"], entry["size"]) for entry in trace.entries] == [
        ("alloc", 4000),
        ("free_requested", 4000),
        ("free_completed", 4000),
        ("free_requested", 400),
        ("free_completed", 400),
    ]
    assert trace.live_bytes == 0
    assert trace.peak_bytes == 4400
    assert trace.snapshot()["segments"] == []
