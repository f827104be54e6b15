"""What the tests of the fused linear cross-entropy share: inputs, and PyTorch's own error as the measure of ours."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cs336_systems.kernels.linear_cross_entropy import linear_cross_entropy
from tests.attention_helpers import largest_error


def draw(
    n_tokens: int, vocab_size: int, d_model: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor]:
    """x (n_tokens, d_model), weight (vocab_size, d_model) and targets (n_tokens,); logits are about 1."""
    x = torch.randn(n_tokens, d_model, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(vocab_size, d_model, device=device) / d_model**0.5).to(dtype).requires_grad_()
    return x, weight, torch.randint(vocab_size, (n_tokens,), device=device)


def plain(x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = -100) -> Tensor:
    """The loss as PyTorch computes it: logits in the inputs' dtype, their cross-entropy in float32."""
    return F.cross_entropy((x @ weight.T).float(), targets, ignore_index=ignore_index)


def loss_and_gradients(
    function: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    dtype: torch.dtype | None = None,
    scale: float = 1.0,
    **options: Any,
) -> tuple[Tensor, ...]:
    """The function's loss, and the gradients of x and weight times `scale`, for inputs rounded to `dtype`."""
    x, weight = (tensor.detach().to(dtype or tensor.dtype).requires_grad_() for tensor in (x, weight))
    loss = function(x, weight, targets, **options)
    return loss.detach(), *torch.autograd.grad(loss * scale, (x, weight))


def exact(x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = -100) -> Tensor:
    """The loss in the inputs' dtype throughout."""
    return F.cross_entropy(x @ weight.T, targets, ignore_index=ignore_index)


def check_against_float64(
    x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = -100, scale: float = 1.0, **options: Any
) -> None:
    """No worse than twice PyTorch's own error in the same dtype, with room for float32's rounding of sums."""
    expected = loss_and_gradients(exact, x, weight, targets, torch.float64, scale, ignore_index=ignore_index)
    peers = loss_and_gradients(plain, x, weight, targets, None, scale, ignore_index=ignore_index)
    ours = loss_and_gradients(
        linear_cross_entropy, x, weight, targets, None, scale, ignore_index=ignore_index, **options
    )
    assert ours[0].dtype == torch.float32
    for name, our, peer, true in zip(("loss", "dx", "dweight"), ours, peers, expected, strict=True):
        assert our.dtype == peer.dtype, name
        floor = 8 * torch.finfo(torch.float32).eps * true.abs().max().item()
        assert largest_error(our, true) <= 2 * largest_error(peer, true) + floor, name
