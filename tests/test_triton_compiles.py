"""The attention kernels are compiled for every architecture they claim to run on, with no GPU: each configuration that
can be chosen must fit the card's shared memory, and spill no registers but for the few bytes that are known.

Run as a script (by the tests below, in processes without the interpreter) it compiles the cases that it reads from
stdin as JSON and writes a JSON line for each.
"""

import contextlib
import io
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

# KiB that one program can have.
SHARED_MEMORY_KIB = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
HEAD_DIMS = (16, 32, 64, 128, 256)
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
    replaced. Shared memory in bytes, spilled bytes, and registers a thread."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.runtime.jit import create_function_from_signature

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
        passes = ((name, triton_tuning.choose(name, problem, case.use_tma)),)
        plan = triton_plan.plan_backward(problem, strides, True, passes=passes)
        if case.is_hopper:
            plan = hopper_plan.with_hopper_dq(plan, problem, strides, needs_dq=True)

    launches = []
    kernels = [step.kernel for step in plan.steps]
    for kernel in kernels:
        kernel.run = lambda *args, grid, warmup, kernel=kernel, **options: launches.append((kernel, args, options))
    triton_launch.run(plan, tensors)
    # The kernel that a case is about is the last step, or named for one that comes before.
    named = [x for x in launches if case.name in x[0].__name__]
    kernel, args, options = named[0] if named else launches[-1]
    options = {**options, "debug": False, "instrumentation_mode": ""}
    target = GPUTarget("cuda", case.arch, 32)
    backend = make_backend(target)
    bound, specialization, parsed = create_function_from_signature(kernel.signature, kernel.params, backend)(
        *args, **options
    )
    parsed, signature, constants, attributes = kernel._pack_args(backend, options, bound, specialization, parsed)
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        make_source = GluonASTSource if kernel.is_gluon() else ASTSource
        source = make_source(kernel, signature, constants, attributes)
        compiled = triton.compile(source, target=target, options=parsed.__dict__)
    if case.is_hopper:
        return {"hopper_code": _order_of_work(compiled.asm["cubin"])} | _resources(compiled, log.getvalue())
    return _resources(compiled, log.getvalue())


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


def _resources(compiled, log: str) -> dict:
    return {
        "shared_bytes": compiled.metadata.shared,
        "spilled_bytes": int(re.search(r"(\d+) bytes spill stores", log)[1]),
        "registers": int(re.search(r"Used (\d+) registers", log)[1]),
    }


def _compile_from_stdin() -> None:
    from triton import knobs

    knobs.nvidia.dump_ptxas_log = True  # prints what ptxas -v says of registers and spills
    knobs.compilation.always_compile = True  # a cached kernel has no log
    for case in json.load(sys.stdin):
        try:
            result = compile_case(Case(*case))
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"[-500:]}
        print(json.dumps(result), flush=True)


def compile_in_processes(cases: list[Case], n_processes: int) -> dict[Case, dict]:
    root = Path(__file__).resolve().parents[1]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(root)}

    def run(share: list[Case]) -> list[dict]:
        process = subprocess.run(
            [sys.executable, __file__], input=json.dumps(share), env=environment, capture_output=True, text=True
        )
        lines = process.stdout.splitlines()
        assert len(lines) == len(share), process.stderr[-2000:]
        return [json.loads(line) for line in lines]

    shares = [cases[i::n_processes] for i in range(n_processes)]
    with ThreadPoolExecutor(n_processes) as pool:
        results = pool.map(run, shares)
        return {
            case: result
            for share, done in zip(shares, results, strict=True)
            for case, result in zip(share, done, strict=True)
        }


# Bytes a thread. Most choices spill nothing; a few for cards and dtypes that are not tuned yet spill some, and must not
# come to spill more. With head_dim 256 the accumulators alone fill the registers, and spills are not judged.
SPILL_TOLERATED_BYTES = 64


def tolerated_spill(case: Case) -> float:
    return float("inf") if case.head_dim == 256 else SPILL_TOLERATED_BYTES


def problems(results: dict[Case, dict]) -> list[str]:
    """What is wrong with each case, if anything is."""
    wrong = []
    for case, result in results.items():
        limit = 1024 * SHARED_MEMORY_KIB[case.arch]
        if "error" in result:
            wrong.append(f"{case}: {result['error']}")
        elif result["shared_bytes"] > limit:
            wrong.append(f"{case}: {result['shared_bytes']} bytes of shared memory, the card has {limit}")
        elif result["spilled_bytes"] > tolerated_spill(case):
            wrong.append(f"{case}: {result['spilled_bytes']} bytes of registers spilled")
    return wrong


SLICE = [
    Case(75, "float16", 16, "forward"),
    Case(80, "bfloat16", 128, "fused"),
    Case(89, "float16", 64, "dkdv", group=2),
    Case(90, "bfloat16", 128, "dkdv", use_tma=True),
    Case(90, "bfloat16", 128, "dq", use_tma=True, is_causal=False),
    Case(90, "bfloat16", 128, "forward", use_tma=True, is_hopper=True, length=16384),
    Case(90, "bfloat16", 128, "dq", use_tma=True, group=2, is_hopper=True, length=16384),
    Case(90, "float32", 64, "forward", use_tma=True),
    Case(90, "float32", 128, "dv", use_tma=True),
    Case(80, "float32", 64, "split"),
    Case(100, "bfloat16", 64, "forward", dropout_p=0.1),
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
        if arch == 90 and head_dim == 128 and dtype != "float32" and name in ("forward", "dq"):
            cases += [
                Case(arch, dtype, head_dim, name, True, is_causal, length=16384, is_hopper=True)
                for is_causal in (False, True)
            ]
        if dtype == "float32" and arch > 75 and name in ("forward", "fused"):
            cases.append(Case(arch, dtype, head_dim, name, length=128))
        if name == "fused" and (dtype != "float32" or arch == 75):  # too long to compute D where it is used
            cases.append(Case(arch, dtype, head_dim, name, length=4096))
    return cases


def test_representative_cases_compile():
    pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")
    results = compile_in_processes(SLICE, 1)
    assert problems(results) == []
    for case, result in results.items():
        if case.is_hopper:
            code = result["hopper_code"]
            assert code.count("P") > 6 * sum(code.count(n) for n in "01"), "ptxas waits after every product"
        if case.is_hopper and case.name == "forward":
            # A tile's 64 exponentials a thread, and two for its rows, lie between the waits for S and for P V, in two
            # consumers, with and without a mask.
            assert re.findall(r"1(e*)0", code) == ["e" * 66] * 4, "ptxas has moved the softmax behind the wait"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_case_compiles():
    pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")
    assert problems(compile_in_processes(every_case(), 2)) == []


if __name__ == "__main__":
    _compile_from_stdin()
