"""The graph that autograd builds: its nodes, what each keeps, and the line of the forward pass that made each."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

# A frame as traceback.format_stack() writes it.
_FRAME = re.compile(r'\s*File "(?P<filename>.+)", line (?P<line>\d+), in (?P<name>.+)')
# By parts of paths, since a snapshot may be read on another machine than the one that it was recorded on.
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "/torch/")
_WATCHERS = ("/cs336_systems/profiling/", "/cs336_systems/weight_copies.py")


@contextmanager
def forward_lines_kept() -> Generator[None]:
    """Within it each new node remembers its Python stack, as in autograd's anomaly mode; no values are checked."""
    before = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    torch.autograd.set_detect_anomaly(True, check_nan=False)
    try:
        yield
    finally:
        torch.autograd.set_detect_anomaly(*before)


def graph_nodes(root: Any) -> Iterator[Any]:
    """All nodes from `root` (a tensor's `grad_fn`) down, each once, those nearest the root first."""
    seen, waiting = {root}, [root]
    for node in waiting:
        yield node
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                waiting.append(child)


def forward_line(node: Any) -> str:
    """Where in the forward pass the node was made, e.g. "cs336_basics/model.py:110 silu"; "" if it was not kept."""
    frames = (_FRAME.match(entry) for entry in reversed(node.metadata.get("traceback_", [])))
    return model_line([frame.groupdict() for frame in frames if frame])


def model_line(frames: list[dict[str, Any]]) -> str:
    """The innermost frame that is no library's and not the profiler's, e.g. "cs336_basics/model.py:110 silu".

    `frames` have "filename", "line" and "name", the innermost first. "" if there is none.
    """
    for frame in frames:
        path = Path(frame["filename"])
        is_ours = "/cs336_basics/" in path.as_posix()  # wherever it is installed
        if path.suffix == ".py" and (is_ours or not any(part in path.as_posix() for part in _LIBRARIES + _WATCHERS)):
            return f"{path.parent.name}/{path.name}:{frame['line']} {frame['name']}"
    return ""


def announce_nodes(root: Any, announce: Callable[[str], None]) -> None:
    """Has backward call `announce`, e.g. "MulBackward0 of cs336_basics/model.py:110 silu", before each node runs."""
    for node in graph_nodes(root):
        # A hook there could hold the gradient, and a gradient that is held is copied instead of taken.
        if node.name().endswith("AccumulateGrad"):
            continue
        line = forward_line(node)
        text = f"{node.name()} of {line}" if line else node.name()
        node.register_prehook(lambda gradients, text=text: announce(text))
