"""Activation checkpointing: keep the inputs of segments of blocks, and run a segment again when backward comes to it.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost": equal segments (section 4.1) and nested ones (4.4).
Selective, a segment keeps attention's output too and repeats only the rest (Korthikanti et al. 2022, section 5).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from cs336_systems.attention.operators import flash_attention_forward

Layer = Callable[[Tensor], Tensor]


class CheckpointedSegment(nn.Sequential):
    """Modules in a row, for which only the first one's input is kept between forward and backward; with
    `keeps_attention` also the output and the logsumexp of each FlashAttention, which then runs once and not twice."""

    keeps_attention = False

    def forward(self, input: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """(…) to (…), as the modules in a row give it. Under `torch.no_grad()` it is a plain `nn.Sequential`."""
        # torch.compile follows a checkpoint without a context, and not one whose context is chosen at run time.
        if not self.keeps_attention:
            return checkpoint(super().forward, input, use_reentrant=False)
        context = partial(create_selective_checkpoint_contexts, [flash_attention_forward])
        return checkpoint(super().forward, input, use_reentrant=False, context_fn=context)


def checkpoint_blocks(model: nn.Module, every: int, keep_attention: bool = False, n_blocks: int | None = None) -> None:
    """Puts the blocks of `model.layers` into checkpointed segments of `every`; the last may be shorter.

    The model computes the same and keeps its parameters, the same objects in the same order; their names have one level
    more, e.g. "layers.0.1.ln1.weight" for what was "layers.1.ln1.weight".

    Args:
        model: its `layers` are called one after another, each on the output of the one before.
        every: blocks in a segment.
        keep_attention: segments keep what the flash implementations of attention return (`flash_attention`'s "triton",
            "hopper" and "pytorch"; others run again). It costs a kept output a block, and some microseconds of Python
            for each operation in the segments.
        n_blocks: only the first so many; the others stay as they are. The first, since backward has freed what the
            last ones kept when it comes to run the first again.

    Raises:
        ValueError: `every` is not between 1 and the number of blocks, or `n_blocks` not between 0 and it.
    """
    blocks = list(model.layers)  # ty: ignore[invalid-argument-type]
    if not 1 <= every <= len(blocks):
        raise ValueError(f"every={every}: must be between 1 and {len(blocks)}, the number of blocks")
    n_blocks = len(blocks) if n_blocks is None else n_blocks
    if not 0 <= n_blocks <= len(blocks):
        raise ValueError(f"n_blocks={n_blocks}: must be between 0 and {len(blocks)}, the number of blocks")
    segments = [
        CheckpointedSegment(*blocks[first : min(first + every, n_blocks)]) for first in range(0, n_blocks, every)
    ]
    for segment in segments:
        segment.keeps_attention = keep_attention
    model.layers = nn.ModuleList([*segments, *blocks[n_blocks:]])


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
