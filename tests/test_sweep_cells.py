"""Combinations of a sweep that cannot be: refused where there are no others, and rows that say why beside those."""

from dataclasses import asdict

import pytest

from cs336_systems.benchmarking.attention_benchmark import AttentionBenchmarkCell
from cs336_systems.benchmarking.data_parallel import DataParallelCell, DataParallelRow, data_parallel_cells
from cs336_systems.benchmarking.flash_benchmark import FlashCell
from cs336_systems.benchmarking.kernel_benchmark import KernelRow, kernel_cells
from cs336_systems.benchmarking.model_benchmark import BenchmarkRow
from cs336_systems.benchmarking.sharding_cells import ShardingCell
from cs336_systems.benchmarking.sweep import unmeasured
from cs336_systems.configs import BenchmarkCell, Incompatible, named_shape
from cs336_systems.records import ResultsFile, read_results
from cs336_systems.sweep_cells import Impossible, cells_of, combinations, named_cells, possible
from tests.example_rows import RUN

TINY = {"vocab_size": 50, "ctx": 8}


def test_what_cannot_go_together_stands_beside_what_can():
    cells = named_cells(["tiny"], **TINY, precision=("fp32", "tf32"), checkpoint_every=(0, 2, 3))
    assert [cell if isinstance(cell, Impossible) else (cell.precision, cell.checkpoint_every) for cell in cells] == [
        ("fp32", 0),
        ("fp32", 2),
        _impossible(
            checkpoint_every=3,
            reason="checkpoint_every=3: must be between 1 and 2, the model's blocks, or 0 for no checkpoints",
        ),
        *(_impossible(precision="tf32", checkpoint_every=every, reason=NO_TF32) for every in (0, 2, 3)),
    ]
    assert possible(cells) == cells[:2]


NO_TF32 = "precision='tf32': is a mode of NVIDIA's tensor cores, and device='cpu'; there fp32 and bf16 run"


def _impossible(reason, **changes):
    """Of tiny's cells above."""
    values = asdict(BenchmarkCell(**named_shape("tiny") | TINY)) | changes
    return _Equal(values, reason)


class _Equal:
    """Equal to an Impossible of these values, in whatever order it has them."""

    def __init__(self, values, reason):
        self.values, self.reason = values, reason

    def __eq__(self, other):
        return isinstance(other, Impossible) and (dict(other.values), other.reason) == (self.values, self.reason)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"precision": ("tf32", "tf32")}, "precision='tf32'"),  # nothing that can be
        ({"checkpoint_every": (3, 4)}, "checkpoint_every=3"),
        ({"precision": ("fp32", "tf32"), "ctx": (8, 0)}, "ctx=0"),  # bad in itself, whatever it is with
        ({"checkpoint_every": (0, -1)}, "checkpoint_every=-1"),
        ({"precision": ("fp32", "tf32"), "seed": -1}, "seed=-1"),
        ({"precision": ("tf32", "fp32"), "num_heads": 3}, "num_heads=3"),
        ({"device": ("cpu", "tpu"), "precision": ("fp32", "tf32")}, "device='tpu'"),
    ],
)
def test_bad_values_and_sweeps_without_a_possible_cell_are_refused(parameters, message):
    with pytest.raises(ValueError, match=message):
        named_cells(["tiny"], **{**TINY, **parameters})


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"device": "mps", "precision": "fp16"}, "precision"),
        ({"cuda_graphs": "on"}, "cuda_graphs"),
        ({"cuda_graphs": "on", "device": "cuda", "checkpoint_every": 1}, "cuda_graphs"),
        ({"master_weights": "on", "kernels": "fused"}, "master_weights"),
        ({"master_weights": "on", "precision": "bf16"}, "master_weights"),
        ({"master_weights": "on", "precision": "bf16", "kernels": "loss", "mode": "forward"}, "master_weights"),
        (
            {"master_weights": "on", "precision": "bf16", "kernels": "loss", "optimizer": "adamw-fused"},
            "master_weights",
        ),
    ],
)
def test_a_models_values_that_do_not_go_together(change, argument):
    with pytest.raises(Incompatible, match=f"^{argument}="):
        BenchmarkCell(**named_shape("tiny") | TINY | change)


