"""The steps that make everything under results/: a script's arguments on a GPU and on a CPU, and where its rows go.

A table to read: scripts/reproduce.py runs it, and the report names from it the command that makes what is missing.
Imports no torch.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

Machine = Literal["cpu", "gpu", "gpus"]
MACHINES: tuple[str, ...] = get_args(Machine)

_SIZES = "--size small medium large xl 2.7b"
_XL = "--size xl --ctx 512"
_BF16_RANKS = f"{_XL} --precision bf16 --warmup 3 --steps 20"  # host-bound steps scatter
_FUSED = "--size large 2.7b --ctx 1024 --precision bf16"
_TINY_RANKS = "--device cpu --size tiny --ctx 64 --batch-size 2 --warmup 1 --steps 3"
_QUICK = "--rep-ms 20 --warmup-ms 5 --max-call-ms 200"
_KERNELS = "--implementation flash-triton flash-hopper sdpa-flash sdpa-cudnn"
_ANCHORS = f"--precision bf16 --warmup-ms 20 --rep-ms 60 {_KERNELS}"


@dataclass(frozen=True)
class Step:
    """One script, run once or, with other arguments into the same files, several times.

    Args:
        folder: its rows' under the results folder, and the step's name, e.g. "benchmark/sizes".
        file: its rows, `<folder>/<file>.json`.
        gpu: arguments on a GPU, or on all GPUs where `needs_ranks`; None where the step has nothing to do there.
        cpu: arguments on a CPU, small enough for a laptop; a machine with one GPU runs these too where `needs_ranks`.
        needs_ranks: it is about several processes, one a GPU.
        needs_program: a program that must be installed.
        resumes: the script has --resume.
        seconds: a rough guess by machine, on an H100 or a CPU of two cores. Once a step has run on a machine, what it
            took there is told instead.
    """

    folder: str
    script: str
    file: str
    gpu: tuple[str, ...] | None
    cpu: tuple[str, ...] | None
    seconds: Mapping[str, int] = field(default_factory=dict)
    needs_ranks: bool = False
    needs_program: str | None = None
    resumes: bool = True

    @property
    def path(self) -> str:
        """The rows' file, under the results folder."""
        return f"{self.folder}/{self.file}.json"

    def arguments(self, machine: str) -> tuple[str, ...] | None:
        """By runs, or None where the machine can't."""
        on_cpu = machine == "cpu" or (self.needs_ranks and machine == "gpu")
        return self.cpu if on_cpu else self.gpu

    @property
    def needs(self) -> str:
        """What the machine must have, in words."""
        least = "any machine" if self.cpu is not None else "two GPUs" if self.needs_ranks else "a GPU"
        return f"{least} with {self.needs_program}" if self.needs_program else least

    def commands(self, machine: str, results: Path | str, resume: bool = False) -> list[list[str]]:
        """As `python` is given them; each run after the first adds to the first's rows."""
        runs = self.arguments(machine) or ()
        words = [shlex.split(f"scripts/{self.script}.py {arguments}") for arguments in runs]
        where = ["--out", f"{results}/{self.folder}"]
        return [
            [*line, *where, *(["--resume"] if self.resumes and (resume or number) else [])]
            for number, line in enumerate(words)
        ]


def _guess(cpu: int = 0, gpu: int = 0, gpus: int = 0) -> dict[str, int]:
    return {"cpu": cpu, "gpu": gpu, "gpus": gpus or gpu}


