"""The timeline picture: what is drawn where, in which colour."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_hex

from cs336_systems.profiling import timeline
from cs336_systems.profiling.timeline import CLASS_COLOURS, plot_timeline
from cs336_systems.profiling.trace import Kernel, Range, Trace

MS = 1_000_000


def _kernel(name: str, start: int, end: int, ranges: tuple[Range, ...], stream: int = 7) -> Kernel:
    return Kernel(name, start * MS, end * MS, stream, 0, 1, start * MS - 1, ranges)


@pytest.fixture
def trace() -> Trace:
    """Two steps of 100 ms from 1000 ms on; in each, forward with one block, then backward beside a collective."""
    ranges, kernels = [], []
    for start in (1000, 1100):
        spans = {"step": (0, 100), "forward": (0, 40), "block 0": (10, 30), "softmax": (12, 20), "backward": (40, 100)}
        step, forward, block, softmax, backward = (
            Range(name, (start + first) * MS, (start + last) * MS, 1, 1) for name, (first, last) in spans.items()
        )
        ranges += [step, forward, block, softmax, backward]
        kernels.append(_kernel("sgemm", start + 10, start + 20, (step, forward, block)))
        kernels.append(_kernel("reduce_kernel", start + 20, start + 30, (step, forward, block, softmax)))
        kernels.append(_kernel("sgemm", start + 50, start + 90, (step, backward)))
        kernels.append(_kernel("ncclDevKernel_AllReduce", start + 60, start + 95, (step, backward), stream=21))
    return Trace(kernels, ranges, "made")


def _bars(axis: Any) -> dict[tuple[float, str], list[tuple[float, float]]]:
    """By row and colour, the times in ms from which and to which something is drawn."""
    drawn: dict[tuple[float, str], list[tuple[float, float]]] = {}
    for collection in axis.collections:
        for path in collection.get_paths():
            box = path.get_extents()
            colour = to_hex(collection.get_facecolor()[0]).upper()
            drawn.setdefault((round((box.y0 + box.y1) / 2), colour), []).append((round(box.x0, 3), round(box.x1, 3)))
    return drawn


def test_the_first_step_and_one_block_are_drawn(trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = []
    monkeypatch.setattr(timeline, "save_figure", lambda figure, path: figures.append(figure))
    plot_timeline(trace, tmp_path / "timeline.png", "small")
    whole, block = figures[0].axes
    assert whole.get_title() == "small: one step, 4 kernels"
    assert [label.get_text() for label in whole.get_yticklabels()] == ["host", "on the device", "GPU 0, 7", "GPU 0, 21"]
    bars = _bars(whole)
    assert sorted(bars[2, CLASS_COLOURS["matmul"]]) == [(10, 20), (50, 90)]
    assert bars[2, CLASS_COLOURS["reduction"]] == [(20, 30)]
    assert bars[3, CLASS_COLOURS["collective"]] == [(60, 95)]
    backward = timeline.PHASE_COLOURS["backward"].upper()
    assert bars[0, backward] == [(40, 100)]
    assert bars[1, backward] == [(50, 95)]  # when its kernels ran
    assert {text.get_text() for text in whole.texts} == {"forward", "backward"}
    assert block.get_title() == "small: forward of block 0, 2 kernels"
    assert block.get_xlim() == (0, 20)
    assert _bars(block)[2, CLASS_COLOURS["reduction"]] == [(10, 20)]
    assert [text.get_text() for text in block.texts] == ["softmax"]
    assert [text.get_text() for text in whole.get_legend().get_texts()] == ["matmul", "reduction", "collective"]


def test_a_trace_without_ranges_is_drawn_whole(trace: Trace, tmp_path: Path) -> None:
    bare = Trace([_kernel(k.name, k.start_ns // MS, k.end_ns // MS, ()) for k in trace.kernels], [], "bare")
    plot_timeline(bare, tmp_path / "bare.svg")
    assert "8 kernels" in (tmp_path / "bare.svg").read_text()


def test_an_empty_trace_has_no_picture(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="empty: has no kernels to draw"):
        plot_timeline(Trace([], [], "empty"), tmp_path / "empty.png")
