"""How ranges get into a model: hooks on its blocks, and an annotated attention in the place of its own.

A mark is any function from a name to a context manager: `torch.cuda.nvtx.range` for nsys, or
`torch.profiler.record_function`. The model does not know which of them watches it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

import cs336_basics.model
from cs336_basics.nn_utils import softmax
from cs336_systems.attention.model_attention import naive_attention
from cs336_systems.profiling.trace import ATTENTION, BLOCK, FINAL_MATMUL, SCORES, SOFTMAX

Mark = Callable[[str], AbstractContextManager[Any]]


@contextmanager
def marked_model(model: cs336_basics.model.BasicsTransformerLM, mark: Mark) -> Generator[None]:
    """Within it, each block of `model` runs in a range of its own, and the attention of every model in ranges too.

    Compiled code is one piece and holds no ranges inside, so it is not for compiled models or blocks.
    """
    hooks = [hook for index, block in enumerate(model.layers) for hook in _mark_calls(block, f"{BLOCK} {index}", mark)]
    attention: Any = cs336_basics.model.scaled_dot_product_attention
    cs336_basics.model.scaled_dot_product_attention = annotated_attention(mark, attention)
    try:
        yield
    finally:
        cs336_basics.model.scaled_dot_product_attention = attention
        for hook in hooks:
            hook.remove()


def annotated_attention(mark: Mark, attention: Callable[..., Tensor] = naive_attention) -> Any:
    """`attention` with its parts in ranges: the plain one's scores, softmax and final matmul; any other in one range.

    The result takes the place of `cs336_basics.model.scaled_dot_product_attention` (handout, section on nsys).
    """

    def annotated_plain_attention(
        Q: Float[Tensor, "*batch queries d_k"],
        K: Float[Tensor, "*batch keys d_k"],
        V: Float[Tensor, "*batch keys d_v"],
        mask: Bool[Tensor, "... queries keys"] | None = None,
    ) -> Float[Tensor, "*batch queries d_v"]:
        with mark(SCORES):
            scores = Q @ K.transpose(-2, -1) / math.sqrt(K.shape[-1])
            if mask is not None:
                scores = torch.where(mask, scores, float("-inf"))
        with mark(SOFTMAX):
            weights = softmax(scores, dim=-1)
        with mark(FINAL_MATMUL):
            return weights @ V

    def annotated_other_attention(
        Q: Float[Tensor, "*batch queries d_k"],
        K: Float[Tensor, "*batch keys d_k"],
        V: Float[Tensor, "*batch keys d_v"],
        mask: Bool[Tensor, "... queries keys"] | None = None,
    ) -> Float[Tensor, "*batch queries d_v"]:
        with mark(ATTENTION):
            return attention(Q, K, V, mask)

    if attention is naive_attention:
        return annotated_plain_attention
    vars(annotated_other_attention)["is_causal"] = getattr(attention, "is_causal", False)
    return annotated_other_attention


def _mark_calls(module: torch.nn.Module, name: str, mark: Mark) -> list[Any]:
    """Hooks that open a range before the module's forward and close it behind, whether it returned or raised."""
    open_ranges: list[AbstractContextManager[Any]] = []

    def before(*_: Any) -> None:
        opened = mark(name)
        opened.__enter__()
        open_ranges.append(opened)

    def after(*_: Any) -> None:
        open_ranges.pop().__exit__(None, None, None)

    return [module.register_forward_pre_hook(before), module.register_forward_hook(after, always_call=True)]
