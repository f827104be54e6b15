"""A language model's last layer and its loss in one function, of which the logits never exist whole.

Loss: mean over the tokens of logsumexp(z) - z[target], with z = W x. Gradient with respect to a token's logits:
(softmax(z) - onehot(target)) / tokens. At 32,768 tokens and a vocabulary of 151,936 the logits alone are 9.3 GiB in
bfloat16, and plain PyTorch holds several such tensors. Here a chunk of tokens at a time: cuBLAS writes the chunk's
logits into one buffer, a kernel makes the losses and puts the logits' gradient in their place, and cuBLAS multiplies
that into both gradients. So the gradients are made in forward, while the logits are there, and backward only scales
them: three matrix products in all, where computing the logits again in backward would be four.

Keeping gradients and not logits for backward is an idea of Hsu et al. 2024, "Liger Kernel".
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from cs336_systems.kernels.support import autocast_dtype, check_device, check_tensors, launch, operator, tl, triton

# Of a chunk's logits. Each chunk adds to the weight's gradient, which is read and written for that, 5 GB at the size
# above with d_model 4,096: fewer and larger chunks are faster, and need more memory.
DEFAULT_CHUNK_BYTES = 2**30

# Tiles of cuBLAS's products are 128 or 256 rows high, and the buffer's rows begin at multiples of 128 bytes or more.
_ROWS_MULTIPLE = 128
_COLUMNS_MULTIPLE = 64
_MAX_BLOCK = 4096


@triton.jit
def _cross_entropy_kernel(
    logits_ptr,  # (n_rows, vocab); the gradient takes their place
    targets_ptr,  # (n_rows,) int64
    losses_ptr,  # (n_rows,) float32
    row_stride,
    vocab,
    ignore_index,
    NEEDS_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: a token's loss, and in place of its logits their gradient, not yet divided by the tokens."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row)
    is_counted = target != ignore_index
    logits_ptr += row * row_stride
    is_in_range = (target >= 0) & (target < vocab)
    target_logit = tl.load(logits_ptr + target, mask=is_in_range, other=0.0).to(tl.float32)

    # Online softmax: one maximum for all, but sums by lane, so that only the maximum makes the lanes wait for another.
    # It begins at a number and not at -inf, as -inf - -inf is no number.
    max_logit = tl.full((), -3.0e38, tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + columns, mask=columns < vocab, other=float("-inf")).to(tl.float32)
        new_max = tl.maximum(max_logit, tl.max(logits, axis=0))
        sums = sums * tl.exp(max_logit - new_max) + tl.exp(logits - new_max)
        max_logit = new_max
    total = tl.sum(sums, axis=0)
    # Never the logsumexp itself: large logits leave it few digits behind the point, and exp() would show it.
    loss = tl.log(total) + (max_logit - target_logit)
    tl.store(losses_ptr + row, tl.where(is_counted, loss, 0.0))

    if NEEDS_GRADIENT:
        # From the end: what was read last is the likeliest to be still in the cache.
        inverse_total = 1.0 / total
        n_blocks = tl.cdiv(vocab, BLOCK)
        for i in range(n_blocks):
            columns = (n_blocks - 1 - i) * BLOCK + tl.arange(0, BLOCK)
            logits = tl.load(logits_ptr + columns, mask=columns < vocab, other=0.0).to(tl.float32)
            gradient = tl.exp(logits - max_logit) * inverse_total - tl.where(columns == target, 1.0, 0.0)
            gradient = tl.where(is_counted, gradient, 0.0)
            tl.store(logits_ptr + columns, gradient.to(logits_ptr.dtype.element_ty), mask=columns < vocab)


def _launch_cross_entropy(
    logits: Tensor, targets: Tensor, losses: Tensor, ignore_index: int, needs_gradient: bool
) -> None:
    n_rows, vocab = logits.shape
    block = min(triton.next_power_of_2(vocab), _MAX_BLOCK)
    launch(
        _cross_entropy_kernel, n_rows, logits, targets, losses, logits.stride(0), vocab, ignore_index,
        NEEDS_GRADIENT=needs_gradient, BLOCK=block, num_warps=max(1, block // 512),
    )  # fmt: skip


def chunk_rows(n_tokens: int, vocab_size: int, element_bytes: int, chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> int:
    """Tokens of a chunk, so that its logits take at most `chunk_bytes`: chunks of about one size, and, where that many
    fit, a multiple of 128 tokens.

    For example 32,768 tokens with a vocabulary of 151,936 in bfloat16 and 2**30 bytes: 3,328 tokens, in ten chunks.
    Raises ValueError if not even one token's logits fit.
    """
    padded = _padded(vocab_size)
    most = chunk_bytes // (padded * element_bytes)
    if most < 1:
        raise ValueError(
            f"chunk_bytes is {chunk_bytes}; the logits of one token take {padded * element_bytes}, it must be that much"
        )
    if n_tokens <= most:
        return max(1, n_tokens)
    multiple = _ROWS_MULTIPLE if most >= _ROWS_MULTIPLE else 1
    most -= most % multiple
    n_chunks = -(-n_tokens // most)
    return _round_up(-(-n_tokens // n_chunks), multiple)


def _padded(vocab_size: int) -> int:
    return _round_up(vocab_size, _COLUMNS_MULTIPLE)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _add_product(out: Tensor, a: Tensor, b: Tensor, beta: int) -> None:
    """out ← beta·out + a b, in float32 whatever a and b are: the sum over chunks is rounded like that over tokens."""
    if a.dtype == torch.float32:
        torch.addmm(out, a, b, beta=beta, out=out)
    elif a.is_cuda:
        torch.ops.aten.addmm.dtype_out(out, a, b, torch.float32, beta=beta, out=out)
    else:
        torch.addmm(out, a.float(), b.float(), beta=beta, out=out)


def _linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    chunk_bytes: int,
    dtype: torch.dtype,
    needs_dx: bool,
    needs_dw: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss, the number of tokens that count, and the gradients of the summed loss: dx in `dtype`, dw in float32,
    each empty where it is not needed. x (n, d), weight (vocab, d), targets (n,)."""
    n_tokens, (vocab_size, d_model) = x.shape[0], weight.shape
    _check_range(targets, vocab_size, ignore_index)
    with torch.autocast(x.device.type, enabled=False):
        x, weight = x.to(dtype), weight.to(dtype)
        dx = x.new_empty((n_tokens, d_model) if needs_dx else (0, d_model))
        dw = x.new_empty((vocab_size, d_model) if needs_dw else (0, d_model), dtype=torch.float32)
        losses = x.new_empty(n_tokens, dtype=torch.float32)
        rows = chunk_rows(n_tokens, vocab_size, x.element_size(), chunk_bytes)
        buffer = x.new_empty(rows, _padded(vocab_size))[:, :vocab_size]
        for first in range(0, n_tokens, rows):
            chunk = slice(first, first + rows)
            x_chunk = x[chunk]
            logits = buffer[: x_chunk.shape[0]]
            torch.mm(x_chunk, weight.T, out=logits)
            _launch_cross_entropy(logits, targets[chunk], losses[chunk], ignore_index, needs_dx or needs_dw)
            if needs_dx:
                torch.mm(logits, weight, out=dx[chunk])
            if needs_dw:
                _add_product(dw, logits.T, x_chunk, beta=int(first > 0))
        if n_tokens == 0:
            dw.zero_()
        n_counted = (targets != ignore_index).sum().float()
        return losses.sum() / n_counted, n_counted, dx, dw


