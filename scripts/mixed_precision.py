"""Mixed precision: what float16 and bfloat16 do to numbers, and what they bring.

The parts: 0.01 added up a thousand times in several ways; the dtypes of a toy model under autocast; LayerNorm with one
part at a time in low precision; and the end-to-end benchmark in each precision, with the memory of the weights'
low-precision copies told apart from that of activations:

    python scripts/mixed_precision.py
    python scripts/mixed_precision.py --part benchmark --size small large --ctx 512 --attention naive flash-triton

Tables are printed as Markdown, and rows are kept under --out as JSON, CSV, Markdown, LaTeX and a plot.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cs336_systems.cli import command_line, parse, refusing_bad_input
from cs336_systems.configs import Attention, Compile, Mode, Optimizer, Precision, check_ignored

Part = Literal["accumulation", "dtypes", "layer-norm", "benchmark"]


@dataclass(frozen=True)
class Arguments:
    part: tuple[Part, ...] = ("accumulation", "dtypes", "layer-norm", "benchmark")
    """What to run."""
    size: tuple[str, ...] | None = None
    """Named sizes for the benchmark: tiny, small, medium, large, xl, 2.7b, 10b, 8b. Default: small, medium, large, xl
    and 2.7b on a GPU, and tiny elsewhere."""
    ctx: tuple[int, ...] = (256,)
    """Context lengths, in tokens."""
    mode: tuple[Mode, ...] = ("train-step",)
    """forward runs without autograd; forward-backward adds the loss and backward; train-step adds the optimizer."""
    precision: tuple[Precision, ...] | None = None
    """bf16 and fp16 are autocast over float32 weights; fp16 scales the loss in a train step. Default: fp32, bf16 and
    fp16 on a GPU, and fp32 and bf16 elsewhere."""
    compile: tuple[Compile, ...] = ("off",)
    """torch.compile: off, on (the whole model), or blocks; memory by kind is known only without it."""
    attention: tuple[Attention, ...] = ("naive",)
    """The attention that the model calls."""
    optimizer: tuple[Optimizer, ...] = ("adamw",)
    """The project's AdamW, or PyTorch's fused one."""
    warmup: int = 5
    """Steps before measuring."""
    steps: int = 10
    """Measured steps."""
    batch_size: int = 4
    """Sequences in a batch."""
    device: str = "auto"
    """cpu, cuda, cuda:N, mps, or auto: the first GPU if there is one."""
    seed: int = 0
    """Seed of the random weights and tokens."""
    out: Path = Path("out/mixed_precision")
    """Folder for rows, tables and pictures; an earlier run's are moved aside, unless resumed."""
    resume: bool = False
    """Keep the benchmark's rows under --out and skip their cells."""


def main() -> None:
    arguments = parse(Arguments, __doc__)
    if "benchmark" not in arguments.part:
        with refusing_bad_input():
            others = vars(arguments).keys() - {"part", "device", "out"}
            check_ignored(arguments, others, "goes with --part benchmark")
    from cs336_systems.benchmarking.run_mixed_precision import run_mixed_precision

    run_mixed_precision(command_line(), **vars(arguments))


if __name__ == "__main__":
    main()
