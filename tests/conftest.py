"""What every test gets: shape and dtype checks on, few threads, seeded randomness, GPU tests skipped without a GPU."""

import os
from collections.abc import Generator
from pathlib import Path

# Before torch is imported: the suite shares two cores with the ranks that its distributed tests spawn.
os.environ.setdefault("OMP_NUM_THREADS", "2")
# Without a GPU the Triton kernels run in Triton's interpreter; it must be chosen before triton is imported.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

import jaxtyping
from jaxtyping import install_import_hook

import tests.typecheck  # noqa: F401  found by its name below

_ROOT = Path(__file__).resolve().parents[1]


def _modules_to_check() -> list[str]:
    """Every module that annotates tensors, except those that define Triton kernels: the hook would wrap the kernels
    themselves, and Triton must see the bare functions."""
    modules = []
    for source_root, package in ((_ROOT, "cs336_systems"), (_ROOT / "cs336-basics", "cs336_basics")):
        for file in (source_root / package).rglob("*.py"):
            text = file.read_text(encoding="utf-8")
            if "from jaxtyping import" in text and "triton.jit" not in text:
                modules.append(".".join(file.relative_to(source_root).with_suffix("").parts))
    return modules


# Every jaxtyping annotation of the two packages is checked while the tests run.
install_import_hook(_modules_to_check(), "tests.typecheck.check")

import pytest  # noqa: E402
import torch  # noqa: E402


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU, and torch.cuda.is_available() is False")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def annotations_unchecked() -> Generator[None]:
    """For tests that compile in this process: an active checker around each function breaks torch.compile's graph."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def device() -> str:
    """The card where there is one, else the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"
