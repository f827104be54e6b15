"""What ends a training run before its last step, and that one which goes on is bit for bit the uninterrupted one."""

import dataclasses
import math

import pytest
import torch

from cs336_systems.training import loop
from cs336_systems.training.checkpoints import checkpoint_path, list_checkpoints, load_checkpoint
from cs336_systems.training.metrics import METRICS
from tests.training_helpers import changed_trainer, lines, make_config, train


def _fail_at(trainer, at):
    step = trainer.step

    def failing(number, count_zeros=False):
        if number == at:
            raise RuntimeError("pulled the plug")
        return step(number, count_zeros)

    trainer.step = failing


@pytest.mark.parametrize(
    "changes",
    [{}, {"precision": "fp16", "optimizer": "adamw-fused"}, {"precision": "bf16", "accumulation_steps": 2}],
    ids=["fp32", "fp16", "bf16"],
)
def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(tmp_path, changes, monkeypatch):
    whole = make_config(tmp_path, out=tmp_path / "whole", **changes)
    train(whole)
    cut = make_config(tmp_path, out=tmp_path / "cut", **changes)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "Trainer", changed_trainer(lambda trainer: _fail_at(trainer, 5)))
        with pytest.raises(RuntimeError, match="pulled the plug"):
            train(cut)
    assert [line["step"] for line in lines(cut, "train")] == [1, 2, 3, 4]
    summary = train(dataclasses.replace(cut, resume=True))
    assert summary.status == "finished"
    for kind in ("train", "validation"):
        assert lines(cut, kind) == lines(whole, kind)
    first, second = (load_checkpoint(checkpoint_path(config.out, 8)).state for config in (whole, cut))
    _assert_same_tree(first, second)
    assert [line["step"] for line in lines(cut, "run")] == [0, 3]


def _assert_same_tree(first, second):
    if torch.is_tensor(first):
        assert torch.equal(first, second)
    elif isinstance(first, dict):
        assert first.keys() == second.keys()
        for key in first:
            _assert_same_tree(first[key], second[key])
    elif isinstance(first, list):
        for one, other in zip(first, second, strict=True):
            _assert_same_tree(one, other)
    else:
        assert first == second


def test_a_truncated_checkpoint_is_told_and_the_one_before_it_used(tmp_path, capsys):
    config = make_config(tmp_path)
    train(config)
    expected = lines(config, "train")
    newest = checkpoint_path(config.out, 8)
    newest.write_bytes(newest.read_bytes()[:100])
    summary = train(dataclasses.replace(config, resume=True))
    assert (summary.status, summary.step) == ("finished", 8)
    assert lines(config, "train") == expected
    assert "checkpoint-00000008.pt is refused: it is truncated, 100 bytes of" in capsys.readouterr().err
    assert "going on from checkpoint-00000006.pt" in lines(config, "event")[0]["message"]


def test_resuming_where_nothing_is_begins(tmp_path, capsys):
    summary = train(make_config(tmp_path, resume=True))
    assert (summary.status, summary.step) == ("finished", 8)
    assert "no checkpoint under" in capsys.readouterr().err


def test_a_new_run_moves_the_earlier_one_aside(tmp_path):
    config = make_config(tmp_path)
    train(config)
    before = (config.out / METRICS).read_bytes()
    train(make_config(tmp_path, steps=2))
    (aside,) = config.out.glob("earlier-*")
    assert (aside / METRICS).read_bytes() == before
    assert [path.name for path in list_checkpoints(aside)] == ["checkpoint-00000006.pt", "checkpoint-00000008.pt"]
    assert [path.name for path in list_checkpoints(config.out)] == ["checkpoint-00000002.pt"]


# ---- What stops a run ------------------------------------------------------------------------------------------------


def _poison_at(trainer, at):
    step = trainer.step

    def poisoned(number, count_zeros=False):
        if number == at:
            trainer.model.bare.ln_final.weight.data.fill_(math.nan)
        return step(number, count_zeros)

    trainer.step = poisoned


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize(("at", "last"), [(2, None), (5, 3)])
def test_a_nan_loss_stops_with_the_step_and_the_last_good_checkpoint(tmp_path, monkeypatch, precision, at, last):
    monkeypatch.setattr(loop, "Trainer", changed_trainer(lambda trainer: _poison_at(trainer, at)))
    config = make_config(tmp_path, precision=precision)
    summary = train(config)
    assert (summary.status, summary.step) == ("stopped", at)
    assert f"the loss is nan at step {at}" in summary.reason
    named = "there is no checkpoint yet" if last is None else f"good checkpoint is {checkpoint_path(config.out, last)}"
    assert named in summary.reason
    assert ("activations overflowed float16 in the forward pass" in summary.reason) == (precision == "fp16")
    assert lines(config, "train")[-1]["loss"] == "nan"
    assert lines(config, "event")[-1]["message"] == summary.reason
    assert len(list_checkpoints(config.out)) == (last is not None)


def test_infinite_gradients_stop_float32(tmp_path, monkeypatch):
    def spoil(trainer):
        trainer.model.bare.lm_head.weight.register_hook(lambda grad: grad * math.inf)

    monkeypatch.setattr(loop, "Trainer", changed_trainer(spoil))
    summary = train(make_config(tmp_path))
    assert summary.status == "stopped"
    assert "the gradients' norm is inf at step 1, with a loss of 5." in summary.reason
