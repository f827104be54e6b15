"""Random training batches from an array of token ids, which may be memory-mapped from a file."""

import numpy as np
import torch
from jaxtyping import Int, Integer
from torch import Tensor


def get_batch(
    dataset: Integer[np.ndarray, " n_tokens"],
    batch_size: int,
    context_length: int,
    device: str | torch.device,
) -> tuple[Int[Tensor, "batch_size context_length"], Int[Tensor, "batch_size context_length"]]:
    """`batch_size` windows of `context_length` tokens from random places, and each window's next tokens.

    For the dataset [10, 11, 12, 13, …], context_length 3 and a window that starts at 1, the input is [11, 12, 13] and
    its target [12, 13, 14]. The starts are drawn, with replacement, by torch's CPU generator: `torch.manual_seed` fixes
    them. Of a `np.memmap` only the windows are read.

    Args:
        dataset: (n_tokens,) token ids of any integer dtype.
        device: where the batch goes. A copy to a GPU is from pinned memory and does not make the host wait.

    Returns:
        inputs and targets, int64, both (batch_size, context_length).

    Raises:
        ValueError: a size below 1, or fewer than context_length + 1 tokens.
    """
    if batch_size < 1 or context_length < 1:
        raise ValueError(f"batch_size is {batch_size} and context_length is {context_length}; both must be at least 1")
    if dataset.ndim != 1:
        raise ValueError(f"dataset has {dataset.ndim} dimensions; it must have one")
    n_starts = len(dataset) - context_length
    if n_starts < 1:
        raise ValueError(
            f"dataset has {len(dataset)} tokens; context_length {context_length} needs at least {context_length + 1}"
        )
    starts = torch.randint(n_starts, (batch_size, 1), device="cpu").numpy()
    windows = torch.from_numpy(dataset[starts + np.arange(context_length + 1)].astype(np.int64))
    device = torch.device(device)
    if device.type == "cuda":
        windows = windows.pin_memory()
    windows = windows.to(device, non_blocking=True)
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
