"""Records what a step allocates: the allocator's history, marks where its phases begin, and who holds what.

The result is a snapshot as pytorch.org/memory_viz opens it, with what this project's analysis needs under one more key.
"""

from __future__ import annotations

import gc
import pickle
from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from cs336_systems.files import write_atomically
from cs336_systems.profiling.autograd_nodes import announce_nodes, forward_lines_kept
from cs336_systems.profiling.storage_trace import StorageTrace
from cs336_systems.records import Unsupported
from cs336_systems.weight_copies import WeightCopies
from cs336_systems.workload import Workload

Snapshot = dict[str, Any]

EXTRA_KEY = "cs336_systems"
START, END = "start", "end"  # marks around the step; those between have the names of its phases
MARK_FUNCTION = "_allocate_mark"
_MAX_ENTRIES = 1_000_000  # a step of the largest size has some ten thousand


def record_step(workload: Workload) -> tuple[Snapshot, Exception | None]:
    """Runs one step and returns its snapshot, and the error that ended it early, such as running out of memory.

    Args:
        workload: on a GPU, or on a CPU, where tensors alone are seen (`StorageTrace`). It should have run a step
            before: the first one makes the optimizer's state and the libraries' workspaces.

    Returns:
        What `torch.cuda.memory._snapshot()` returns, and under `EXTRA_KEY` a dict of plain values:
        "marks": names in the order of the marks, from "start" over the step's phases to "end" (a step that ended early
        lacks the rest). A mark is an entry of the history itself, a tiny allocation made by `MARK_FUNCTION`: no clocks
        need to be compared. "held": {"mark": index (or -1: at the history's end), "category", "addresses"}, what the
        allocations live at that mark are. "has_backward": whether the mode has a backward pass.

    Raises:
        Unsupported: another device, or compiled code on a CPU.
    """
    gc.collect()
    recorder = _Recorder(workload)
    with recorder.history:
        try:
            recorder.mark(START)
            recorder.hold_persistent()
            workload.step(recorder.phase)
            recorder.mark(END)
            recorder.hold_persistent()
        except Exception as error:  # its traceback holds the step's tensors: they are live in the snapshot
            recorder.hold_at_the_end()
            return recorder.snapshot(), error
        return recorder.snapshot(), None


def save_snapshot(snapshot: Snapshot, path: Path) -> None:
    """Writes the file for pytorch.org/memory_viz whole, or raises OSError and leaves none."""
    write_atomically(path, pickle.dumps(snapshot))


def load_snapshot(path: Path) -> Snapshot:
    """Reads a snapshot, this project's or any other that `torch.cuda.memory._dump_snapshot` wrote.

    The file is a pickle, which can run code: open none that you do not trust. Raises ValueError, naming the file, where
    it is none.
    """
    try:
        snapshot = pickle.loads(path.read_bytes())
        if not isinstance(snapshot, dict) or not {"segments", "device_traces"} <= set(snapshot):
            raise ValueError("it lacks segments or device_traces")
    except (OSError, ValueError, EOFError, pickle.UnpicklingError, AttributeError, ImportError, IndexError) as error:
        raise ValueError(
            f"snapshot={str(path)!r}: must be a file that torch.cuda.memory._dump_snapshot wrote ({error})"
        ) from error
    return snapshot


class _CudaHistory:
    """The CUDA allocator's own history, with Python stacks."""

    def __enter__(self) -> None:
        torch.cuda.memory._record_memory_history(
            context="alloc", stacks="python", max_entries=_MAX_ENTRIES, clear_history=True
        )

    def __exit__(self, *_: object) -> None:
        torch.cuda.memory._record_memory_history(enabled=None)

    def label(self, text: str) -> None:
        torch.cuda.memory._set_memory_metadata(text)

    def snapshot(self) -> Snapshot:
        return torch.cuda.memory._snapshot()


class _TraceHistory:
    """The same for a device whose allocator keeps no history."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        self._trace = StorageTrace(known)

    def __enter__(self) -> None:
        self._trace.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._trace.__exit__(*error)

    def label(self, text: str) -> None:
        self._trace.label = text

    def snapshot(self) -> Snapshot:
        return self._trace.snapshot()


class _Recorder:
    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        device = workload.device.type
        if device not in ("cuda", "cpu"):
            raise Unsupported(f"device={device!r}: memory is recorded on cuda and on cpu")
        if device == "cpu" and workload.cell.compile != "off":
            raise Unsupported(f"compile={workload.cell.compile!r}: on a CPU only eager code is seen")
        self.history = _CudaHistory() if device == "cuda" else _TraceHistory(_known_tensors(workload))
        self._marks: list[str] = []
        self._held: list[dict[str, Any]] = []
        # Compiled code runs without Python: there is nothing to watch, and a mode would keep it from running at all.
        self._is_watched = workload.cell.compile == "off" and workload.cell.mode != "forward"
        self._copies = WeightCopies(list(workload.model.parameters()))

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        if name == "backward":
            # They are live until backward, and are looked for at its mark, which comes next.
            self._hold("weight copies", self._copies.addresses(), len(self._marks))
            if self._is_watched and self.workload.loss is not None:
                announce_nodes(self.workload.loss.grad_fn, self.history.label)
        self.mark(name)
        with self._watch(name):
            yield
        if name == "backward":
            self.history.label("")

    def mark(self, name: str) -> None:
        _allocate_mark(self.workload.device)
        self._marks.append(name)

    def _watch(self, name: str) -> AbstractContextManager[Any]:
        """In forward: which casts of weights are kept, and which line made each node of the graph."""
        watching = ExitStack()
        if not self._is_watched or name not in ("forward", "loss"):
            return watching
        if self.workload.cell.precision in ("bf16", "fp16"):
            watching.enter_context(self._copies)
        watching.enter_context(forward_lines_kept())
        return watching

    def hold_at_the_end(self) -> None:
        """Notes where everything is when a step has ended early."""
        self._hold("weight copies", self._copies.addresses(), -1)
        self.hold_persistent(-1)

    def hold_persistent(self, mark: int | None = None) -> None:
        """Notes where parameters, gradients and optimizer state are now, by default at the last mark."""
        mark = len(self._marks) - 1 if mark is None else mark
        for category, tensors in _persistent_tensors(self.workload).items():
            self._hold(category, {tensor.untyped_storage().data_ptr() for tensor in tensors}, mark)

    def _hold(self, category: str, addresses: set[int], mark: int) -> None:
        self._held.append({"mark": mark, "category": category, "addresses": sorted(addresses)})

    def snapshot(self) -> Snapshot:
        snapshot = self.history.snapshot()
        has_backward = self.workload.cell.mode != "forward"
        snapshot[EXTRA_KEY] = {"marks": self._marks, "held": self._held, "has_backward": has_backward}
        return snapshot


def _allocate_mark(device: torch.device) -> None:
    torch.empty(1, dtype=torch.uint8, device=device)


def _persistent_tensors(workload: Workload) -> dict[str, list[torch.Tensor]]:
    parameters: list[torch.Tensor] = list(workload.model.parameters())
    states = workload.optimizer.state.values() if workload.optimizer is not None else ()
    return {
        "parameters": parameters,
        "gradients": [parameter.grad for parameter in parameters if parameter.grad is not None],
        "optimizer state": [value for state in states for value in state.values() if torch.is_tensor(value)],
    }


def _known_tensors(workload: Workload) -> list[torch.Tensor]:
    persistent = [tensor for tensors in _persistent_tensors(workload).values() for tensor in tensors]
    return [*persistent, *workload.model.buffers(), workload.inputs, workload.targets]
