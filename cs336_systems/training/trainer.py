"""One rank's side of training: model, optimizer and scaler, an optimizer step on a batch, and the validation loss.

What a step is, in order: the whole batch by its number, this rank's part in micro-batches, forward and backward of
each, gradients averaged over the ranks, unscaled, clipped, and the optimizer's step at the schedule's learning rate.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cs336_basics.nn_utils import cross_entropy
from cs336_basics.optimizer import get_cosine_lr
from cs336_systems.training.config import TrainConfig
from cs336_systems.training.data import TokenFile, training_batch
from cs336_systems.training.loss_scaling import LossScaler, zero_gradient_counts
from cs336_systems.training.parallel import ParallelModel
from cs336_systems.workload import (
    AUTOCAST_DTYPE,
    build_model,
    check_kernels,
    compile_model,
    optimizer_class,
    select_attention,
)


@dataclass(frozen=True)
class StepResult:
    """What a step measured, the same on every rank.

    `loss` is the batch's, in nats a token; `gradient_norm` the whole model's before clipping, unscaled. `loss_scale` is
    what this step's loss was multiplied by (None but for fp16). `zero_gradient_share` is counted only where asked for.
    """

    loss: float
    gradient_norm: float
    learning_rate: float
    is_skipped: bool
    skipped_steps: int
    loss_scale: float | None
    zero_gradient_share: float | None


class Trainer:
    """Builds everything that a run trains, from its seed, or from a checkpoint's `state`.

    Attributes:
        model: the `ParallelModel`.
        optimizer, scaler: its optimizer, and its `LossScaler`.

    Raises:
        Unsupported: the run's attention or kernels cannot run on this device.
    """

    def __init__(
        self, config: TrainConfig, tokens: TokenFile, device: torch.device, state: dict[str, Any] | None = None
    ) -> None:
        select_attention(config.attention, device, config.precision)
        check_kernels(config.kernels, device)
        self.config = config
        self.device = device
        self.train_tokens, self.validation_tokens = tokens.open()
        torch.manual_seed(config.seed)
        torch.set_float32_matmul_precision("high" if config.precision == "tf32" else "highest")
        bare = build_model(config.model_config(), device, config.kernels)
        if state is not None:  # before wrapping: each scheme then divides or copies the weights as it does new ones
            bare.load_state_dict(state["model"])
        compile_model(bare, config.compile)
        self.model = ParallelModel(bare, config, device)
        make, keywords = optimizer_class(config.optimizer, config.kernels)
        self.optimizer = self.model.make_optimizer(
            make, lr=config.learning_rate, weight_decay=config.weight_decay, **keywords
        )
        self.scaler = LossScaler(device.type, config.precision == "fp16", config.loss_scaling)
        if state is not None:
            self.model.load_optimizer_state(self.optimizer, state["optimizer"])
            self.scaler.load_state_dict(state["scaler"])

    def autocast(self) -> AbstractContextManager[None]:
        """Mixed precision for forward and loss; nothing in fp32 and tf32."""
        dtype = AUTOCAST_DTYPE.get(self.config.precision)
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype)

    def step(self, step: int, count_zeros: bool = False) -> StepResult:
        """Runs optimizer step `step` (the first is 1). Waits for the device once, at the end."""
        config, model = self.config, self.model
        learning_rate = get_cosine_lr(
            step, config.learning_rate, config.min_learning_rate, config.rising_steps, config.steps
        )
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        model.wrapped.zero_grad(set_to_none=True)
        micro_batches = self._parts(self.train_tokens, config.seed, step)
        loss_sum = torch.zeros((), device=self.device)
        for index, (inputs, targets) in enumerate(micro_batches):
            is_last = index == len(micro_batches) - 1
            with nullcontext() if is_last else model.accumulating():
                loss = self._loss(inputs, targets) / len(micro_batches)
                self.scaler.scaled(loss).backward()
            loss_sum += loss.detach()
        model.finish_gradients()
        loss_scale = self.scaler.scale
        self.scaler.unscale(self.optimizer, model)
        counts = zero_gradient_counts(model.wrapped) if count_zeros else loss_sum.new_tensor([0, 1])
        norm = model.clip_gradients(config.clip_norm)
        is_taken = self.scaler.step(self.optimizer)
        loss, zeros, n_elements = model.sum_over_ranks(torch.cat([loss_sum.view(1), counts])).tolist()
        return StepResult(
            loss=loss / model.world_size,
            gradient_norm=float(norm),
            learning_rate=learning_rate,
            is_skipped=not is_taken,
            skipped_steps=self.scaler.skipped_steps,
            loss_scale=loss_scale,
            zero_gradient_share=zeros / n_elements if count_zeros else None,
        )

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Mean loss in nats a token over the same batches of validation tokens at each call. A collective call."""
        total = torch.zeros((), device=self.device)
        count = 0
        for index in range(self.config.validation_batches):
            for inputs, targets in self._parts(self.validation_tokens, self.config.seed, index):
                total += self._loss(inputs, targets)
                count += 1
        return (self.model.sum_over_ranks(total) / (count * self.model.world_size)).item()

    def state(self) -> dict[str, Any] | None:
        """What a checkpoint keeps, on rank 0; None on the others. A collective call.

        Weights and the optimizer's state are whole, as one process would have them: any number of ranks can go on.
        """
        weights, optimizer = self.model.weights(), self.model.optimizer_state(self.optimizer)
        if self.model.rank != 0:
            return None
        return {"model": weights, "optimizer": optimizer, "scaler": self.scaler.state_dict()}

    def _loss(self, inputs: Int[Tensor, "batch ctx"], targets: Int[Tensor, "batch ctx"]) -> Float[Tensor, ""]:
        with self.autocast():
            if self.config.kernels != "plain":
                return self.model.wrapped(inputs, targets)
            return cross_entropy(self.model.wrapped(inputs), targets)

    def _parts(self, tokens: Any, seed: int, step: int) -> list[tuple[Tensor, Tensor]]:
        """This rank's micro-batches of the batch that seed and step draw from `tokens`."""
        config, model = self.config, self.model
        inputs, targets = training_batch(tokens, config.batch_size, config.ctx, seed, step, self.device)
        mine = (tensor.chunk(model.world_size)[model.rank] for tensor in (inputs, targets))
        return list(zip(*(part.chunk(config.accumulation_steps) for part in mine), strict=True))
