"""Puts the fused kernels into a `BasicsTransformerLM`: RMSNorm with the addition before it, SwiGLU, rotary positions,
and the last layer with the loss.

Modules stay where they are, with their parameters and names; only their classes change, to subclasses of what they
were, so that a state dict goes from a plain model to a fused one and back.

Forward and backward at 8b's shapes (32,768 tokens, bfloat16, an H200), ms, the kernels alone, from
results/kernel_benchmark/kernels:

| | fused | torch.compile's | eager |
|---|---|---|---|
| RMSNorm | 0.39 | 0.41 | 5.96 |
| RMSNorm with the addition | 0.73 | 0.72 | 6.45 |
| SwiGLU | 1.33 | 1.33 | 4.31 |
| rotary positions | 0.66 | 0.81 | 10.89 |

Where torch.compile's code is as fast, both are as fast as memory: those kernels are for models that are not compiled.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn

from cs336_basics.model import BasicsTransformerLM, RMSNorm, SwiGLU, TransformerBlock
from cs336_basics.rotary import RotaryEmbedding
from cs336_systems.kernels.linear_cross_entropy import linear_cross_entropy
from cs336_systems.kernels.rms_norm import add_rms_norm, rms_norm
from cs336_systems.kernels.rope import rope
from cs336_systems.kernels.support import autocast_dtype
from cs336_systems.kernels.swiglu import silu_multiply
from cs336_systems.recomputation import made_again


class FusedRMSNorm(RMSNorm):
    """`RMSNorm` in one kernel, with the addition before it if there is one. Under autocast it returns autocast's dtype,
    to which the layers that read it would round each for itself."""

    def forward(self, x: Float[Tensor, "*batch d"], residual: Float[Tensor, "*batch d"] | None = None) -> Any:
        """The norm of x, or, with a residual, that of x + residual and the sum itself; all (..., d)."""
        dtype = autocast_dtype(x.device.type)
        if residual is None:
            return rms_norm(x, self.weight, self.eps, dtype)
        return add_rms_norm(x, residual, self.weight, self.eps, dtype)


class FusedSwiGLU(SwiGLU):
    """`SwiGLU` with one kernel between its matrix products; with `recomputes` backward runs that kernel again, and the
    last product's input is not kept."""

    recomputes = False

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        a, b = self.w1(x), self.w3(x)
        hidden = silu_multiply(a, b)
        if not self.recomputes:
            return self.w2(hidden)
        with made_again(hidden, partial(silu_multiply, a.detach(), b.detach())):
            return self.w2(hidden)


class FusedRotaryEmbedding(RotaryEmbedding):
    """`RotaryEmbedding` in one kernel, for (batch, heads, seq, dim) as the model calls it; other shapes as ever."""

    def forward(
        self, x: Float[Tensor, "*batch seq dim"], pos_ids: Int[Tensor, "... seq"] | None = None
    ) -> Float[Tensor, "*batch seq dim"]:
        if x.ndim != 4 or x.shape[-1] != self.dim or (pos_ids is None and x.shape[-2] > self.context_length):
            return super().forward(x, pos_ids)  # says what is wrong, if anything is
        if pos_ids is None:
            return rope(x, self.cos, self.sin)
        if pos_ids.ndim > 1 and pos_ids.shape[-2] == 1:
            pos_ids = pos_ids.squeeze(-2)  # the same for all heads
        if pos_ids.ndim > 2 or pos_ids.shape[-1] != x.shape[-2] or (pos_ids.ndim == 2 and len(pos_ids) != len(x)):
            return super().forward(x, pos_ids)
        return rope(x, self.cos, self.sin, pos_ids)


class FusedTransformerBlock(TransformerBlock):
    """`TransformerBlock` whose first addition is part of the second norm. With `recomputes` backward norms again, and
    what the norms return is not kept."""

    recomputes = False

    def forward(self, x: Float[Tensor, "*batch seq d_model"]) -> Float[Tensor, "*batch seq d_model"]:
        normed = self.ln1(x)
        with self._made_again(normed, self.ln1, x):
            attended = self.attn(normed)
        normed, x = self.ln2(attended, residual=x)
        with self._made_again(normed, self.ln2, x):
            return x + self.ffn(normed)

    def _made_again(self, normed: Tensor, norm: RMSNorm, x: Tensor) -> AbstractContextManager[None]:
        if not self.recomputes:
            return nullcontext()
        return made_again(normed, partial(rms_norm, x.detach(), norm.weight.detach(), norm.eps, normed.dtype))


class FusedTransformerLM(BasicsTransformerLM):
    """`BasicsTransformerLM` that can be asked for its loss, without ever making all logits."""

    def forward(
        self, x: Int[Tensor, "*batch seq"], targets: Int[Tensor, "*batch seq"] | None = None
    ) -> Float[Tensor, "..."]:
        """Token ids (batch, seq) to logits (batch, seq, vocab_size), or with `targets` (batch, seq) to the mean
        cross-entropy, a float32 scalar."""
        hidden = self.token_embeddings(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.lm_head(self.ln_final(hidden), targets)


def _head_or_loss(
    self: Any, x: Float[Tensor, "*batch d_model"], targets: Int[Tensor, "*batch"] | None = None
) -> Float[Tensor, "..."]:
    """`lm_head`'s forward. The loss is made inside the layer's call, where a sharded weight is whole."""
    return type(self).forward(self, x) if targets is None else linear_cross_entropy(x, self.weight, targets)


_FUSED: dict[type, type] = {
    RMSNorm: FusedRMSNorm,
    SwiGLU: FusedSwiGLU,
    RotaryEmbedding: FusedRotaryEmbedding,
    TransformerBlock: FusedTransformerBlock,
    BasicsTransformerLM: FusedTransformerLM,
}


def recompute_elementwise(block: nn.Module) -> None:
    """Have a `FusedTransformerBlock` keep for backward only its input and what matrix products and attention return.
    What the norms and SwiGLU's activation make of that is made again, by one kernel each: a few hundredths of the time
    that the whole block takes. Not for a block in a checkpointed segment, nor for a compiled one."""
    for module in block.modules():
        if isinstance(module, (FusedTransformerBlock, FusedSwiGLU)):
            module.recomputes = True


def use_fused_kernels(model: BasicsTransformerLM, only_loss: bool = False) -> FusedTransformerLM:
    """Changes a model in place, and returns it: `model(inputs, targets)` is then the mean loss, `model(inputs)` logits.

    With `only_loss` the blocks stay as they are, for torch.compile to fuse. Parameters, their names and the state dict
    are what they were. Call it before the model is compiled, wrapped for data parallelism or divided into checkpointed
    segments. The kernels run on a CUDA device, or on a CPU in Triton's interpreter; elsewhere forward raises ValueError
    (`support.why_not` tells in advance).

    Raises:
        TypeError: `model` is not a `BasicsTransformerLM` itself, or is fused already.
    """
    if type(model) is not BasicsTransformerLM:
        raise TypeError(f"model is a {type(model).__name__}; it must be a BasicsTransformerLM that is not fused yet")
    for module in [model] if only_loss else model.modules():
        module.__class__ = _FUSED.get(type(module), type(module))
    # An instance's method and no subclass: what shards layers knows them by their class.
    vars(model.lm_head)["forward"] = partial(_head_or_loss, model.lm_head)
    assert isinstance(model, FusedTransformerLM)
    return model
