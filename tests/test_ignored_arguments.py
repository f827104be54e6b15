"""Arguments that a run would not read are refused, by name and before any work, in every script that has such."""

import dataclasses
import json
import runpy
import shlex
from pathlib import Path

import pytest

from cs336_systems.configs import named_cell
from cs336_systems.sweep_cells import named_cells

ROOT = Path(__file__).resolve().parents[1]
NO_OPTIMIZER = "--optimizer adamw-fused: goes with --mode train-step; other steps have no optimizer"
NO_BACKWARD = "--checkpoint-every 1: goes with --mode forward-backward or train-step"


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("benchmark", "--mode forward --optimizer adamw-fused", NO_OPTIMIZER),
        ("benchmark", "--mode forward forward-backward --optimizer adamw adamw-fused", NO_OPTIMIZER),
        ("benchmark", "--mode forward --checkpoint-every 0 1", NO_BACKWARD),
        (
            "benchmark",
            "--mode forward --kernels loss",
            "--kernels loss: is of loss and optimizer",
        ),
        ("benchmark", "--cold-caches", "--cold-caches: goes with what is compiled: --compile on or blocks"),
        ("profile_memory", "--mode forward --optimizer adamw-fused", NO_OPTIMIZER),
        ("profile_memory", "--mode forward --checkpoint-every 1", NO_BACKWARD),
        (
            "profile_memory",
            "--snapshot x --mode forward train-step --batch-size 2",
            "--batch-size 2: is of what",
        ),
        ("profile_memory", "--snapshot x --ctx 8 16", "--ctx 8 16: is of what is recorded; --snapshot goes"),
        ("profile_kernels", "--mode forward --optimizer adamw-fused", NO_OPTIMIZER),
        ("profile_nsys", "--dry-run --mode forward --optimizer adamw-fused", NO_OPTIMIZER),
        ("profile_nsys", "--dry-run --top 3", "--top 3: goes without --dry-run, whose commands do not depend"),
        ("profile_nsys", "--dry-run --resume", "--resume: goes without --dry-run, whose commands do not"),
        ("mixed_precision", "--mode forward-backward --optimizer adamw-fused", NO_OPTIMIZER),
        ("mixed_precision", "--part dtypes layer-norm --size small", "--size small: goes with --part benchmark"),
        ("mixed_precision", "--part accumulation --resume", "--resume: goes with --part benchmark"),
        ("checkpointing", "--part nested --ctx 8", "--ctx 8: goes with --part model"),
        ("checkpointing", "--part model --layers 4 8", "--layers 4 8: goes with --part nested"),
        ("analyze_nsys", "x --steps 2", "--steps 2: goes with --trim"),
        ("analyze_nsys", "x --trim y --out z", "--out z: goes without --trim, which does nothing else"),
        ("analyze_nsys", "x y --compare --top 3", "--top 3: goes without --compare, which does nothing else"),
        (
            "flash_benchmark",
            "--implementation naive --compiled-shapes static",
            "--compiled-shapes static: goes with",
        ),
        ("kernel_benchmark", "--kernel rope --adamw-layers 2", "--adamw-layers 2: goes with --kernel adamw"),
        ("kernel_benchmark", "--kernel adamw --tokens 64", "--tokens 64: goes with other kernels than adamw"),
        (
            "submit_sweep",
            "--command x --cluster local --partition p",
            "--partition p: is of Slurm; jobs on this machine",
        ),
        ("ddp_benchmark", "--implementation naive --bucket-size-mb 1 2", "--bucket-size-mb 1.0 2.0: goes with"),
        ("ddp_benchmark", "--implementation torch-ddp --comm-dtype bf16", "--comm-dtype bf16: goes with"),
        *(
            (
                script,
                "--device cpu --batch-size 8 --total-batch-size 8",
                "--batch-size 8: goes without --total-batch-",
            )
            for script in ("ddp_benchmark", "fsdp_benchmark", "sharded_optimizer_benchmark", "scaling_benchmark")
        ),
        (
            "convergence",
            "--variant fp32 bf16 --processes 2",
            "--processes 2: goes with --variant ddp or",
        ),
        (
            "train",
            "--parallel ddp --bucket-size-mb 1",
            "--bucket-size-mb 1.0: goes with --parallel bucketed",
        ),
        ("train", "--data x.txt --token-dtype uint8", "--token-dtype uint8: goes with --data of a .bin file"),
        ("accounting", "--handout --size large", "--size large: is not of the exercise; --handout goes without"),
    ],
)
def test_what_would_be_ignored_is_refused(run_script, tmp_path, monkeypatch, script, arguments, message):
    monkeypatch.chdir(tmp_path)
    status, shown, errors = run_script(script, *arguments.split())
    assert (status, shown) == (2, "")
    assert f"error: {message}" in errors
    assert not any(tmp_path.iterdir())


