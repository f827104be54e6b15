"""The kernels' benchmark: its cells, that all implementations of a cell do the same work, and its files."""

import re
from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")

from cs336_systems.attention import implementations
from cs336_systems.benchmarking import kernel_peers
from cs336_systems.benchmarking.before_work import without_missing
from cs336_systems.benchmarking.kernel_benchmark import (
    KernelCell,
    KernelMeasure,
    KernelRow,
    kernel_cells,
    phases_of,
    write_kernel_files,
)
from cs336_systems.benchmarking.kernel_peers import make_work
from cs336_systems.records import ResultsFile, Unsupported, read_results
from tests.attention_helpers import IGNORE_INTERPRETER
from tests.example_rows import RUN
from tests.script_helpers import assert_help_needs_no_torch

pytestmark = IGNORE_INTERPRETER


def _cell(kernel, implementation="eager", phase="both", **changes):
    shape = {"tokens": 5, "d_model": 12, "d_ff": 20, "num_heads": 2, "vocab_size": 33, "num_layers": 1}
    settings = {"warmup_ms": 0, "rep_ms": 1, "precision": "fp32", "size": "tiny"}
    return KernelCell(kernel=kernel, implementation=implementation, phase=phase, **{**shape, **settings, **changes})


def test_the_help_answers_without_torch():
    assert_help_needs_no_torch("kernel_benchmark", "--kernel", "--implementation", "--tokens", "--resume")


def test_the_default_cells_are_the_models_shapes():
    kernels = ("linear-cross-entropy", "adamw", "rms-norm", "add-rms-norm", "swiglu", "rope")
    names = ("fused", "eager", "compiled", "torch")
    assert {cell.size for cell in kernel_cells(kernels, names, (), ("bf16",), None, 4, device="cpu")} == {"tiny"}
    cells = kernel_cells(kernels, names, (), ("bf16",), None, 4, device="cuda:0")
    assert {(cell.size, cell.tokens, cell.d_model, cell.vocab_size, cell.num_layers) for cell in cells} == {
        ("large", 4096, 1280, 10_000, 4),
        ("8b", 32_768, 4096, 151_936, 4),
    }
    assert len(cells) == 2 * (4 * (2 + 1 + 3) + 3 * (3 + 3 + 3))
    assert not [cell for cell in cells if cell.implementation == "torch" and cell.kernel == "swiglu"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kernel": "softmax"}, "kernel='softmax': must be one of linear-cross-entropy, adamw"),
        ({"kernel": "adamw"}, "phase='both': must be one of step for adamw"),
        ({"phase": "backward"}, "phase='backward': must be one of forward, both"),
        (
            {"kernel": "rope", "implementation": "torch"},
            "implementation='torch': PyTorch has no fused function for rope",
        ),
        ({"kernel": "rope", "timed": "kernels"}, "timed='kernels': needs a GPU and an elementwise kernel"),
        ({"timed": "kernels", "device": "cuda"}, "got device='cuda' and kernel='linear-cross-entropy'"),
        ({"tokens": 0}, "tokens=0: must be at least 1"),
        ({"num_heads": 5}, "num_heads=5: must divide"),
    ],
)
def test_cells_that_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        _cell(**{"kernel": "linear-cross-entropy", **changes})


@pytest.mark.parametrize("kernel", ["linear-cross-entropy", "rms-norm", "add-rms-norm", "swiglu", "rope"])
def test_all_implementations_do_the_same_work(kernel, monkeypatch):
    monkeypatch.setattr(kernel_peers, "LOSS_CHUNK", 2)
    expected = None
    for implementation in ("eager", "fused", "torch"):
        if implementation == "torch" and kernel not in ("linear-cross-entropy", "rms-norm"):
            continue
        gradients = []
        for phase in phases_of(kernel):
            torch.manual_seed(3)
            work = make_work(_cell(kernel, implementation, phase))
            work.call()
            gradients.append([tensor.grad for tensor in work.inputs])
        assert all(gradient is None for gradient in gradients[0])  # forward
        for found in gradients[1:]:
            expected = expected or found
            for our, their in zip(found, expected, strict=True):
                torch.testing.assert_close(our, their, rtol=1e-4, atol=1e-5)


def test_the_optimizers_take_the_same_step(monkeypatch):
    updated = []
    for implementation in ("eager", "fused", "torch"):
        made: list[torch.Tensor] = []
        original = torch.randn

        def randn(*args, original=original, made=made, **options):
            made.append(original(*args, **options))
            return made[-1]

        torch.manual_seed(3)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "randn", randn)
            make_work(_cell("adamw", implementation, "step")).call()
        updated.append([tensor.detach() for tensor in made])
    assert len(updated[0]) == 12
    for others in updated[1:]:
        for our, their in zip(others, updated[0], strict=True):
            torch.testing.assert_close(our, their, rtol=1e-5, atol=1e-5)


