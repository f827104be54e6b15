"""FlashAttention-2: a reference, tiled PyTorch, Triton, and one public function over them, `flash_attention`.

The names below are imported at their first use, so that `MODEL_ATTENTION_NAMES` can be read without importing torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cs336_systems.attention.api import flash_attention
    from cs336_systems.attention.model_attention import set_attention, use_attention
    from cs336_systems.attention.reference import attention_reference

# What the model's attention can be: the values of `--attention`, see model_attention.py.
MODEL_ATTENTION_NAMES = ("naive", "sdpa", "flash-pytorch", "flash-triton", "flash-hopper")

__all__ = ["MODEL_ATTENTION_NAMES", "attention_reference", "flash_attention", "set_attention", "use_attention"]

_MODULE_OF = {
    "attention_reference": "reference",
    "flash_attention": "api",
    "set_attention": "model_attention",
    "use_attention": "model_attention",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
