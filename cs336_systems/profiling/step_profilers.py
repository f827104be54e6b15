"""The profilers of one step that the benchmarks on ranks are given: on a rank they import what they need, torch first;
in the process that starts the ranks its import would keep a refusal waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cs336_systems.intervals import StepIntervals

if TYPE_CHECKING:
    import torch


def profile_step(step: Callable[[Callable[[str], Any]], object], device: torch.device | str) -> StepIntervals:
    """When one step computed and when it communicated (`overlap.profile_step`)."""
    from cs336_systems.profiling import overlap

    return overlap.profile_step(step, device)


def profile_sharded_step(step: Callable[..., object], device: torch.device | str) -> dict[str, Any]:
    """The same, and how FSDP's gathers ended (`gather_timing.profile_sharded_step`)."""
    from cs336_systems.profiling import gather_timing

    return gather_timing.profile_sharded_step(step, device)