def test_the_least_traffic_and_the_operations():
    numbers = 5 * 12  # of x
    assert make_work(_cell("rms-norm", phase="forward")).n_bytes == 2 * 4 * numbers
    assert make_work(_cell("rms-norm", phase="backward")).n_bytes == 3 * 4 * numbers
    assert make_work(_cell("add-rms-norm")).n_bytes == 8 * 4 * numbers
    assert make_work(_cell("rope", precision="bf16")).n_bytes == 8 * 2 * numbers
    assert make_work(_cell("swiglu")).n_bytes == 8 * 4 * 5 * 20
    parameters = 2 * 33 * 12 + 4 * 12 * 12 + 3 * 12 * 20 + 3 * 12
    assert make_work(_cell("adamw", phase="step")).n_bytes == 7 * 4 * parameters
    product = 2 * 5 * 12 * 33
    assert make_work(_cell("linear-cross-entropy", phase="forward")).flops == product
    assert make_work(_cell("linear-cross-entropy")).flops == 3 * product


def test_a_cell_is_measured():
    results = KernelMeasure()(_cell("swiglu"))
    assert 0 < results["min_ms"] <= results["p20_ms"] <= results["median_ms"] <= results["p80_ms"]
    assert results["gb_per_s"] == pytest.approx(8 * 4 * 100 / results["median_ms"] / 1e6)
    assert results["tflops"] is None
    row = KernelRow(**vars(_cell("swiglu")), **{**results, "gb_per_s": 1234.0})
    assert row.rate == "1234 GB/s"
    results = KernelMeasure()(_cell("linear-cross-entropy"))
    assert results["tflops"] == pytest.approx(6 * 5 * 12 * 33 / results["median_ms"] / 1e9)
    assert results["gb_per_s"] is None


def test_where_the_kernels_cannot_run(monkeypatch):
    monkeypatch.setattr(implementations, "_TRITON_IS_INTERPRETED", False)
    with pytest.raises(Unsupported, match="TRITON_INTERPRET=1"):
        make_work(_cell("rope", "fused"))
    assert _cell("rope", "eager").missing_here() == ""
    assert _cell("rope", "fused").missing_here().startswith("implementation='fused': Triton compiles for GPUs, and")


@pytest.mark.parametrize(("missing", "why"), [(("", "b"), ""), (("a", "b"), "a")])
def test_a_sweep_of_which_nothing_can_run_is_refused(missing, why):
    """What only some of its cells lack is their rows' reason."""
    cells = [_Cell(text) for text in missing]
    if why:
        with pytest.raises(ValueError, match=r"^a$"):
            without_missing(cells)
    else:
        assert without_missing(cells) == cells


@dataclass(frozen=True)
class _Cell:
    missing: str

    def missing_here(self) -> str:
        return self.missing


def test_tables_have_a_line_for_each_pass_and_a_column_for_each_implementation(tmp_path):
    results = ResultsFile(tmp_path, "kernel_benchmark", KernelRow, RUN)
    for implementation, gb_per_s in (("fused", 3000.0), ("eager", 500.0)):
        cell = _cell("swiglu", implementation, "forward")
        results.append(KernelRow(**vars(cell), median_ms=0.25, gb_per_s=gb_per_s))
    cell = _cell("linear-cross-entropy", "eager", phase="forward")
    results.append(KernelRow(**vars(cell), median_ms=1.5, p20_ms=1.25, p80_ms=1.75, tflops=600.0))
    results.append(KernelRow(**vars(_cell("linear-cross-entropy", "fused", "forward")), status="oom"))
    text = write_kernel_files(results)
    assert {path.name for path in tmp_path.iterdir()} == {f"kernel_benchmark.{x}" for x in ("json", "csv", "md", "tex")}
    lines = [re.sub(" +", " ", line) for line in text.splitlines()]
    assert "| what | fused | eager |" in lines
    assert "| swiglu forward | 0.25 (3000 GB/s) | 0.25 (500 GB/s) |" in lines
    assert "| linear-cross-entropy forward | oom | 1.5 ± 17% (600 TFLOP/s) |" in lines


@pytest.mark.slow
def test_the_script_writes_its_files(tmp_path, run_script):
    status, output, errors = run_script(
        "kernel_benchmark", "--device", "cpu", "--kernel", "rms-norm", "--implementation", "fused", "--size", "tiny",
        "--tokens", 2, "--precision", "fp32", "--warmup-ms", 0, "--rep-ms", 1, "--out", tmp_path,
    )  # fmt: skip
    assert status == 0, errors
    assert {path.name for path in tmp_path.iterdir()} == {f"kernel_benchmark.{x}" for x in ("json", "csv", "md", "tex")}
    _, rows, _ = read_results(tmp_path / "kernel_benchmark.json", KernelRow)
    assert [(row.what, row.status) for row in rows] == [
        (f"rms-norm {x}", "ok") for x in ("forward", "backward", "both")
    ]
    assert "rms-norm backward" in output
    assert "GB/s" in output


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["rms-norm", "add-rms-norm", "swiglu", "rope"])
def test_kernels_alone_take_less_time_than_calls(kernel):
    results = {}
    for timed in ("calls", "kernels"):
        for phase in phases_of(kernel):
            results[timed, phase] = KernelMeasure()(
                _cell(kernel, "fused", phase, device="cuda", timed=timed, rep_ms=20)
            )
    for phase in phases_of(kernel):
        assert 0 < results["kernels", phase]["median_ms"] < results["calls", phase]["median_ms"]
