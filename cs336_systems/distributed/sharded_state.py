"""A sharded optimizer's state as a whole: gathered from the ranks' slices, checked, and cut into slices again.

A state dict holds a parameter's state under its number: a dict of tensors shaped like the parameter (moments), other
tensors (step counts, row sums), and plain values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cs336_systems.distributed.collectives import broadcast_tensor
from cs336_systems.distributed.partition import Slice, whole


@dataclass(frozen=True)
class _Announced:
    """A tensor that will follow."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def gather_state(
    local: Mapping[Slice, Mapping[str, Any]],
    parameters: Sequence[Tensor],
    slices: Sequence[Sequence[Slice]],
    group: dist.ProcessGroup,
    to_rank: int | None,
) -> dict[int, dict[str, Any]]:
    """Every parameter's whole state by number, on the CPU; a collective call.

    Args:
        local: this rank's slices' states.
        slices: each rank's slices.
        to_rank: the only rank that keeps what is gathered; every rank does if None.
    """
    announced: list[Any] = [None] * group.size()
    dist.all_gather_object(announced, {piece: _announce(state) for piece, state in local.items()}, group=group)
    rank = dist.get_rank(group)
    keep = to_rank is None or to_rank == rank
    pieces: dict[int, list[tuple[Slice, dict[str, Any]]]] = {}
    for owner, owned in enumerate(slices):
        for piece in owned:
            if piece not in announced[owner]:  # not updated yet
                continue
            state = dict(announced[owner][piece])
            for name, value in state.items():
                if isinstance(value, _Announced):
                    device = parameters[piece.parameter].device
                    tensor = (
                        local[piece][name].to(device)
                        if owner == rank
                        else torch.empty(value.shape, dtype=value.dtype, device=device)
                    )
                    broadcast_tensor(tensor, group, owner)
                    state[name] = tensor.to("cpu", copy=True) if keep else None
            if keep:
                pieces.setdefault(piece.parameter, []).append((piece, state))
    return {number: _merge(pieces[number]) for number in sorted(pieces)}


def _announce(state: Mapping[str, Any]) -> dict[str, Any]:
    """What the other ranks must know: large tensors' shapes, and all else itself."""
    return {
        name: _Announced(tuple(value.shape), value.dtype)
        if isinstance(value, Tensor) and value.ndim > 0
        else value.cpu()
        if isinstance(value, Tensor)
        else value
        for name, value in state.items()
    }


def _merge(pieces: list[tuple[Slice, dict[str, Any]]]) -> dict[str, Any]:
    pieces = sorted(pieces, key=lambda entry: entry[0].start)
    first_slice, merged = pieces[0]
    if len(pieces) == 1:
        return merged
    for name, value in merged.items():
        if isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == first_slice.n_rows:
            merged[name] = torch.cat([state[name] for _, state in pieces])
    return merged


def slice_state(state: Mapping[str, Any], piece: Slice, parameter: Tensor) -> dict[str, Any]:
    """The slice's part of a parameter's whole state: rows of tensors shaped like the parameter, copies of all else.

    Copies, so that an optimizer which updates its state in place leaves the state dict as it was.
    """
    is_cut = piece.n_rows != whole(0, tuple(parameter.shape), 1).n_rows
    part = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            rows = value[piece.start : piece.stop] if is_cut and value.shape == parameter.shape else value
            value = rows.clone()
        part[name] = value
    return part


def check_state(state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], shapes_match: bool) -> None:
    """Raises ValueError unless a state dict has these groups' numbers of parameters and, for optimizers whose tensors
    are shaped like their parameters (`shapes_match`), their shapes."""
    if not {"state", "param_groups"} <= set(state_dict):
        raise ValueError(f"state_dict: must have 'state' and 'param_groups'; it has {sorted(map(str, state_dict))}")
    saved = [len(group["params"]) for group in state_dict["param_groups"]]
    ours = [len(group["params"]) for group in groups]
    if saved != ours:
        raise ValueError(
            f"state_dict: it is another model's. Its groups have {saved} parameters, this optimizer's have {ours}"
        )
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    parameters = [parameter for group in groups for parameter in group["params"]]
    unknown = set(state_dict["state"]) - set(numbers)
    if unknown:
        raise ValueError(f"state_dict: it has states of parameters {sorted(map(str, unknown))}, which no group lists")
    for number, parameter in zip(numbers, parameters, strict=True):
        for name, value in state_dict["state"].get(number, {}).items():
            if shapes_match and isinstance(value, Tensor) and value.ndim > 0 and value.shape != parameter.shape:
                raise ValueError(
                    f"state_dict: it is another model's. {name!r} of parameter {number} has shape "
                    f"{tuple(value.shape)}, and the parameter {tuple(parameter.shape)}"
                )
