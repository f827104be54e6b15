"""Rotary position embedding, with its cosines and sines cached in float32."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


class RotaryEmbedding(nn.Module):
    """Rotary position embedding (Su et al. 2021, section 3.4.2): rotates pair i of position p by p · theta^(-2i/dim).

    A pair is the elements (2i, 2i + 1) of the input. Its rotated first element goes to place i of the output, its
    second to dim/2 + i. Queries and keys are permuted alike, so their dot products are those of the paper's order.

    Args:
        context_length: positions 0 … context_length - 1 can be rotated.
        dim: the head dimension, even.
        theta: the base of the angles.
    """

    cos: Float[Tensor, "context_length half_dim"]
    sin: Float[Tensor, "context_length half_dim"]

    def __init__(
        self, context_length: int, dim: int, theta: float = 10000.0, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        if context_length < 1:
            raise ValueError(f"context_length is {context_length}; it must be at least 1")
        if dim < 2 or dim % 2:
            raise ValueError(f"dim is {dim}; rotary embeddings rotate pairs, so it must be even and at least 2")
        if not theta > 0:
            raise ValueError(f"theta is {theta}; it must be above 0")
        self.context_length, self.dim, self.theta = context_length, dim, theta
        self._make_cache(torch.get_default_device() if device is None else torch.device(device))

    def _make_cache(self, device: torch.device) -> None:
        # In float64 on the CPU: a float32 angle at position 32768 is off by up to 0.002, and each device rounds its own
        # way.
        positions = torch.arange(self.context_length, dtype=torch.float64, device="cpu")
        frequencies = self.theta ** -(torch.arange(0, self.dim, 2, dtype=torch.float64, device="cpu") / self.dim)
        angles = torch.outer(positions, frequencies)
        self.register_buffer("cos", angles.cos().to(device, torch.float32), persistent=False)
        self.register_buffer("sin", angles.sin().to(device, torch.float32), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RotaryEmbedding":
        cos, sin = self.cos, self.sin
        super()._apply(fn, recurse)
        # Of what `fn` made of the cache only the device counts: `model.to(torch.bfloat16)` rounds it, and
        # `model.to_empty` leaves it without values.
        device = self.cos.device
        if cos.is_meta:
            self._make_cache(device)
        else:
            self.cos, self.sin = cos.to(device), sin.to(device)
        return self

    def forward(
        self, x: Float[Tensor, "*batch seq dim"], pos_ids: Int[Tensor, "... seq"] | None = None
    ) -> Float[Tensor, "*batch seq dim"]:
        """Rotate `x`; the result has its shape and dtype, and is computed in float32 or better.

        Args:
            x: (..., seq, dim).
            pos_ids: (..., seq) positions in [0, context_length), whose leading dimensions broadcast against those of
                `x`; None means 0 … seq - 1.

        Raises:
            ValueError: `x` has a last dimension other than `dim`, or is longer than the context when `pos_ids` is None.
        """
        seq, dim = x.shape[-2:]
        if dim != self.dim:
            raise ValueError(f"x has a last dimension of {dim}; it must be {self.dim}")
        if pos_ids is None:
            if seq > self.context_length:
                raise ValueError(f"x has {seq} positions; context_length allows at most {self.context_length}")
            cos, sin = self.cos[:seq], self.sin[:seq]
        else:
            cos, sin = self.cos[pos_ids], self.sin[pos_ids]
        first, second = x[..., 0::2], x[..., 1::2]
        return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1).to(x.dtype)
