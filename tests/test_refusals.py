"""Each script answers `--help`, and refuses what can be told without torch, without importing it: in a fraction of a
second. Neither needs a clock here: what a process has imported says it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from cs336_systems.provenance import count_gpus, may_have_gpu
from tests.script_helpers import ROOT, assert_help_needs_no_torch, refused_without_torch

# The flags, and what is said of them: a value that cannot be, and some that don't go together.
WIDE = "--d-model 512 --num-heads 1 --attention flash-pytorch"
TOO_WIDE = "--attention flash-pytorch: takes heads of at most 256, and d_model / num_heads is 512"
CUSTOM = "--size custom --d-ff 64 --num-layers 1"
REFUSED = [
    ("accounting", WIDE, TOO_WIDE),
    ("accounting", "--bandwidth-gb-per-s inf", "--bandwidth-gb-per-s inf: must be a finite number"),
    ("accounting", "--ctx 0", "--ctx 0: must be between 1"),
    ("benchmark", f"{CUSTOM} {WIDE}", TOO_WIDE),
    ("benchmark", f"{CUSTOM} --d-model 16384 --num-heads 64 --kernels fused", "--kernels fused: takes a d_model of at"),
    ("train", f"{CUSTOM} {WIDE}", TOO_WIDE),
    ("train", f"{CUSTOM} --d-model 4096 --num-heads 2 --kernels fused", "--kernels fused: takes heads of at most 1024"),
    ("accounting", "--size nope", "--size nope: must be one of tiny"),
    ("accounting", "--handout --size xl", "--size xl: is not of the exercise"),
    ("all_reduce_benchmark", "--device cpu --sizes-mb 0", "--sizes-mb 0.0: must be at least one float32"),
    ("all_reduce_benchmark", "--device cpu --max-ctas 4", "--max-ctas 4: is an option of NCCL's"),
    ("all_reduce_benchmark", "--device cpu --sizes-mb 1 nan", "--sizes-mb nan: must be a finite number"),
    ("all_reduce_benchmark", "--device cpu --processes", "--processes: needs at least one value"),
    ("all_reduce_benchmark", "--device cpu --processes 0", "--processes 0: must be at least 1"),
    ("analyze_nsys", "", "error: reports: needs at least one value"),
    ("analyze_nsys", "report.sqlite --steps 3", "--steps 3: goes with --trim"),
    ("attention_benchmark", "--head-dim 0", "--head-dim 0: must be from 1 to 256"),
    ("benchmark", "--device cpu --cold-caches", "--cold-caches: goes with what is compiled"),
    ("benchmark", "--ctx 0", "--ctx 0: must be between 1"),
    ("benchmark", "--master-weights on", "--master-weights on: needs precision='bf16'"),
    ("checkpointing", "--ctx 0", "--ctx 0: must be between 1"),
    ("checkpointing", "--layers 1", "--layers 1: must be at least 2"),
    ("checkpointing", "--part nested --size tiny", "--size tiny: goes with --part model"),
    ("convergence", "--ctx 0", "--ctx 0: must be at least 1"),
    ("convergence", "--variant nope", "--variant nope: must be one of fp32"),
    ("convergence", "--variant fp32 --processes 4", "--processes 4: goes with --variant ddp"),
    ("convergence", "--steps 5 --warmup-steps 6", "--warmup-steps 6: must be 0 to 5"),
    ("ddp_benchmark", "--device cpu --ctx 0", "--ctx 0: must be between 1"),
    ("ddp_benchmark", "--device cpu --batch-size 3 --total-batch-size 8", "--batch-size 3: goes without"),
    ("ddp_benchmark", "--implementation flat --bucket-size-mb 1", "--bucket-size-mb 1.0: goes with"),
    ("ddp_benchmark", "--device cpu --size 8b --ctx 32768 --batch-size 4096", "--size 8b: a train-step"),
    ("flash_benchmark", "--head-dim 0", "--head-dim 0: must be from 1 to 256"),
    ("fsdp_benchmark", "--device cpu --implementation nope", "--implementation nope: must be one of none"),
    ("fsdp_benchmark", "--device cpu --max-ctas 4", "--max-ctas 4: is an option of NCCL's"),
    ("kernel_benchmark", "--tokens 0", "--tokens 0: must be at least 1"),
    ("kernel_benchmark", "--kernel adamw --tokens 8", "--tokens 8: goes with other kernels than adamw"),
    ("leaderboard_attention", "--length 0", "--length 0: must be at least 1"),
    ("leaderboard_step", "--device cpu --ctx 0", "--ctx 0: must be between 1"),
    ("leaderboard_step", "--device cpu --high-priority on", "--high-priority on: is an option of NCCL's"),
    ("mixed_precision", "--ctx 0", "--ctx 0: must be between 1"),
    ("mixed_precision", "--part dtypes --size tiny", "--size tiny: goes with --part benchmark"),
    ("profile_kernels", "--ctx 0", "--ctx 0: must be between 1"),
    ("profile_memory", "--checkpoint-every 99", "--checkpoint-every 99: must be between 1"),
    ("profile_memory", "--snapshot a.pickle --size tiny", "--size tiny: is of what is recorded"),
    ("profile_nsys", "--ctx 0", "--ctx 0: must be between 1"),
    ("reproduce", "--only nope", "--only nope"),
    ("reproduce", "--results /dev/null --only all_reduce", "--results /dev/null: must be a folder"),
    ("reproduce", "--only", "--only: needs at least one value"),
    ("saved_tensors", "--ctx 0", "--ctx 0: must be between 1"),
    ("scaling_benchmark", "--device cpu --size nope", "--size nope: must be one of tiny"),
    ("scaling_benchmark", "--device cpu --processes 0", "--processes 0: must be at least 1"),
    ("sharded_optimizer_benchmark", "--device cpu --precision bf16 --ctx 0", "--ctx 0: must be between 1"),
    ("submit_sweep", "--command scripts/train.py --vary", "--vary: needs at least one value"),
    ("submit_sweep", "--command scripts/train.py --cluster local --partition gpu", "--partition gpu: is of Slurm"),
    ("train", "--learning-rate 1e300", "--learning-rate 1e+300: must be above 0 and at most 3.4028234663852886e+38,"),
    ("train", "--weight-decay 1e39", "--weight-decay 1e+39: must be between 0 and 3.4028234663852886e+38,"),
    ("train", "--weight-decay inf", "--weight-decay inf: must be a finite number"),
    ("train", "--clip-norm nan", "--clip-norm nan: must be a finite number, or inf"),
    ("train", "--no-loss-scaling", "--no-loss-scaling: only fp16 scales the loss"),
    ("train", "--ctx 0", "--ctx 0: must be at least 1"),
]
# Those without a flag that only some values suit.
REFUSE_NOTHING = ("report", "update_readme")
SCRIPTS = sorted(script.stem for script in (ROOT / "scripts").glob("*.py"))
WITH_A_DEVICE = [script for script in SCRIPTS if "device: " in (ROOT / f"scripts/{script}.py").read_text("utf-8")] + [
    "ddp_benchmark",
    "fsdp_benchmark",
    "scaling_benchmark",
    "sharded_optimizer_benchmark",
    "train",
]
WITHOUT_GPUS = pytest.mark.skipif(may_have_gpu(), reason="where there may be GPUs, torch is asked for them")


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_needs_no_torch(script: str) -> None:
    assert_help_needs_no_torch(script)


def test_every_script_is_here() -> None:
    assert {script for script, *_ in REFUSED} | {*REFUSE_NOTHING} == {*SCRIPTS}


@pytest.mark.parametrize(("script", "arguments", "said"), REFUSED)
def test_bad_arguments_are_refused_without_torch(script: str, arguments: str, said: str, tmp_path: Path) -> None:
    out = () if script in ("accounting", "reproduce", "submit_sweep") else ("--out", str(tmp_path))
    assert said in refused_without_torch(script, *arguments.split(), *out)


@WITHOUT_GPUS
@pytest.mark.parametrize("script", [name for name in WITH_A_DEVICE if name != "profile_nsys"])
def test_a_gpu_that_is_not_here_is_refused_without_torch(script: str, tmp_path: Path) -> None:
    shown = refused_without_torch(script, "--device", "cuda", "--out", str(tmp_path))
    assert "error: --device cuda: is not on this machine" in shown


@WITHOUT_GPUS
@pytest.mark.parametrize("script", ["benchmark", "mixed_precision", "profile_kernels", "profile_memory"])
def test_what_no_cpu_can_is_refused_without_torch(script: str, tmp_path: Path) -> None:
    shown = refused_without_torch(script, "--precision", "tf32", "--out", str(tmp_path))
    assert "error: --precision tf32: is a mode of NVIDIA's tensor cores, and device='cpu'" in shown


@WITHOUT_GPUS
@pytest.mark.parametrize("script", ["profile_memory", "profile_kernels"])
def test_what_depends_on_the_size_is_that_of_a_cpus_own(script: str, tmp_path: Path) -> None:
    """tiny has 2 blocks, and small, a GPU's, 12."""
    shown = refused_without_torch(script, "--checkpoint-every", "99", "--out", str(tmp_path))
    assert "--checkpoint-every 99: must be between 1 and 2, the model's blocks" in shown


@WITHOUT_GPUS
def test_without_a_driver_there_are_no_gpus() -> None:
    assert count_gpus() == 0
