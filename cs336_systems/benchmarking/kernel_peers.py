"""What scripts/kernel_benchmark.py times: each kernel's work as the fused kernel, eager PyTorch, torch.compile, and
PyTorch's own fused function do it, with the memory traffic or the operations that it needs at least.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cs336_basics.model import BasicsTransformerLM, silu
from cs336_basics.optimizer import AdamW
from cs336_basics.rotary import RotaryEmbedding
from cs336_systems.benchmarking.attention_cells import torch_dtype
from cs336_systems.benchmarking.call_timing import Work
from cs336_systems.kernels import support

if TYPE_CHECKING:
    from cs336_systems.benchmarking.kernel_benchmark import KernelCell

LOSS_CHUNK = 4096  # tokens of a chunk in the chunked peer of linear-cross-entropy
RMS_EPS = 1e-5


def make_work(cell: KernelCell) -> Work:
    """The cell's call, on random inputs on its device. Raises `Unsupported` where the fused kernels cannot run."""
    from cs336_systems.records import Unsupported

    missing = support.why_not(cell.device) if cell.implementation == "fused" else None
    if missing is not None:
        raise Unsupported(missing)
    make = {"adamw": _adamw, "linear-cross-entropy": _linear_cross_entropy}.get(cell.kernel, _elementwise)
    return make(cell)


# ---- Elementwise kernels: memory traffic is what they cost -----------------------------------------------------------


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + RMS_EPS) * weight).to(x.dtype)


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    h = x + residual
    return _rms_norm(h, weight), h


def _silu_multiply(a: Tensor, b: Tensor) -> Tensor:
    return silu(a) * b


def _elementwise(cell: KernelCell) -> Work:
    function, inputs, forward, backward = _elementwise_parts(cell)
    outputs = function(*inputs)
    several = outputs if isinstance(outputs, tuple) else (outputs,)
    gradients = [torch.randn(y.shape, dtype=y.dtype, device=y.device) for y in several]  # not laid out like y
    row_bytes = several[0].numel() * several[0].element_size()
    n_bytes = row_bytes * {"forward": forward, "backward": backward, "both": forward + backward}[cell.phase]

    def differentiate(outputs: Any, retain_graph: bool) -> None:
        several = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.autograd.backward(several, gradients, retain_graph=retain_graph)

    calls = {
        "forward": lambda: function(*inputs),
        "backward": lambda: differentiate(outputs, True),
        "both": lambda: differentiate(function(*inputs), False),
    }
    return Work(calls[cell.phase], inputs, n_bytes=n_bytes)


def _elementwise_parts(cell: KernelCell) -> tuple[Callable, list[Tensor], int, int]:
    """The function, its inputs, and how many tensors of its output's size forward and backward read and write."""
    from cs336_systems.kernels.rms_norm import add_rms_norm, rms_norm
    from cs336_systems.kernels.rope import rope
    from cs336_systems.kernels.swiglu import silu_multiply

    def random(*shape: int) -> Tensor:
        dtype = torch_dtype(cell.precision)
        return torch.randn(shape, dtype=dtype, device=cell.device, requires_grad=True)

    functions: dict[str, Callable]
    x_shape = cell.tokens, cell.d_model
    if cell.kernel == "rms-norm":
        functions = {"fused": rms_norm, "eager": _rms_norm, "torch": _torch_rms_norm}
        inputs, traffic = [random(*x_shape), random(cell.d_model)], (2, 3)
    elif cell.kernel == "add-rms-norm":
        functions = {"fused": add_rms_norm, "eager": _add_rms_norm}
        inputs, traffic = [random(*x_shape), random(*x_shape), random(cell.d_model)], (4, 4)
    elif cell.kernel == "swiglu":
        functions = {"fused": silu_multiply, "eager": _silu_multiply}
        inputs, traffic = [random(cell.tokens, cell.d_ff) for _ in range(2)], (3, 5)
    else:  # queries and keys, which lie as their projections leave them
        heads, head_dim = cell.num_heads, cell.d_model // cell.num_heads
        embedding = RotaryEmbedding(cell.tokens, head_dim, device=cell.device)
        cos, sin = embedding.cos, embedding.sin
        functions = {
            "fused": lambda q, k: (rope(_heads(q, heads), cos, sin), rope(_heads(k, heads), cos, sin)),
            "eager": lambda q, k: (embedding(_heads(q, heads)), embedding(_heads(k, heads))),
        }
        inputs, traffic = [random(1, *x_shape) for _ in range(2)], (4, 4)
    return _compiled_if_asked(cell, functions), inputs, *traffic


