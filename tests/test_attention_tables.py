"""Tables and pictures of the attention benchmarks' rows."""

import re
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from cs336_systems.benchmarking import attention_benchmark, attention_plots, model_benchmark
from cs336_systems.benchmarking.attention_benchmark import (
    AttentionBenchmarkCell,
    AttentionBenchmarkRow,
    formulas,
)
from cs336_systems.benchmarking.attention_plots import COLOUR_OF, colour_of, plot_attention, plot_flash
from cs336_systems.benchmarking.attention_tables import pivot_markdown, value_or_status, why_not_run
from cs336_systems.benchmarking.flash_benchmark import FlashRow
from cs336_systems.benchmarking.run_flash_benchmark import write_flash_files
from cs336_systems.records import ResultsFile
from tests.example_rows import RUN


def _flash_row(implementation, length, median_ms=None, status="ok", **changes):
    parameters = {"precision": "bf16", "head_dim": 64, "phase": "both"} | changes
    tflops = None if median_ms is None else 100.0
    return FlashRow(implementation, length=length, median_ms=median_ms, tflops=tflops, status=status, **parameters)


def test_tables_have_lengths_down_and_implementations_across():
    rows = [
        _flash_row("naive", 1024, 2.0),
        _flash_row("naive", 65536, status="oom", reason="no room"),
        _flash_row("flash-triton", 1024, 0.5),
        _flash_row("flash-triton", 128, 0.25),
        _flash_row("sdpa-cudnn", 128, status="unsupported", reason="no GPU"),
        _flash_row("sdpa-cudnn", 128, status="unsupported", reason="no GPU", precision="fp32"),
        _flash_row("naive", 128, 1.0, phase="forward"),
    ]
    tables = pivot_markdown(
        rows, {"head_dim": "head_dim", "phase": ""}, "length", "implementation",
        lambda row: value_or_status(row, "median_ms", "tflops"),
    )  # fmt: skip
    cells = [re.findall(r"[^|\s][^|]*[^|\s]|[^|\s]", line) for line in tables.splitlines() if "---" not in line]
    assert cells == [
        ["**both**"],
        [],
        ["length", "naive", "flash-triton"],
        ["128", "–", "0.25 (100)"],
        ["1024", "2 (100)", "0.5 (100)"],
        ["65536", "oom", "–"],
        [],
        ["**forward**"],
        [],
        ["length", "naive"],
        ["128", "1 (100)"],
    ]
    assert why_not_run(rows, "precision").splitlines() == [
        "- naive (bf16): oom, no room",
        "- sdpa-cudnn (bf16, fp32): unsupported, no GPU",
    ]


@pytest.mark.parametrize(
    ("p20", "p80", "shown"),
    [
        (0.25, 0.25, "0.25 ± 0.0% (100)"),
        (0.24, 0.26, "0.25 ± 4.0% (100)"),
        (0.2, 0.35, "0.25 ± 30% (100)"),
        (None, None, "0.25 (100)"),
    ],
)
def test_times_have_the_spread_of_their_calls(tmp_path, p20, p80, shown):
    """Of rows from before percentiles were kept there is none."""
    results = ResultsFile(tmp_path, "flash", FlashRow, RUN)
    results.append(_flash_row("naive", 128, 0.25, p20_ms=p20, p80_ms=p80))
    assert f"|      128 | {shown} |" in write_flash_files(results)


def test_calls_by_themselves_and_in_a_row_stand_apart(tmp_path, monkeypatch):
    panels = []
    monkeypatch.setattr(attention_plots, "save_figure", lambda figure, path: panels.extend(figure.axes))
    results = ResultsFile(tmp_path, "flash", FlashRow, RUN)
    for timed, ms in (("calls", 0.25), ("in-a-row", 0.125)):
        results.append(_flash_row("naive", 128, ms, timed=timed))
    written = write_flash_files(results)
    assert re.findall(r"\*\*(.*)\*\*|(0[.]\d+) \(100\)", written) == [
        ("calls", ""), ("", "0.25"), ("in-a-row", ""), ("", "0.125"),
    ]  # fmt: skip
    assert [axis.get_title() for axis in panels] == ["head_dim 64, calls, both", "head_dim 64, in-a-row, both"]


