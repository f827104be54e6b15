"""Measure activation checkpointing: memory and time over the number of blocks in a segment, and nested checkpoints.

    python scripts/checkpointing.py --size 2.7b --ctx 2048 --checkpoint-every 0 1 2 4 8 --precision bf16
    python scripts/checkpointing.py --part nested

The model's part sets each train step's peak memory and time beside the formulas of docs/accounting.md, also where it
does not fit. The nested part shows on a stack of small layers how memory and time grow with depth: without checkpoints,
with segments of the square root, and with checkpoints within checkpoints; it runs on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cs336_systems.cli import command_line, parse, refusing_bad_input
from cs336_systems.configs import Attention, Optimizer, Precision, check_ignored


@dataclass(frozen=True)
class Arguments:
    part: tuple[Literal["model", "nested"], ...] = ("model", "nested")
    """What to run."""
    size: tuple[str, ...] | None = None
    """Named sizes: tiny, small, medium, large, xl, 2.7b, 10b, 8b. Default: small on a GPU and tiny elsewhere."""
    ctx: tuple[int, ...] = (512,)
    """Context lengths, in tokens."""
    checkpoint_every: tuple[int, ...] = (0, 1, 2)
    """Blocks in a checkpointed segment; 0 for no checkpoints, which the later ones are compared with."""
    precision: tuple[Precision, ...] = ("fp32",)
    """bf16 and fp16 are autocast over float32 weights; tf32 is fp32 with tensor cores."""
    attention: tuple[Attention, ...] = ("naive",)
    """The attention that the model calls."""
    optimizer: tuple[Optimizer, ...] = ("adamw",)
    """The project's AdamW, or PyTorch's fused one."""
    warmup: int = 1
    """Steps before measuring."""
    steps: int = 3
    """Measured steps."""
    batch_size: int = 4
    """Sequences in a batch."""
    layers: tuple[int, ...] = (4, 8, 16, 32, 64, 128)
    """Depths of the stack of the nested part."""
    device: str = "auto"
    """Of the model: cpu, cuda, cuda:N, mps, or auto: the first GPU if there is one."""
    seed: int = 0
    """Seed of the random weights and tokens."""
    out: Path = Path("out/checkpointing")
    """Folder for rows, tables and pictures; an earlier run's are moved aside, unless resumed."""
    resume: bool = False
    """Keep the rows under --out and skip their cells."""


def main() -> None:
    arguments = parse(Arguments, __doc__)
    options = dict(vars(arguments))
    with refusing_bad_input():
        if "model" not in arguments.part:
            check_ignored(arguments, options.keys() - {"part", "layers", "out", "resume"}, "goes with --part model")
        if "nested" not in arguments.part:
            check_ignored(arguments, {"layers"}, "goes with --part nested")
    from cs336_systems.benchmarking.checkpointing import run_checkpointing
    from cs336_systems.benchmarking.into_files import measure_into_files
    from cs336_systems.profiling.nested_tables import NestedRow, nested_cells, write_nested

    parts, layers = options.pop("part"), options.pop("layers")
    with refusing_bad_input():  # refused before the model's part is measured
        nested = nested_cells(layers) if "nested" in parts else []
    if "model" in parts:
        run_checkpointing(command_line(), **options)
    if "nested" in parts:
        from cs336_systems.profiling.nested_checkpointing import run_nested_sweep

        measure_into_files(
            command_line(), "nested", NestedRow, lambda device: nested, run_nested_sweep, write_nested,
            device="cpu", out=options["out"], resume=options["resume"],
        )  # fmt: skip


if __name__ == "__main__":
    main()
