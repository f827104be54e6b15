"""The attention kernels are compiled for every architecture they claim to run on, with no GPU: each configuration that
can be chosen must fit the card's shared memory, and spill no registers but for the few bytes that are known. Run as a
script it compiles cases for the tests (compile_helpers.py)."""

import itertools
import re
import subprocess
import tempfile
from typing import NamedTuple

import pytest

from tests.compile_helpers import (
    SHARED_MEMORY_KIB,
    compile_from_stdin,
    compile_in_processes,
    compile_launch,
    problem,
)

HEAD_DIMS = (16, 32, 64, 128, 256)
HOPPERS = ("forward", "dq", "backward", "scale_dq")
PASSES = ("forward", "dkdv", "dq", "fused", "combine", "preprocess", "measure", "split")


class Case(NamedTuple):
    arch: int
    dtype: str
    head_dim: int
    name: str  # of the pass
    use_tma: bool = False
    is_causal: bool = True
    dropout_p: float = 0.0
    group: int = 1
    length: int = 1024
    is_hopper: bool = False  # Hopper's own kernel


def compile_case(case: Case) -> dict:
    """Compile what the launch code would launch: it runs for real, on tensors without memory, with the launch itself
    replaced. What the kernel needs, and of Hopper's own the order of its work."""
    import torch

    from cs336_systems.attention import hopper_plan, triton_launch, triton_plan, triton_tuning

    def tensor(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    dtype, length = getattr(torch, case.dtype), case.length
    q = tensor(1, 2 * case.group, length, case.head_dim, dtype=dtype)
    k = tensor(1, 2, length, case.head_dim, dtype=dtype)
    lse = tensor(1, 2 * case.group, length, dtype=torch.float32)
    gpu = triton_tuning.Gpu("", case.arch, 100, 1024 * SHARED_MEMORY_KIB[case.arch])
    problem = triton_launch.make_problem(q, k, case.is_causal, 0.125, case.dropout_p, gpu)
    if case.name in ("forward", "combine"):
        tensors = (q, k, k, q, lse)
        strides = [x.stride() for x in tensors[:4]]
        config = triton_tuning.choose("forward", problem, case.use_tma)
        plan = triton_plan.plan_forward(problem, strides, True, config, 2 if case.name == "combine" else 1)
        if case.is_hopper:
            plan = hopper_plan.with_hopper_forward(plan, problem, strides)
    else:
        tensors = (q, q, k, k, q, lse, q, k, k)
        strides = [x.stride() for x in tensors if x is not lse]
        name = "dkdv" if case.name in ("preprocess", "measure", "split") else case.name
        is_one_pass = case.name in ("backward", "scale_dq")
        name = "dq" if is_one_pass else name
        passes = ((name, triton_tuning.choose(name, problem, case.use_tma)),)
        plan = triton_plan.plan_backward(problem, strides, True, passes=passes)
        if case.is_hopper:
            plan = hopper_plan.with_hopper_backward(plan, problem, strides, True, needs_dkdv=is_one_pass)

    launches = []
    kernels = [step.kernel for step in plan.steps]
    for kernel in kernels:
        kernel.run = lambda *args, grid, warmup, kernel=kernel, **options: launches.append((kernel, args, options))
    triton_launch.run(plan, tensors)
    # The kernel that a case is about is the last step, or named for one that comes before.
    named = [x for x in launches if case.name in x[0].__name__]
    kernel, args, options = named[0] if named else launches[-1]
    compiled, needs = compile_launch(kernel, args, options, case.arch)
    is_gluon = case.is_hopper and case.name != "scale_dq"
    return needs | ({"hopper_code": _order_of_work(compiled.asm["cubin"])} if is_gluon else {})


def _order_of_work(cubin: bytes) -> str:
    """The kernel's tensor-core products (P), waits for all but n of them (n) and exponentials (e), in order."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "-c", file.name]
        sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    signs = []
    for line in sass.splitlines():
        if "HGMMA" in line:
            signs.append("P")
        elif "WARPGROUP.DEPBAR.LE" in line:
            signs.append(line.split("0x")[-1][0])
        elif "MUFU.EX2" in line:
            signs.append("e")
    return "".join(signs)


# Bytes a thread. Most choices spill nothing; a few for cards and dtypes that are not tuned yet spill some, and must not
# come to spill more. With head_dim 256 the accumulators alone fill the registers, and spills are not judged.
SPILL_TOLERATED_BYTES = 64


# Hopper's one pass has its 240 registers full, and keeps addresses and part of lse in memory: of some 600 instructions
# of a step 10 to 30 are such loads and stores.
ONE_PASS_SPILL_BYTES = 384


def tolerated_spill(case: Case) -> float:
    if case.is_hopper and case.name == "backward":
        return ONE_PASS_SPILL_BYTES
    return float("inf") if case.head_dim == 256 else SPILL_TOLERATED_BYTES


def problems(results: dict[Case, dict]) -> list[str]:
    """What is wrong with each case, if anything is."""
    found = {
        case: problem(case.arch, result, tolerated_spill(case)) or wrong_order(case, result.get("hopper_code"))
        for case, result in results.items()
    }
    return [f"{case}: {what}" for case, what in found.items() if what is not None]


def wrong_order(case: Case, hopper_code: str | None) -> str | None:
    """What is wrong with the order of a Hopper kernel's work (`_order_of_work`), if anything is."""
    if hopper_code is None:
        return None
    if hopper_code.count("P") <= 4 * sum(hopper_code.count(n) for n in "01"):
        return "ptxas waits after every product"
    # A tile's 64 exponentials a thread, and two for its rows, lie between the waits for S and for P V, in each of two
    # or three consumers, with and without a mask.
    n_consumers = 3 if case.head_dim == 64 else 2
    if case.name == "forward" and re.findall(r"1(e*)0", hopper_code) != ["e" * 66] * 2 * n_consumers:
        return "ptxas has moved the softmax behind the wait"
    return None


SLICE = [
    Case(89, "float16", 64, "dkdv", group=2),
    Case(90, "bfloat16", 128, "dkdv", use_tma=True),
    Case(90, "bfloat16", 128, "dq", use_tma=True, is_causal=False),
    Case(90, "bfloat16", 128, "forward", use_tma=True, is_hopper=True, length=16384),
    Case(90, "bfloat16", 128, "dq", use_tma=True, group=2, is_hopper=True, length=16384),
    Case(90, "bfloat16", 128, "backward", use_tma=True, is_hopper=True, length=16384),
    Case(90, "float32", 64, "forward", use_tma=True),
    Case(80, "float32", 64, "split"),
    Case(120, "bfloat16", 64, "combine"),
]


def every_case() -> list[Case]:
    cases = []
    for arch, dtype, head_dim, name in itertools.product(
        SHARED_MEMORY_KIB, ("float32", "float16", "bfloat16"), HEAD_DIMS, PASSES
    ):
        if arch == 75 and dtype == "bfloat16":
            continue
        if name in ("measure", "split") and (dtype != "float32" or arch == 75):
            continue
        has_tma = arch == 90 and name in ("forward", "dkdv", "dq", "fused")
        cases.extend(Case(arch, dtype, head_dim, name, use_tma) for use_tma in (False, True)[: 1 + has_tma])
        if (arch, dtype, head_dim, name) == (90, "float32", 128, "dkdv"):
            cases.extend(Case(arch, dtype, head_dim, apart, use_tma=True) for apart in ("dv", "dk"))
        if (arch, name) == (90, "forward") and dtype != "float32" and head_dim in (64, 128):
            cases += [
                Case(arch, dtype, head_dim, hoppers, True, is_causal, group=group, length=16384, is_hopper=True)
                for hoppers in (HOPPERS if head_dim == 128 else ("forward",))
                for is_causal, group in itertools.product((False, True), (1, 3))
            ]
        if dtype == "float32" and arch > 75 and name in ("forward", "fused"):
            cases.append(Case(arch, dtype, head_dim, name, length=128))
        if name == "fused" and (dtype != "float32" or arch == 75):  # too long to compute D where it is used
            cases.append(Case(arch, dtype, head_dim, name, length=4096))
    cases.append(Case(100, "bfloat16", 64, "forward", dropout_p=0.1))
    return cases


def test_representative_cases_compile():
    pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")
    results = compile_in_processes(__file__, SLICE)
    assert problems(results) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_case_compiles():
    pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")
    assert problems(compile_in_processes(__file__, every_case(), 2)) == []


if __name__ == "__main__":
    compile_from_stdin(lambda case: compile_case(Case(*case)))
