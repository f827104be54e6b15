"""Batches from arrays and memory-mapped token files."""

import numpy as np
import pytest
import torch

from cs336_basics.data import get_batch

N_TOKENS = 1000


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64])
def test_targets_are_the_next_tokens_of_a_memory_mapped_file(tmp_path, dtype):
    # Token i is 3·i + 7, so that a token tells its place in the file.
    (3 * np.arange(N_TOKENS) + 7).astype(dtype).tofile(tmp_path / "tokens.bin")
    dataset = np.memmap(tmp_path / "tokens.bin", dtype=dtype, mode="r")
    inputs, targets = get_batch(dataset, batch_size=16, context_length=32, device="cpu")
    for tensor in (inputs, targets):
        assert tensor.shape == (16, 32)
        assert tensor.dtype == torch.int64
        assert tensor.is_contiguous()
    starts = (inputs[:, 0] - 7) // 3
    torch.testing.assert_close(inputs, 3 * (starts[:, None] + torch.arange(32)) + 7)
    torch.testing.assert_close(targets, inputs + 3)
    assert len(starts.unique()) > 8, "the windows start in random places"


def test_batches_are_copies_that_outlive_the_dataset():
    dataset = np.arange(20)
    inputs, targets = get_batch(dataset, 2, 4, "cpu")
    before = inputs.clone()
    dataset[:] = -1
    targets[:] = -2
    assert torch.equal(inputs, before)


def test_every_start_is_drawn_about_equally_often():
    n_starts, draws = 5, 10_000
    inputs, targets = get_batch(np.arange(8), draws, 3, "cpu")
    counts = torch.bincount(inputs[:, 0], minlength=n_starts)
    assert counts.shape == (n_starts,), "the last start leaves room for the target and no more"
    assert targets.max() == 7
    # Five standard deviations of a binomial count.
    assert (counts - draws / n_starts).abs().max() < 5 * (draws * 0.2 * 0.8) ** 0.5


def test_torchs_seed_fixes_the_batch():
    batches = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        batches.append(get_batch(np.arange(N_TOKENS), 8, 4, "cpu")[0])
    assert torch.equal(batches[0], batches[1])
    assert not torch.equal(batches[0], batches[2])


def test_the_shortest_possible_dataset_has_one_window():
    inputs, targets = get_batch(np.array([5, 6, 7, 8], dtype=np.uint16), 2, 3, "cpu")
    assert inputs.tolist() == [[5, 6, 7]] * 2
    assert targets.tolist() == [[6, 7, 8]] * 2


def test_a_default_device_of_torchs_changes_nothing():
    with torch.device("meta"):
        inputs, _ = get_batch(np.arange(10), 2, 3, "cpu")
    assert inputs.device.type == "cpu"


@pytest.mark.parametrize("n_tokens", [0, 1, 3])
def test_a_dataset_without_a_window_is_rejected(n_tokens):
    with pytest.raises(ValueError, match=f"dataset has {n_tokens} tokens; context_length 3 needs at least 4"):
        get_batch(np.arange(n_tokens), 2, 3, "cpu")


@pytest.mark.parametrize(("batch_size", "context_length"), [(0, 3), (2, 0), (-1, 3)])
def test_sizes_below_one_are_rejected(batch_size, context_length):
    with pytest.raises(ValueError, match="must be at least 1"):
        get_batch(np.arange(10), batch_size, context_length, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda", torch.device("cuda", 0)], ids=str)
def test_a_batch_for_the_gpu_is_copied_without_waiting(device):
    get_batch(np.arange(N_TOKENS), 4, 16, device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        inputs, targets = get_batch(np.arange(N_TOKENS), 4, 16, device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert inputs.is_cuda
    assert torch.equal(targets, inputs + 1)
