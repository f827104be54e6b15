"""What is measured: the step does each phase's work once, on fresh gradients, and only its mode's phases."""

import functools
from contextlib import contextmanager

import pytest
import torch

from cs336_systems.benchmarking.isolation import run_isolated
from cs336_systems.configs import named_cell
from cs336_systems.workload import Workload
from tests.attention_helpers import IGNORE_INTERPRETER


class _Recorder:
    def __init__(self):
        self.names = []

    @contextmanager
    def __call__(self, name):
        self.names.append(name)
        yield


def _cell(**parameters):
    return named_cell("tiny", 16, **{"batch_size": 2, "vocab_size": 50, **parameters})


@pytest.mark.parametrize(
    ("mode", "phases"),
    [
        ("forward", ["forward"]),
        ("forward-backward", ["forward", "loss", "backward"]),
        ("train-step", ["forward", "loss", "backward", "optimizer"]),
    ],
)
def test_a_mode_runs_its_phases_in_order(mode, phases):
    recorder = _Recorder()
    Workload(_cell(mode=mode)).step(recorder)
    assert recorder.names == phases


def test_gradients_do_not_accumulate_from_step_to_step():
    workload = Workload(_cell(mode="forward-backward"))
    workload.step(_Recorder())
    first = [parameter.grad.clone() for parameter in workload.model.parameters()]
    workload.step(_Recorder())
    for before, parameter in zip(first, workload.model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, before)


def test_forward_keeps_no_graph():
    workload = Workload(_cell(mode="forward"))
    outputs = []
    workload.model.register_forward_hook(lambda module, args, output: outputs.append(output))
    workload.step(_Recorder())
    assert outputs[0].shape == (2, 16, 50)
    assert not outputs[0].requires_grad


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_train_step_learns_its_batch(precision, optimizer):
    workload = Workload(_cell(precision=precision, optimizer=optimizer))
    losses = []
    for _ in range(8):
        workload.step(_Recorder())
        losses.append(float(workload.loss))
    assert losses[-1] < losses[0] - 0.2
    assert all(parameter.dtype == torch.float32 for parameter in workload.model.parameters())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_computes_in_low_precision(precision):
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    workload = Workload(_cell(precision=precision))
    outputs = []
    workload.model.layers[0].ffn.w1.register_forward_hook(lambda module, args, output: outputs.append(output.dtype))
    workload.step(_Recorder())
    assert outputs == [dtype]


def test_the_same_seed_builds_the_same_workload():
    first, second, other = (Workload(_cell(seed=seed)) for seed in (1, 1, 2))
    for workload in (first, second, other):
        workload.step(_Recorder())
    assert float(first.loss) == float(second.loss) != float(other.loss)


@pytest.mark.slow
@pytest.mark.parametrize("compile", ["on", "blocks"])
def test_compiled_steps_agree_with_eager_ones(compile, device):
    """In processes of their own, where no annotation is checked: Dynamo would trace the checks too. On a CPU the graphs
    are captured but not built, since Inductor's C++ takes a minute."""
    eager, compiled = (run_isolated(_losses, _cell(compile=how, device=device)).value for how in ("off", compile))
    assert compiled == pytest.approx(eager, rel=1e-4)


def _losses(cell):
    if cell.device == "cpu":
        torch.nn.Module.compile = functools.partialmethod(torch.nn.Module.compile, backend="aot_eager")
    workload = Workload(cell)
    losses = []
    for _ in range(2):
        workload.step(_Recorder())
        losses.append(float(workload.loss))
    assert bool(torch._dynamo.utils.counters["stats"]["unique_graphs"]) == (cell.compile != "off")
    return losses


@pytest.mark.gpu
def test_the_model_is_made_on_the_card_and_tf32_is_set_and_unset():
    workload = Workload(_cell(device="cuda", precision="tf32"))
    assert torch.get_float32_matmul_precision() == "high"
    assert {parameter.device.type for parameter in workload.model.parameters()} == {"cuda"}
    Workload(_cell(device="cuda"))
    assert torch.get_float32_matmul_precision() == "highest"


@IGNORE_INTERPRETER
@pytest.mark.parametrize("kernels", ["fused", pytest.param("loss", marks=pytest.mark.gpu)])
def test_master_weights_change_no_gradient(kernels, device):
    """Autocast rounds float32 weights to what the model holds here, and widens the gradients that it gets here."""
    pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")
    smallest = {"num_layers": 1, "d_model": 32, "d_ff": 48, "num_heads": 2}  # Triton's interpreter is slow
    cell = functools.partial(_cell, precision="bf16", kernels=kernels, device=device, attention="sdpa", **smallest)
    plain, rounded = Workload(cell()), Workload(cell(master_weights="on"))
    for workload in (plain, rounded):
        workload.step(_Recorder())
    assert torch.equal(plain.loss, rounded.loss)
    narrow = set()
    for (name, weight), ours in zip(plain.model.named_parameters(), rounded.model.parameters(), strict=True):
        assert torch.equal(weight.grad, ours.grad.float())
        assert torch.equal(weight, rounded.optimizer.state[ours].get("master", ours))
        if ours.dtype == torch.bfloat16:
            narrow.add(name)
    blocks = "q_proj", "k_proj", "v_proj", "output_proj", "w1", "w2", "w3"
    assert {name.split(".")[-2] for name in narrow} == set(blocks)
    assert len(narrow) == len(blocks)
    if device == "cuda":  # the interpreter cuts off where a GPU rounds
        for _ in range(3):
            plain.step(_Recorder())
            rounded.step(_Recorder())
            assert torch.equal(plain.loss, rounded.loss)
