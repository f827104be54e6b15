"""What a block keeps for backward: read off autograd's graph, the same that its hooks see and that the formulas say."""

import pytest
import torch

from cs336_systems.accounting import memory
from cs336_systems.configs import BenchmarkCell
from cs336_systems.profiling.saved_tensors import _backward_peak, measure_block, saved_tensors
from cs336_systems.weight_copies import WeightCopies

MIB = 2**20


def _cell(**parameters) -> BenchmarkCell:
    shape = {"d_model": 24, "d_ff": 56, "num_layers": 1, "num_heads": 3, "vocab_size": 37, "batch_size": 2}
    return BenchmarkCell(size="custom", ctx=40, mode="forward-backward", **{**shape, **parameters})


@pytest.mark.parametrize("attention", ["naive", "sdpa", "flash-pytorch"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_blocks_tensors_add_up_to_the_formula(precision, attention):
    cell = _cell(precision=precision, attention=attention)
    results = measure_block(cell)
    config = cell.model_config()
    predicted = sum(memory.block_saved_tensors(config, 2, 40, precision, attention).values())
    assert results["activations_mib"] == results["predicted_mib"] == predicted / MIB
    matrices = memory.num_block_matrix_parameters(config)
    assert results["weight_copies_mib"] == (2 * matrices / MIB if precision == "bf16" else 0)
    norms = 2 * 24 * 4
    assert results["parameters_mib"] == ((norms + 4 * matrices) / MIB if precision == "fp32" else norms / MIB)
    # Backward leaves gradients of the parameters and of the input.
    assert results["gradients_mib"] == (norms + 4 * matrices + 2 * 40 * 24 * 4) / MIB
    sums = {kind: 0.0 for kind in ("activation", "parameter", "weight copy", "buffer")}
    for row in results["tensors"]:
        sums[row["kind"]] += row["mib"] * row["count"]
    assert sums["activation"] == pytest.approx(results["activations_mib"])
    assert [row["mib"] for row in results["tensors"]] == sorted((r["mib"] for r in results["tensors"]), reverse=True)


def test_names_are_autograds_and_lines_the_models():
    rows = {row["kept_by"]: row for row in measure_block(_cell())["tensors"] if row["kind"] == "activation"}
    exponentials = rows["DivBackward0.self, ExpBackward0.result"]
    assert exponentials["shape"] == "2 × 3 × 40 × 40"
    assert exponentials["mib"] == 2 * 3 * 40 * 40 * 4 / MIB
    assert exponentials["line"].startswith("cs336_basics/nn_utils.py:")
    assert exponentials["line"].endswith(" softmax")
    assert rows["MulBackward0.other, SigmoidBackward0.result"]["shape"] == "2 × 40 × 56"
    flash = [row for row in measure_block(_cell(attention="flash-pytorch"))["tensors"] if "Flash" in row["kept_by"]]
    assert [(row["shape"], row["count"]) for row in flash] == [("2 × 3 × 40 × 8", 4), ("2 × 3 × 40", 1)]


def test_a_storage_that_two_operations_keep_is_one_tensor():
    x = torch.randn(10, requires_grad=True)
    y = torch.exp(x)
    (kept,) = [saved for saved in saved_tensors(y * y.view(2, 5).view(10)) if saved.n_bytes == 40]
    assert sorted(kept.kept_by) == ["ExpBackward0.result", "MulBackward0.other", "MulBackward0.self"]


def test_backward_holds_at_most_what_a_chain_needs():
    x = torch.randn(1000, requires_grad=True)
    # One gradient after the other: sin's cosine and the product are two more while the first is held from outside.
    peak = _backward_peak(torch.sin(x), x, is_eager=True)
    assert peak == 2 * 4000 / MIB


def test_what_has_no_graph_is_refused():
    with pytest.raises(ValueError, match=r"output=\(3,\): must have a grad_fn"):
        saved_tensors(torch.ones(3))


def test_autocast_caches_no_copy_of_a_weight_that_it_is_given_a_view_of():
    weight = torch.randn(8, 8, requires_grad=True)
    x = torch.randn(4, 8)
    held = {}
    for name, product in (
        ("the model's", lambda: x @ weight.T),
        ("of a leaf", lambda: torch.nn.functional.linear(x, weight)),
    ):
        copies = WeightCopies([weight])
        with torch.autocast("cpu", dtype=torch.bfloat16), copies:
            product()  # its graph goes with its result
            held[name] = copies.bytes_held()
    assert held == {"the model's": 0, "of a leaf": 2 * 64}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_compiled_block_keeps_less(precision, annotations_unchecked):
    eager = measure_block(_cell(precision=precision))
    compiled = measure_block(_cell(precision=precision, compile="blocks"))
    assert 0 < compiled["activations_mib"] < eager["activations_mib"]
    assert compiled["weight_copies_mib"] == eager["weight_copies_mib"]
    assert compiled["gradients_mib"] == eager["gradients_mib"]
    assert compiled["predicted_mib"] is compiled["backward_peak_mib"] is None
    assert {row["kept_by"] for row in compiled["tensors"]} == {"CompiledFunctionBackward.saved_tensors"}
