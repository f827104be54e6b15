"""The command that goes on with a run, as it was typed: with the environment and the launcher that it had."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cs336_systems.cli import command_line

ROOT = Path(__file__).resolve().parents[1]


def test_the_command_has_what_the_environment_changes(monkeypatch):
    for name in ("OMP_NUM_THREADS", "TRITON_INTERPRET", "CS336_AUTOTUNE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", [str(ROOT / "scripts" / "benchmark.py"), "--out", "a b"])
    assert command_line() == "python scripts/benchmark.py --out 'a b'"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert command_line() == "OMP_NUM_THREADS=1 TRITON_INTERPRET=1 python scripts/benchmark.py --out 'a b'"


_TORCHRUN = {"RANK": "0", "TORCHELASTIC_RUN_ID": "none"}
_STEP = {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2"}


@pytest.mark.parametrize(
    ("environment", "launched"),
    [
        ({**_TORCHRUN, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1"},
         "torchrun --nproc-per-node 2"),
        ({**_TORCHRUN, "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"},
         "torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:PORT"),
        ({"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
         "RANK=0 WORLD_SIZE=3 MASTER_ADDR=a MASTER_PORT=1 python"),  # set by hand
        (_STEP, "srun --nodes 2 --ntasks 8 python"),
        ({**_STEP, "SLURM_CPUS_PER_TASK": "4", "SLURM_GPUS_PER_TASK": "1"},
         "srun --nodes 2 --ntasks 8 --cpus-per-task 4 --gpus-per-task 1 python"),
        ({**_STEP, "SLURM_STEP_NUM_TASKS": "1"}, "python"),  # a lone task spawns its own ranks
    ],
)  # fmt: skip
def test_the_command_has_the_launcher(monkeypatch, environment, launched):
    for name in ("OMP_NUM_THREADS", "TRITON_INTERPRET", "CS336_AUTOTUNE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", [str(ROOT / "scripts" / "ddp_benchmark.py"), "--out", "a b"])
    assert command_line() == f"{launched} scripts/ddp_benchmark.py --out 'a b'"


@pytest.mark.skipif(sys.platform != "linux", reason="reads another process's command line under /proc")
def test_the_command_has_torchrun_s_options_as_they_were_typed(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for name, value in {**_TORCHRUN, "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    script = str(ROOT / "scripts" / "ddp_benchmark.py")
    monkeypatch.setattr(sys, "argv", [script, "--out", "a"])
    typed = ["bin/torchrun", "--nproc_per_node=2", "--master-port", "29711", *sys.argv]
    code = "input(print('ready', flush=True) or '')"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code, *typed], **pipes) as parent:
        assert parent.stdout.readline() == b"ready\n"
        monkeypatch.setattr(os, "getppid", lambda: parent.pid)
        command = command_line()
        parent.communicate(b"\n")
    assert command == "torchrun --nproc_per_node=2 --master-port 29711 scripts/ddp_benchmark.py --out a"
