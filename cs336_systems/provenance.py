"""Where measurements came from: the command, the card, the versions and the commit, once a run beside its rows."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cs336_systems.configs import check
from cs336_systems.cpu_cores import usable_cores
from cs336_systems.files import check_writable

_SOURCE_ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Provenance:
    """Where rows came from: once a run, beside its rows."""

    command: str
    date: str  # UTC, e.g. "2026-01-31 12:00"
    gpu: str  # "none" on a CPU
    gpu_count: int
    gpu_memory_gib: float
    driver: str
    cuda: str  # "none" on a CPU, whatever torch was built with
    torch: str
    triton: str
    python: str
    cpu: str
    cpu_count: int  # the cores that the run may use (cpu_cores.py)
    git_commit: str  # with "+changes" behind it if the work tree differs from the commit
    # What others took of a CPU as its measuring began or ended, if times are longer for it (cpu_load.py): so many
    # cores; or the load average as it began, where the system tells no more.
    busy_cores: float | None = None
    busy_load: float | None = None

    def summary(self) -> str:
        """One line for a person, e.g. under a table."""
        if self.gpu == "none":
            busy = "" if self.busy_load is None else f", busy as it began: load {self.busy_load:.1f}"
            if self.busy_cores is not None:
                busy = f", of which others used {self.busy_cores:.1f} as it began or ended"
            hardware = f"{self.cpu} ({self.cpu_count} cores{busy}); "
        else:
            hardware = f"{self.gpu_count} × {self.gpu} ({self.gpu_memory_gib:.0f} GiB, driver {self.driver}); "
            hardware += f"CUDA {self.cuda}, "
        return (
            f"{hardware}torch {self.torch}, Triton {self.triton}, Python {self.python}; "
            f"commit {self.git_commit}, {self.date} UTC; `{self.command}`"
        )


def has_nvidia_driver() -> bool:
    """Whether NVIDIA's driver is here: without it torch, which takes seconds to import, need not be asked for GPUs."""
    try:
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return False
    return True


def may_have_gpu() -> bool:
    """Whether torch, which takes seconds to import, must be asked for GPUs: there is a driver of some (NVIDIA's, or
    AMD's, which torch calls cuda too), or a Mac's."""
    return has_nvidia_driver() or Path("/dev/kfd").exists() or sys.platform == "darwin"


def count_gpus() -> int:
    """How many GPUs torch calls cuda; torch is imported only where there may be one."""
    if not may_have_gpu():
        return 0
    import torch

    return torch.cuda.device_count()


def check_cpu_alone(device: str) -> None:
    """Raises ValueError for a device that is none of a CPU's, where there is certainly no GPU; without torch."""
    allowed = may_have_gpu() or device in ("auto", "cpu")
    check(allowed, "device", device, "is not on this machine; it has cpu")


def check_without_torch(make_cells: Callable[[str], object], device: str, out: Path) -> None:
    """Refuses what can be told before torch is imported, which takes seconds: cells that can never be, and, where there
    is certainly no GPU, a device that is none of a CPU's, and cells that cannot be on one; then a folder `out` that
    cannot be written to.

    Raises ValueError, also as `make_cells(device)` does.
    """
    may_be_gpu = may_have_gpu()
    if device == "auto":
        make_cells("cuda" if may_be_gpu else "cpu")
    else:
        make_cells(device)
        check_cpu_alone(device)
        if not may_be_gpu:
            make_cells("cpu")
    check_writable(out)


def devices_here() -> list[str]:
    """This machine's devices by torch's names, e.g. ["cpu", "cuda", "cuda:0"]. Touches the CUDA driver."""
    import torch

    devices = ["cpu"]
    if torch.backends.mps.is_available():
        devices.append("mps")
    if torch.cuda.is_available():
        devices += ["cuda", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    return devices


def best_device(devices: list[str]) -> str:
    """What "auto" stands for: the first GPU if there is one."""
    return next(name for name in ("cuda", "mps", "cpu") if name in devices)


def collect_provenance(command: str, device: str = "cuda") -> Provenance:
    """Reads the machine's and the software's versions. `command` is what a person would type to repeat the run.

    `device` "cpu" leaves the GPU out, so that a CPU's rows are not credited to a card. Touches the CUDA driver: a
    parent that must leave the card alone calls this in a child (`run_isolated`). The commit comes from git, or from the
    environment variable GIT_COMMIT where there is no checkout (a container).
    """
    import torch

    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = "none"
    on_gpu = device.startswith("cuda") and torch.cuda.is_available()
    properties = torch.cuda.get_device_properties(device) if on_gpu else None
    return Provenance(
        command=command,
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        gpu=properties.name if properties else "none",
        gpu_count=torch.cuda.device_count() if on_gpu else 0,
        gpu_memory_gib=round(properties.total_memory / 2**30, 1) if properties else 0.0,
        driver=_driver_version() if on_gpu else "none",
        cuda=str(torch.version.cuda) if on_gpu else "none",
        torch=str(torch.__version__),
        triton=triton_version,
        python=platform.python_version(),
        cpu=_cpu_name(),
        cpu_count=usable_cores(),
        git_commit=_git_commit(),
    )


def _driver_version() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return _output(query).splitlines()[0] if shutil.which("nvidia-smi") else "unknown"


def _cpu_name() -> str:
    if platform.system() == "Darwin":
        return _output(["sysctl", "-n", "machdep.cpu.brand_string"]) or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _git_commit() -> str:
    commit = _output(["git", "-C", str(_SOURCE_ROOT), "rev-parse", "--short=12", "HEAD"])
    if not commit:
        return re.sub(r"^([0-9a-f]{12})[0-9a-f]{28}$", r"\1", os.environ.get("GIT_COMMIT", "unknown"))
    # What a run writes is not a change of the code that it measures.
    changed = _output(["git", "-C", str(_SOURCE_ROOT), "status", "--porcelain", "--", ".", ":!results", ":!out"])
    return commit + ("+changes" if changed else "")


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
