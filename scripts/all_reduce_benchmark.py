"""Time all-reduce over buffer sizes and numbers of processes: gloo on the CPU, NCCL on GPUs.

    python scripts/all_reduce_benchmark.py --device cpu --processes 2 4 --sizes-mb 1 10

Prints the times of the slowest rank, algorithm and bus bandwidth, and a fit of the cost of a call (o) and the
bandwidth (w). Also runs under torchrun and srun, on one node or several, with the launcher's number of processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cs336_systems.cli import command_line, parse


@dataclass(frozen=True)
class Arguments:
    processes: tuple[int, ...] = ()
    """Numbers of processes, one a GPU. Default: 2, 4 and 6, or those of them for which there are GPUs or, on a CPU,
    cores."""
    sizes_mb: tuple[float, ...] = (1, 10, 100, 1000)
    """Buffer sizes in MB (10**6 bytes) of float32."""
    warmup: int = 5
    """All-reduces before measuring."""
    repeats: int = 20
    """Measured all-reduces, the same number on every rank."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """cpu (gloo), cuda (NCCL), or auto: GPUs if there are any."""
    max_ctas: int | None = None
    """NCCL's largest number of CTAs, each of which takes a multiprocessor from the kernels that compute. Default: left
    to NCCL."""
    high_priority: bool = False
    """Have the GPU schedule NCCL's blocks before those of the kernels that compute."""
    timeout_s: float = 600.0
    """The limit of one collective, in seconds: ranks that wait longer for another end the run, and name it."""
    resume: bool = False
    """Keep the rows under --out and skip their cells."""
    out: Path = Path("out/all_reduce")
    """Folder for rows, tables and pictures; an earlier run's are moved aside, unless resumed."""


def main() -> None:
    arguments = parse(Arguments, __doc__, on_ranks=True)
    from cs336_systems.benchmarking.run_all_reduce import run_all_reduce_benchmark

    run_all_reduce_benchmark(command_line(), **vars(arguments))


if __name__ == "__main__":
    main()