STEPS: tuple[Step, ...] = (
    Step("benchmark/sizes", "benchmark", "benchmark",
         gpu=(f"{_SIZES} --ctx 128 256 512 1024 --precision fp32 bf16",),
         cpu=("--device cpu --size tiny --ctx 128 256 --precision fp32 bf16 --warmup 2 --steps 5",),
         seconds=_guess(cpu=30, gpu=300)),
    Step("benchmark/modes", "benchmark", "benchmark",
         gpu=(f"{_SIZES} --ctx 256 --mode forward forward-backward --precision fp32 bf16",),
         cpu=("--device cpu --size tiny --ctx 256 --mode forward forward-backward --warmup 2 --steps 5",),
         seconds=_guess(cpu=20, gpu=120)),
    Step("benchmark/warmup", "benchmark", "benchmark",
         gpu=(f"{_SIZES} --ctx 256 --warmup 0 1 2 5",),
         cpu=("--device cpu --size tiny --ctx 256 --warmup 0 1 2 5 --steps 5",),
         seconds=_guess(cpu=40, gpu=110)),
    Step("benchmark/compile", "benchmark", "benchmark",
         gpu=(f"{_SIZES} --ctx 256 --precision fp32 bf16 --compile off on",), cpu=None,
         seconds=_guess(gpu=900)),
    Step("model_attention", "benchmark", "benchmark",
         gpu=(f"{_SIZES} --ctx 1024 --precision bf16 --attention naive sdpa flash-triton --compile off blocks",),
         cpu=("--device cpu --size tiny --ctx 128 --attention naive sdpa flash-pytorch --warmup 2 --steps 5",),
         seconds=_guess(cpu=30, gpu=280)),
    Step("benchmark/kernels", "benchmark", "benchmark",
         gpu=(f"{_FUSED} --attention sdpa flash-triton --kernels plain loss fused --compile off blocks"
              " --cuda-graphs off on",
              f"{_FUSED} --attention sdpa --optimizer adamw-fused --compile blocks --cuda-graphs off on",
              f"{_FUSED} --attention sdpa --optimizer adamw-fused --compile on"), cpu=None,
         seconds=_guess(gpu=600)),
    Step("benchmark/kernels_256", "benchmark", "benchmark",
         gpu=("--size large --ctx 256 --precision bf16 --attention flash-triton --kernels loss fused"
              " --compile off blocks --cuda-graphs on", "--size large --ctx 256"), cpu=None,
         seconds=_guess(gpu=60)),
    Step("nsys", "profile_nsys", "steps",
         gpu=("--size small large 2.7b --ctx 128 256 512 1024",), cpu=None,
         seconds=_guess(gpu=600), needs_program="nsys"),
    Step("kernels", "profile_kernels", "steps",
         gpu=("--size small --ctx 256",), cpu=("--device cpu --size tiny --ctx 128 --warmup 1 --steps 1",),
         seconds=_guess(cpu=15, gpu=45), resumes=False),
    Step("mixed_precision", "mixed_precision", "benchmark",
         gpu=("",), cpu=("--device cpu --size tiny --ctx 128 --precision fp32 bf16 fp16 --warmup 1 --steps 3",),
         seconds=_guess(cpu=25, gpu=240)),
    Step("memory", "profile_memory", "memory",
         gpu=("--size 2.7b --ctx 128 256 512 --mode forward train-step --precision fp32 bf16",),
         cpu=("--device cpu --size tiny --ctx 64 128 --mode forward train-step --precision fp32 bf16",),
         seconds=_guess(cpu=40, gpu=150)),
    Step("memory_check", "profile_memory", "memory",
         gpu=("--size large --ctx 512 --mode train-step --attention naive flash-triton --checkpoint-every 0 2",),
         cpu=("--device cpu --size tiny --ctx 128 --mode train-step --attention naive flash-pytorch"
              " --checkpoint-every 0 1",),
         seconds=_guess(cpu=40, gpu=100)),
    Step("memory_2048", "profile_memory", "memory",
         gpu=("--size 2.7b --ctx 2048 --mode forward train-step --precision fp32 bf16",), cpu=None,
         seconds=_guess(gpu=90)),
    Step("saved_tensors", "saved_tensors", "saved_tensors",
         gpu=("--size 2.7b --ctx 512 --precision fp32 bf16 --compile off blocks",),
         cpu=("--device cpu --size tiny --ctx 128 --precision fp32 bf16",),
         seconds=_guess(cpu=15, gpu=60)),
    Step("checkpointing_model", "checkpointing", "checkpointing",
         gpu=("--part model --size 2.7b --ctx 2048 --precision bf16 --attention naive flash-triton"
              " --checkpoint-every 0 1 2 4 8 16 --steps 2",),
         cpu=("--part model --device cpu --size tiny --ctx 128 --checkpoint-every 0 1 2",),
         seconds=_guess(cpu=15, gpu=150)),
    Step("checkpointing", "checkpointing", "nested",
         gpu=("--part nested",), cpu=("--part nested --layers 4 16 64",), seconds=_guess(cpu=15, gpu=30)),
    Step("attention_benchmark", "attention_benchmark", "attention_benchmark",
         gpu=("",),
         cpu=("--device cpu --head-dim 16 64 --length 256 512 1024 --batch-size 2 --compile off --steps 10",),
         seconds=_guess(cpu=20, gpu=300)),
    Step("flash_benchmark", "flash_benchmark", "flash_benchmark",
         gpu=(f"--precision bf16 {_QUICK} --implementation flash-triton sdpa-flash sdpa-cudnn flex naive"
              " naive-compiled",
              f"--precision fp32 {_QUICK} --implementation flash-triton sdpa-efficient"),
         cpu=("--device cpu --length 128 256 512 --head-dim 16 64 --precision fp32"
              " --implementation naive flash-pytorch",),
         seconds=_guess(cpu=20, gpu=240)),
    Step("flash_short", "flash_benchmark", "flash_benchmark",
         gpu=("--timed in-a-row --length 128 256 512 1024 2048 --precision bf16 --warmup-ms 10 --rep-ms 50"
              " --implementation flash-triton sdpa-flash sdpa-cudnn sdpa-efficient",), cpu=None,
         seconds=_guess(gpu=60)),
    Step("flash_kernels", "flash_benchmark", "flash_benchmark",
         gpu=(f"--timed kernels --phase forward backward --precision bf16 {_QUICK} {_KERNELS}",), cpu=None,
         seconds=_guess(gpu=90)),
    *(Step(f"{folder}{run}", "flash_benchmark", "flash_benchmark",
           gpu=tuple(f"--head-dim {head_dim} --heads {heads} {causal} {lengths} {_ANCHORS}"
                     for head_dim, heads in ((64, 16), (128, 8))
                     for lengths in ("--length 16384 65536", "--length 4096 --batch-size 4")),
           cpu=None, seconds=_guess(gpu=120))
      for folder, causal in (("flash_anchors", "--causal"), ("flash_anchors_not_causal", "--no-causal"))
      for run in ("", "_repeat")),  # the same twice: how far two runs differ
    Step("flash_anchors_fp32", "flash_benchmark", "flash_benchmark",
         gpu=("--head-dim 64 --heads 16 --length 16384 --precision fp32 --implementation flash-triton sdpa-efficient",
              "--head-dim 128 --heads 8 --length 16384 --precision fp32 --implementation flash-triton sdpa-efficient"),
         cpu=None, seconds=_guess(gpu=60)),
    Step("leaderboard_attention", "leaderboard_attention", "leaderboard_attention",
         gpu=("--implementation flash-triton flash-hopper sdpa-flash sdpa-cudnn flex",),
         cpu=None, seconds=_guess(gpu=90)),
    Step("kernel_benchmark/calls", "kernel_benchmark", "kernel_benchmark",
         gpu=("",), cpu=("--device cpu --size tiny --tokens 64 --implementation eager torch",),
         seconds=_guess(cpu=20, gpu=600)),
    Step("kernel_benchmark/kernels", "kernel_benchmark", "kernel_benchmark",
         gpu=("--timed kernels --kernel rms-norm add-rms-norm swiglu rope",), cpu=None,
         seconds=_guess(gpu=480)),
    Step("convergence", "convergence", "convergence",
         gpu=("",), cpu=("--device cpu --variant fp32 bf16 ddp --seed 0 --steps 20 --batch-size 4 --ctx 64",),
         seconds=_guess(cpu=40, gpu=240)),
    Step("all_reduce", "all_reduce_benchmark", "all_reduce",
         gpu=("",), cpu=("--device cpu --processes 2 --sizes-mb 1 10 --repeats 5",),
         seconds=_guess(cpu=15, gpu=15, gpus=60), needs_ranks=True),
    Step("ddp/fp32", "ddp_benchmark", "ddp",
         gpu=(f"{_XL} --precision fp32",), cpu=(f"{_TINY_RANKS} --bucket-size-mb 0.1 1",),
         seconds=_guess(cpu=30, gpu=30, gpus=240), needs_ranks=True),
    Step("ddp/bf16", "ddp_benchmark", "ddp",
         gpu=(f"{_BF16_RANKS} --implementation none bucketed torch-ddp flat bucketed-in-place naive overlapped"
              " --bucket-size-mb 100 1000 --no-profile",), cpu=None,
         seconds=_guess(gpus=120), needs_ranks=True),
    Step("ddp/bf16_repeat", "ddp_benchmark", "ddp",
         gpu=(f"{_BF16_RANKS} --implementation none torch-ddp bucketed --bucket-size-mb 1000 100 --no-profile",),
         cpu=None, seconds=_guess(gpus=65), needs_ranks=True),
    Step("ddp/bf16_batch_8", "ddp_benchmark", "ddp",
         gpu=(f"{_BF16_RANKS} --batch-size 8 --implementation none bucketed torch-ddp bucketed-in-place"
              " --bucket-size-mb 1000",), cpu=None,
         seconds=_guess(gpus=95), needs_ranks=True),
    Step("ddp/bf16_compiled", "ddp_benchmark", "ddp",
         gpu=(f"{_BF16_RANKS} --compile blocks --implementation none bucketed torch-ddp bucketed-in-place"
              " --bucket-size-mb 1000",), cpu=None,
         seconds=_guess(gpus=90), needs_ranks=True),
    Step("ddp/nccl_options", "ddp_benchmark", "ddp",
         gpu=(f"{_XL} --precision fp32 --implementation none bucketed-in-place --bucket-size-mb 100"
              " --max-ctas 0 4 8 --no-profile",), cpu=None,
         seconds=_guess(gpus=120), needs_ranks=True),
    Step("sharded_optimizer", "sharded_optimizer_benchmark", "sharded_optimizer",
         gpu=(f"{_XL} --precision fp32 bf16 --implementation none sharded-optimizer torch-zero ddp torch-ddp",),
         cpu=(_TINY_RANKS,),
         seconds=_guess(cpu=30, gpu=30, gpus=300), needs_ranks=True),
    Step("fsdp", "fsdp_benchmark", "fsdp",
         gpu=(f"{_XL} --precision fp32 bf16",), cpu=(_TINY_RANKS,),
         seconds=_guess(cpu=30, gpu=30, gpus=150), needs_ranks=True),
    Step("scaling/weak", "scaling_benchmark", "scaling",
         gpu=("--size xl",), cpu=(f"{_TINY_RANKS} --processes 1 2 --implementation none ddp fsdp",),
         seconds=_guess(cpu=40, gpu=40, gpus=400), needs_ranks=True),
    Step("scaling/strong", "scaling_benchmark", "scaling",
         gpu=("--size xl --total-batch-size 8",), cpu=None,
         seconds=_guess(gpus=400), needs_ranks=True),
    Step("leaderboard_step", "leaderboard_step", "leaderboard_step",
         gpu=("--kept-blocks 0", ""),
         cpu=("--device cpu --size tiny --ctx 16 --precision fp32 --implementation torch --warmup 1 --steps 3",),
         seconds=_guess(cpu=25, gpu=25, gpus=600), needs_ranks=True),
)  # fmt: skip


def step_named(folder: str) -> Step:
    """The step of a results folder, e.g. "ddp/fp32". Raises ValueError for a folder that no step makes."""
    found = [step for step in STEPS if step.folder == folder]
    if not found:
        raise ValueError(f"only={folder!r}: must be one of {', '.join(step.folder for step in STEPS)}")
    return found[0]
