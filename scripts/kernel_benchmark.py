"""Time the fused kernels beside eager PyTorch, torch.compile and PyTorch's own fused functions, at the models' shapes.

By default the large model's shapes (4 sequences of 1,024 tokens) and the 8b model's (32,768 tokens), in bfloat16;
without a GPU the tiny model's:

    python scripts/kernel_benchmark.py --kernel linear-cross-entropy rms-norm --size 8b
    python scripts/kernel_benchmark.py --implementation eager torch    # on a laptop's CPU

Each is timed by triton.testing.do_bench (the L2 cache emptied before each call; without CUDA on the host's clock). What
cannot run, or runs out of memory, has a row that says so. Tables are printed as Markdown, and rows are kept under --out
as JSON, CSV, Markdown and LaTeX.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from cs336_systems.benchmarking.kernel_benchmark import ImplementationName, KernelName, Timed
from cs336_systems.cli import command_line, parse, refusing_bad_input
from cs336_systems.configs import Precision, check_ignored


@dataclass(frozen=True)
class Arguments:
    kernel: tuple[KernelName, ...] = get_args(KernelName)
    """What is computed: the last layer with its loss, AdamW, RMSNorm without and with the addition before it, SwiGLU's
    elementwise part, rotary positions of queries and keys."""
    implementation: tuple[ImplementationName, ...] = get_args(ImplementationName)
    """fused is the project's kernel; torch is fused AdamW, F.rms_norm, and the loss in checkpointed chunks of 4,096
    tokens (nothing for the others)."""
    size: tuple[str, ...] = ()
    """Named sizes, whose widths and vocabulary are used: tiny, small, medium, large, xl, 2.7b, 10b, 8b. Default: large
    and 8b on a GPU, tiny elsewhere."""
    precision: tuple[Precision, ...] = ("bf16",)
    """The dtype of inputs, weights, gradients and state; tf32 is fp32 with tensor cores."""
    tokens: int | None = None
    """Tokens of a batch. Default: 32,768 for 8b and 4,096 for the others."""
    adamw_layers: int = 4
    """AdamW updates the parameters of at most this many blocks, embedding, last norm and last layer."""
    warmup_ms: int = 25
    """Time spent on calls before measuring."""
    rep_ms: int = 200
    """Time spent on measured calls, at least one."""
    timed: Timed = "calls"
    """calls, each by itself; in-a-row, some 50 one after another, as a loop makes them; or kernels: replayed from a
    CUDA graph, without the host's work (on a GPU, and not for the loss and AdamW)."""
    device: str = "auto"
    """cpu, cuda, cuda:N, mps, or auto: the first GPU if there is one."""
    seed: int = 0
    """Seed of the random inputs."""
    out: Path = Path("out/kernel_benchmark")
    """Folder for rows, tables and pictures; an earlier run's are moved aside, unless resumed."""
    resume: bool = False
    """Keep the rows under --out and skip their cells."""


def main() -> None:
    arguments = parse(Arguments, __doc__)
    with refusing_bad_input():
        if "adamw" not in arguments.kernel:
            check_ignored(arguments, {"adamw_layers"}, "goes with --kernel adamw")
        if set(arguments.kernel) == {"adamw"}:
            check_ignored(arguments, {"tokens"}, "goes with other kernels than adamw, which sees none")
    from cs336_systems.benchmarking.kernel_benchmark import run_kernel_benchmark

    run_kernel_benchmark(command_line(), **vars(arguments))


if __name__ == "__main__":
    main()
