"""What the CUDA allocator's history is on a GPU, for any device: each storage that operations make, and when it goes.

It sees tensors only, not what a kernel takes and gives back inside one operation. Entries have the CUDA history's form,
so that whatever reads a snapshot reads either.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StorageTrace(TorchDispatchMode):
    """While active, an entry for each new storage, and one for each that goes, in order.

    Attributes:
        entries: dicts as in `torch.cuda.memory._snapshot()["device_traces"][0]`.
        label: put into each new entry as "user_metadata".
        live_bytes, peak_bytes: of the storages made or known so far. `peak_bytes` may be set anew at any time.
    """

    def __init__(self, known: Iterable[torch.Tensor] = (), has_stacks: bool = True) -> None:
        """`known`: tensors that are there already; no entry says that they were made, but one says when they go.
        `has_stacks`: whether entries have Python's stack, which costs most of the time."""
        super().__init__()
        self.entries: list[dict[str, Any]] = []
        self.label = ""
        self._has_stacks = has_stacks
        self.live_bytes = self.peak_bytes = 0
        self._live: dict[int, tuple[weakref.ref, int, int]] = {}
        for tensor in known:
            self._add(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and self._add(tensor):
                storage = tensor.untyped_storage()
                self._note("alloc", storage.data_ptr(), storage.nbytes())
        return output

    def snapshot(self) -> dict[str, Any]:
        """The entries and what is live now, in the form of `torch.cuda.memory._snapshot()`."""
        segments = [
            {
                "address": address,
                "total_size": size,
                "blocks": [{"address": address, "size": size, "state": "active_allocated", "frames": []}],
            }
            for _, address, size in self._live.values()
        ]
        return {"segments": segments, "device_traces": [list(self.entries)]}

    def _add(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's storage is a new one; from now on its end is seen."""
        storage = tensor.untyped_storage()
        key, address, size = storage._cdata, storage.data_ptr(), storage.nbytes()
        if size == 0 or key in self._live:
            return False

        def gone(_: weakref.ref) -> None:
            del self._live[key]
            self.live_bytes -= size
            self._note("free_requested", address, size)
            self._note("free_completed", address, size)

        self._live[key] = (weakref.ref(storage, gone), address, size)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return True

    def _note(self, action: str, address: int, size: int) -> None:
        entry = {"action": action, "addr": address, "size": size, "stream": 0, "time_us": time.time_ns() // 1000}
        self.entries.append(
            entry | {"frames": _python_frames() if self._has_stacks else [], "user_metadata": self.label}
        )


def _python_frames() -> list[dict[str, Any]]:
    """The callers outside this file, the innermost first."""
    frames = []
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename != __file__:
            frames.append({"filename": code.co_filename, "line": frame.f_lineno, "name": code.co_name})
        frame = frame.f_back
    return frames
