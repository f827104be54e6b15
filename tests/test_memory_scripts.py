"""scripts/profile_memory.py, saved_tensors.py and checkpointing.py as a person runs them."""

import re

import pytest

from cs336_systems.benchmarking.checkpointing import CheckpointRow
from cs336_systems.profiling.memory_profile import AllocationRow, MemoryRow
from cs336_systems.profiling.saved_tensors import BlockRow, SavedTensorRow
from cs336_systems.records import read_results
from tests.script_helpers import assert_help_needs_no_torch

QUICK = ["--size", "tiny", "--ctx", 32, "--device", "cpu"]


@pytest.mark.parametrize("name", ["profile_memory", "saved_tensors", "checkpointing"])
def test_help_answers_at_once_and_without_torch(name):
    assert_help_needs_no_torch(name, "--size", "--ctx", "--precision", "--out", "--resume")


def test_a_memory_profile_and_its_snapshot_by_itself(tmp_path, run_script):
    status, shown, errors = run_script(
        "profile_memory", *QUICK, "--mode", "train-step", "--precision", "bf16", "--out", tmp_path / "out"
    )
    assert status == 0, errors
    rows = read_results(tmp_path / "out" / "memory.json", MemoryRow)[1]
    assert [(row.precision, row.status) for row in rows] == [("bf16", "ok")]
    assert all(row.kept_gib == row.kept_predicted_gib for row in rows)
    allocations = read_results(tmp_path / "out" / "memory_allocations.json", AllocationRow)[1]
    assert [row.rank for row in allocations] == [*range(1, 9)]
    heading = re.sub(" +", " ", next(line for line in shown.splitlines() if line.startswith("| size ")))
    assert "| peak GiB | predicted peak GiB | in | parameters GiB | optimizer state GiB |" in heading
    assert "allocated" not in heading
    assert "Sizes are as asked for.\n" in shown  # a CPU has no allocator to tell of
    assert "cs336_basics/model.py:" in shown
    snapshot = tmp_path / "out" / "snapshots" / "tiny_ctx32_train-step_bf16.pickle"
    status, shown, errors = run_script("profile_memory", "--snapshot", snapshot, "--out", tmp_path / "read")
    assert status == 0, errors
    assert "| phase | peak GiB | parameters GiB | optimizer state GiB | gradients GiB |" in shown
    assert f"| all | {rows[0].peak_gib:.3f} |" in shown
    assert (tmp_path / "read" / "tiny_ctx32_train-step_bf16.png").exists()


def test_what_is_no_snapshot_is_refused(tmp_path, run_script):
    file = tmp_path / "notes.txt"
    file.write_text("notes")
    status, _, errors = run_script("profile_memory", "--snapshot", file, "--out", tmp_path / "out")
    assert status == 2
    assert errors.startswith(f"error: --snapshot {file}: must be a file that torch.cuda.memory._dump_snapshot")


def test_a_blocks_saved_tensors(tmp_path, run_script):
    status, _, errors = run_script("saved_tensors", *QUICK, "--precision", "fp32", "--out", tmp_path)
    assert status == 0, errors
    (block,) = read_results(tmp_path / "saved_tensors.json", BlockRow)[1]
    assert block.activations_mib == block.predicted_mib
    tensors = read_results(tmp_path / "saved_tensors_list.json", SavedTensorRow)[1]
    assert sum(row.mib * row.count for row in tensors if row.kind == "activation") == pytest.approx(
        block.activations_mib
    )


@pytest.mark.slow
def test_checkpoints_of_a_model_and_nested_ones(tmp_path, run_script):
    options = ["--checkpoint-every", 0, 2, "--steps", 1, "--layers", 2, 4, "--out", tmp_path]
    status, shown, errors = run_script("checkpointing", *QUICK, *options)
    assert status == 0, errors
    plain, checkpointed = read_results(tmp_path / "checkpointing.json", CheckpointRow)[1]
    assert plain.step_over_none is None
    assert checkpointed.step_over_none == checkpointed.step_median_ms / plain.step_median_ms
    assert checkpointed.peak_predicted_gib < plain.peak_predicted_gib
    assert "| nested " in shown
    assert {path.name for path in tmp_path.glob("*.png")} == {"checkpointing.png", "nested.png"}


def test_layers_that_cannot_be_are_refused_before_the_model_is_measured(tmp_path, run_script):
    status, shown, errors = run_script("checkpointing", *QUICK, "--layers", -3, "--out", tmp_path)
    assert status == 2
    assert "error: --layers -3: must be" in errors
    assert shown == ""


def test_a_segment_longer_than_the_model_is_refused(tmp_path, run_script):
    status, _, errors = run_script("checkpointing", *QUICK, "--checkpoint-every", 3, "--out", tmp_path)
    assert status == 2
    assert "error: --checkpoint-every 3: must be between 1 and 2" in errors
