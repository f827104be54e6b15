"""FlashAttention-2 in Triton: the functions and the autograd Function over the kernels.

The kernels and Triton itself are imported at the first call, so that this module imports on machines without Triton.
"""

import importlib
import importlib.util
import os

import torch
from jaxtyping import Float
from torch import Tensor


def _launchers(device: torch.device):
    """The module that launches the kernels, or an error that says what is missing to run them on this device."""
    if device.type != "cuda" and not (device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
        raise RuntimeError(
            f"the Triton kernels need a CUDA device, and the tensors are on {device}; on a CPU they run in Triton's "
            "interpreter: set TRITON_INTERPRET=1 before Triton is imported"
        )
    if importlib.util.find_spec("triton") is None:
        raise RuntimeError("the Triton kernels need the package triton, which is not installed")
    from cs336_systems.attention import triton_launch

    return triton_launch
