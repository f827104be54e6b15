"""The fused kernels are compiled for every architecture they claim to run on, with no GPU: each must fit the card's
shared memory and spill next to nothing. Run as a script it compiles cases for the tests (compile_helpers.py)."""

import itertools
from typing import Any, NamedTuple

import pytest

from tests.compile_helpers import (
    SHARED_MEMORY_KIB,
    compile_from_stdin,
    compile_in_processes,
    compile_launch,
    problem,
)


class Case(NamedTuple):
    arch: int
    dtype: str
    kernel: str
    width: int  # of a row: the vocabulary, d_model, d_ff or head_dim


WIDTHS = {
    "_cross_entropy_kernel": (100, 151_936),
    "_adamw_kernel": (4096,),
    "_adamw_kernel with masters": (4096,),
    "_rms_norm_forward_kernel": (100, 768, 8192),
    "_rms_norm_backward_kernel": (100, 768, 8192),
    "_silu_multiply_forward_kernel": (100, 11_008),
    "_silu_multiply_backward_kernel": (100, 11_008),
    "_rope_kernel": (16, 80, 128),
    "_rope_kernel backward": (16, 80, 128),
}


def launch(case: Case) -> None:
    """Calls the launch code that ends in the case's kernel, on tensors without memory."""
    import torch

    from cs336_systems.kernels import adamw_launch, linear_cross_entropy, rms_norm, rope, swiglu

    dtype = getattr(torch, case.dtype)

    def tensor(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    rows, d = 256, case.width
    x, w, of_rows = tensor(rows, d), tensor(d), tensor(rows, dtype=torch.float32)
    name = case.kernel
    if name.startswith("_adamw_kernel"):
        update = adamw_launch.Launch()
        update.add((0, 0, 0, 0, 0), d, (0, 0, 0))
        float32 = torch.float32
        dtypes = (float32, dtype, float32, float32, dtype) if "masters" in name else (*(dtype,) * 4, None)
        adamw_launch.launch_adamw(update, dtypes, True, torch.device("cpu"))
    elif name == "_cross_entropy_kernel":
        targets = tensor(rows, dtype=torch.int64)
        linear_cross_entropy._launch_cross_entropy(x, targets, of_rows, -100, True)
    elif name == "_rms_norm_forward_kernel":
        rms_norm._rms_norm_forward(x, x, w, 1e-5, dtype)
    elif name == "_rms_norm_backward_kernel":
        rms_norm._rms_norm_backward(x, x, x, w, of_rows, True)
    elif name == "_silu_multiply_forward_kernel":
        swiglu._silu_multiply_forward(x, x)
    elif name == "_silu_multiply_backward_kernel":
        swiglu._silu_multiply_backward(x, x, x)
    else:
        angles = tensor(rows, d // 2, dtype=torch.float32)
        q, positions = tensor(2, 8, rows, d), tensor(2, rows, dtype=torch.int64)
        rope._rope(q, angles, angles, positions, q.stride() if "backward" in name else ())


def compile_case(case: Case) -> dict[str, Any]:
    """Compiles what the launch code would launch: it runs for real, with the launch itself replaced. What the kernel
    needs, and whether it has vector accesses to global memory."""
    from triton.runtime.jit import JITFunction

    launches = []
    JITFunction.run = lambda kernel, *args, grid, warmup, **options: launches.append((kernel, args, options))
    launch(case)
    ((kernel, args, options),) = launches
    assert case.kernel.split()[0] == kernel.__name__
    compiled, needs = compile_launch(kernel, args, options, case.arch)
    is_vectorised = any(f"global.v{n}." in compiled.asm["ptx"] for n in (2, 4)) or "global.b128" in compiled.asm["ptx"]
    return needs | {"is_vectorised": is_vectorised}


# ptxas spills two words for sm_100 in one small case, where most registers are free.
SPILL_TOLERATED_BYTES = 8


def problems(results: dict[Case, dict[str, Any]]) -> list[str]:
    """What is wrong with each case, if anything is."""
    wrong = []
    for case, result in results.items():
        found = problem(case.arch, result, SPILL_TOLERATED_BYTES)
        if found is None and not result["is_vectorised"] and case.width % 8 == 0:
            found = "reads and writes single elements"
        if found is None and case.kernel.startswith("_adamw") and result["shared_bytes"] > 0:
            found = "threads exchange elements through shared memory"
        if found is not None:
            wrong.append(f"{case}: {found}")
    return wrong


SLICE = [
    Case(75, "float16", "_rms_norm_backward_kernel", 4096),
    Case(89, "bfloat16", "_rope_kernel backward", 80),
    Case(120, "bfloat16", "_adamw_kernel with masters", 4096),
    Case(90, "bfloat16", "_cross_entropy_kernel", 151_936),
]


def every_case() -> list[Case]:
    return [
        Case(arch, dtype, kernel, width)
        for arch, dtype, (kernel, widths) in itertools.product(
            SHARED_MEMORY_KIB, ("float32", "float16", "bfloat16"), WIDTHS.items()
        )
        for width in widths
        if (arch, dtype) != (75, "bfloat16")
    ]


@pytest.mark.slow
def test_representative_cases_compile():
    pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")
    assert problems(compile_in_processes(__file__, SLICE)) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_case_compiles():
    pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")
    assert problems(compile_in_processes(__file__, every_case())) == []


if __name__ == "__main__":
    compile_from_stdin(lambda case: compile_case(Case(*case)))
