"""Work out a model's parameters, FLOPs, memory and communication on paper, for one named size or your own.

    python scripts/accounting.py --size 2.7b --ctx 512 --precision bf16 --gpu "NVIDIA H200"
    python scripts/accounting.py --handout

Nothing is built or measured: the tables are Markdown from the formulas of docs/accounting.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cs336_systems.accounting.training_memory import Sharding
from cs336_systems.cli import parse, refusing_bad_input, show
from cs336_systems.configs import MODEL_SIZES, Attention, Precision, check_choice, check_ignored, check_widths


@dataclass(frozen=True)
class Arguments:
    size: str = "small"
    """A named size: tiny, small, medium, large, xl, 2.7b, 10b, 8b. The model's own flags below change it."""
    ctx: int = 256
    """Context length, in tokens."""
    batch_size: int = 4
    """Sequences in a device's batch."""
    precision: Precision = "fp32"
    """bf16 and fp16 are autocast over float32 weights; tf32 is fp32 with tensor cores."""
    attention: Attention = "naive"
    """The attention that the model calls."""
    checkpoint_every: int | None = None
    """Blocks in a checkpointed segment. Default: no checkpoints."""
    sharding: Sharding = "none"
    """What is divided over the devices: nothing, AdamW's moments, gradients too, or the weights too."""
    num_devices: int = 1
    """Devices, each with a batch of its own."""
    gpu: str | None = None
    """A GPU's name as torch reports it, e.g. "NVIDIA H100 80GB HBM3", for times at its peak. Default: no times."""
    bandwidth_gb_per_s: float | None = None
    """With --gpu: what a device sends, in 1e9 bytes/s (NVLink of an H100: 450), for the limits of parallel schemes."""
    handout: bool = False
    """Print the paper exercise on the XXL model step by step, and nothing else."""
    vocab_size: int | None = None
    """Vocabulary, in tokens. Default: the size's."""
    d_model: int | None = None
    """Width of the residual stream. Default: the size's."""
    d_ff: int | None = None
    """Width of the feed-forward layer. Default: the size's."""
    num_layers: int | None = None
    """Transformer blocks. Default: the size's."""
    num_heads: int | None = None
    """Attention heads; they must divide --d-model. Default: the size's."""


def main() -> None:
    arguments = parse(Arguments, __doc__)
    from cs336_systems.accounting.report import model_report
    from cs336_systems.accounting.xxl import derivation

    if arguments.handout:
        with refusing_bad_input():
            others = vars(arguments).keys() - {"handout"}
            check_ignored(arguments, others, "is not of the exercise; --handout goes without other flags")
        show(derivation())
        return
    options = dict(vars(arguments))
    size, ctx, _ = (options.pop(name) for name in ("size", "ctx", "handout"))
    shape = {name: options.pop(name) for name in ("vocab_size", "d_model", "d_ff", "num_layers", "num_heads")}
    with refusing_bad_input():
        check_choice("size", size, MODEL_SIZES)
        given = {name: value for name, value in shape.items() if value is not None}
        config = replace(MODEL_SIZES[size], context_length=ctx, **given)
        check_widths(arguments, config, arguments.attention)
        report = model_report(config, context_length=ctx, **options)
    show(report)


if __name__ == "__main__":
    main()
