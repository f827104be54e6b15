"""Time attention alone, without heads, forward and backward, and weigh what it keeps between the two.

Batch 8, head_dims 16 to 128, lengths 256 to 16,384, float32, causal, plain attention eager and compiled (without a GPU
eager only, to 1,024, which takes a minute); for example beside FlashAttention-2:

    python scripts/attention_benchmark.py --implementation naive flash-triton --precision bf16

Where memory runs out, the row says so, and has the memory by formula. Rows are kept under --out as JSON, CSV, Markdown,
LaTeX and a plot.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cs336_systems.benchmarking.attention_benchmark import CompileAttention
from cs336_systems.benchmarking.attention_cells import EagerPeerName
from cs336_systems.cli import command_line, parse
from cs336_systems.configs import Precision


@dataclass(frozen=True)
class Arguments:
    implementation: tuple[EagerPeerName, ...] = ("naive",)
    """The attention; naive is the model's own, sdpa-* are PyTorch's backends."""
    compile: tuple[CompileAttention, ...] | None = None
    """Eager, or with torch.compile, anew for each cell. Default: both on a GPU and eager elsewhere."""
    precision: tuple[Precision, ...] = ("fp32",)
    """The inputs' dtype; tf32 is fp32 with torch.set_float32_matmul_precision("high")."""
    head_dim: tuple[int, ...] = (16, 32, 64, 128)
    """Width of queries, keys and values."""
    length: tuple[int, ...] | None = None
    """Tokens, of queries and keys alike. Default: 256, 1024, 4096, 8192 and 16384 on a GPU, 256 and 1024 elsewhere."""
    batch_size: int = 8
    """Sequences in a batch."""
    causal: bool = True
    """Each query sees the keys up to its own place."""
    warmup: int = 5
    """Forward and backward passes before measuring."""
    steps: int | None = None
    """Measured forward passes, and backward passes. Default: 100 on a GPU and 10 elsewhere."""
    device: str = "auto"
    """cpu, cuda, cuda:N, mps, or auto: the first GPU if there is one."""
    seed: int = 0
    """Seed of the random inputs."""
    out: Path = Path("out/attention_benchmark")
    """Folder for rows, tables and pictures; an earlier run's are moved aside, unless resumed."""
    resume: bool = False
    """Keep the rows under --out and skip their cells."""


def main() -> None:
    arguments = parse(Arguments, __doc__)
    from cs336_systems.benchmarking.attention_benchmark import run_attention_benchmark

    run_attention_benchmark(command_line(), **vars(arguments))


if __name__ == "__main__":
    main()
