"""Time a Transformer's forward pass, backward pass and optimizer step, one cell or a whole sweep.

Several values for size, ctx, mode, precision, compile, cuda-graphs, attention, kernels, optimizer, master-weights,
checkpoint-every or warmup are a sweep over their product:

    python scripts/benchmark.py --size small medium --ctx 128 256 --precision fp32 bf16

Each cell runs in a process of its own and starts with a fresh card. The table is printed as Markdown, and rows are kept
under --out as JSON, CSV, Markdown, LaTeX and a plot.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cs336_systems.cli import command_line, parse
from cs336_systems.configs import Attention, Compile, Kernels, Mode, Optimizer, Precision, Switch


@dataclass(frozen=True)
class Arguments:
    size: tuple[str, ...] | None = None
    """Named sizes: tiny, small, medium, large, xl, 2.7b, 10b, 8b; or custom, with the model's own flags below. Default:
    small on a GPU, tiny elsewhere."""
    ctx: tuple[int, ...] = (256,)
    """Context lengths, in tokens."""
    mode: tuple[Mode, ...] = ("train-step",)
    """forward runs without autograd; forward-backward adds the loss and backward; train-step adds the optimizer."""
    precision: tuple[Precision, ...] = ("fp32",)
    """bf16 and fp16 are autocast over float32 weights; fp16 scales the loss in a train step; tf32 is fp32 with
    tensor cores."""
    compile: tuple[Compile, ...] = ("off",)
    """torch.compile: off, on (the whole model), or blocks (each block by itself, which compiles much sooner)."""
    cuda_graphs: tuple[Switch, ...] = ("off",)
    """on records forward, loss and backward as CUDA graphs in the first step and replays them from then on: the host
    launches each as one piece. The optimizer's step is launched as ever."""
    attention: tuple[Attention, ...] = ("naive",)
    """The attention that the model calls."""
    kernels: tuple[Kernels, ...] = ("plain",)
    """Triton's instead of PyTorch's: none (plain); the last layer with the loss, whose time is then part of forward's,
    and the project's AdamW (loss); or these and norms, SwiGLU and rotary positions (fused)."""
    optimizer: tuple[Optimizer, ...] = ("adamw",)
    """The project's AdamW, or PyTorch's fused one."""
    master_weights: tuple[Switch, ...] = ("off",)
    """on, with --precision bf16 and --kernels loss or fused: the blocks hold their matrices in bfloat16, and the
    optimizer their float32 masters: the numbers are autocast's, which rounds and widens them anew in every step."""
    checkpoint_every: tuple[int, ...] = (0,)
    """Blocks in a checkpointed segment, run again in backward; 0 for no checkpoints."""
    warmup: tuple[int, ...] = (5,)
    """Steps before measuring."""
    steps: int = 10
    """Measured steps."""
    batch_size: int = 4
    """Sequences in a batch."""
    device: str = "auto"
    """cpu, cuda, cuda:N, mps, or auto: the first GPU if there is one."""
    seed: int = 0
    """Seed of the random weights and tokens."""
    out: Path = Path("out/benchmark")
    """Folder for rows, tables and pictures; an earlier run's are moved aside, unless resumed."""
    resume: bool = False
    """Keep the rows under --out and skip their cells."""
    cold_caches: bool = False
    """Give each cell empty compile caches, to see what a first run costs."""
    nvtx: bool = False
    """Mark warm-up, steps, phases, blocks and attention's parts for nsys, and capture the measured steps only;
    scripts/profile_nsys.py runs nsys for you."""
    vocab_size: int | None = None
    """Vocabulary, in tokens. Default: the size's, or 10,000 for custom."""
    d_model: int | None = None
    """With --size custom: width of the residual stream."""
    d_ff: int | None = None
    """With --size custom: width of the feed-forward layer."""
    num_layers: int | None = None
    """With --size custom: Transformer blocks."""
    num_heads: int | None = None
    """With --size custom: attention heads; they must divide --d-model."""


def main() -> None:
    options = dict(vars(parse(Arguments, __doc__)))
    from cs336_systems.benchmarking.run_benchmark import run_benchmark

    watch = None
    if options.pop("nvtx"):
        from cs336_systems.profiling.nvtx import watch_with_nvtx as watch
    run_benchmark(command_line(), watch=watch, **options)


if __name__ == "__main__":
    main()
