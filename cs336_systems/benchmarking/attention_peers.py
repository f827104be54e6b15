"""The attention implementations that are measured beside each other, by name: ours, plain attention, and PyTorch's.

Each is a function `attention(q, k, v, is_causal)` of (batch, length, head_dim) or (batch, heads, length, head_dim).
To add one, add a line to `PEERS` and its name to `attention_cells.PeerName`.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Generator, Hashable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from cs336_basics.model import scaled_dot_product_attention
from cs336_systems.attention import flash_attention
from cs336_systems.attention.reference import causal_mask
from cs336_systems.benchmarking.attention_cells import CUDA_ONLY, PeerName, cuda_only
from cs336_systems.benchmarking.isolation import is_out_of_memory
from cs336_systems.records import Unsupported

Attention = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
Compiler = Callable[[Callable], Callable]


def naive(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """The model's own attention: all scores in memory, and its mask made anew at each call."""
    mask = causal_mask(q.shape[-2], k.shape[-2], q.device) if is_causal else None
    return scaled_dot_product_attention(q, k, v, mask)


def sdpa(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """PyTorch's scaled_dot_product_attention; a peer's backend is chosen around its calls, not in them."""
    if q.ndim == 3:  # the fused kernels take four dimensions only
        return sdpa(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), is_causal).squeeze(0)
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def flex(kernel: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """FlexAttention with `kernel`, compiled or not; a length's block mask is made once, at the first call."""
    if q.ndim == 3:
        return flex(kernel, q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), is_causal).squeeze(0)
    return kernel(q, k, v, block_mask=_causal_block_mask(q.shape[-2], q.device) if is_causal else None)


@torch.compiler.disable
@functools.lru_cache(maxsize=1)
def _causal_block_mask(length: int, device: torch.device) -> BlockMask:
    return create_block_mask(lambda batch, head, query, key: query >= key, None, None, length, length, device)


def flash_pytorch(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    return flash_attention(q, k, v, is_causal, implementation="pytorch")


def flash_triton(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    return flash_attention(q, k, v, is_causal, implementation="triton")


def flash_hopper(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    return flash_attention(q, k, v, is_causal, implementation="hopper")


@dataclass(frozen=True)
class Peer:
    """How a peer is made: `build(compiler)` returns its function, with the parts that need compiling compiled.

    `backend` is the one that SDPA may use.
    `is_compiled` says that PyTorch's compiler makes its kernels, which may turn out not to fit the card.
    """

    build: Callable[[Compiler], Attention]
    backend: SDPBackend | None = None
    is_compiled: bool = False


PEERS: dict[PeerName, Peer] = {
    "naive": Peer(lambda compiler: naive),
    "naive-compiled": Peer(lambda compiler: compiler(naive), is_compiled=True),
    "sdpa-flash": Peer(lambda compiler: sdpa, SDPBackend.FLASH_ATTENTION),
    "sdpa-cudnn": Peer(lambda compiler: sdpa, SDPBackend.CUDNN_ATTENTION),
    "sdpa-efficient": Peer(lambda compiler: sdpa, SDPBackend.EFFICIENT_ATTENTION),
    "flex": Peer(lambda compiler: functools.partial(flex, compiler(flex_attention)), is_compiled=True),
    "flash-pytorch": Peer(lambda compiler: flash_pytorch),
    "flash-triton": Peer(lambda compiler: flash_triton),
    "flash-hopper": Peer(lambda compiler: flash_hopper),
}


@contextmanager
def open_peer(name: PeerName, device: torch.device, compiler: Compiler = torch.compile) -> Generator[Attention]:
    """The peer's function, to be called inside the `with` block, where SDPA may use the peer's backend only.

    Args:
        name: a key of `PEERS`.
        device: where its inputs will be.
        compiler: compiles what "naive-compiled" and "flex" need compiled, at their first call.

    Raises:
        Unsupported: from the block too, where PyTorch or the peer says that it can't run on these inputs, with its
            reason. Other errors pass through unchanged.
    """
    peer = PEERS[name]
    if name in CUDA_ONLY and device.type != "cuda":
        raise Unsupported(cuda_only(name, device.type))
    with (
        _refusals_explained(peer),
        nullcontext() if peer.backend is None else sdpa_kernel(peer.backend),
    ):
        yield peer.build(compiler)


_REFUSALS = (
    "No available kernel",  # SDPA, whose backend refuses the inputs
    "No viable backend",  # SDPA, whose backend does not exist on the device
    "cuDNN Frontend error",  # SDPA, whose backend finds only now that it has no kernel
    "cannot run here",  # flash_attention
)
_COMPILER_REFUSALS = ("No valid triton configs", "out of resource")  # no kernel that fits the card's shared memory


@contextmanager
def _refusals_explained(peer: Peer) -> Generator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        try:
            yield
        except Exception as error:
            text = str(error)
            refused = any(sign in text for sign in _REFUSALS)
            if peer.is_compiled:
                refused |= isinstance(error, TorchDynamoException) or any(sign in text for sign in _COMPILER_REFUSALS)
            if is_out_of_memory(error) or not refused:
                raise
            raise Unsupported(_reason(text, [str(warning.message) for warning in caught], peer)) from error


def _reason(error: str, warned: list[str], peer: Peer) -> str:
    """One line. SDPA's error only says that there is no kernel; why not, it warned before, backend by backend."""
    reasons = [text.partition(" (Triggered")[0].strip() for text in warned] if peer.backend is not None else []
    reasons = [text for text in reasons if not text.endswith("because:") and "runtime disabled" not in text]
    return " ".join(dict.fromkeys(reasons)) or next(line.strip() for line in error.splitlines() if line.strip())


@functools.lru_cache(maxsize=1)
def compile_once(function: Callable, dynamic: bool, key: Hashable) -> Callable:
    """`torch.compile(function, dynamic=dynamic)`, the same for the same arguments in a row.

    Another function or key throws away all that was compiled before, so that no cell is slowed by the guards of those
    before it, nor runs eagerly because PyTorch's limit of 8 recompilations was reached.
    """
    torch._dynamo.reset()
    return torch.compile(function, dynamic=dynamic)
