"""Make nsys's tables without nsys: a few steps under torch.profiler, read by the same code.

    python scripts/profile_kernels.py --size small --ctx 256

Needs no root and no further program. On a CPU the tables are of operators. Leaves what scripts/analyze_nsys.py leaves,
and the trace, which ui.perfetto.dev opens and analyze_nsys.py reads again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cs336_systems.cli import command_line, parse
from cs336_systems.configs import Attention, Compile, Mode, Optimizer, Precision


@dataclass(frozen=True)
class Arguments:
    size: str | None = None
    """A named size: tiny, small, medium, large, xl, 2.7b, 10b, 8b. Default: small on a GPU and tiny elsewhere."""
    ctx: int = 256
    """Context length, in tokens."""
    mode: Mode = "train-step"
    """forward runs without autograd; forward-backward adds the loss and backward; train-step adds the optimizer."""
    precision: Precision = "fp32"
    """bf16 and fp16 are autocast over float32 weights; tf32 is fp32 with tensor cores."""
    compile: Compile = "off"
    """torch.compile: off, on, or blocks; compiled code has no ranges inside."""
    attention: Attention = "naive"
    """The attention that the model calls; naive shows its three parts."""
    optimizer: Optimizer = "adamw"
    """The project's AdamW, or PyTorch's fused one."""
    checkpoint_every: int = 0
    """Blocks in a checkpointed segment, run again in backward; 0 for no checkpoints."""
    warmup: int = 3
    """Steps before the profile."""
    steps: int = 3
    """Profiled steps."""
    batch_size: int = 4
    """Sequences in a batch."""
    device: str = "auto"
    """cpu, cuda, cuda:N, or auto: the first GPU if there is one."""
    seed: int = 0
    """Seed of the random weights and tokens."""
    benchmark: Path | None = None
    """Rows of scripts/benchmark.py (benchmark.json) for the same cell without a profiler, to be set beside."""
    top: int = 8
    """Kernels to list for each range."""
    out: Path = Path("out/kernels")
    """Folder for what is written."""


def main() -> None:
    options = dict(vars(parse(Arguments, __doc__)))
    from cs336_systems.profiling.run_kernels import run_kernels

    run_kernels(command_line(), **options)


if __name__ == "__main__":
    main()
