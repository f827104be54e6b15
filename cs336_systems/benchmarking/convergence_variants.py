"""What convergence.py compares, by name, and the checks of what is asked for: no torch here, so that it can be refused
at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cs336_systems.configs import check, check_choice
from cs336_systems.defaults import fill_in
from cs336_systems.files import check_writable
from cs336_systems.provenance import check_cpu_alone, may_have_gpu
from cs336_systems.training.config import TrainConfig

# What differs from the base run, which is fp32 with plain attention on one device.
VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "tf32": {"precision": "tf32"},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "fp16-unscaled": {"precision": "fp16", "loss_scaling": False},
    "fp32-flash": {"attention": "flash-triton"},
    "bf16-flash": {"precision": "bf16", "attention": "flash-triton"},
    "ddp": {"parallel": "ddp"},
    "bucketed": {"parallel": "bucketed"},
    "ddp-sharded-optimizer": {"parallel": "ddp", "sharded_optimizer": True},
    "fsdp": {"parallel": "fsdp"},
    "bf16-fsdp": {"precision": "bf16", "parallel": "fsdp"},
}
DEFAULTS: dict[str, tuple[Any, Any]] = {
    "variant": (
        tuple(name for name in VARIANTS if name not in ("tf32", "bf16-fsdp")),
        ("fp32", "bf16", "ddp"),
    ),
    "seed": ((0, 1, 2), (0,)),
    "steps": (300, 30),
}
ON_RANKS = [name for name, changes in VARIANTS.items() if "parallel" in changes]


def check_convergence(
    *,
    variant: tuple[str, ...] | None,
    seed: tuple[int, ...] | None,
    processes: int | None,
    at_once: int,
    device: str,
    out: Path,
    **base: Any,
) -> None:
    """Raises ValueError for what `run_convergence` would refuse of these, as far as that can be told without torch."""
    for flag, values in (("variant", variant), ("seed", seed)):
        if values is not None:
            check(len(values) > 0, flag, "", "needs at least one value")
            check(len(set(values)) == len(values), flag, " ".join(map(str, values)), "must name each once")
    check(at_once >= 0, "at_once", at_once, "must be 0 or more")
    check(processes is None or processes >= 1, "processes", processes, "must be at least 1")
    for name in variant or ():
        check_choice("variant", name, VARIANTS)
    is_read = processes is None or variant is None or not {*variant}.isdisjoint(ON_RANKS)
    check(is_read, "processes", processes, f"goes with --variant {' or '.join(ON_RANKS)}")
    for value in seed or ():
        check(0 <= value < 2**63, "seed", value, "must be 0 or more, and less than 2**63")
    check_cpu_alone(device)
    likely = device if device != "auto" else "cuda" if may_have_gpu() else "cpu"
    TrainConfig(**fill_in(base, {"steps": DEFAULTS["steps"]}, likely), device=device, out=out)
    check_writable(out)
