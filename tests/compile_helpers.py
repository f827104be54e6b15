"""What the tests share that compile kernels for other cards, with no GPU: they start a script in a process without the
interpreter, which compiles the cases that it reads from stdin as JSON and writes a JSON line for each."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

Case = TypeVar("Case", bound=tuple)

# KiB that one program can have.
SHARED_MEMORY_KIB = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}


def compile_launch(kernel: Any, args: tuple, options: dict[str, Any], arch: int) -> tuple[Any, dict[str, int]]:
    """The kernel compiled as this launch would have it, and what it needs: bytes of shared memory, spilled bytes and
    registers a thread."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.runtime.jit import create_function_from_signature

    options = {**options, "debug": False, "instrumentation_mode": ""}
    target = GPUTarget("cuda", arch, 32)
    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, parsed = bind(*args, **options)
    parsed, signature, constants, attributes = kernel._pack_args(backend, options, bound, specialization, parsed)
    make_source = GluonASTSource if kernel.is_gluon() else ASTSource
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        source = make_source(kernel, signature, constants, attributes)
        compiled = triton.compile(source, target=target, options=parsed.__dict__)
    return compiled, {
        "shared_bytes": compiled.metadata.shared,
        "spilled_bytes": int(re.search(r"(\d+) bytes spill stores", log.getvalue())[1]),
        "registers": int(re.search(r"Used (\d+) registers", log.getvalue())[1]),
    }


def compile_from_stdin(compile_case: Callable[[list], dict[str, Any]]) -> None:
    """What such a script does: a line for each case, with its results or its error."""
    from triton import knobs

    knobs.nvidia.dump_ptxas_log = True  # prints what ptxas -v says of registers and spills
    knobs.compilation.always_compile = True  # a cached kernel has no log
    for case in json.load(sys.stdin):
        try:
            result = compile_case(case)
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"[-500:]}
        print(json.dumps(result), flush=True)


def compile_in_processes(script: str, cases: Sequence[Case], n_processes: int = 1) -> dict[Case, dict[str, Any]]:
    """The results by case, of `script` run in `n_processes`."""
    root = Path(__file__).resolve().parents[1]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(root)}

    def run(share: Sequence[Case]) -> dict[Case, dict[str, Any]]:
        process = subprocess.run(
            [sys.executable, script], input=json.dumps(share), env=environment, capture_output=True, text=True
        )
        lines = process.stdout.splitlines()
        assert len(lines) == len(share), process.stderr[-2000:]
        return dict(zip(share, map(json.loads, lines), strict=True))

    with ThreadPoolExecutor(n_processes) as pool:
        done = pool.map(run, [cases[i::n_processes] for i in range(n_processes)])
        return {case: result for share in done for case, result in share.items()}


def problem(arch: int, result: dict[str, Any], spill_tolerated_bytes: float) -> str | None:
    """What is wrong with a compiled case, if anything is."""
    limit = 1024 * SHARED_MEMORY_KIB[arch]
    if "error" in result:
        return result["error"]
    if result["shared_bytes"] > limit:
        return f"{result['shared_bytes']} bytes of shared memory, the card has {limit}"
    if result["spilled_bytes"] > spill_tolerated_bytes:
        return f"{result['spilled_bytes']} bytes of registers spilled"
    return None
