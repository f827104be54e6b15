"""The leaderboard's step on two gloo ranks against the plain model in float32."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")

from cs336_basics.nn_utils import cross_entropy
from cs336_basics.optimizer import AdamW
from cs336_systems.benchmarking.leaderboard_cells import LeaderboardCell
from cs336_systems.benchmarking.leaderboard_step import LOSS_CHUNK_TOKENS, ChunkedLossLM, LeaderboardStep
from cs336_systems.checkpointing import CheckpointedSegment
from cs336_systems.distributed.fsdp import FSDP
from cs336_systems.workload import build_model
from tests.attention_helpers import IGNORE_INTERPRETER
from tests.distributed_helpers import run_gloo

pytestmark = IGNORE_INTERPRETER

# Rows that two ranks divide unevenly, and of two blocks one that keeps everything. Triton's interpreter is slow.
SHAPE: dict[str, Any] = {"d_model": 6, "d_ff": 5, "num_layers": 2, "num_heads": 1, "vocab_size": 7}
FIELDS: dict[str, dict[str, Any]] = {
    "fused": {"attention": "flash-pytorch", "kernels": "fused", "optimizer": "adamw"},
    "torch": {"attention": "sdpa", "optimizer": "adamw-fused"},
}


def cell_of(implementation, **parameters):
    fixed: dict[str, Any] = {
        "size": "custom",
        "ctx": 2,
        "batch_size": 1,
        "precision": "fp32",
        "kept_blocks": 1,
        "checkpoint_every": 1,
    }
    return LeaderboardCell(
        **{**SHAPE, **fixed, "implementation": implementation, **FIELDS[implementation], **parameters}
    )


def no_phase(name):
    return nullcontext()


def gathered(values):
    """All ranks' parts of a batch, one below the other."""
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, values)
    return torch.cat(parts)


def whole_parameters(step):
    """Of the step's model, in the plain model's order."""
    if isinstance(step.model, FSDP):
        return list(step.model.gather_full_params().values())
    return [parameter.full_tensor() for parameter in step.model.parameters()]


def whole_gradients(step):
    """Gathered as the parameters are, in whose places they are put for that time."""
    parameters = list(step.model.parameters())
    with torch.no_grad():
        kept = [parameter.clone() for parameter in parameters]
        for parameter in parameters:
            parameter.copy_(parameter.grad)
        gradients = [gradient.clone() for gradient in whole_parameters(step)]
        for parameter, values in zip(parameters, kept, strict=True):
            parameter.copy_(values)
    return gradients


def compare_with_the_plain_model(context, implementation):
    cell = cell_of(implementation)
    step = LeaderboardStep(context, cell)
    checkpointed = [module for module in step.model.modules() if isinstance(module, CheckpointedSegment)]
    assert [segment.keeps_attention for segment in checkpointed] == [implementation == "fused"]  # one block of two
    torch.manual_seed(cell.seed)
    plain = build_model(cell.model_config(), "cpu")
    parameters = list(plain.parameters())
    for ours, theirs in zip(whole_parameters(step), parameters, strict=True):
        assert torch.equal(ours, theirs)
    inputs, targets = gathered(step.inputs), gathered(step.targets)
    assert not torch.equal(inputs[0], inputs[1])
    optimizer = AdamW(plain.parameters())
    for group in optimizer.param_groups + step.optimizer.param_groups:
        group["eps"] = 1e-4  # else rounding would count where a gradient is next to nothing
    for _ in range(3):
        optimizer.zero_grad()
        loss = cross_entropy(plain(inputs), targets)
        loss.backward()
        step.compute_gradients(no_phase)
        torch.testing.assert_close(gathered(step.loss.view(1)).mean(), loss.detach(), rtol=1e-5, atol=1e-5)
        for ours, theirs in zip(whole_gradients(step), parameters, strict=True):
            assert theirs.grad.abs().max() > 1e-3
            torch.testing.assert_close(ours, theirs.grad, rtol=1e-5, atol=1e-5)
        optimizer.step()
        step.optimizer.step()
    for ours, theirs in zip(whole_parameters(step), parameters, strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", ["fused", "torch"])
def test_loss_gradients_and_three_steps_are_the_plain_models(implementation):
    run_gloo(compare_with_the_plain_model, implementation)


def test_the_loss_in_chunks_is_the_loss(monkeypatch):
    monkeypatch.setattr("cs336_systems.benchmarking.leaderboard_step.LOSS_CHUNK_TOKENS", 4)
    assert LOSS_CHUNK_TOKENS == 4096
    config = cell_of("torch").model_config()
    model = build_model(config, "cpu")
    inputs, targets = torch.randint(7, (2, 3, 2))
    sizes = []
    model.lm_head.register_forward_hook(lambda layer, args, logits: sizes.append(len(logits)))
    loss = ChunkedLossLM(model)(inputs, targets)
    ours = torch.autograd.grad(loss, list(model.parameters()))
    assert sizes == [4, 2, 2, 4]  # each once more, in backward's order
    expected = cross_entropy(model(inputs), targets)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(ours, torch.autograd.grad(expected, list(model.parameters())))
