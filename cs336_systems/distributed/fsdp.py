"""Fully sharded data parallelism: each rank keeps a part of every weight, gathers whole weights just before use, frees
them just after, and keeps only its part of the averaged gradients (ZeRO-3, Rajbhandari et al. 2020, section 5.3; Zhao
et al., PyTorch FSDP, VLDB 2023).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import cs336_basics.model
from cs336_systems.distributed import fsdp_state
from cs336_systems.distributed.collectives import broadcast_module, check_same_module
from cs336_systems.distributed.ddp_base import DataParallel
from cs336_systems.distributed.ddp_flat import FlatDDP
from cs336_systems.distributed.fsdp_casts import register_casts
from cs336_systems.distributed.fsdp_schedule import Use, WeightManager
from cs336_systems.distributed.fsdp_weight import ShardedWeight
from cs336_systems.distributed.marks import is_shard, mark_shard
from cs336_systems.distributed.step_checks import check_same_parameters

_LINEAR = (cs336_basics.model.Linear, nn.Linear)
_EMBEDDING = (cs336_basics.model.Embedding, nn.Embedding)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # that layers compute, and all backends add up


class FullyShardedDataParallel(nn.Module):
    """A module whose Linear and Embedding weights are sharded over the ranks by rows; all else is replicated.

        model = FullyShardedDataParallel(module)
        optimizer = torch.optim.AdamW(model.parameters())
        loss_function(model(inputs), targets).backward()
        model.finish_gradient_synchronization()
        optimizer.step()

    Loss functions must take the mean over this rank's part of the batch, and the parts must be of one size. Every rank
    must run the same layers in the same order: each use of a weight is a collective.

    Attributes:
        module: the wrapped module. Its parameters keep their names; a sharded one is this rank's rows, and so is its
            gradient, both in the dtype that the parameter had (float32 masters).
        compute_dtype: the dtype in which weights and gradients travel and layers compute, e.g. torch.bfloat16; None
            for the parameters' own.

    A weight is whole only inside its own layer's forward: code that uses another layer's weight sees the shard. Layers
    of other classes, subclasses included, are replicated. torch.compile must not span a sharded layer.
    """

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Copy rank 0's parameters and buffers to all ranks, and shard. `module` itself is changed.

        Raises:
            RuntimeError: there is no process group.
            ValueError: `compute_dtype`, or the dtype of a weight to be sharded, is not float16, bfloat16, float32 or
                float64; the module has been wrapped already, also by another wrapper; an embedding cannot be sharded
                (sparse gradients, max_norm); a weight is tied to a layer that would not gather it; or the ranks'
                modules differ (on all ranks).
        """
        super().__init__()
        if not dist.is_initialized():
            raise RuntimeError("no process group: make one first, e.g. with cs336_systems.distributed.process_group")
        if compute_dtype not in (None, *_DTYPES):
            raise ValueError(f"compute_dtype={compute_dtype}: must be one of {_DTYPES}, or None")
        if any(isinstance(child, FullyShardedDataParallel) for child in module.modules()):
            raise ValueError("module: it is, or holds, a FullyShardedDataParallel already; wrap the whole model once")
        if any(isinstance(child, DataParallel) for child in module.modules()):
            raise ValueError("module: it is, or holds, a data-parallel wrapper; FSDP averages gradients itself")
        group = process_group or dist.group.WORLD
        assert group is not None
        self.process_group: dist.ProcessGroup = group
        self.module = module
        self.compute_dtype = compute_dtype
        layers = [(name, layer) for name, layer in module.named_modules() if _is_sharded(name, layer)]
        _check_can_be_sharded(module, [layer for _, layer in layers])
        check_same_module(module, group)
        broadcast_module(module, group)
        self._manager = WeightManager(group)
        module.register_forward_pre_hook(self._before_module, with_kwargs=True)
        module.register_forward_hook(self._after_module, always_call=True)
        by_parameter: dict[nn.Parameter, ShardedWeight] = {}
        for name, layer in layers:
            parameter = layer.weight
            if parameter not in by_parameter:  # tied weights are one
                weight = ShardedWeight(f"{name}.weight".lstrip("."), parameter, compute_dtype, group)
                mark_shard(parameter)
                # Weakly: autograd's hooks are no business of the garbage collector, which would never free the cycle.
                tell = partial(_gradient_is_ready, weakref.ref(self._manager), weakref.ref(weight))
                weight.full.register_post_accumulate_grad_hook(tell)
                by_parameter[parameter] = weight
            self._gather_around(layer, by_parameter[parameter])
        self._layers = [(layer, by_parameter[layer.weight]) for _, layer in layers]
        self._weights = list(by_parameter.values())
        if compute_dtype is not None:
            register_casts(module, compute_dtype, set(by_parameter), self._manager.is_in_pass)
        rest = [parameter for parameter in module.parameters() if parameter not in by_parameter]
        # In a list, so that it is no submodule: these parameters have their place in the module.
        self._replicated = [FlatDDP(nn.ParameterList(rest), group)]
        averaged = [*by_parameter, *(parameter for parameter in rest if parameter.requires_grad)]
        self._averaged_ids = {id(parameter) for parameter in averaged}

    # ---- Forward and backward ----------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward pass on this rank's part of the batch; `compute_dtype` out."""
        return self.module(*args, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        """Make every gradient the mean over the ranks; call it after backward and before the optimizer's step.

        Several backward passes before it add up. Every rank must call it equally often. On a GPU it queues work and
        does not wait for the device, unless a replicated parameter has no gradient on this rank.

        Raises:
            RuntimeError: a parameter that requires a gradient was none of the module's, or was replicated and frozen,
                at wrapping.
        """
        check_same_parameters(self.module, self._averaged_ids)
        self._manager.finish_gradients()
        self._replicated[0].finish_gradient_synchronization()

    def _before_module(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        for layer, weight in self._layers:
            weight.check_unchanged(layer._parameters.get("weight"))
        self._manager.begin_forward()
        return self._cast(args), self._cast(kwargs)

    def _after_module(self, module: nn.Module, args: Any, output: Any) -> None:
        self._manager.end_forward()

    def _cast(self, values: Any) -> Any:
        if self.compute_dtype is None or not values:
            return values
        if len(values) == 1 and isinstance(values, tuple) and isinstance(values[0], Tensor):
            # What nearly every layer is called with; tree_map would take longer than the launch of a kernel.
            if values[0].dtype is self.compute_dtype or not values[0].is_floating_point():
                return values
            return (values[0].to(self.compute_dtype),)
        return tree_map(lambda v: v.to(self.compute_dtype) if _is_floating(v) else v, values)

    def _gather_around(self, layer: nn.Module, weight: ShardedWeight) -> None:
        """Replace the layer's forward by one that gathers the weight. Hooks could do the same, for more of the host's
        time."""
        layer.forward = _GatheredForward(layer, weight, self._manager, self._cast)
        if type(layer) is nn.Linear:
            # nn.TransformerEncoderLayer has a fast path that reads its layers' weights itself, unless they have hooks.
            layer.register_forward_pre_hook(_change_nothing)

    # ---- Norms and states --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Float[Tensor, ""]:
        """Scale all gradients by min(1, max_norm / (norm + 1e-6)), where norm is the L2 norm of all ranks' shards and
        the replicated gradients, each counted once. Call it after finish_gradient_synchronization, on every rank.

        Returns:
            The norm before clipping, the same on all ranks, float32 (float64 for float64 parameters).

        Raises:
            ValueError: `max_norm` is not above 0.
            RuntimeError: it was called before finish_gradient_synchronization averaged the replicated gradients.
        """
        if self._replicated[0].is_due:
            raise RuntimeError(
                "clip_grad_norm_(): gradients of replicated parameters are this rank's alone; call "
                "finish_gradient_synchronization() after backward and before clipping"
            )
        return fsdp_state.clip_grad_norm_(self, max_norm)

    def gather_full_params(self) -> dict[str, Shaped[Tensor, "..."]]:
        """Every parameter whole, in its own dtype, under the bare module's names; a collective call."""
        return fsdp_state.gather_full_params(self)

    def full_state_dict(self, to_rank: int | None = None) -> dict[str, Shaped[Tensor, "..."]]:
        """A state dict for the bare module, on the CPU: on every rank, or only on `to_rank` (empty on the others). A
        collective call, one weight at a time."""
        return fsdp_state.full_state_dict(self, to_rank)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The sharded state dict: sharded weights are DTensors that share the shards' memory, for
        torch.distributed.checkpoint, which saves them and loads them at any world size.

        Raises:
            ValueError: an argument is given, as state_dict() of a module around this one does.
        """
        if args or kwargs:
            raise ValueError(
                f"state_dict() with {', '.join(kwargs) or 'arguments'}: a FullyShardedDataParallel has a state dict of "
                "its own, which is no part of another module's; call it without arguments and save that beside the rest"
            )
        return fsdp_state.sharded_state_dict(self)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> None:
        """Load a full state dict (the bare module's) or a sharded one; no collective, every rank loads the same.

        Raises:
            ValueError: `strict`, and names are missing or not known; a tensor of another shape; a sharded tensor of
                another world size; or `assign`, which would replace the shards.
        """
        if assign:
            raise ValueError("assign=True: must be False; the shards stay, and are filled")
        fsdp_state.load_state_dict(self, state_dict, strict)
        self._manager.free_ahead()


class _GatheredForward:
    """A layer's forward with the whole weight in the layer while it runs.

    It is put into the instance's dictionary, where attributes are looked up before a module's parameters: the parameter
    stays registered, under its name, all the time.
    """

    def __init__(
        self, layer: nn.Module, weight: ShardedWeight, manager: WeightManager, cast: Callable[[Any], Any]
    ) -> None:
        self._layer, self._weight, self._manager, self._cast = layer, weight, manager, cast
        self._forward = layer.forward
        self._needs_weight_in_backward = not isinstance(layer, _EMBEDDING)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._cast(args), self._cast(kwargs)
        layer, manager, weight = self._layer, self._manager, self._weight
        manager.acquire(weight)
        try:
            use = Use(manager, weight)
            layer.__dict__["weight"] = use.weight_for_forward()
            if not weight.shard.requires_grad:
                args = tuple(use.input_for_forward(value) for value in args)
                kwargs = {name: use.input_for_forward(value) for name, value in kwargs.items()}
            output = self._forward(*args, **kwargs)
        finally:  # also when forward raises, as it does where activation checkpointing has computed all it needs
            layer.__dict__.pop("weight", None)
            manager.release(weight)
        if self._needs_weight_in_backward and output.requires_grad:
            output.register_hook(use.begin_backward)
        return output

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy would compute with the original's weights."""
        raise TypeError(
            f"the layer of {self._weight.name!r} is sharded by FullyShardedDataParallel and can be neither copied nor "
            "pickled: build the model anew and load full_state_dict()"
        )


def _change_nothing(layer: nn.Module, args: Any) -> None: ...


def _check_can_be_sharded(module: nn.Module, sharded: list[nn.Module]) -> None:
    """Raises ValueError if a parameter is sharded already, or belongs to a layer that would not gather it, too."""
    mine, gathering = {layer.weight for layer in sharded}, set(sharded)
    for layer_name, layer in module.named_modules():
        for name, parameter in layer._parameters.items():
            full_name = f"{layer_name}.{name}".lstrip(".")
            if is_shard(parameter):
                raise ValueError(
                    f"module: its parameter {full_name!r} has been sharded already; wrap a model once, and whole"
                )
            if parameter in mine and not (name == "weight" and layer in gathering):
                raise ValueError(
                    f"module: its parameter {full_name!r} is tied to the weight of a Linear or Embedding, which is "
                    f"sharded, and {type(layer).__name__} is not among the layers that gather theirs"
                )


def _is_sharded(name: str, layer: nn.Module) -> bool:
    """Whether a layer's weight is to be sharded; raises ValueError for one that cannot be."""
    if type(layer) not in (*_LINEAR, *_EMBEDDING) or "weight" not in layer._parameters:
        return False
    if layer.weight.dtype not in _DTYPES:
        full_name = f"{name}.weight".lstrip(".")
        raise ValueError(
            f"module: its parameter {full_name!r} is {layer.weight.dtype}; to be sharded it must be one of {_DTYPES}"
        )
    if getattr(layer, "sparse", False) or getattr(layer, "max_norm", None) is not None:
        raise ValueError(
            f"module: embedding {name!r} has sparse={layer.sparse}, max_norm={layer.max_norm}; a sharded one must have "
            "sparse=False (its gradient is reduce-scattered) and max_norm=None (which would write into the weight)"
        )
    return True


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _gradient_is_ready(manager: weakref.ref[WeightManager], weight: weakref.ref[ShardedWeight], full: Tensor) -> None:
    the_manager, the_weight = manager(), weight()
    if the_manager is not None and the_weight is not None:  # gone with the model
        the_manager.gradient_is_ready(the_weight)


FSDP = FullyShardedDataParallel
