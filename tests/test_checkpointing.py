"""Activation checkpointing: the same gradients from fewer kept tensors, in every mode, precision and compilation."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from cs336_systems.attention import implementations
from cs336_systems.benchmarking.timing import time_step
from cs336_systems.checkpointing import checkpoint_blocks, run_nested
from cs336_systems.configs import BenchmarkCell, named_cell
from cs336_systems.workload import Workload


def _cell(**parameters) -> BenchmarkCell:
    shape = {"d_model": 24, "d_ff": 56, "num_layers": 5, "num_heads": 3, "vocab_size": 37}
    return BenchmarkCell(size="custom", ctx=20, **{**shape, "batch_size": 2, **parameters})


def _loss_and_gradients(cell: BenchmarkCell) -> list[torch.Tensor]:
    workload = Workload(cell)
    workload.step(lambda name: nullcontext())
    return [workload.loss, *(parameter.grad for parameter in workload.model.parameters())]


@pytest.mark.parametrize("every", [1, 2, 5])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_loss_and_gradients_are_those_without_checkpoints(precision, every):
    plain = _loss_and_gradients(_cell(mode="forward-backward", precision=precision))
    found = _loss_and_gradients(_cell(mode="forward-backward", precision=precision, checkpoint_every=every))
    for expected, tensor in zip(plain, found, strict=True):
        torch.testing.assert_close(tensor, expected, rtol=0, atol=0)


@pytest.mark.parametrize("attention", ["sdpa", "flash-pytorch"])
def test_attentions_of_other_kinds_run_again_too(attention):
    plain = _loss_and_gradients(_cell(mode="forward-backward", attention=attention))
    found = _loss_and_gradients(_cell(mode="forward-backward", attention=attention, checkpoint_every=2))
    for expected, tensor in zip(plain, found, strict=True):
        torch.testing.assert_close(tensor, expected, rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["forward", "forward-backward", "train-step"])
def test_how_often_each_block_runs(mode):
    workload = Workload(_cell(mode=mode, checkpoint_every=2))
    runs = []
    for segment in workload.model.layers:
        for block in segment:
            block.register_forward_pre_hook(lambda module, args: runs.append(module))
    assert [len(segment) for segment in workload.model.layers] == [2, 2, 1]
    before = [parameter.detach().clone() for parameter in workload.model.parameters()]
    time_step(workload.step, 0, 2, "cpu")
    times = 1 if mode == "forward" else 2
    assert len(runs) == 2 * times * 5
    moved = any((a != b).any() for a, b in zip(before, workload.model.parameters(), strict=True))
    assert moved == (mode == "train-step")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["on", "blocks"])
def test_with_torch_compile(how, annotations_unchecked):
    plain = _loss_and_gradients(_cell(mode="forward-backward", num_layers=2))
    found = _loss_and_gradients(_cell(mode="forward-backward", num_layers=2, checkpoint_every=1, compile=how))
    for expected, tensor in zip(plain, found, strict=True):
        torch.testing.assert_close(tensor, expected)


@pytest.mark.parametrize("every", [-1, 3])
def test_a_segment_has_as_many_blocks_as_there_are_at_most(every):
    with pytest.raises(ValueError, match=rf"checkpoint_every={every}: must be between 1 and 2, .*or 0"):
        named_cell("tiny", 16, checkpoint_every=every)


def test_a_segment_has_at_least_one_block():
    model = Workload(_cell()).model
    for every in (0, 6):
        with pytest.raises(ValueError, match=f"every={every}: must be between 1 and 5"):
            checkpoint_blocks(model, every)


@pytest.mark.parametrize(("every", "n_blocks"), [(1, None), (2, None), (2, 3), (1, 0)])
@pytest.mark.parametrize("keep_attention", [False, True])
def test_attention_runs_once_where_its_output_is_kept(every, n_blocks, keep_attention, monkeypatch):
    plain = _loss_and_gradients(_cell(mode="forward-backward", attention="flash-pytorch"))
    workload = Workload(_cell(mode="forward-backward", attention="flash-pytorch"))
    checkpoint_blocks(workload.model, every, keep_attention, n_blocks)
    forward, backward = implementations.kernels("pytorch")
    runs = []

    def counted(*args):
        runs.append(phase_now[-1])
        return forward(*args)

    phase_now = []

    def phase(name):
        phase_now.append(name)
        return nullcontext()

    monkeypatch.setattr("cs336_systems.attention.operators.kernels", lambda name: (counted, backward))
    workload.step(phase)
    found = [workload.loss, *(parameter.grad for parameter in workload.model.parameters())]
    for expected, tensor in zip(plain, found, strict=True):
        torch.testing.assert_close(tensor, expected, rtol=0, atol=0)
    n_checkpointed = 5 if n_blocks is None else n_blocks
    assert runs.count("forward") == 5
    assert runs.count("backward") == (0 if keep_attention else n_checkpointed)


def test_only_the_first_blocks():
    model = Workload(_cell()).model
    blocks = list(model.layers)
    checkpoint_blocks(model, 2, n_blocks=3)
    assert [list(layer) for layer in model.layers[:2]] == [blocks[:2], blocks[2:3]]
    assert list(model.layers[2:]) == blocks[3:]
    with pytest.raises(ValueError, match="n_blocks=6: must be between 0 and 4"):
        checkpoint_blocks(model, 2, n_blocks=6)


def test_the_model_keeps_its_parameters_and_their_order():
    model = Workload(_cell()).model
    before = list(model.parameters())
    checkpoint_blocks(model, 2)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert "layers.2.0.ln1.weight" in dict(model.named_parameters())


class _Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 8**0.5)
        self.runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return x + torch.tanh(x @ self.weight)


@pytest.mark.parametrize("n_layers", [1, 2, 3, 7, 16])
def test_nested_checkpoints_give_the_same_gradients(n_layers):
    layers = [_Layer() for _ in range(n_layers)]
    x = torch.randn(4, 8, requires_grad=True)
    expected = torch.autograd.grad(nn.Sequential(*layers)(x).square().sum(), [x, *(y.weight for y in layers)])
    found = torch.autograd.grad(run_nested(layers, x).square().sum(), [x, *(y.weight for y in layers)])
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=0)