def test_other_cells_values_that_do_not_go_together():
    attention = {"implementation": "naive", "precision": ("fp32", "tf32"), "head_dim": 8, "length": 8}
    assert len(possible(cells_of(AttentionBenchmarkCell, combinations(**attention)))) == 1
    timed = combinations(**attention | {"precision": "fp32"}, phase="forward", timed=("calls", "kernels"))
    assert [cell.timed for cell in possible(cells_of(FlashCell, timed))] == ["calls"]
    shape = named_shape("tiny") | {"ctx": 8}
    implementations = combinations(**shape, implementation=("fsdp", "ddp"), compile="blocks")
    assert [cell.implementation for cell in possible(cells_of(ShardingCell, implementations))] == ["ddp"]


def test_kernels_that_fill_the_card_are_timed_as_calls_only():
    sweep = (("adamw", "rope"), ("fused",), ("tiny",), ("fp32",), 8, 1)
    cells = kernel_cells(*sweep, device="cuda", timed="kernels")
    assert [cell.what for cell in possible(cells)] == ["rope forward", "rope backward", "rope both"]
    assert [dict(cell.values)["kernel"] for cell in cells if isinstance(cell, Impossible)] == ["adamw"]
    row = KernelRow(**dict(cells[0].values), status="unsupported", reason=cells[0].reason)
    assert row.timed == "kernels"


def test_they_become_rows_once_and_are_told(tmp_path, capsys):
    cells = named_cells(["tiny"], **TINY, precision=("fp32", "tf32"), attention=("naive", "sdpa"))
    results = ResultsFile(tmp_path, "bench", BenchmarkRow, RUN)
    assert unmeasured(cells, results) == possible(cells)
    assert [(row.precision, row.attention, row.status, row.reason, row.step_mean_ms) for row in results.rows] == [
        ("tf32", "naive", "unsupported", NO_TF32, None),
        ("tf32", "sdpa", "unsupported", NO_TF32, None),
    ]
    assert read_results(results.path, BenchmarkRow)[1] == results.rows
    flag = NO_TF32.replace("precision='tf32'", "--precision tf32")
    assert capsys.readouterr().err == (
        f"2 of 4 combinations cannot be measured, and become rows that say why: {flag}.\n"
    )
    resumed = ResultsFile(tmp_path, "bench", BenchmarkRow, RUN, resume=True)
    more = named_cells(["tiny"], **TINY, precision=("fp32", "tf32"), attention=("naive", "sdpa", "flash-pytorch"))
    unmeasured(more, resumed)
    assert [row.attention for row in resumed.rows] == ["naive", "sdpa", "flash-pytorch"]
    assert capsys.readouterr().err.startswith("1 of 6 combinations cannot be measured")


def test_what_can_be_by_now_is_measured_on_resume(tmp_path):
    """As flash-triton on a CPU, once TRITON_INTERPRET is set as its row's reason says."""
    naive, flash = named_cells(["tiny"], **TINY, attention=("naive", "flash-triton"))
    results = ResultsFile(tmp_path, "bench", BenchmarkRow, RUN)
    unmeasured([naive, Impossible.of(flash, "no interpreter")], results)
    results.append(BenchmarkRow(**asdict(naive), status="oom"))
    resumed = ResultsFile(tmp_path, "bench", BenchmarkRow, RUN, resume=True)
    assert unmeasured([naive, Impossible.of(flash, "no interpreter")], resumed) == []
    assert len(resumed.rows) == 2
    assert unmeasured([naive, flash], resumed) == [flash]
    assert [row.status for row in read_results(results.path, BenchmarkRow)[1]] == ["oom"]


def test_many_reasons_are_one_line(tmp_path, capsys):
    cells = named_cells(["tiny"], **TINY, checkpoint_every=(0, 3, 4, 5, 6, 7))
    unmeasured(cells, ResultsFile(tmp_path, "bench", BenchmarkRow, RUN))
    shown = capsys.readouterr().err
    assert shown.startswith(
        "5 of 6 combinations cannot be measured, and become rows that say why: --checkpoint-every 3: "
    )
    assert shown.endswith("; and for 2 more reasons.\n")
    assert shown.count("\n") == 1


def test_cells_on_ranks_too(tmp_path):
    base = DataParallelCell(**named_shape("tiny"), ctx=8, implementation="none")
    schemes = {"batch_sizes": {2: 4}, "implementation": ("naive",), "bucket_size_mb": ()}
    cells = data_parallel_cells(base, precision=("fp32", "tf32"), **schemes)
    results = ResultsFile(tmp_path, "ddp", DataParallelRow, RUN)
    assert [cell.implementation for cell in unmeasured(cells, results)] == ["none", "naive"]
    assert [(row.precision, row.implementation) for row in results.rows] == [("tf32", "none"), ("tf32", "naive")]
    with pytest.raises(ValueError, match="tf32"):
        data_parallel_cells(base, precision=("tf32",), **schemes)
