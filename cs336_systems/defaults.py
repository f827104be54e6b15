"""What a script measures where its arguments don't say: on a GPU the assignment's, elsewhere what ends in a minute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SIZES: dict[str, tuple[Any, Any]] = {"size": (("small",), ("tiny",))}


def fill_in(given: Mapping[str, Any], defaults: Mapping[str, tuple[Any, Any]], device: str) -> dict[str, Any]:
    """`given`, where what is None of `defaults` takes its first value on a GPU ("cuda", "cuda:0"), else its second."""
    on_gpu = device.startswith("cuda")
    values = {name: full if on_gpu else quick for name, (full, quick) in defaults.items()}
    return {**given, **{name: value for name, value in values.items() if given[name] is None}}
