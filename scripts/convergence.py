"""Train one small model with each technique and several seeds, to see that they converge alike.

A variant is a precision, an attention or a parallel scheme; each run is scripts/train.py's, with the same data in the
same order. Under --out are each run's metrics, and a table and a picture of all of them:

    python scripts/convergence.py --size small --ctx 256 --steps 1000
    python scripts/convergence.py --variant fp32 fp16 fp16-unscaled --seed 0 1 2
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cs336_systems.cli import command_line, parse, refusing_bad_input


@dataclass(frozen=True)
class Arguments:
    variant: tuple[str, ...] | None = None
    """fp32, tf32, bf16, fp16, fp16-unscaled, fp32-flash, bf16-flash, ddp, bucketed, ddp-sharded-optimizer, fsdp,
    bf16-fsdp. The others are compared with the first; what can't run here is a row that says so. Default: all but tf32
    and bf16-fsdp on a GPU; fp32, bf16 and ddp elsewhere."""
    seed: tuple[int, ...] | None = None
    """Seed of the weights and of the order of the data. Default: 0, 1 and 2 on a GPU and 0 elsewhere."""
    processes: int | None = None
    """Ranks of the parallel variants, one a GPU. Default: 2."""
    at_once: int = 0
    """Runs at the same time; 0: one on a CPU, and beside a GPU half the CPU's cores, 8 at most."""
    data: Path | None = None
    """As for scripts/train.py: any text file, .npy or .bin. Default: Python's own library."""
    size: str = "tiny"
    """A named size: tiny, small, medium, large, xl, 2.7b, 10b, 8b."""
    ctx: int = 128
    """Context length, in tokens."""
    batch_size: int = 16
    """Sequences of an optimizer step, over all processes."""
    steps: int | None = None
    """Optimizer steps of each run. Default: 300 on a GPU and 30 elsewhere."""
    warmup_steps: int | None = None
    """Steps over which the learning rate rises. Default: a tenth of the steps, and 20 at most."""
    learning_rate: float = 1e-3
    """The highest learning rate."""
    min_learning_rate: float = 1e-4
    """The last step's learning rate."""
    validate_every: int = 25
    """Steps between validations."""
    checkpoint_every: int = 100
    """Steps between checkpoints, from which --resume goes on with a run that was ended. After Ctrl-C a run in one
    process loses no step."""
    device: str = "auto"
    """cpu, cuda, or auto: the first GPU if there is one."""
    out: Path = Path("out/convergence")
    """Folder for the runs and the results."""
    resume: bool = False
    """Keep the rows under --out, and go on with the runs that have none."""


def main() -> None:
    arguments = parse(Arguments, __doc__)
    from cs336_systems.benchmarking.convergence_variants import check_convergence

    with refusing_bad_input():
        check_convergence(**{name: value for name, value in vars(arguments).items() if name != "resume"})
    from cs336_systems.benchmarking.convergence import run_convergence

    run_convergence(command_line(), **vars(arguments))


if __name__ == "__main__":
    main()
