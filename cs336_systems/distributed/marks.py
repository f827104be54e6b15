"""What a wrapper leaves on the parameters that it has taken over, for whoever wraps them next to see."""

from __future__ import annotations

from torch import Tensor

_SHARD = "_is_shard"


def mark_shard(parameter: Tensor) -> None:
    """FSDP has cut `parameter` down to this rank's rows."""
    setattr(parameter, _SHARD, True)


def is_shard(parameter: Tensor) -> bool:
    """Whether `parameter` has this rank's rows only, so that it is another than the other ranks' of that name."""
    return getattr(parameter, _SHARD, False)
