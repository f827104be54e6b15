"""Run the benchmark under Nsight Systems (nsys), and answer from its reports where the time of a step goes.

    python scripts/profile_nsys.py --size small --ctx 256
    python scripts/profile_nsys.py --size small large 2.7b --ctx 128 256 512 1024

Each cell gets a report of its measured steps; every nsys command is printed, so that it can be run by hand. The same
cells are also timed without nsys, which shows what profiling costs. The reports are then read as
scripts/analyze_nsys.py reads them. Without nsys, scripts/profile_kernels.py makes the same tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cs336_systems.cli import command_line, parse, refusing_bad_input
from cs336_systems.configs import Attention, Compile, Mode, Optimizer, Precision, check_ignored


@dataclass(frozen=True)
class Arguments:
    size: tuple[str, ...] = ("small",)
    """Named sizes: tiny, small, medium, large, xl, 2.7b, 10b, 8b."""
    ctx: tuple[int, ...] = (256,)
    """Context lengths, in tokens."""
    mode: tuple[Mode, ...] = ("train-step",)
    """forward runs without autograd; forward-backward adds the loss and backward; train-step adds the optimizer."""
    precision: tuple[Precision, ...] = ("fp32",)
    """bf16 and fp16 are autocast over float32 weights; tf32 is fp32 with tensor cores."""
    compile: Compile = "off"
    """torch.compile: off, on, or blocks; compiled code has no ranges inside."""
    attention: Attention = "naive"
    """The attention that the model calls; naive shows its three parts."""
    optimizer: Optimizer = "adamw"
    """The project's AdamW, or PyTorch's fused one."""
    warmup: int = 3
    """Steps before the report begins."""
    steps: int = 3
    """Steps in the report."""
    batch_size: int = 4
    """Sequences in a batch."""
    device: str = "cuda"
    """cuda or cuda:N."""
    seed: int = 0
    """Seed of the random weights and tokens."""
    nsys: str = "nsys"
    """The program, its path, or a command with arguments that calls it, e.g. "bash wrapper.sh"."""
    unprofiled: bool = True
    """Time the same cells without nsys too."""
    resume: bool = False
    """Keep the reports under --out, which must be of the same workload, and capture the others."""
    dry_run: bool = False
    """Print the commands and run nothing."""
    top: int = 8
    """Kernels to list for each range."""
    out: Path = Path("out/nsys")
    """Folder for reports, rows, tables and pictures."""


def main() -> None:
    arguments = parse(Arguments, __doc__)
    if arguments.dry_run:
        with refusing_bad_input():
            check_ignored(arguments, {"resume", "top"}, "goes without --dry-run, whose commands do not depend on it")
    from cs336_systems.profiling.run_nsys import run_nsys

    run_nsys(command_line(), **vars(arguments))


if __name__ == "__main__":
    main()
