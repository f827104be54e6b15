"""The functions that the course's tests call, for both editions of the assignment.

Dropped into tests/, the course's own test files import these and pass unchanged. Imports are made inside the functions,
so that a test of one part needs no other.
"""

from __future__ import annotations

import torch


def get_flashattention_autograd_function_pytorch() -> type:
    """FlashAttention-2 in tiled PyTorch: a class whose `.apply(q, k, v, is_causal)` takes (batch, length, head_dim)."""
    from cs336_systems.attention.flash_pytorch import FlashAttentionPyTorch

    return FlashAttentionPyTorch


def get_flashattention_autograd_function_triton() -> type:
    """FlashAttention-2 in Triton, called in the same way."""
    from cs336_systems.attention.flash_triton import FlashAttentionTriton

    return FlashAttentionTriton


def get_ddp_individual_parameters(module: torch.nn.Module) -> torch.nn.Module:
    """2025: data parallelism that all-reduces each gradient as soon as backward has made it."""
    from cs336_systems.distributed.ddp_overlapped import OverlappedDDP

    return OverlappedDDP(module)


def ddp_individual_parameters_on_after_backward(ddp_model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """2025: wait for the gradients' all-reduces, before the optimizer steps."""
    ddp_model.finish_gradient_synchronization()


def get_ddp_bucketed(module: torch.nn.Module, bucket_size_mb: float) -> torch.nn.Module:
    """2025: data parallelism that all-reduces gradients in buckets of at most `bucket_size_mb`."""
    from cs336_systems.distributed.ddp_bucketed import BucketedDDP

    return BucketedDDP(module, bucket_size_mb=bucket_size_mb)


def ddp_bucketed_on_after_backward(ddp_model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """2025: wait for the buckets' all-reduces, before the optimizer steps."""
    ddp_model.finish_gradient_synchronization()


def ddp_bucketed_on_train_batch_start(ddp_model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """2025: called before each step's forward pass; nothing needs resetting there."""


def get_ddp(module: torch.nn.Module) -> torch.nn.Module:
    """2026: data parallelism with communication overlapped."""
    return get_ddp_individual_parameters(module)


def ddp_on_after_backward(ddp_model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """2026: wait for the gradients' communication, before the optimizer steps."""
    ddp_model.finish_gradient_synchronization()


def get_fsdp(module: torch.nn.Module, compute_dtype: torch.dtype | None = None) -> torch.nn.Module:
    """2026: Linear and Embedding weights sharded over the ranks; the rest replicated."""
    from cs336_systems.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(module, compute_dtype=compute_dtype)


def fsdp_on_after_backward(fsdp_model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """2026: wait for the gradients' communication, before the optimizer steps."""
    fsdp_model.finish_gradient_synchronization()


def fsdp_gather_full_params(fsdp_model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """2026: every parameter whole, in float32, under the bare module's names; a collective call."""
    return fsdp_model.gather_full_params()


def get_sharded_optimizer(params, optimizer_cls: type[torch.optim.Optimizer], **kwargs) -> torch.optim.Optimizer:
    """Both editions: an optimizer whose state is divided over the ranks."""
    from cs336_systems.distributed.sharded_optimizer import ShardedOptimizer

    return ShardedOptimizer(params, optimizer_cls, **kwargs)