@pytest.mark.parametrize(("most", "scale"), [(9.0, "linear"), (500.0, "log")])
def test_values_over_more_than_a_decade_are_drawn_on_a_logarithmic_scale(tmp_path, monkeypatch, most, scale):
    drawn = []
    monkeypatch.setattr(attention_plots, "save_figure", lambda figure, path: drawn.extend(figure.axes))
    rows = [
        replace(_flash_row("naive", 128, 2.0), tflops=1.0),
        replace(_flash_row("naive", 1024, 2.0, head_dim=16), tflops=most),
    ]
    plot_flash(rows, tmp_path)
    assert [axis.get_yscale() for axis in drawn] == [scale] * len(drawn)
    assert len({axis.get_ylim() for axis in drawn}) == (1 if scale == "log" else 2)


@pytest.mark.parametrize("names", [("flash-triton", "flash-hopper"), ("flash-hopper", "flash-triton")])
def test_lines_that_coincide_are_both_seen(tmp_path, monkeypatch, names):
    seen = {}

    def look(figure, path):
        figure.axes[0].get_legend().remove()
        figure.set_dpi(300)
        figure.canvas.draw()
        pixels = np.asarray(figure.canvas.buffer_rgba())[..., :3]
        for name in names:
            colour = np.round(np.array(to_rgb(COLOUR_OF[name])) * 255)
            seen[name] = (pixels == colour).all(-1).sum()

    monkeypatch.setattr(attention_plots, "save_figure", look)
    plot_flash([_flash_row(name, length, 1.0) for name in names for length in (128, 1024, 65536)], tmp_path)
    assert min(seen.values()) > 1000, seen


def test_plots_of_rows_with_gaps(tmp_path):
    rows = [
        replace(_flash_row("naive", 1024, 2.0), peak_memory_gib=0.1),
        replace(_flash_row("flash-triton", 1024, 0.5), peak_memory_gib=0.01),
        _flash_row("naive", 65536, status="oom"),
        _flash_row("naive", 1024, 2.0, heads=16, precision="fp32"),
    ]
    paths = plot_flash(rows, tmp_path)
    assert [path.name for path in paths] == [
        "flash_benchmark_tflops_bf16.png", "flash_benchmark_tflops_fp32.png", "flash_benchmark_memory.png",
    ]  # fmt: skip
    assert all(path.stat().st_size > 5000 for path in paths)
    assert plot_flash([rows[2]], tmp_path) == []

    cell = AttentionBenchmarkCell("naive", "fp32", head_dim=16, length=256)
    measured = {"forward_mean_ms": 1.0, "backward_mean_ms": 2.0, "memory_before_backward_gib": 0.01}
    alone = [
        AttentionBenchmarkRow(**vars(cell), **measured, **formulas(cell)),
        AttentionBenchmarkRow(
            **vars(replace(cell, length=16384)), status="oom", **formulas(replace(cell, length=16384))
        ),
    ]
    plot_attention(alone, tmp_path / "alone.png")
    assert (tmp_path / "alone.png").stat().st_size > 5000


def test_no_two_columns_have_the_same_title():
    for headings in (attention_benchmark._RESULTS, model_benchmark._RESULT_HEADINGS):
        titles = [" ".join(title.split()) for title in headings.values()]
        assert len(set(titles)) == len(titles)


def test_another_implementation_gets_a_colour_too():
    more = colour_of([*COLOUR_OF, "chunked"])
    assert more.items() >= COLOUR_OF.items()
    assert more["chunked"].startswith("#")
