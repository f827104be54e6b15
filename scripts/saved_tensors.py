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
from typing import Any

from cs336_systems.cli import command_line, parse
from cs336_systems.configs import Attention, Compile, Precision


@dataclass(frozen=True)
class Arguments:
    size: tuple[str, ...] = ("small",)
    """Named sizes: tiny, small, medium, large, xl, 2.7b, 10b, 8b."""
    ctx: tuple[int, ...] = (256,)
    """Context lengths, in tokens."""
    precision: tuple[Precision, ...] = ("fp32", "bf16")
    """bf16 and fp16 are autocast over float32 weights."""
    attention: tuple[Attention, ...] = ("naive",)
    """The attention that the block calls."""
    compile: tuple[Compile, ...] = ("off",)
    """torch.compile: off, or blocks, to see what the compiled block keeps."""
    batch_size: int = 4
    """Sequences in a batch."""
    device: str = "auto"
    """cpu, cuda, cuda:N, or auto: the first GPU if there is one."""
    seed: int = 0
    """Of the random weights and input."""
    out: Path = Path("out/saved_tensors")
    """Folder for rows (JSON, CSV) and tables (Markdown, LaTeX)."""
    resume: bool = False
    """Keep the rows under --out and skip their cells."""


def main() -> None:
    options = dict(vars(parse(Arguments, __doc__)))
    from cs336_systems.benchmarking.into_files import measure_into_files
    from cs336_systems.benchmarking.model_benchmark import cell_label
    from cs336_systems.benchmarking.sweep import run_sweep
    from cs336_systems.configs import named_cells
    from cs336_systems.profiling.saved_tensors import BlockRow, SavedTensorRow, measure_block, write_files
    from cs336_systems.records import DetailRows, ResultsFile

    sizes, files = options.pop("size"), {name: options.pop(name) for name in ("device", "out", "resume")}
    details: list[DetailRows] = []

    def sweep(cells: list[Any], results: ResultsFile) -> None:
        details.append(DetailRows(results, "saved_tensors_list", SavedTensorRow, "tensors", files["resume"]))
        run_sweep(cells, measure_block, results, cell_label, details[0].complete)

    fixed = {"mode": "forward-backward", "num_layers": 1, "steps": 1}
    measure_into_files(
        command_line(),
        "saved_tensors",
        BlockRow,
        lambda device: named_cells(sizes, device=device, **fixed, **options),
        sweep,
        lambda results: write_files(results, details[0].file),
        **files,
    )


if __name__ == "__main__":
    main()
