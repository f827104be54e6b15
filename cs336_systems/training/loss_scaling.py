"""Loss scaling for float16 (Micikevicius et al. 2018, section 3.2), with what happens counted and told.

Gradients below 6e-8 are zero in float16 and those above 65504 are infinite. Multiplying the loss, and with it every
gradient, moves them into range; a step whose gradients overflow all the same is skipped, and the scale halved.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cs336_systems.training.parallel import ParallelModel


class LossScaler:
    """`torch.amp.GradScaler` over one or several ranks. Of another precision than fp16 it changes nothing.

    With `is_scaling` False the scale stays 1: gradients may become zero, and steps that overflow are skipped all the
    same, since infinite gradients would end the weights.

    Attributes:
        skipped_steps: how many so far.
        skipped_in_a_row: since the last step that was taken.
    """

    def __init__(self, device_type: str, is_float16: bool, is_scaling: bool, initial_scale: float = 2.0**16) -> None:
        self.is_float16 = is_float16
        self.is_scaling = is_scaling
        self.skipped_steps = 0
        self.skipped_in_a_row = 0
        scale = initial_scale if is_scaling else 1.0
        self._scaler = torch.amp.GradScaler(device_type, init_scale=scale, enabled=is_float16)

    @property
    def scale(self) -> float | None:
        """What the next loss is multiplied by; None if the precision is not fp16."""
        return self._scaler.get_scale() if self.is_float16 else None

    def scaled(self, loss: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """The loss to call backward on."""
        return self._scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer, model: ParallelModel) -> None:
        """Divides the gradients by the scale, before they are clipped, and looks for infinity and NaN among them."""
        if not self.is_float16:
            return
        self._scaler.unscale_(optimizer)
        for found in self._scaler._found_inf_per_device(optimizer).values():
            # Where a rank holds a part of the gradients only, all must skip a step that one of them has to.
            model.sum_over_ranks(found)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Steps the optimizer and adapts the scale; False if the gradients overflowed and the step was skipped."""
        if not self.is_float16:
            optimizer.step()
            return True
        has_overflowed = any(found.item() for found in self._scaler._found_inf_per_device(optimizer).values())
        self._scaler.step(optimizer)
        self._scaler.update(None if self.is_scaling else 1.0)
        self.skipped_steps += has_overflowed
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if has_overflowed else 0
        return not has_overflowed

    def state_dict(self) -> dict:
        """Plain values; the scale comes back with `load_state_dict`."""
        return {
            "scaler": self._scaler.state_dict(),
            "skipped_steps": self.skipped_steps,
            "skipped_in_a_row": self.skipped_in_a_row,
        }

    def load_state_dict(self, state: dict) -> None:
        if self.is_float16:
            self._scaler.load_state_dict(state["scaler"])
        self.skipped_steps = state["skipped_steps"]
        self.skipped_in_a_row = state["skipped_in_a_row"]


@torch.no_grad()
def zero_gradient_counts(model: nn.Module) -> Float[Tensor, " 2"]:
    """How many gradient elements are exactly zero, and how many there are.

    The token embedding is left out: a token that the batch does not have has a zero gradient in any precision. Of the
    others next to none is zero in float32, so in float16 their share is what underflow has cost.
    """
    gradients = [
        parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and "token_embeddings" not in name
    ]
    zeros = torch.stack([(gradient == 0).sum() for gradient in gradients]).sum()
    return torch.stack([zeros, zeros.new_tensor(sum(gradient.numel() for gradient in gradients))]).float()
