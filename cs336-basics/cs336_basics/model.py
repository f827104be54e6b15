"""A pre-norm Transformer language model with RoPE and SwiGLU: the plain form that all else is measured against.

Parameter names are the course's, so that a state dict of the course's model loads.
"""

import json
import math
import os
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from cs336_basics.nn_utils import softmax
from cs336_basics.rotary import RotaryEmbedding

Device = torch.device | str | None


def _require_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")


class Linear(nn.Module):
    """y = x Wᵀ, without bias. The weight is normal with variance 2 / (d_in + d_out), cut at 3 standard deviations."""

    def __init__(self, d_in: int, d_out: int, device: Device = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        _require_positive(d_in=d_in, d_out=d_out)
        self.weight: Float[Tensor, "d_out d_in"] = nn.Parameter(torch.empty(d_out, d_in, device=device, dtype=dtype))
        std = math.sqrt(2 / (d_in + d_out))
        nn.init.trunc_normal_(self.weight, std=std, a=-3 * std, b=3 * std)

    def forward(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_out"]:
        return x @ self.weight.T


class Embedding(nn.Module):
    """A row of the weight for each token id. The weight is standard normal, cut at 3."""

    def __init__(self, vocab_size: int, d_model: int, device: Device = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        _require_positive(vocab_size=vocab_size, d_model=d_model)
        self.weight: Float[Tensor, "vocab_size d_model"] = nn.Parameter(
            torch.empty(vocab_size, d_model, device=device, dtype=dtype)
        )
        nn.init.trunc_normal_(self.weight, std=1.0, a=-3.0, b=3.0)

    def forward(self, token_ids: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch d_model"]:
        # Not self.weight[token_ids], which takes a negative id for a row counted from the end.
        return F.embedding(token_ids, self.weight)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight over the last dimension (Zhang & Sennrich 2019, eq. 4).

    Computed in float32 (float64 for float64 input), returned in the input's dtype. The weight starts at one.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _require_positive(hidden_size=hidden_size)
        self.weight: Float[Tensor, " hidden_size"] = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*batch hidden_size"]) -> Float[Tensor, "*batch hidden_size"]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        inverse_rms = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * inverse_rms * self.weight).to(x.dtype)


def silu(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """x · σ(x)."""
    return x * torch.sigmoid(x)


class SwiGLU(nn.Module):
    """w2(silu(w1 x) · w3 x) (Shazeer 2020, eq. 6)."""

    def __init__(self, d_model: int, d_ff: int, device: Device = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.w1 = Linear(d_model, d_ff, device, dtype)
        self.w2 = Linear(d_ff, d_model, device, dtype)
        self.w3 = Linear(d_model, d_ff, device, dtype)

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        return self.w2(silu(self.w1(x)) * self.w3(x))


def scaled_dot_product_attention(
    Q: Float[Tensor, "*batch queries d_k"],
    K: Float[Tensor, "*batch keys d_k"],
    V: Float[Tensor, "*batch keys d_v"],
    mask: Bool[Tensor, "... queries keys"] | None = None,
) -> Float[Tensor, "*batch queries d_v"]:
    """softmax(Q Kᵀ / √d_k) V, with every score in memory (Vaswani et al. 2017, section 3.2.1).

    Args:
        mask: True where a query may see a key; broadcasts over leading dimensions. Each query must see some key.
    """
    scores = Q @ K.transpose(-2, -1) / math.sqrt(K.shape[-1])
    if mask is not None:
        scores = torch.where(mask, scores, float("-inf"))
    return softmax(scores, dim=-1) @ V


class CausalMultiHeadSelfAttention(nn.Module):
    """Multi-head self-attention in which each position sees itself and what is before it.

    It looks up this module's `scaled_dot_product_attention` at each call, so that
    `cs336_basics.model.scaled_dot_product_attention = other` puts another implementation into every model. `other` is
    called as `other(q, k, v, mask)` with q, k, v of (batch, heads, length, head_dim); if it has an attribute
    `is_causal` that is True, it masks by itself, and the mask it gets is None.

    Args:
        d_model: the width, a multiple of `num_heads`.
        positional_encoder: applied to queries and keys as `positional_encoder(x, pos_ids)`; None for no positions.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        positional_encoder: nn.Module | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _require_positive(d_model=d_model, num_heads=num_heads)
        if d_model % num_heads:
            raise ValueError(f"num_heads is {num_heads}; it must divide d_model, {d_model}")
        self.num_heads = num_heads
        self.q_proj = Linear(d_model, d_model, device, dtype)
        self.k_proj = Linear(d_model, d_model, device, dtype)
        self.v_proj = Linear(d_model, d_model, device, dtype)
        self.output_proj = Linear(d_model, d_model, device, dtype)
        self.positional_encoder = positional_encoder

    def forward(
        self, x: Float[Tensor, "*batch seq d_model"], token_positions: Int[Tensor, "... seq"] | None = None
    ) -> Float[Tensor, "*batch seq d_model"]:
        """Attend over (batch, seq, d_model); `token_positions` are the positions of x, by default 0 … seq - 1."""
        q, k, v = (
            projection(x).unflatten(-1, (self.num_heads, -1)).transpose(-3, -2)  # (batch, heads, seq, head_dim)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.positional_encoder is not None:
            pos_ids = None if token_positions is None else token_positions.unsqueeze(-2)
            q, k = self.positional_encoder(q, pos_ids), self.positional_encoder(k, pos_ids)
        mask = None
        if not getattr(scaled_dot_product_attention, "is_causal", False):
            seq = x.shape[-2]
            mask = torch.ones(seq, seq, dtype=torch.bool, device=x.device).tril()
        attended = scaled_dot_product_attention(q, k, v, mask)
        return self.output_proj(attended.transpose(-3, -2).flatten(-2))


class TransformerBlock(nn.Module):
    """x + attn(ln1(x)), then x + ffn(ln2(x))."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        d_ff: int,
        positional_encoder: nn.Module | None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.attn = CausalMultiHeadSelfAttention(d_model, num_heads, positional_encoder, device, dtype)
        self.ffn = SwiGLU(d_model, d_ff, device, dtype)
        self.ln1 = RMSNorm(d_model, device=device, dtype=dtype)
        self.ln2 = RMSNorm(d_model, device=device, dtype=dtype)

    def forward(self, x: Float[Tensor, "*batch seq d_model"]) -> Float[Tensor, "*batch seq d_model"]:
        x = x + self.attn(self.ln1(x))
        return x + self.ffn(self.ln2(x))


class BasicsTransformerLM(nn.Module):
    """A decoder-only language model; the input embedding and `lm_head` are not tied.

    Args:
        vocab_size: number of token ids.
        context_length: the longest input.
        d_model, num_layers, num_heads, d_ff: width, blocks, heads a block, width of the feed-forward layer.
        rope_theta: base of the rotary angles.
        device, dtype: where and as what the weights are made; by default torch's own defaults.

    `.config` holds the arguments from `vocab_size` to `rope_theta`, as `from_pretrained` reads them.

    Raises:
        ValueError: a size below 1, heads that don't divide `d_model`, or an odd head dimension.
    """

    def __init__(
        self,
        vocab_size: int,
        context_length: int,
        d_model: int,
        num_layers: int,
        num_heads: int,
        d_ff: int,
        rope_theta: float = 10000.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _require_positive(vocab_size=vocab_size, context_length=context_length, num_layers=num_layers)
        _require_positive(d_model=d_model, num_heads=num_heads, d_ff=d_ff)
        if d_model % num_heads:
            raise ValueError(f"num_heads is {num_heads}; it must divide d_model, {d_model}")
        self.config = {
            "vocab_size": vocab_size,
            "context_length": context_length,
            "d_model": d_model,
            "num_layers": num_layers,
            "num_heads": num_heads,
            "d_ff": d_ff,
            "rope_theta": rope_theta,
        }
        self.token_embeddings = Embedding(vocab_size, d_model, device, dtype)
        self.positional_encoder = RotaryEmbedding(context_length, d_model // num_heads, rope_theta, device)
        self.layers = nn.ModuleList(
            TransformerBlock(d_model, num_heads, d_ff, self.positional_encoder, device, dtype)
            for _ in range(num_layers)
        )
        self.ln_final = RMSNorm(d_model, device=device, dtype=dtype)
        self.lm_head = Linear(d_model, vocab_size, device, dtype)

    def forward(self, x: Int[Tensor, "*batch seq"]) -> Float[Tensor, "*batch seq vocab_size"]:
        """Token ids (batch, seq) to next-token logits (batch, seq, vocab_size); ValueError if seq > context_length."""
        hidden = self.token_embeddings(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.lm_head(self.ln_final(hidden))

    def get_num_params(self, non_embedding: bool = False) -> int:
        """Number of parameters: all of them, or with `non_embedding` all but the input embedding's (`lm_head`, a matrix
        product, is counted either way; rotary positions have no parameters)."""
        total = sum(parameter.numel() for parameter in self.parameters())
        return total - self.token_embeddings.weight.numel() if non_embedding else total

    @torch.no_grad()
    def generate(
        self,
        x: Int[Tensor, "*batch length"],
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        eos_token_id: int | None = None,
    ) -> Int[Tensor, "rows new_tokens"]:
        """Continue `x`, one token at a time, each from the last `context_length` tokens.

        Args:
            x: (length,) or (batch, length) int64 token ids, at least one.
            max_new_tokens: the most tokens to add.
            temperature: divides the logits; 0 takes the likeliest token.
            top_k: sample only among the `top_k` likeliest tokens.
            eos_token_id: a sequence ends before this token; in a batch, an ended sequence is filled up with it.

        Returns:
            (rows, new_tokens) int64: the new tokens only; rows is 1 for a one-dimensional `x`.

        Raises:
            ValueError: an empty `x` or one of more than two dimensions, or another argument out of its range.
        """
        if x.ndim not in (1, 2) or x.numel() == 0:
            raise ValueError(f"x has shape {tuple(x.shape)}; it must be (length,) or (batch, length), and not empty")
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be at least 0")
        if not temperature >= 0:
            raise ValueError(f"temperature is {temperature}; it must be at least 0")
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k is {top_k}; it must be at least 1")
        tokens = torch.atleast_2d(x)
        prompt_length = tokens.shape[1]
        ended = torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)
        was_training = self.training
        self.eval()
        try:
            for _ in range(max_new_tokens):
                logits = self(tokens[:, -self.config["context_length"] :])[:, -1]
                next_tokens = _sample(logits, temperature, top_k)
                if eos_token_id is not None:
                    next_tokens = next_tokens.masked_fill(ended, eos_token_id)
                    ended = next_tokens == eos_token_id
                    if ended.all():
                        break
                tokens = torch.cat((tokens, next_tokens.unsqueeze(1)), dim=1)
        finally:
            self.train(was_training)
        return tokens[:, prompt_length:]

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str]) -> "BasicsTransformerLM":
        """The model in the directory `path`, on the CPU: `model_config.json` has the constructor's arguments and
        `model.pt` a state dict, which may be that of a model under torch.compile."""
        directory = Path(path)
        model = cls(**json.loads((directory / "model_config.json").read_text(encoding="utf-8")))
        state_dict = torch.load(directory / "model.pt", map_location="cpu", weights_only=True)
        model.load_state_dict({name.replace("_orig_mod.", ""): tensor for name, tensor in state_dict.items()})
        return model


def _sample(logits: Float[Tensor, "batch vocab"], temperature: float, top_k: int | None) -> Int[Tensor, " batch"]:
    """One token a row from softmax(logits / temperature), restricted to the `top_k` largest logits."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    # Sampling among the k candidates themselves, not from a masked row, keeps exactly k where logits tie.
    vocab_size = logits.shape[-1]
    candidate_logits, candidates = logits.topk(vocab_size if top_k is None else min(top_k, vocab_size), dim=-1)
    choice = torch.multinomial(softmax(candidate_logits.float() / temperature, dim=-1), num_samples=1)
    return candidates.gather(-1, choice).squeeze(-1)
