"""The seam between the training loop and data parallelism: a model to call, and what must happen around each step.

A scheme is imported when it is asked for. With none, everything here does nothing, and no process group is needed.
"""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn

from cs336_systems.training.config import TrainConfig
from cs336_systems.workload import AUTOCAST_DTYPE

# Where each scheme is: module, and class.
_SCHEMES = {
    "ddp": ("cs336_systems.distributed.ddp_overlapped", "OverlappedDDP"),
    "bucketed": ("cs336_systems.distributed.ddp_bucketed", "BucketedDDP"),
    "fsdp": ("cs336_systems.distributed.fsdp", "FullyShardedDataParallel"),
}
_SHARDED_OPTIMIZER = ("cs336_systems.distributed.sharded_optimizer", "ShardedOptimizer")


def check_importable(config: TrainConfig) -> None:
    """Raises ValueError, naming the flag, if a scheme that the run asks for is not there."""
    if config.parallel != "none":
        _check_importable("parallel", config.parallel, *_SCHEMES[config.parallel])
    if config.sharded_optimizer:
        _check_importable("sharded_optimizer", True, *_SHARDED_OPTIMIZER)


def _check_importable(name: str, value: object, module: str, class_name: str) -> None:
    try:
        _load(module, class_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name}={value!r}: {module}.{class_name} cannot be imported ({error})") from error


def _load(module: str, class_name: str) -> Any:
    return getattr(importlib.import_module(module), class_name)


class ParallelModel:
    """A model as one rank trains it.

    Attributes:
        wrapped: call this one; its parameters are those that this rank's optimizer steps.
        bare: the model itself.
        rank, world_size: 0 and 1 without a scheme.
    """

    def __init__(self, model: nn.Module, config: TrainConfig, device: torch.device) -> None:
        self.config = config
        self.bare = model
        self.device = device
        self.rank, self.world_size = (0, 1) if config.parallel == "none" else (dist.get_rank(), dist.get_world_size())
        self.wrapped: Any = model
        if config.parallel != "none":
            scheme = _load(*_SCHEMES[config.parallel])
            options = {
                "bucketed": {"bucket_size_mb": config.bucket_size_mb},
                # Weights and gradients travel in the low precision too; what each rank keeps is float32.
                "fsdp": {"compute_dtype": AUTOCAST_DTYPE.get(config.precision)},
            }
            self.wrapped = scheme(model, **options.get(config.parallel, {}))
        self.is_fsdp = config.parallel == "fsdp"

    def make_optimizer(self, optimizer_class: type[torch.optim.Optimizer], **keywords: Any) -> torch.optim.Optimizer:
        """The optimizer of the wrapped model's parameters, its state divided over the ranks if the run says so."""
        if self.config.sharded_optimizer:
            return _load(*_SHARDED_OPTIMIZER)(self.wrapped.parameters(), optimizer_class, **keywords)
        return optimizer_class(self.wrapped.parameters(), **keywords)

    def accumulating(self) -> AbstractContextManager[None]:
        """Around every micro-batch of a step but the last: gradients stay on this rank, but for fsdp, whose gradients
        are divided over the ranks after each."""
        return self.wrapped.no_sync() if hasattr(self.wrapped, "no_sync") else nullcontext()

    def finish_gradients(self) -> None:
        """After the step's last backward pass: gradients are the mean over the ranks when this returns."""
        if self.config.parallel != "none":
            self.wrapped.finish_gradient_synchronization()

    @torch.no_grad()
    def clip_gradients(self, max_norm: float) -> Float[Tensor, ""]:
        """Scales all gradients by min(1, max_norm / (norm + 1e-6)), as `cs336_basics.nn_utils.clip_gradient` does, and
        returns the norm from before: of the whole model's gradients, of which a rank may hold only a part."""
        if self.is_fsdp:
            return self.wrapped.clip_grad_norm_(max_norm)
        gradients = [parameter.grad for parameter in self.wrapped.parameters() if parameter.grad is not None]
        norms = torch.stack([torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients])
        norm = torch.linalg.vector_norm(norms)
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factor)
        return norm

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """`values`, summed over the ranks in place."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    # ---- Whole states: a checkpoint fits every scheme and every number of ranks --------------------------------------

    def weights(self) -> dict[str, Tensor]:
        """The whole model's parameters and buffers under the bare model's names, on rank 0. Collective for fsdp."""
        return self.wrapped.full_state_dict(to_rank=0) if self.is_fsdp else self.bare.state_dict()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The state that the bare model's optimizer would have, on rank 0. Collective for fsdp and a sharded one."""
        if self.is_fsdp:
            return _fsdp_state().full_optimizer_state_dict(self.wrapped, optimizer, to_rank=0)
        if self.config.sharded_optimizer:
            return optimizer.state_dict(to_rank=0)  # ty: ignore[unknown-argument]
        return optimizer.state_dict()

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Takes this rank's part of what `optimizer_state` returned; every rank is given the same."""
        if self.is_fsdp:
            _fsdp_state().load_optimizer_state_dict(self.wrapped, optimizer, state)
        else:
            optimizer.load_state_dict(state)


def _fsdp_state() -> Any:
    return importlib.import_module("cs336_systems.distributed.fsdp_state")
