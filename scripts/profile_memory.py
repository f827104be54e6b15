"""See what holds a GPU's memory over a forward pass or a full training step, and which line of code allocated it.

Several values are a sweep, each cell in a process of its own; one step of each is recorded:

    python scripts/profile_memory.py --size 2.7b --ctx 128 512 --mode forward train-step --precision fp32 bf16

Under --out: the snapshots, which https://pytorch.org/memory_viz opens; a picture of each one's timeline; and tables of
peaks by phase, of what was held at the peak, and of the largest allocations. Where memory runs out, all of them are of
that moment. A snapshot from elsewhere is analysed by itself, on any machine (a snapshot is a pickle: open none that you
do not trust):

    python scripts/profile_memory.py --snapshot out/memory/snapshots/2.7b_ctx512_train-step_fp32.pickle
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cs336_systems.cli import command_line, parse, refusing_bad_input
from cs336_systems.configs import Attention, Compile, Mode, Optimizer, Precision, check_ignored


@dataclass(frozen=True)
class Arguments:
    size: tuple[str, ...] | None = None
    """Named sizes: tiny, small, medium, large, xl, 2.7b, 10b, 8b. Default: small on a GPU and tiny elsewhere."""
    ctx: tuple[int, ...] = (256,)
    """Context lengths, in tokens."""
    mode: tuple[Mode, ...] = ("forward", "train-step")
    """forward runs without autograd; forward-backward adds the loss and backward; train-step adds the optimizer."""
    precision: tuple[Precision, ...] = ("fp32", "bf16")
    """bf16 and fp16 are autocast over float32 weights; tf32 is fp32 with tensor cores."""
    compile: tuple[Compile, ...] = ("off",)
    """torch.compile: off, on (the whole model), or blocks."""
    attention: tuple[Attention, ...] = ("naive",)
    """The attention that the model calls."""
    optimizer: tuple[Optimizer, ...] = ("adamw",)
    """The project's AdamW, or PyTorch's fused one."""
    checkpoint_every: tuple[int, ...] = (0,)
    """Blocks in a checkpointed segment, run again in backward; 0 for no checkpoints."""
    warmup: int = 1
    """Steps before the recorded one; the first of all makes the optimizer's state."""
    batch_size: int = 4
    """Sequences in a batch."""
    device: str = "auto"
    """cuda, cuda:N, cpu (where tensors alone are seen), or auto: the first GPU if there is one."""
    seed: int = 0
    """Seed of the random weights and tokens."""
    out: Path = Path("out/memory")
    """Folder for rows, tables, pictures and snapshots; earlier rows and tables are moved aside, unless resumed."""
    resume: bool = False
    """Keep the rows under --out and skip their cells."""
    snapshot: Path | None = None
    """Analyse this file and record nothing."""


def main() -> None:
    arguments = parse(Arguments, __doc__)
    options = dict(vars(arguments))
    if arguments.snapshot is not None:
        with refusing_bad_input():
            others = options.keys() - {"snapshot", "out"}
            check_ignored(arguments, others, "is of what is recorded; --snapshot goes with --out only")
    from cs336_systems.benchmarking.detailed_sweep import check_detailed_sweep, run_detailed_sweep

    snapshot, out = options.pop("snapshot"), options["out"]
    options["steps"] = 1
    if snapshot is None:
        check_detailed_sweep(**options)
    from cs336_systems.profiling import memory_profile

    if snapshot is not None:
        memory_profile.show_snapshot(snapshot, out)
        return
    run_detailed_sweep(
        command_line(), "memory", memory_profile.MemoryRow,
        ("memory_allocations", memory_profile.AllocationRow, "largest"),
        partial(memory_profile.measure_memory, out=out), memory_profile.write_files, **options,
    )  # fmt: skip


if __name__ == "__main__":
    main()