def _torch_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, RMS_EPS)


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _compiled_if_asked(cell: KernelCell, functions: dict[str, Callable]) -> Callable:
    if cell.implementation == "compiled":
        torch.compiler.reset()  # each cell's shapes are its own: none is to be generalised from the last one's
        return torch.compile(functions["eager"], dynamic=False)
    return functions[cell.implementation]


# ---- The last layer and the loss: matrix products are what they cost -------------------------------------------------


def _plain_loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy((x @ weight.T).float(), targets)


def _chunked_loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """A chunk of tokens at a time, whose logits are made again in backward."""

    def of_chunk(x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy((x @ weight.T).float(), targets, reduction="sum")

    chunks = zip(x.split(LOSS_CHUNK), targets.split(LOSS_CHUNK), strict=True)
    losses = [checkpoint(of_chunk, *chunk, use_reentrant=False) for chunk in chunks]
    return torch.stack(losses).sum() / len(targets)


def _linear_cross_entropy(cell: KernelCell) -> Work:
    from cs336_systems.kernels.linear_cross_entropy import linear_cross_entropy

    dtype = torch_dtype(cell.precision)
    x = torch.randn(cell.tokens, cell.d_model, dtype=dtype, device=cell.device, requires_grad=True)
    weight = torch.randn(cell.vocab_size, cell.d_model, dtype=dtype, device=cell.device)
    weight = weight.mul_(cell.d_model**-0.5).requires_grad_()
    targets = torch.randint(cell.vocab_size, (cell.tokens,), device=cell.device)
    functions: dict[str, Callable] = {"fused": linear_cross_entropy, "eager": _plain_loss, "torch": _chunked_loss}
    function = _compiled_if_asked(cell, functions)
    product = 2 * cell.tokens * cell.d_model * cell.vocab_size
    if cell.phase == "forward":
        return Work(torch.no_grad()(lambda: function(x, weight, targets)), (x, weight), flops=product)
    return Work(lambda: function(x, weight, targets).backward(), (x, weight), flops=3 * product)


# ---- The optimizer ---------------------------------------------------------------------------------------------------


def _adamw(cell: KernelCell) -> Work:
    from cs336_systems.kernels.adamw import FusedAdamW

    with torch.device("meta"):
        model = BasicsTransformerLM(cell.vocab_size, 1, cell.d_model, cell.num_layers, cell.num_heads, cell.d_ff)
    dtype = torch_dtype(cell.precision)
    parameters = [torch.randn(p.shape, dtype=dtype, device=cell.device, requires_grad=True) for p in model.parameters()]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    if cell.implementation == "torch":
        optimizer: Any = torch.optim.AdamW(parameters, fused=True)
    elif cell.implementation == "compiled":
        optimizer = torch.optim.AdamW(parameters)
    else:
        optimizer = {"fused": FusedAdamW, "eager": AdamW}[cell.implementation](parameters)
    step = optimizer.step
    if cell.implementation == "compiled":
        torch.compiler.reset()
        step = torch.compile(optimizer.step)
    # Reads parameter, gradient and both moments, writes all but the gradient.
    return Work(step, n_bytes=7 * sum(p.numel() * p.element_size() for p in parameters))
