"""LayerNorm with one part at a time in a low precision: which of them need float32, on which inputs.

Handout, mixed precision: LayerNorm's parts. The words beside the table are made from its rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from cs336_systems.benchmarking.mixed_precision import DTYPES

# Rows of 1024: of deviation 1; far from zero, as a residual stream can be; too large to square; too small to square.
INPUTS = {"unit": (0.0, 1.0), "offset": (30.0, 1.0), "large": (0.0, 300.0), "small": (0.0, 1e-3)}
PARTS = ("mean", "deviations", "squares", "variance", "inverse root", "scaling")


@dataclass(frozen=True)
class LayerNormRow:
    """LayerNorm with one part in a low precision and the rest in float32: the largest error of any output (they are
    about 1), against float64, for each of `INPUTS`."""

    dtype: str
    part: str
    unit_error: float
    offset_error: float
    large_error: float
    small_error: float


LAYER_NORM_COLUMNS = {
    "dtype": "dtype",
    "part": "part in it",
    "unit_error": "error, inputs N(0, 1)",
    "offset_error": "N(30, 1)",
    "large_error": "N(0, 300²)",
    "small_error": "N(0, 0.001²)",
}


def layer_norm_parts(width: int = 1024, rows: int = 16) -> list[LayerNormRow]:
    """Each part alone in float16 and bfloat16, all of them together, and PyTorch's own layer_norm on such inputs."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    inputs = {name: (mean + std * normal).float() for name, (mean, std) in INPUTS.items()}
    table = []
    for dtype in ("float16", "bfloat16"):
        cases = [("none", ()), *((part, (part,)) for part in PARTS), ("all", PARTS)]
        for label, low in cases:
            errors = {name: _error(_layer_norm(x, low, DTYPES[dtype]), x) for name, x in inputs.items()}
            table.append(LayerNormRow(dtype, label, **{f"{name}_error": error for name, error in errors.items()}))
        own = {}
        for name, x in inputs.items():
            rounded = x.to(DTYPES[dtype])  # what it is given is the rounded input, so that is what it is judged by
            own[f"{name}_error"] = _error(F.layer_norm(rounded, (width,)), rounded)
        table.append(LayerNormRow(dtype, f"F.layer_norm of {dtype}", **own))
    return table


def _layer_norm(x: Float[Tensor, "rows width"], low: tuple[str, ...], dtype: torch.dtype) -> Tensor:
    """(x - mean) / sqrt(variance + eps), the parts named in `low` computed and rounded in `dtype`."""

    def of(part: str) -> torch.dtype:
        return dtype if part in low else torch.float32

    width = x.shape[-1]
    mean = _sum(x.to(of("mean"))) / width
    deviations = x.to(of("deviations")) - mean.to(of("deviations"))
    squares = deviations.to(of("squares")).square()
    variance = _sum(squares.to(of("variance"))) / width
    inverse_root = torch.rsqrt(variance.to(of("inverse root")) + 1e-5)
    return deviations.to(of("scaling")) * inverse_root.to(of("scaling"))


def _sum(x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows 1"]:
    """Added up one by one in the dtype of `x`; torch.sum would add in float32 inside."""
    total = torch.zeros_like(x[:, :1])
    for column in x.split(1, dim=-1):
        total += column
    return total


def _error(output: Tensor, x: Float[Tensor, "rows width"]) -> float:
    expected = F.layer_norm(x.double(), (x.shape[-1],))
    error = (output.double() - expected).abs().max().item()
    return error if math.isfinite(error) else math.inf


def layer_norm_note(rows: list[LayerNormRow], tolerance: float = 0.05) -> str:
    """In words: what LayerNorm's parts need, from the rows. A part is wrong where an output is off by `tolerance`."""
    sentences = []
    for dtype in dict.fromkeys(row.dtype for row in rows):
        wrong = []
        for row in rows:
            if row.dtype == dtype and row.part in PARTS:
                inputs = [name for name in INPUTS if getattr(row, f"{name}_error") > tolerance]
                if inputs:
                    wrong.append(f"{row.part} ({', '.join(inputs)} inputs)")
        unharmed = [
            row.part
            for row in rows
            if row.dtype == dtype and row.part in PARTS and not any(row.part in w for w in wrong)
        ]
        limits = torch.finfo(DTYPES[dtype])
        sentences.append(
            f"{dtype} (largest number {limits.max:.3g}, relative spacing {limits.eps:.2g}): outputs are off by more "
            f"than {tolerance:g} with {_list(wrong)} in it; not with {_list(unharmed)}."
        )
    return (
        "LayerNorm's statistics are what needs float32. Squares overflow float16 from 256 on and vanish in it below "
        "1.7e-4; bfloat16 has float32's range, so nothing overflows, but adding up a row with 8 significant bits stops "
        "short, and subtracting a large mean leaves few digits. So LayerNorm stays in float32 under bfloat16 too. "
        + " ".join(sentences)
    )


def _list(words: list[str]) -> str:
    return ", ".join(words) if words else "nothing"
