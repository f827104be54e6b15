"""See what one Transformer block keeps for backward: each tensor's shape, dtype, bytes and the operation that keeps it.

    python scripts/saved_tensors.py --size 2.7b --ctx 512 --precision fp32 bf16
    python scripts/saved_tensors.py --size small --attention naive flash-pytorch --compile off blocks

Parameters, and the copies of them that autocast makes, are told apart from activations; a tensor that several
operations keep counts once; the formula of docs/accounting.md stands beside the sum. What backward then allocates is
measured too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cs336_systems.cli import command_line, parse
from cs336_systems.configs import Attention, Compile, Precision


@dataclass(frozen=True)
class Arguments:
    size: tuple[str, ...] | None = None
    """Named sizes: tiny, small, medium, large, xl, 2.7b, 10b, 8b. Default: small on a GPU and tiny elsewhere."""
    ctx: tuple[int, ...] = (256,)
    """Context lengths, in tokens."""
    precision: tuple[Precision, ...] = ("fp32", "bf16")
    """bf16 and fp16 are autocast over float32 weights; tf32 is fp32 with tensor cores."""
    attention: tuple[Attention, ...] = ("naive",)
    """The attention that the block calls."""
    compile: tuple[Compile, ...] = ("off",)
    """torch.compile: off, or blocks, to see what the compiled block keeps."""
    batch_size: int = 4
    """Sequences in a batch."""
    device: str = "auto"
    """cpu, cuda, cuda:N, or auto: the first GPU if there is one."""
    seed: int = 0
    """Seed of the random weights and input."""
    out: Path = Path("out/saved_tensors")
    """Folder for rows and tables; an earlier run's are moved aside, unless resumed."""
    resume: bool = False
    """Keep the rows under --out and skip their cells."""


def main() -> None:
    options = dict(vars(parse(Arguments, __doc__)))
    options |= {"mode": "forward-backward", "num_layers": 1, "steps": 1}
    from cs336_systems.benchmarking.detailed_sweep import check_detailed_sweep, run_detailed_sweep

    check_detailed_sweep(**options)
    from cs336_systems.profiling import saved_tensors

    run_detailed_sweep(
        command_line(),
        "saved_tensors",
        saved_tensors.BlockRow,
        ("saved_tensors_list", saved_tensors.SavedTensorRow, "tensors"),
        saved_tensors.measure_block,
        saved_tensors.write_files,
        whole_model=False,
        **options,
    )


if __name__ == "__main__":
    main()
