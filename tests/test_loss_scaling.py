"""Training in float16: steps that overflow, the loss's scale, and gradients that become zero."""

import math

import pytest
import torch

from cs336_systems.training import loop
from cs336_systems.training.checkpoints import checkpoint_path
from cs336_systems.training.loss_scaling import zero_gradient_counts
from tests.training_helpers import changed_trainer, lines, make_config, train, trainer_of, weights_of


def _overflow_gradients(trainer, until=math.inf):
    """Makes one gradient infinite while the scale is at least `until`."""
    weight = trainer.model.bare.lm_head.weight
    weight.register_hook(lambda grad: grad * (math.inf if trainer.scaler.scale >= until else 1))


def test_a_step_that_overflows_is_skipped_counted_and_the_scale_halved(tmp_path):
    trainer = trainer_of(make_config(tmp_path, precision="fp16"))
    _overflow_gradients(trainer, until=2.0**14 + 1)
    before = weights_of(trainer).clone()
    first, second = trainer.step(1), trainer.step(2)
    assert torch.equal(weights_of(trainer), before)
    assert [first.is_skipped, second.is_skipped] == [True, True]
    assert [first.loss_scale, second.loss_scale, trainer.scaler.scale] == [2.0**16, 2.0**15, 2.0**14]
    third = trainer.step(3)
    assert not third.is_skipped
    assert third.skipped_steps == 2
    assert trainer.scaler.skipped_in_a_row == 0
    assert not torch.equal(weights_of(trainer), before)
    assert math.isfinite(third.gradient_norm)


def test_skipped_steps_are_told_as_such(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loop, "Trainer", changed_trainer(lambda trainer: _overflow_gradients(trainer, until=2.0**15)))
    config = make_config(tmp_path, precision="fp16")
    summary = train(config)
    assert summary.status == "finished"
    assert summary.skipped_steps == 2
    events = [line["message"] for line in lines(config, "event")]
    assert events[0].startswith(
        "gradients overflowed float16, the step is skipped: the loss scale goes from 65536 to 32768"
    )
    assert "step 2: gradients overflowed float16" in capsys.readouterr().err
    assert [line["is_skipped"] for line in lines(config, "train")] == [True, True] + [False] * 6


@pytest.mark.parametrize("scaled", [True, False])
def test_overflow_at_every_scale_stops(tmp_path, monkeypatch, scaled):
    monkeypatch.setattr(loop, "Trainer", changed_trainer(lambda trainer: _overflow_gradients(trainer, until=0)))
    config = make_config(tmp_path, precision="fp16", loss_scaling=scaled, steps=40, checkpoint_every=10)
    summary = train(config)
    assert (summary.status, summary.step, summary.skipped_steps) == ("stopped", 30, 30)
    assert "overflowed float16 in 30 steps in a row up to step 30" in summary.reason
    assert summary.reason.endswith(f"the last good checkpoint is {checkpoint_path(config.out, 20)}")


def test_without_scaling_the_scale_stays_one(tmp_path):
    trainer = trainer_of(make_config(tmp_path, precision="fp16", loss_scaling=False))
    _overflow_gradients(trainer, until=0)
    assert trainer.step(1).is_skipped
    assert trainer.step(2).loss_scale == 1


@pytest.mark.parametrize("scaled", [True, False])
def test_scaling_keeps_small_gradients_from_becoming_zero(tmp_path, monkeypatch, scaled, capsys):
    """The loss is divided by 2**14, as a batch of so many more tokens would."""

    def shrink(trainer):
        scale = trainer.scaler.scaled
        trainer.scaler.scaled = lambda loss: scale(loss * 2.0**-14)

    monkeypatch.setattr(loop, "Trainer", changed_trainer(shrink))
    config = make_config(tmp_path, precision="fp16", loss_scaling=scaled)
    train(config)
    counted = [line["zero_gradient_share"] for line in lines(config, "train")]
    assert [share is None for share in counted] == [True, True, True, False] * 2
    told = "of the gradients underflowed to zero in float16: there is no loss scaling" in capsys.readouterr().err
    if scaled:
        assert counted[3] < 0.02
        assert not told
    else:
        assert counted[3] > 0.5
        assert told


def test_zero_gradients_are_counted_but_for_the_embeddings():
    model = torch.nn.ModuleDict({"token_embeddings": torch.nn.Embedding(9, 4), "rest": torch.nn.Linear(4, 2)})
    model["rest"].weight.grad = torch.tensor([[0.0, 1, 2, 3], [0, 0, 1, -0.0]])
    model["token_embeddings"].weight.grad = torch.zeros(9, 4)
    assert zero_gradient_counts(model).tolist() == [4, 8]
