"""Breaks the code in one place at a time, in a copy, and sees that a test fails: `uv run python tests/mutations.py`.

It takes about a minute a mutation on two cores. What it found last stands in docs/testing.md, as it prints it. Words
after it are files, or parts of their names: only their mutations are tried. Ctrl-C says what is left of them.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cs336_systems.signals import STOPPED, answer_requests, stopped_by

ROOT = Path(__file__).resolve().parents[1]
# Longer than any test of these files; a mutation that makes ranks wait for each other ends by it.
_TEST_TIMEOUT_S = 60


@dataclass(frozen=True)
class Mutation:
    """`old`, which stands once in `file`, becomes `new`; one of `tests` should fail."""

    what: str
    file: str
    old: str
    new: str
    tests: str


_A, _D, _K = "cs336_systems/attention/", "cs336_systems/distributed/", "cs336_systems/kernels/"
_BASICS = "cs336-basics/cs336_basics/"
MUTATIONS = [
    Mutation("the softmax's sum is not rescaled when the maximum grows", _A + "triton_tiles.py",
             "row_sum * correction + tl.sum(p, 1)", "row_sum + tl.sum(p, 1)", "test_flash_triton.py"),
    Mutation("a sign in dQ", _A + "triton_backward_tiles.py",
             "ds = p * (dp - delta[:, None])", "ds = p * (dp + delta[:, None])", "test_flash_triton.py"),
    Mutation("a sign in dK", _A + "triton_backward_tiles.py",
             "ds_t = p_t * (dp_t - delta[None, :])", "ds_t = p_t * (dp_t + delta[None, :])", "test_flash_triton.py"),
    Mutation("the diagonal itself is masked", _A + "flash_pytorch.py",
             "masked_fill_(key > query[:, None]", "masked_fill_(key >= query[:, None]", "test_flash_pytorch.py"),
    Mutation("Hopper's results are not fenced", _A + "hopper_ring.py",
             "    tile.store(values)\n    fence_async_shared()\n", "    tile.store(values)\n",
             "test_hopper_simulated.py"),
    Mutation("Hopper's exponentials may move behind the wait for P V", _A + "hopper_forward.py",
             "    wait_for(k_ring, i + 1, i + 1 < n_tiles)\n    acc, p", "    acc, p", "test_triton_compiles.py"),
    Mutation("Hopper's programs take no turns at dQ", _A + "hopper_backward.py",
             "                pass\n            fence", "                break\n            fence",
             "test_hopper_simulated.py"),
    Mutation("one parameter's all-reduce is dropped", _D + "ddp_naive.py",
             "range(len(self._trainable)):", "range(1, len(self._trainable)):", "test_ddp_wrappers.py"),
    Mutation("buckets are not waited for", _D + "ddp_bucketed.py",
             "        for bucket in self._buckets:\n            bucket.finish()\n", "",
             "test_ddp_bucketed.py test_ddp_wrappers.py"),
    Mutation("buffers and parameters are not broadcast at wrapping", _D + "ddp_base.py",
             "        broadcast_module(module, self.process_group)\n", "", "test_ddp_modules.py test_ddp_wrappers.py"),
    Mutation("gradients of no_sync are averaged", _D + "ddp_base.py",
             "self._watch.is_on = self._watch.is_on, False",
             "self._watch.is_on = self._watch.is_on, True",
             "test_ddp_modules.py test_ddp_wrappers.py"),
    Mutation("updated parameters are not sent", _D + "sharded_optimizer.py",
             "            if self.world_size > 1:\n", "            if self.world_size > 9:\n",
             "test_sharded_optimizer.py"),
    Mutation("the closure runs without gradients", _D + "sharded_optimizer.py",
             "            with torch.enable_grad():\n                loss",
             "            with torch.no_grad():\n                loss", "test_sharded_optimizer.py"),
    Mutation("FSDP's replicated gradients are not averaged", _D + "fsdp.py",
             "        self._replicated[0].finish_gradient_synchronization()\n", "", "test_fsdp.py"),
    Mutation("FSDP keeps whole weights", _D + "fsdp_weight.py",
             "            self.gathered.untyped_storage().resize_(0)\n", "", "test_fsdp_memory.py"),
    Mutation("FSDP sums gradients where it should average", _D + "fsdp_weight.py",
             "            gradient.div_(self._group.size())\n", "            pass\n", "test_fsdp.py"),
    Mutation("a phase is not synchronised before its clock starts", "cs336_systems/benchmarking/timing.py",
             "            synchronize(self.device)  # what was queued before this phase is not this phase's\n", "",
             "test_timing.py"),
    Mutation("a phase is not synchronised before its clock stops", "cs336_systems/benchmarking/timing.py",
             "            yield\n            synchronize(self.device)\n", "            yield\n", "test_timing.py"),
    Mutation("gradients are added to the last step's", "cs336_systems/benchmarking/call_timing.py",
             "rep_ms:\n        drop_gradients(grad_to_none)\n", "rep_ms:\n", "test_attention_measuring.py"),
    Mutation("overlapping kernels count twice", "cs336_systems/intervals.py",
             "for start, end in merge(intervals))", "for start, end in intervals)", "test_overlap.py test_timeline.py"),
    Mutation("a kernel is charged to another process's launch", "cs336_systems/profiling/nsys_report.py",
             "launches[thread & ~THREAD_BITS, correlation] =", "launches[0, correlation] =", "test_nsys_report.py"),
    Mutation("AdamW's decay has the wrong sign", _BASICS + "optimizer.py",
             "parameter.mul_(1 - lr *", "parameter.mul_(1 + lr *", "test_optimizer.py"),
    Mutation("the fused AdamW ignores decay", _K + "adamw_launch.py",
             "+ eps), decay * p)", "+ eps), p)", "test_fused_adamw.py"),
    Mutation("the fused AdamW leaves the rounded weights as they were", _K + "adamw_launch.py",
             "        tl.store(w_ptr + offsets", "        tl.store(w_ptr + offsets * 0", "test_master_weights.py"),
    Mutation("a sign in the weighted sum's gradient", _K + "weighted_sum.py",
             "partial_grad_w = tl.sum(x * grad_y[:, None], axis=0)",
             "partial_grad_w = -tl.sum(x * grad_y[:, None], axis=0)", "test_weighted_sum.py"),
    Mutation("the target is left out of the fused loss's gradient", _K + "linear_cross_entropy.py",
             " * inverse_total - tl.where(columns == target, 1.0, 0.0)", " * inverse_total",
             "test_linear_cross_entropy.py"),
    Mutation("a sign in RMSNorm's gradient", _K + "rms_norm.py",
             "dx = inverse_rms * (dy - normed", "dx = inverse_rms * (dy + normed", "test_rms_norm.py"),
    Mutation("rotary positions turn the other way", _K + "rope.py",
             "(first * cos - second * sin)", "(first * cos + second * sin)", "test_rope.py"),
]  # fmt: skip


def run(mutation: Mutation, copy: Path) -> str:
    """The first test that fails in the copy with the mutation; "" if none does. The copy is whole again afterwards."""
    path = copy / mutation.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutation.old) != 1:
        raise ValueError(f"{mutation.file}: {mutation.old!r} stands there {text.count(mutation.old)} times, not once")
    tests = [f"tests/{name}" for name in mutation.tests.split()]
    flags = ["-q", "-x", "--no-header", "-p", "no:cacheprovider", f"--timeout={_TEST_TIMEOUT_S}"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (copy, copy / "cs336-basics")))}
    try:
        path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
        ended = subprocess.run(
            [sys.executable, "-m", "pytest", *flags, *tests], cwd=copy, env=environment, capture_output=True, text=True
        )
    finally:
        path.write_text(text, encoding="utf-8")
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", ended.stdout, flags=re.MULTILINE)
    if ended.returncode not in (0, 1) and failed is None:
        raise RuntimeError(
            f"pytest ended with status {ended.returncode}:\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}"
        )
    return failed[1] if failed else ""


def to_go_on(left: Sequence[Mutation]) -> str:
    """The command that tries what is left, by its files: of the first, mutations that were tried may be tried again."""
    files = dict.fromkeys(mutation.file for mutation in left)
    return f"To go on: uv run python tests/mutations.py {shlex.join(files)}"


def main() -> None:
    # As Ctrl-C: the copy is removed.
    answer_requests(lambda number, frame: sys.exit(128 + number))
    names = sys.argv[1:]
    if {"-h", "--help"} & {*names}:
        print(__doc__)
        return
    for name in names:
        if not any(name in mutation.file for mutation in MUTATIONS):
            print(f"error: {name}: there is no mutation of such a file", file=sys.stderr)
            sys.exit(2)
    chosen = [m for m in MUTATIONS if not names or any(name in m.file for name in names)]
    tried = survived = 0
    try:
        # What the tests of an interrupted mutation have started may still be writing there.
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
            copy = Path(directory) / "copy"
            shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "out", "results", "__pycache__"))
            print("| broken | in | caught by |\n|---|---|---|", flush=True)
            for mutation in chosen:
                failed = run(mutation, copy)
                survived += not failed
                caught = f"`{failed.removeprefix('tests/')}`" if failed else "**nothing**"
                print(f"| {mutation.what} | `{Path(mutation.file).name}` | {caught} |", flush=True)
                tried += 1
    except (KeyboardInterrupt, SystemExit) as error:
        number = stopped_by(error)
        if number is None:
            raise
        print(
            f"\n{STOPPED[number]}: {tried} of {len(chosen)} mutations tried, {survived} of them not seen by a test; "
            f"only a copy was mutated, and it is removed. {to_go_on(chosen[tried:])}",
            file=sys.stderr,
        )
        sys.exit(128 + number)
    if survived:
        sys.exit(f"{survived} of {len(chosen)} mutations were not seen by a test")


if __name__ == "__main__":
    main()
