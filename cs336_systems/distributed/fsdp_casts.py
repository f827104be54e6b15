"""Replicated parameters (biases, norms) of an FSDP module in the dtype of computation: layers see casts, made anew for
each use, where the optimizer sees the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import cs336_basics.model

# They take inputs of any dtype beside a float32 weight, and compute in float32.
_KEEP_DTYPE = (cs336_basics.model.RMSNorm,)


def register_casts(
    module: nn.Module, dtype: torch.dtype, shards: Collection[Tensor], is_computing: Callable[[], bool]
) -> None:
    """Let the layers in `module` see their floating parameters but `shards` in `dtype`: a layer while it is called, and
    anyone who asks for its attributes while `is_computing()`.

    A layer that is called makes its casts once, and hooks remove them. But that does not cover what else reads a
    parameter: a method that activation checkpointing calls again in backward, or another layer (nn.MultiheadAttention
    reads its out_proj's weight). They find a descriptor, for which the layer gets a class of its own, a subclass with
    the same name.
    """
    for layer in module.modules():
        replicated = {
            name: parameter
            for name, parameter in layer.named_parameters(recurse=False)
            if parameter not in shards and parameter.is_floating_point()
        }
        if replicated and not isinstance(layer, _KEEP_DTYPE):
            layer.register_forward_pre_hook(partial(_put_casts, replicated, dtype))
            layer.register_forward_hook(partial(_remove_casts, replicated), always_call=True)
            cls = type(layer)
            casts = {name: _CastOnDemand(name, dtype, is_computing) for name in replicated}
            layer.__class__ = type(
                cls.__name__, (cls,), {"__module__": cls.__module__, "__doc__": cls.__doc__, **casts}
            )


class _CastOnDemand:
    """A class's attribute that is found where the instance's dictionary has no cast."""

    def __init__(self, name: str, dtype: torch.dtype, is_computing: Callable[[], bool]) -> None:
        self._name, self._dtype, self._is_computing = name, dtype, is_computing

    def __get__(self, layer: nn.Module | None, cls: type) -> Any:
        if layer is None:
            return self
        parameter = layer.__getattr__(self._name)  # what is found without this descriptor
        return parameter.to(self._dtype) if isinstance(parameter, Tensor) and self._is_computing() else parameter


def _put_casts(replicated: dict[str, nn.Parameter], dtype: torch.dtype, layer: nn.Module, args: Any) -> None:
    layer.__dict__.update({name: parameter.to(dtype) for name, parameter in replicated.items()})


def _remove_casts(replicated: dict[str, nn.Parameter], layer: nn.Module, args: Any, output: Any) -> None:
    for name in replicated:
        layer.__dict__.pop(name, None)
