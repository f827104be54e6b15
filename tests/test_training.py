"""The training loop's steps: against the same step written out, in every precision, and that they learn."""

import pytest
import torch

from cs336_basics.nn_utils import clip_gradient, cross_entropy
from cs336_basics.optimizer import AdamW, get_cosine_lr
from cs336_systems.training import loop
from cs336_systems.training.data import training_batch
from cs336_systems.training.trainer import Trainer
from cs336_systems.workload import build_model
from tests.training_helpers import lines, make_config, tokens_of, train, trainer_of, weights_of


def test_steps_are_those_of_a_loop_written_out(tmp_path):
    config = make_config(tmp_path, clip_norm=0.5, weight_decay=0.3)
    trainer = trainer_of(config)
    torch.manual_seed(config.seed)
    model = build_model(config.model_config(), "cpu")
    optimizer = AdamW(model.parameters(), weight_decay=0.3)
    data, _ = tokens_of(config).open()
    for step in range(1, 6):
        result = trainer.step(step)
        inputs, targets = training_batch(data, 4, 8, config.seed, step, "cpu")
        rate = get_cosine_lr(step, 1e-2, 1e-3, 2, 8)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
        assert norm > 0.5  # so that clipping does something
        clip_gradient(model.parameters(), 0.5)
        optimizer.step()
        assert result.loss == pytest.approx(loss.item(), rel=1e-6)
        assert result.gradient_norm == pytest.approx(norm.item(), rel=1e-5)
        assert result.learning_rate == rate
    for mine, theirs in zip(trainer.model.bare.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_the_schedule_reaches_its_highest_and_its_lowest(tmp_path):
    config = make_config(tmp_path)
    train(config)
    rates = [line["learning_rate"] for line in lines(config, "train")]
    assert max(rates) == rates[1] == pytest.approx(1e-2)
    assert rates[0] == 5e-3
    assert min(rates) == rates[-1] == 1e-3


@pytest.mark.parametrize("accumulation_steps", [2, 4])
def test_micro_batches_add_up_to_the_batch(tmp_path, accumulation_steps):
    whole, parts = (trainer_of(make_config(tmp_path, accumulation_steps=n)) for n in (1, accumulation_steps))
    for step in range(1, 4):
        expected, found = whole.step(step), parts.step(step)
        assert found.loss == pytest.approx(expected.loss, rel=1e-6)
        assert found.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-4)
    torch.testing.assert_close(weights_of(parts), weights_of(whole), rtol=1e-4, atol=1e-5)
    assert parts.validation_loss() == pytest.approx(whole.validation_loss(), rel=1e-5)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_it_learns_in_every_precision(tmp_path, precision, optimizer):
    config = make_config(tmp_path, steps=30, precision=precision, optimizer=optimizer, checkpoint_every=30)
    summary = train(config)
    losses = [line["loss"] for line in lines(config, "train")]
    assert summary.status == "finished"
    assert losses[0] > 5.3  # ln 256 is 5.55
    assert losses[-1] < losses[0] - 1.5
    assert summary.validation_loss == pytest.approx(losses[-1], abs=0.5)
    assert (lines(config, "train")[0]["loss_scale"] is None) == (precision != "fp16")


@pytest.mark.parametrize("attention", ["sdpa", "flash-pytorch"])
def test_attentions_agree(tmp_path, attention):
    naive, other = (trainer_of(make_config(tmp_path, attention=name)) for name in ("naive", attention))
    assert other.step(1).loss == pytest.approx(naive.step(1).loss, rel=1e-5)
    loop.Trainer(make_config(tmp_path), tokens_of(make_config(tmp_path)), torch.device("cpu"))  # puts naive back


def test_validation_draws_the_same_batches_each_time_and_trains_nothing(tmp_path):
    trainer = trainer_of(make_config(tmp_path))
    before = weights_of(trainer).clone()
    assert trainer.validation_loss() == trainer.validation_loss()
    assert torch.equal(weights_of(trainer), before)
    assert all(parameter.grad is None for parameter in trainer.model.bare.parameters())


# ---- On a card -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["naive", "flash-triton"])
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_it_learns_on_a_card(tmp_path, precision, attention):
    changes = {"d_model": 64, "d_ff": 96, "ctx": 64, "steps": 40, "checkpoint_every": 40}
    config = make_config(tmp_path, device="cuda", precision=precision, attention=attention, **changes)
    trainer = Trainer(config, tokens_of(config), torch.device("cuda"))
    losses = [trainer.step(step).loss for step in range(1, 41)]
    assert losses[-1] < losses[0] - 1.5
    state = trainer.state()
    resumed = Trainer(config, tokens_of(config), torch.device("cuda"), state)
    assert resumed.validation_loss() == pytest.approx(trainer.validation_loss(), rel=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("compile", ["on", "blocks"])
def test_compiled_steps_agree_with_eager_ones(tmp_path, compile, annotations_unchecked):
    losses = {}
    for how in ("off", compile):
        config = make_config(tmp_path, device="cuda", compile=how, d_model=64, d_ff=96, ctx=64)
        trainer = Trainer(config, tokens_of(config), torch.device("cuda"))
        losses[how] = [trainer.step(step).loss for step in range(1, 9)]
    assert losses[compile] == pytest.approx(losses["off"], rel=1e-3)
