"""What the tests of the language model share: a small one, tokens for it, and rotary positions by their definition."""

import torch

from cs336_basics.model import BasicsTransformerLM

SIZES = {"vocab_size": 50, "context_length": 12, "d_model": 24, "num_layers": 2, "num_heads": 3, "d_ff": 40}


def make_model(**changes) -> BasicsTransformerLM:
    return BasicsTransformerLM(**{**SIZES, **changes})


def draw_tokens(*shape: int) -> torch.Tensor:
    return torch.randint(SIZES["vocab_size"], shape)


def rotate_by_definition(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Each pair (x[2i], x[2i + 1]) as a complex number, times exp(j · position · theta^(-2i/dim))."""
    dim = x.shape[-1]
    pairs = torch.view_as_complex(x.double().unflatten(-1, (dim // 2, 2)).contiguous())
    frequencies = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    turned = pairs * torch.exp(1j * positions.double().unsqueeze(-1) * frequencies)
    return torch.cat((turned.real, turned.imag), dim=-1)