# A value of each argument that is not its default, for the scripts whose --dry-run prints commands.
DRY_RUNS = {
    "profile_nsys": {
        "size": "large", "ctx": "8", "mode": "forward", "precision": "bf16", "compile": "on", "attention": "sdpa",
        "optimizer": "adamw-fused", "warmup": "9", "steps": "9", "batch_size": "9", "device": "cuda:7", "seed": "9",
        "nsys": "other", "unprofiled": "False", "resume": "True", "top": "9", "out": "elsewhere",
    },
    "reproduce": {"results": "elsewhere", "only": "all_reduce", "machine": "gpus"},
}  # fmt: skip


@pytest.mark.parametrize(("script", "values"), DRY_RUNS.items())
def test_what_a_dry_run_would_not_show_is_refused(run_script, tmp_path, monkeypatch, script, values):
    """Every other argument changes what is printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("cs336_systems.benchmarking.reproduce.has_nvidia_driver", lambda: False)
    arguments = runpy.run_path(str(ROOT / "scripts" / f"{script}.py"))["Arguments"]
    assert {field.name for field in dataclasses.fields(arguments)} == {*values, "dry_run"}
    status, plain, _ = run_script(script, "--dry-run")
    assert status == 0
    for name, value in values.items():
        flag = f"--{name.replace('_', '-')}"
        words = {"True": [flag], "False": [f"--no-{flag[2:]}"]}.get(value, [flag, value])
        status, shown, errors = run_script(script, "--dry-run", *words)
        if name in ("resume", "top"):
            assert (status, shown) == (2, "")
            assert errors.startswith(f"error: {' '.join(words)}: goes without --dry-run")
        else:
            assert status == 0, errors
            assert shown != plain, name
    assert not any(tmp_path.iterdir())


def test_what_some_cells_read_is_no_error_and_those_that_do_not_are_measured_once():
    modes = ("forward", "train-step")
    cells = named_cells(("tiny",), ctx=8, mode=modes, optimizer=("adamw", "adamw-fused"), checkpoint_every=(0, 1))
    assert cells[0] == named_cell("tiny", 8, mode="forward")
    assert [(cell.optimizer, cell.checkpoint_every) for cell in cells if cell.mode == "train-step"] == [
        ("adamw", 0), ("adamw", 1), ("adamw-fused", 0), ("adamw-fused", 1),
    ]  # fmt: skip
    assert len(cells) == 1 + 4
    assert named_cells(("tiny",), ctx=8, cold_caches=True, compile=("off", "on")) == [
        named_cell("tiny", 8),
        named_cell("tiny", 8, compile="on", cold_caches=True),
    ]


def test_nsys_captures_what_the_benchmark_does_not_refuse(run_script, tmp_path, monkeypatch):
    """Its cells one by one, though --optimizer is only of one of them."""
    monkeypatch.chdir(tmp_path)
    modes = ("--mode", "forward", "train-step", "--optimizer", "adamw-fused")
    status, shown, _ = run_script("profile_nsys", "--dry-run", "--device", "cuda", *modes)
    assert status == 0
    captured = [shlex.split(line) for line in shown.splitlines() if "--nvtx" in line]
    flags = [{name: words[words.index(name) + 1] for name in ("--mode", "--optimizer")} for words in captured]
    assert flags == [
        {"--mode": "forward", "--optimizer": "adamw"},
        {"--mode": "train-step", "--optimizer": "adamw-fused"},
    ]


def test_a_sweep_in_which_one_mode_reads_the_optimizer(run_script, tmp_path):
    tiny = ("--size", "tiny", "--ctx", 8, "--batch-size", 1, "--warmup", 0, "--steps", 1, "--device", "cpu")
    modes = ("--mode", "forward", "train-step", "--optimizer", "adamw-fused")
    status, _, errors = run_script("benchmark", *tiny, *modes, "--out", tmp_path)
    assert status == 0, errors
    rows = json.loads((tmp_path / "benchmark.json").read_text())["rows"]
    assert [(row["mode"], row["optimizer"]) for row in rows] == [("forward", "adamw"), ("train-step", "adamw-fused")]
