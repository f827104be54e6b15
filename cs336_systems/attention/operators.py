"""FlashAttention as two PyTorch operators, `cs336::flash_attention_forward` and `cs336::flash_attention_backward`.

As operators they are opaque to torch.compile (no graph break, any length), known to fake tensors, and differentiable.
Short sequences notice the Python around a kernel, so that `attend` calls kernels without the dispatcher where nothing
listens there. Forward and backward with kernels that only allocate their results, in microseconds on one core of an
AMD EPYC: `flash_attention` 58; with every call through the dispatcher 96; as `torch.library.custom_op` with
`register_autograd` 111; as a bare autograd Function, which torch.compile would trace into, 46; SDPA 50.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from cs336_systems.attention.implementations import kernels

_LIBRARY = torch.library.Library("cs336", "FRAGMENT")
# `seed` is a tensor, so that torch.compile can trace where it is drawn; it lives on the CPU, so that reading it does
# not wait for a GPU. No argument has a default: the dispatcher would drop arguments that equal it.
_LIBRARY.define(
    "flash_attention_forward(Tensor q, Tensor k, Tensor v, bool is_causal, float scale, float dropout_p, Tensor? seed, "
    "str implementation) -> (Tensor o, Tensor lse)",
    tags=torch.Tag.pt2_compliant_tag,
)
_LIBRARY.define(
    "flash_attention_backward(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, bool is_causal, "
    "float scale, float dropout_p, Tensor? seed, str implementation, bool[3] needs) -> Tensor[]",
    tags=torch.Tag.pt2_compliant_tag,
)
flash_attention_forward = torch.ops.cs336.flash_attention_forward.default
flash_attention_backward = torch.ops.cs336.flash_attention_backward.default


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
    implementation: str,
) -> tuple[Tensor, Tensor]:
    if q.numel() == 0 or k.numel() == 0:  # nothing to attend, and no kernel is launched on an empty grid
        return torch.zeros_like(q), q.new_full(q.shape[:-1], -torch.inf, dtype=_lse_dtype(q))
    forward, _ = kernels(implementation)
    return forward(q, k, v, is_causal, scale, dropout_p, 0 if seed is None else int(seed), 0)


def _gradients(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
    implementation: str,
    needs: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dq, dk and dv; those that are not needed may be None."""
    if q.numel() == 0 or k.numel() == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    _, backward = kernels(implementation)
    seed_value = 0 if seed is None else int(seed)
    return backward(do, q, k, v, o, lse, is_causal, scale, dropout_p, seed_value, 0, tuple(needs))


def _backward(*args: Any) -> list[Tensor]:
    grads = zip(_gradients(*args), args[-1], strict=True)
    return [grad for grad, needed in grads if needed and grad is not None]


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=_lse_dtype(q))


def _backward_fake(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *settings: Any) -> list[Tensor]:
    needs = settings[-1]
    return [torch.empty_like(x) for x, needed in zip((q, k, v), needs, strict=True) if needed]


_PLAIN = frozenset((Tensor, Parameter))


def _is_intercepted(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a compiler, a mode (fake tensors, a FLOP counter, selective checkpointing), a transform, a tensor
    subclass or a meta tensor needs the operators. Else their implementations are called without the dispatcher.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or not (type(q) in _PLAIN and type(k) in _PLAIN and type(v) in _PLAIN)
        or q.is_meta
    )


def _forward_without_autograd(q: Tensor, k: Tensor, v: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    if not _is_intercepted(q, k, v):
        return _forward(q, k, v, *settings)
    with torch._C._AutoDispatchBelowAutograd():
        return flash_attention_forward(q, k, v, *settings)


def _backward_without_autograd(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *settings: Any) -> list[Tensor]:
    if not _is_intercepted(q, k, v):
        return _backward(do, q, k, v, *settings)
    with torch._C._AutoDispatchBelowAutograd():
        return flash_attention_backward(do, q, k, v, *settings)


def _spread(grads: Sequence[Tensor], needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """The gradients that are needed, in their inputs' places."""
    remaining = iter(grads)
    return tuple([next(remaining) if needed else None for needed in needs])


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        q, k, v, is_causal, scale, dropout_p, seed, ctx.implementation = args
        o, lse = _forward_without_autograd(*args)
        ctx.save_for_backward(q, k, v, o, lse, seed)
        ctx.set_materialize_grads(False)
        ctx.settings = is_causal, scale, dropout_p
        ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        do = grad_outputs[0]  # the other is the logsumexp's, which has none
        if do is None:
            return (None,) * 8
        *tensors, seed = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        grads = _backward_autograd(do, *tensors, *ctx.settings, seed, ctx.implementation, needs)
        return *_spread(grads, needs), *(None,) * 5


class _DirectFlashAttention(torch.autograd.Function):
    """The same where nothing intercepts the call: without looking again, without an output that nobody reads, and with
    the settings as one argument, since PyTorch examines each."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, settings: tuple) -> Tensor:
        o, lse = _forward(q, k, v, *settings)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.set_materialize_grads(False)
        ctx.settings = settings
        return o

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        (do,) = grad_outputs
        if do is None:
            return (None,) * 4
        q, k, v, o, lse = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled() or _is_intercepted(q, k, v):  # what is so now need not have been so in forward
            return *_spread(_backward_autograd(do, q, k, v, o, lse, *ctx.settings, needs), needs), None
        return *_gradients(do, q, k, v, o, lse, *ctx.settings, needs), None


class _NoSecondDerivative(torch.autograd.Function):
    """The backward operator where someone builds a graph through it: using that graph is an error, not silence."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        return tuple(_backward_without_autograd(*args))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError(
            "flash_attention has no second derivative: its backward pass is a kernel that autograd cannot "
            'differentiate. Use implementation="reference" (or "sdpa" with its math backend) for double backward.'
        )


def _is_differentiated(q: Tensor, k: Tensor, v: Tensor) -> bool:
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    # Forward-mode derivatives are not implemented: the Function says so, where the kernel alone would drop them.
    return needs_grad or forward_ad._current_level >= 0


def _forward_autograd(q: Tensor, k: Tensor, v: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    if _is_differentiated(q, k, v):
        return _FlashAttention.apply(q, k, v, *settings)
    return _forward_without_autograd(q, k, v, *settings)


def _backward_autograd(*args: Any) -> list[Tensor]:
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args):
        return list(_NoSecondDerivative.apply(*args))
    return _backward_without_autograd(*args)


_LIBRARY.impl("flash_attention_forward", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("flash_attention_backward", _backward, "CompositeExplicitAutograd")
_LIBRARY.impl("flash_attention_forward", _forward_autograd, "Autograd")
_LIBRARY.impl("flash_attention_backward", _backward_autograd, "Autograd")
torch.library.register_fake("cs336::flash_attention_forward", _forward_fake, lib=_LIBRARY)
torch.library.register_fake("cs336::flash_attention_backward", _backward_fake, lib=_LIBRARY)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
    implementation: str,
) -> Tensor:
    """The output of an implementation that is a pair of kernels, differentiable; inputs checked by the caller."""
    settings = is_causal, scale, dropout_p, seed, implementation
    if _is_intercepted(q, k, v):
        return flash_attention_forward(q, k, v, *settings)[0]
    if _is_differentiated(q, k, v):
        return _DirectFlashAttention.apply(q, k, v, settings)
    return _forward(q, k, v, *settings)[0]
