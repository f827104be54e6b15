"""What low precision does to numbers: long sums, and the dtypes of a toy model under autocast.

Handout, mixed precision: the four accumulations and the toy model. Each value comes with its reason in words, made from
what was computed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_TERM = 0.01


# ---- Accumulations ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AccumulationRow:
    """0.01 added up `n_terms` times. `term` is 0.01 as the terms' dtype holds it. The result's distance from the exact
    sum is `term_error` (that of all terms together) plus `rounding_error` (of the additions)."""

    sum_dtype: str
    term_dtype: str
    is_cast_first: bool
    n_terms: int
    term: float
    result: float
    result_to_4_places: str
    term_error: float
    rounding_error: float
    reason: str


ACCUMULATION_COLUMNS = {
    "sum_dtype": "sum",
    "term_dtype": "terms",
    "is_cast_first": "cast first",
    "result_to_4_places": "result",
    "term_error": "terms' error",
    "rounding_error": "additions' error",
    "reason": "why",
}


def accumulations(n_terms: int = 1000) -> list[AccumulationRow]:
    """The handout's four, and bfloat16, which the benchmarks use: alone, and into a float32 sum."""
    return [
        _accumulate("float32", "float32", False, n_terms),
        _accumulate("float16", "float16", False, n_terms),
        _accumulate("float32", "float16", False, n_terms),
        _accumulate("float32", "float16", True, n_terms),
        _accumulate("bfloat16", "bfloat16", False, n_terms),
        _accumulate("float32", "bfloat16", False, n_terms),
    ]


def _accumulate(sum_dtype: str, term_dtype: str, is_cast_first: bool, n_terms: int) -> AccumulationRow:
    term = torch.tensor(_TERM, dtype=DTYPES[term_dtype])
    total = torch.tensor(0.0, dtype=DTYPES[sum_dtype])
    for _ in range(n_terms):
        total += term.to(total.dtype) if is_cast_first else term
    value, result = float(term), float(total)
    row = {
        "sum_dtype": sum_dtype,
        "term_dtype": term_dtype,
        "is_cast_first": is_cast_first,
        "n_terms": n_terms,
        "term": value,
        "result": result,
        "result_to_4_places": f"{result:.4f}",
        "term_error": n_terms * (value - _TERM),
        "rounding_error": result - n_terms * value,
    }
    is_stuck = bool(total + term == total)
    return AccumulationRow(**row, reason=_why(row, spacing(result, sum_dtype), is_stuck))


def spacing(value: float, dtype: str) -> float:
    """The distance from |value| to the next number that `dtype` has: near 10 it is 2**-7 in float16."""
    return 2.0 ** math.floor(math.log2(abs(value))) * torch.finfo(DTYPES[dtype]).eps


def _why(row: dict, gap: float, is_stuck: bool) -> str:
    term = f"0.01 is {row['term']:.8g} in {row['term_dtype']}, {row['term_error']:+.2g} over {row['n_terms']} terms"
    near = f"near {row['result']:.4g}, {row['sum_dtype']} has a number every {gap:.2g}"
    if is_stuck:
        return f"{term}; {near}, more than twice the term, so that adding it changes nothing any more"
    if gap > row["term"] / 10:
        added = round(row["term"] / gap) * gap
        return f"{term}; {near}, so that an addition there adds {added:.4g}"
    if row["is_cast_first"]:
        return (
            f"the addition would cast each term by itself: the same numbers, the same sum as without the cast ({term})"
        )
    if row["sum_dtype"] != row["term_dtype"]:
        return f"{term}; {near}, so that the additions lose next to nothing: what is wrong was lost in the term"
    return f"{term}; {near}, and every addition rounds by up to half of that, mostly in the same direction"


# ---- Dtypes under autocast -------------------------------------------------------------------------------------------


class ToyModel(nn.Module):
    """The handout's: Linear to 10 without bias, ReLU, LayerNorm, Linear without bias."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(in_features, 10, bias=False)
        self.relu = nn.ReLU()
        self.ln = nn.LayerNorm(10)
        self.fc2 = nn.Linear(10, out_features, bias=False)

    def forward(self, x: Float[Tensor, "batch in_features"]) -> Float[Tensor, "batch out_features"]:
        return self.fc2(self.ln(self.relu(self.fc1(x))))


@dataclass(frozen=True)
class DtypeRow:
    """A tensor's dtype without autocast and under each of its dtypes, on one device, and why."""

    device: str
    tensor: str
    float32: str
    float16: str
    bfloat16: str
    reason: str


DTYPE_COLUMNS = {
    "tensor": "tensor",
    "float32": "no autocast",
    "float16": "float16 autocast",
    "bfloat16": "bfloat16 autocast",
    "reason": "why",
}


def autocast_dtypes(device: str) -> list[DtypeRow]:
    """What the toy model's tensors are, from its parameters to their gradients, on "cpu" or "cuda"."""
    by_dtype = {name: _toy_dtypes(device, dtype) for name, dtype in DTYPES.items()}
    return [
        DtypeRow(
            device=device,
            tensor=tensor,
            **{name: found[tensor] for name, found in by_dtype.items()},
            reason=_why_dtype(tensor, by_dtype["float16"][tensor], torch.device(device).type),
        )
        for tensor in by_dtype["float32"]
    ]


def _toy_dtypes(device: str, dtype: torch.dtype) -> dict[str, str]:
    torch.manual_seed(0)
    model = ToyModel(20, 5).to(device)
    found = {"parameters": next(model.parameters()).dtype}
    outputs: dict[str, Tensor] = {}
    for name in ("fc1", "relu", "ln", "fc2"):
        model.get_submodule(name).register_forward_hook(lambda m, a, output, name=name: outputs.update({name: output}))
    x, targets = torch.randn(4, 20, device=device), torch.arange(4, device=device)
    with torch.autocast(torch.device(device).type, dtype=dtype, enabled=dtype != torch.float32):
        loss = F.cross_entropy(model(x), targets)
    outputs["fc1"].retain_grad()
    loss.backward()
    found |= {
        "first layer's output": outputs["fc1"].dtype,
        "ReLU's output": outputs["relu"].dtype,
        "LayerNorm's output": outputs["ln"].dtype,
        "logits": outputs["fc2"].dtype,
        "loss": loss.dtype,
        "gradient of the first layer's output": _only(outputs["fc1"].grad).dtype,
        "gradients of the parameters": _only(model.fc1.weight.grad).dtype,
    }
    return {name: str(dtype).removeprefix("torch.") for name, dtype in found.items()}


def _only(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient


def _why_dtype(tensor: str, under_float16: str, device_type: str) -> str:
    if tensor == "LayerNorm's output":
        if under_float16 == "float32":
            return "layer_norm is on autocast's float32 list: its input is cast up, and its output stays float32"
        return (
            f"{device_type}'s autocast has layer_norm on neither list (CUDA's casts it up): it keeps its input's "
            "dtype, and its kernel computes the statistics in float32"
        )
    return {
        "parameters": "autocast casts copies, operation by operation; parameters stay float32, for small updates",
        "first layer's output": "a matrix product is on autocast's list for the low precision",
        "ReLU's output": "on neither list: it keeps its input's dtype",
        "logits": "a matrix product casts its inputs down, whatever LayerNorm made",
        "loss": "cross-entropy is on the float32 list: it sums exponentials over the classes",
        "gradient of the first layer's output": "backward runs in forward's dtypes: in float16 a small gradient "
        "becomes zero, hence loss scaling",
        "gradients of the parameters": "the gradient passes back through the copy's cast, to the parameter's dtype",
    }[tensor]
