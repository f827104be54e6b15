"""Time FlashAttention-2 beside plain attention and PyTorch's own: forward, backward and both, over lengths.

Batch 1, one head, causal, lengths 128 to 65,536, head_dims 16 to 128, bfloat16 and float32 (without a GPU less, which
takes a minute); any of it can be changed:

    python scripts/flash_benchmark.py --length 16384 --head-dim 64 --heads 16 --precision bf16 --compiled-shapes static

Each is timed by triton.testing.do_bench (the L2 cache emptied before each call; without CUDA on the host's clock), and
checked against float64 where that is cheap. An implementation that cannot run, or runs out of memory, has a row that
says so. Tables are printed as Markdown, and rows are kept under --out as JSON, CSV, Markdown, LaTeX and plots.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cs336_systems.benchmarking.attention_cells import PeerName
from cs336_systems.benchmarking.flash_benchmark import CompiledShapes, Phase, Timed
from cs336_systems.cli import command_line, parse
from cs336_systems.configs import Precision


@dataclass(frozen=True)
class Arguments:
    implementation: tuple[PeerName, ...] | None = None
    """What is measured; sdpa-* are PyTorch's backends, naive-compiled and flex (FlexAttention) use torch.compile.
    Default: all on a GPU, and naive, flash-pytorch and sdpa-flash elsewhere."""
    length: tuple[int, ...] | None = None
    """Tokens, of queries and keys alike. Default: the powers of two from 128 to 65,536 on a GPU, to 1,024 elsewhere."""
    head_dim: tuple[int, ...] = (16, 32, 64, 128)
    """Width of a head."""
    precision: tuple[Precision, ...] | None = None
    """The inputs' dtype; tf32 is fp32 with torch.set_float32_matmul_precision("high"), fp32 with "highest". Default:
    bf16 and fp32 on a GPU, and fp32 elsewhere."""
    phase: tuple[Phase, ...] = ("forward", "backward", "both")
    """Forward keeps what backward needs; backward is timed by itself; both are one after the other."""
    causal: bool = True
    """Each query sees the keys up to its own place; its operations are counted as half."""
    heads: int = 1
    """Heads of a sequence."""
    batch_size: int = 1
    """Sequences in a batch."""
    compiled_shapes: CompiledShapes = "dynamic"
    """naive-compiled and flex: one kernel for all lengths of a head_dim and precision (dynamic), or one for each
    length (static). Static kernels are faster, but each costs seconds of compiling: for few lengths."""
    warmup_ms: int = 25
    """Time spent on calls before measuring."""
    rep_ms: int = 100
    """Time spent on measured calls, at least one."""
    max_call_ms: int = 1000
    """An implementation of which one call takes longer is skipped there and at longer lengths."""
    timed: Timed = "calls"
    """calls, each by itself; in-a-row, some 50 one after another, as a loop makes them, which tells what the host needs
    for short ones; or kernels: replayed from a CUDA graph, without the host's work (GPU only)."""
    device: str = "auto"
    """cpu, cuda, cuda:N, mps, or auto: the first GPU if there is one."""
    seed: int = 0
    """Seed of the random inputs."""
    out: Path = Path("out/flash_benchmark")
    """Folder for rows, tables and pictures; an earlier run's are moved aside, unless resumed."""
    resume: bool = False
    """Keep the rows under --out and skip their cells."""


def main() -> None:
    arguments = parse(Arguments, __doc__)
    from cs336_systems.benchmarking.run_flash_benchmark import run_flash_benchmark

    run_flash_benchmark(command_line(), **vars(arguments))


if __name__ == "__main__":
    main()
