"""Activation checkpointing: keep the inputs of segments of blocks, and run a segment again when backward comes to it.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost": equal segments (section 4.1) and nested ones (4.4).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Layer = Callable[[Tensor], Tensor]


class CheckpointedSegment(nn.Sequential):
    """Modules in a row, for which only the first one's input is kept between forward and backward."""

    def forward(self, input: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """(…) to (…), as the modules in a row give it. Under `torch.no_grad()` it is a plain `nn.Sequential`."""
        return checkpoint(super().forward, input, use_reentrant=False)


def checkpoint_blocks(model: nn.Module, every: int) -> None:
    """Puts the blocks of `model.layers` into checkpointed segments of `every`; the last may be shorter.

    The model computes the same and keeps its parameters, the same objects in the same order; their names have one level
    more, e.g. "layers.0.1.ln1.weight" for what was "layers.1.ln1.weight".

    Raises:
        ValueError: `every` is not between 1 and the number of blocks.
    """
    blocks = list(model.layers)  # ty: ignore[invalid-argument-type]
    if not 1 <= every <= len(blocks):
        raise ValueError(f"every={every}: must be between 1 and {len(blocks)}, the number of blocks")
    model.layers = nn.ModuleList(
        CheckpointedSegment(*blocks[first : first + every]) for first in range(0, len(blocks), every)
    )


def run_nested(layers: Sequence[Layer], x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The layers one after another on `x`; each half is a checkpoint, and so is each half of a half, down to one layer.

    Of L layers, backward holds about log2(L) inputs and one layer's activations at a time (Chen et al. 2016, section
    4.4): O(log L) memory, where equal segments need O(√L). The price is O(L log L) time: each layer runs again for
    every checkpoint around it, but for those in which it comes last, since PyTorch ends a repeated forward as soon as
    it has what backward asked for.
    """
    if len(layers) == 1:
        return checkpoint(layers[0], x, use_reentrant=False)
    middle = (len(layers) + 1) // 2
    for half in (layers[:middle], layers[middle:]):
        x = checkpoint(run_nested, half, x, use_reentrant=False) if len(half) > 1 else run_nested(half, x)
    return x
