"""Time attention as the course's 2025 leaderboard does: forward and backward of o.sum(), the mean over ten seconds.

Its rules are the defaults on a GPU: 16 heads, length 16,384, head_dim 64, causal, bfloat16, the function wrapped in
torch.compile, triton.testing.do_bench with warmup=1000 and rep=10000. Elsewhere the host's clock times length 1,024
for a tenth of that.

    python scripts/leaderboard_attention.py --implementation flash-triton sdpa-flash

The table is printed as Markdown, and rows are kept under --out as JSON, CSV, Markdown and LaTeX.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cs336_systems.benchmarking.attention_cells import PeerName
from cs336_systems.cli import command_line, parse
from cs336_systems.configs import Precision


@dataclass(frozen=True)
class Arguments:
    implementation: tuple[PeerName, ...] | None = None
    """What is measured, each in a process of its own; sdpa-* are PyTorch's backends. Default: flash-triton, sdpa-flash,
    sdpa-cudnn and flex on a GPU, and flash-pytorch and sdpa-flash elsewhere."""
    heads: int = 16
    """Heads, in the place of a batch."""
    length: int | None = None
    """Tokens, of queries and keys alike. Default: 16,384 on a GPU and 1,024 elsewhere."""
    head_dim: int = 64
    """Width of a head."""
    precision: Precision = "bf16"
    """The inputs' dtype; tf32 is fp32 with torch.set_float32_matmul_precision("high")."""
    causal: bool = True
    """Each query sees the keys up to its own place; its operations are counted as half."""
    warmup_ms: int | None = None
    """Time spent on calls before measuring. Default: 1,000 on a GPU and 100 elsewhere."""
    rep_ms: int | None = None
    """Time spent on measured calls. Default: 10,000 on a GPU and 1,000 elsewhere."""
    device: str = "auto"
    """cpu, cuda, cuda:N, mps, or auto: the first GPU if there is one."""
    seed: int = 0
    """Seed of the random inputs."""
    out: Path = Path("out/leaderboard_attention")
    """Folder for rows, tables and pictures; an earlier run's are moved aside, unless resumed."""
    resume: bool = False
    """Keep the rows under --out and skip their cells."""


def main() -> None:
    arguments = parse(Arguments, __doc__)
    from cs336_systems.benchmarking.leaderboard_attention import run_leaderboard

    run_leaderboard(command_line(), **vars(arguments))


if __name__ == "__main__":
    main()
