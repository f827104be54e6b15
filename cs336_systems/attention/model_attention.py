"""The model's attention by name: functions that take the place of `cs336_basics.model.scaled_dot_product_attention`.

The model looks that function up by its global name at each call, so that putting another one there swaps the attention
of every model at once, those that exist included.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

import cs336_basics.model
from cs336_systems.attention import MODEL_ATTENTION_NAMES
from cs336_systems.attention.api import flash_attention
from cs336_systems.attention.implementations import IMPLEMENTATIONS

# As the model has it at the time of this import.
naive_attention = cs336_basics.model.scaled_dot_product_attention


def _causal_attention(q: Tensor, k: Tensor, v: Tensor, implementation: str) -> Tensor:
    if q.ndim == 4:
        return flash_attention(q, k, v, is_causal=True, implementation=implementation)
    flat = (x.reshape(-1, *x.shape[-2:]) for x in (q, k, v))
    return flash_attention(*flat, is_causal=True, implementation=implementation).view(q.shape)


def sdpa_attention(
    Q: Float[Tensor, "*batch queries d_k"],
    K: Float[Tensor, "*batch keys d_k"],
    V: Float[Tensor, "*batch keys d_k"],
    mask: Bool[Tensor, "... queries keys"] | None = None,
) -> Float[Tensor, "*batch queries d_k"]:
    """Causal attention by PyTorch's `scaled_dot_product_attention`, in place of the model's function.

    `mask` is there for the signature and is never read: a model that passes one must mean the causal mask, True where
    key <= query, which is what the models of `cs336_basics` always pass. (Comparing it would cost as much as using it,
    and on a GPU wait for it.) A model that looks at the attribute `is_causal`, as ours does, makes no mask at all.
    """
    return _causal_attention(Q, K, V, "sdpa")


def flash_pytorch_attention(
    Q: Float[Tensor, "*batch queries d_k"],
    K: Float[Tensor, "*batch keys d_k"],
    V: Float[Tensor, "*batch keys d_k"],
    mask: Bool[Tensor, "... queries keys"] | None = None,
) -> Float[Tensor, "*batch queries d_k"]:
    """Causal FlashAttention-2 in tiled PyTorch, in place of the model's function; `mask` as in `sdpa_attention`."""
    return _causal_attention(Q, K, V, "pytorch")


def flash_triton_attention(
    Q: Float[Tensor, "*batch queries d_k"],
    K: Float[Tensor, "*batch keys d_k"],
    V: Float[Tensor, "*batch keys d_k"],
    mask: Bool[Tensor, "... queries keys"] | None = None,
) -> Float[Tensor, "*batch queries d_k"]:
    """Causal FlashAttention-2 in Triton, in place of the model's function; `mask` as in `sdpa_attention`."""
    return _causal_attention(Q, K, V, "triton")


def flash_hopper_attention(
    Q: Float[Tensor, "*batch queries d_k"],
    K: Float[Tensor, "*batch keys d_k"],
    V: Float[Tensor, "*batch keys d_k"],
    mask: Bool[Tensor, "... queries keys"] | None = None,
) -> Float[Tensor, "*batch queries d_k"]:
    """Causal attention with Hopper's own kernels, in place of the model's function; `mask` as in `sdpa_attention`."""
    return _causal_attention(Q, K, V, "hopper")


# The model passes no mask to functions that say that they are causal by themselves.
for _function in (sdpa_attention, flash_pytorch_attention, flash_triton_attention, flash_hopper_attention):
    vars(_function)["is_causal"] = True

_ATTENTIONS: dict[str, tuple[Callable, str]] = {  # name: function, and the implementation that it needs
    "naive": (naive_attention, "reference"),
    "sdpa": (sdpa_attention, "sdpa"),
    "flash-pytorch": (flash_pytorch_attention, "pytorch"),
    "flash-triton": (flash_triton_attention, "triton"),
    "flash-hopper": (flash_hopper_attention, "hopper"),
}


def model_attention(name: str) -> Callable[..., Tensor]:
    """The function for a name of `MODEL_ATTENTION_NAMES`; called as `f(Q, K, V, mask)`.

    All but "naive" are causal by themselves, and carry the attribute `is_causal = True`.

    Raises:
        ValueError: an unknown name.
    """
    if name not in _ATTENTIONS:
        raise ValueError(f"attention is {name!r}; it must be one of {', '.join(MODEL_ATTENTION_NAMES)}")
    return _ATTENTIONS[name][0]


def why_not(name: str, device: torch.device | str, dtype: torch.dtype = torch.float32) -> str | None:
    """What is missing to run an attention on a device ("cuda", "cpu", …), on tensors of that dtype; None where it can
    run."""
    model_attention(name)
    return IMPLEMENTATIONS[_ATTENTIONS[name][1]].why_not(torch.device(device), dtype)


def set_attention(name: str) -> None:
    """Give every model of `cs336_basics` this attention, until the next call."""
    attention: Any = model_attention(name)
    cs336_basics.model.scaled_dot_product_attention = attention


@contextmanager
def use_attention(name: str) -> Generator[None]:
    """`set_attention` inside a with statement; at its end the attention from before is back."""
    before = cs336_basics.model.scaled_dot_product_attention
    set_attention(name)
    try:
        yield
    finally:
        cs336_basics.model.scaled_dot_product_attention = before
