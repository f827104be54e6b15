"""`flash_attention`, the function that people call: it checks its inputs, chooses an implementation, and dispatches.

Host work is kept short (see operators.py): below a length of about 1,024 it takes longer than the kernels.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from cs336_systems.attention.checks import check_inputs
from cs336_systems.attention.implementations import IMPLEMENTATIONS, choose
from cs336_systems.attention.operators import attend


def flash_attention(
    q: Shaped[Tensor, "*q_shape"],
    k: Shaped[Tensor, "*kv_shape"],
    v: Shaped[Tensor, "..."],
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    implementation: str = "auto",
) -> Float[Tensor, "*q_shape"]:
    """softmax(q kᵀ · scale) v without the matrix of scores in memory (Dao 2023, FlashAttention-2).

    Args:
        q: (batch, n_queries, head_dim) or (batch, heads, n_queries, head_dim), float32, float16 or bfloat16 (float64
            for all implementations but "triton" and "hopper"), head_dim at most 256, any strides.
        k, v: (batch, n_keys, head_dim) or (batch, kv_heads, n_keys, head_dim), in q's dtype; kv_heads divides heads,
            and query head h reads key head h // (heads / kv_heads).
        is_causal: query i sees keys 0 … i, also where n_queries and n_keys differ (as in PyTorch's SDPA).
        scale: 1/sqrt(head_dim) unless given.
        dropout_p: share of the probabilities that is set to 0; the others are divided by 1 - dropout_p. "triton" and
            "pytorch" draw one seed a call from the default generator of the CPU (so `torch.manual_seed` repeats it,
            and no GPU is waited for), and derive the mask from it in forward and again in backward.
        implementation: "triton"; "hopper", with kernels of their own for an H100 or H200 where those are faster;
            "pytorch", tiled like Triton's; "reference", plain attention; "sdpa", PyTorch's; or "auto": for tensors on a
            GPU where they can run "hopper" or "triton", else "pytorch".

    Returns the output, with q's shape, dtype and, as far as they are dense, strides. A query that sees no key (n_keys
    is 0) gets 0. "triton" and "pytorch" are deterministic, and keep q, k, v, the output and a float32 logsumexp for
    backward; their second derivative is an error. Under autocast the inputs are cast to its dtype, as SDPA's are.

    Raises:
        ValueError: inputs whose ranks, shapes, dtypes or devices don't fit together, dtypes that are not floating
            point, dropout_p outside [0, 1), or an unknown implementation.
        RuntimeError: an implementation that can't run here, with what is missing.
    """
    device_type = q.device.type
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        q, k, v = (x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (q, k, v))
    check_inputs(q, k, v)
    if not 0 <= dropout_p < 1:
        raise ValueError(f"flash_attention: dropout_p is {dropout_p}; it must be at least 0 and less than 1")
    if implementation == "auto":
        implementation = choose(q)
    elif implementation not in IMPLEMENTATIONS:
        allowed = ", ".join(["auto", *IMPLEMENTATIONS])
        raise ValueError(f"flash_attention: implementation is {implementation!r}; it must be one of {allowed}")
    else:
        missing = IMPLEMENTATIONS[implementation].why_not(q.device, q.dtype)
        if missing is not None:
            raise RuntimeError(f'flash_attention: implementation="{implementation}" cannot run here: {missing}')
    composite = IMPLEMENTATIONS[implementation].composite

    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    if not -math.inf < scale < math.inf:
        raise ValueError(f"flash_attention: scale is {scale}; it must be a finite number")
    if composite is not None:
        return composite(q, k, v, is_causal, scale, dropout_p)
    # Below 2**31, so that every kernel takes the seed as the same integer type.
    seed = torch.randint(2**31 - 1, (), dtype=torch.int64, device="cpu") if dropout_p > 0 else None
    return attend(q, k, v, is_causal, scale, dropout_p, seed, implementation)
