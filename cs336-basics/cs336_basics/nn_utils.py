"""Softmax, cross-entropy and gradient clipping, written out from their definitions.

Each is numerically stable, and none of them makes the host wait for the device.
"""

from collections.abc import Iterable

import torch
from jaxtyping import Float, Int
from torch import Tensor


def _at_least_float32(x: Tensor) -> Tensor:
    """`x` in float32 where it has fewer bits: a float16 sum of more than 65504 exponentials overflows."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def softmax(x: Float[Tensor, "*shape"], dim: int = -1) -> Float[Tensor, "*shape"]:
    """exp(x) / Σ exp(x) along `dim`; shape and dtype of `x`, computed in float32 or better.

    A slice that is -inf everywhere gives NaN, as `torch.softmax` does.
    """
    wide = _at_least_float32(x)
    # The result does not depend on the shift, so its gradient is zero and need not be followed.
    exponentials = torch.exp(wide - wide.detach().amax(dim=dim, keepdim=True))
    return (exponentials / exponentials.sum(dim=dim, keepdim=True)).to(x.dtype)


def log_softmax(x: Float[Tensor, "*shape"], dim: int = -1) -> Float[Tensor, "*shape"]:
    """x - log Σ exp(x) along `dim`; shape and dtype of `x`, computed in float32 or better."""
    wide = _at_least_float32(x)
    shifted = wide - wide.detach().amax(dim=dim, keepdim=True)
    return (shifted - shifted.exp().sum(dim=dim, keepdim=True).log()).to(x.dtype)


def cross_entropy(inputs: Float[Tensor, "... vocab"], targets: Int[Tensor, "..."]) -> Float[Tensor, ""]:
    """Mean of -log softmax(inputs)[target] over all positions.

    Args:
        inputs: (..., vocab) logits.
        targets: (...) int64 class indices in [0, vocab). Others are an error that the device reports.

    Returns:
        A scalar, in float32 (float64 for float64 logits).

    Raises:
        ValueError: the shape of `targets` is not that of `inputs` without its last dimension.
    """
    if inputs.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets has shape {tuple(targets.shape)}; inputs of shape {tuple(inputs.shape)} "
            f"need targets of shape {tuple(inputs.shape[:-1])}"
        )
    logits = _at_least_float32(inputs)
    # logsumexp saves for backward only the logits, which are there anyway, and not a second (..., vocab) tensor.
    target_logits = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return (torch.logsumexp(logits, dim=-1) - target_logits).mean()


@torch.no_grad()
def clip_gradient(parameters: Iterable[Tensor], max_norm: float) -> None:
    """Scale all gradients, in place, by min(1, max_norm / (norm + 1e-6)).

    The norm is the L2 norm of all gradients taken together, accumulated in float32 or better. Parameters without a
    gradient are left out, and it is no error if none has one. All gradients must be on one device.

    Raises:
        ValueError: `max_norm` is not above zero.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm}; it must be above 0")
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return
    norms = [
        torch.linalg.vector_norm(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32))
        for gradient in gradients
    ]
    total_norm = torch.linalg.vector_norm(torch.stack(norms))
    # Multiplying by 1 where nothing is to be clipped costs a pass; asking the device whether to would cost a wait.
    factor = (max_norm / (total_norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor)