def _linear_cross_entropy_fake(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    chunk_bytes: int,
    dtype: torch.dtype,
    needs_dx: bool,
    needs_dw: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    vocab_size, d_model = weight.shape
    scalar = x.new_empty((), dtype=torch.float32)
    dx = x.new_empty((x.shape[0] if needs_dx else 0, d_model), dtype=dtype)
    dw = x.new_empty((vocab_size if needs_dw else 0, d_model), dtype=torch.float32)
    return scalar, torch.empty_like(scalar), dx, dw


_loss_and_gradients = operator(_linear_cross_entropy, _linear_cross_entropy_fake)


def _check_range(targets: Tensor, vocab_size: int, ignore_index: int) -> None:
    is_good = ((targets >= 0) & (targets < vocab_size)) | (targets == ignore_index)
    if targets.is_cuda:  # asking would make the host wait for the device: the device itself stops
        torch._assert_async(is_good.all(), f"linear_cross_entropy: a target is not in [0, {vocab_size})")
    elif not is_good.all():
        raise ValueError(
            f"linear_cross_entropy: a target is {targets[~is_good][0].item()}; it must be at least 0, less than the "
            f"vocabulary's {vocab_size}, or ignore_index, {ignore_index}"
        )


def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """gradient · factor (1,) in `dtype`, in place if that is the gradient's: it can be gigabytes. The product is made
    in float32, as `factor` has a dimension; one without would be rounded to the gradient's dtype first."""
    if torch.compiler.is_compiling():
        return (gradient * factor).to(dtype)
    out = gradient if gradient.dtype == dtype else torch.empty_like(gradient, dtype=dtype)
    return torch.mul(gradient, factor, out=out)


class LinearCrossEntropy(torch.autograd.Function):
    """`LinearCrossEntropy.apply(x, weight, targets, ignore_index, chunk_bytes, dtype, needs_dx, needs_dw)`: x (n, d),
    weight (vocab, d), targets (n,) int64 -> the mean loss, float32. Arguments are checked in `linear_cross_entropy`.

    Its backward pass scales what forward made, where it lies: with `retain_graph=True` a second one is refused by
    autograd, which finds that what it saved has been modified.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, ignore_index, chunk_bytes, dtype, needs_dx, needs_dw):
        loss, n_counted, dx, dw = _loss_and_gradients(
            x, weight, targets, ignore_index, chunk_bytes, dtype, needs_dx, needs_dw
        )
        ctx.save_for_backward(n_counted, dx, dw)
        ctx.needs, ctx.dtypes = (needs_dx, needs_dw), (x.dtype, weight.dtype)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss):
        n_counted, *gradients = ctx.saved_tensors
        # Without tokens that count the loss is NaN, and the gradients are 0, as F.cross_entropy has it.
        factor = (grad_loss / n_counted.clamp(min=1)).view(1)
        dx, dw = (
            _scaled(gradient, factor, dtype) if needed else None
            for gradient, dtype, needed in zip(gradients, ctx.dtypes, ctx.needs, strict=True)
        )
        return dx, dw, None, None, None, None, None, None


def linear_cross_entropy(
    x: Float[Tensor, "... d_model"],
    weight: Float[Tensor, "vocab_size d_model"],
    targets: Int[Tensor, "..."],
    ignore_index: int = -100,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
) -> Float[Tensor, ""]:
    """`F.cross_entropy(x @ weight.T, targets)`, of which only `chunk_bytes` of logits exist at a time.

    x (..., d_model) and weight (vocab_size, d_model) are float32, float16 or bfloat16, in one dtype unless autocast is
    on, on one CUDA device (or on a CPU in Triton's interpreter); targets (...) are int64 or int32, in [0, vocab_size)
    or `ignore_index`, which counts for nothing. The loss is a float32 scalar: the mean over the tokens that count, NaN
    if there is none.

    Logits are rounded to the inputs' dtype, or autocast's, as `x @ weight.T` is; softmax and loss are float32, and so
    are the gradient's sums over tokens and chunks. Gradients get the dtypes of x and weight; that of x is rounded twice
    if it is narrow, before and after the division by the number of tokens. They are made in forward where something
    requires them: the loss itself can be multiplied and differentiated once, and with `retain_graph=True` not again.

    Raises:
        ValueError: shapes, dtypes or devices that don't fit together, `chunk_bytes` below one token's logits, no Triton
            here, or, on a CPU, a target out of range. On a GPU such a target is an assertion on the device, as in
            `F.cross_entropy`.
    """
    if x.ndim < 1 or weight.ndim != 2 or x.shape[-1] != weight.shape[1] or x.shape[:-1] != targets.shape:
        raise ValueError(
            "linear_cross_entropy: x must be (..., d_model), weight (vocab_size, d_model) and targets (...), got "
            f"{tuple(x.shape)}, {tuple(weight.shape)} and {tuple(targets.shape)}"
        )
    if weight.shape[0] < 1:
        raise ValueError(f"linear_cross_entropy: weight is {tuple(weight.shape)}; the vocabulary must not be empty")
    check_tensors("linear_cross_entropy", x=x, weight=weight)
    check_device("linear_cross_entropy", x=x, targets=targets)
    if targets.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"linear_cross_entropy: targets is {targets.dtype}; it must be int64 or int32")
    dtype = autocast_dtype(x.device.type)
    if dtype is None and x.dtype != weight.dtype:
        raise ValueError(f"linear_cross_entropy: x is {x.dtype} and weight {weight.dtype}; without autocast give one")
    dtype = dtype or x.dtype
    chunk_rows(targets.numel(), weight.shape[0], dtype.itemsize, chunk_bytes)
    is_differentiated = torch.is_grad_enabled()
    loss: Tensor = LinearCrossEntropy.apply(
        x.reshape(-1, x.shape[-1]),
        weight,
        targets.reshape(-1).long(),
        ignore_index,
        chunk_bytes,
        dtype,
        is_differentiated and x.requires_grad,
        is_differentiated and weight.requires_grad,
    )
    return loss
