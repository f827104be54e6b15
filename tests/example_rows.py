"""A run's provenance, for tests that write results."""

from cs336_systems.provenance import Provenance

RUN = Provenance(
    command="python scripts/x.py",
    date="2026-01-31 12:00",
    gpu="NVIDIA H100 80GB HBM3",
    gpu_count=1,
    gpu_memory_gib=79.6,
    driver="580.1",
    cuda="13.0",
    torch="2.11.0",
    triton="3.6.0",
    python="3.12.3",
    cpu="A CPU",
    cpu_count=16,
    git_commit="abc",
)
