"""The training loop: a step against the same step written out, loss scaling, bit-for-bit resuming, what stops it."""

import dataclasses
import math
import re

import pytest
import torch

from cs336_basics.nn_utils import clip_gradient, cross_entropy
from cs336_basics.optimizer import AdamW, get_cosine_lr
from cs336_systems.training import loop
from cs336_systems.training.checkpoints import checkpoint_path, list_checkpoints, load_checkpoint
from cs336_systems.training.config import TrainConfig
from cs336_systems.training.data import training_batch
from cs336_systems.training.loss_scaling import zero_gradient_counts
from cs336_systems.training.metrics import METRICS, MetricsFile, plot_metrics, read_metrics
from cs336_systems.training.trainer import Trainer
from cs336_systems.workload import build_model
from tests.training_helpers import QUICK, lines, make_config, tokens_of, train


def _trainer(config):
    return Trainer(config, tokens_of(config), torch.device("cpu"))


def _weights(trainer):
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.bare.parameters()])


def test_steps_are_those_of_a_loop_written_out(tmp_path):
    config = make_config(tmp_path, clip_norm=0.5, weight_decay=0.3)
    trainer = _trainer(config)
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
    whole, parts = (_trainer(make_config(tmp_path, accumulation_steps=n)) for n in (1, accumulation_steps))
    for step in range(1, 4):
        expected, found = whole.step(step), parts.step(step)
        assert found.loss == pytest.approx(expected.loss, rel=1e-6)
        assert found.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-4)
    torch.testing.assert_close(_weights(parts), _weights(whole), rtol=1e-4, atol=1e-5)
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
    naive, other = (_trainer(make_config(tmp_path, attention=name)) for name in ("naive", attention))
    assert other.step(1).loss == pytest.approx(naive.step(1).loss, rel=1e-5)
    loop.Trainer(make_config(tmp_path), tokens_of(make_config(tmp_path)), torch.device("cpu"))  # puts naive back


def test_validation_draws_the_same_batches_each_time_and_trains_nothing(tmp_path):
    trainer = _trainer(make_config(tmp_path))
    before = _weights(trainer).clone()
    assert trainer.validation_loss() == trainer.validation_loss()
    assert torch.equal(_weights(trainer), before)
    assert all(parameter.grad is None for parameter in trainer.model.bare.parameters())


# ---- float16 ---------------------------------------------------------------------------------------------------------


def _overflow_gradients(trainer, until=math.inf):
    """Makes one gradient infinite while the scale is at least `until`."""
    weight = trainer.model.bare.lm_head.weight
    weight.register_hook(lambda grad: grad * (math.inf if trainer.scaler.scale >= until else 1))


def test_a_step_that_overflows_is_skipped_counted_and_the_scale_halved(tmp_path):
    trainer = _trainer(make_config(tmp_path, precision="fp16"))
    _overflow_gradients(trainer, until=2.0**14 + 1)
    before = _weights(trainer).clone()
    first, second = trainer.step(1), trainer.step(2)
    assert torch.equal(_weights(trainer), before)
    assert [first.is_skipped, second.is_skipped] == [True, True]
    assert [first.loss_scale, second.loss_scale, trainer.scaler.scale] == [2.0**16, 2.0**15, 2.0**14]
    third = trainer.step(3)
    assert not third.is_skipped
    assert third.skipped_steps == 2
    assert trainer.scaler.skipped_in_a_row == 0
    assert not torch.equal(_weights(trainer), before)
    assert math.isfinite(third.gradient_norm)


def test_skipped_steps_are_told_as_such(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loop, "Trainer", _with(lambda trainer: _overflow_gradients(trainer, until=2.0**15)))
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
    monkeypatch.setattr(loop, "Trainer", _with(lambda trainer: _overflow_gradients(trainer, until=0)))
    config = make_config(tmp_path, precision="fp16", loss_scaling=scaled, steps=40, checkpoint_every=10)
    summary = train(config)
    assert (summary.status, summary.step, summary.skipped_steps) == ("stopped", 30, 30)
    assert "overflowed float16 in 30 steps in a row up to step 30" in summary.reason
    assert summary.reason.endswith(f"the last good checkpoint is {checkpoint_path(config.out, 20)}")


def test_without_scaling_the_scale_stays_one(tmp_path):
    trainer = _trainer(make_config(tmp_path, precision="fp16", loss_scaling=False))
    _overflow_gradients(trainer, until=0)
    assert trainer.step(1).is_skipped
    assert trainer.step(2).loss_scale == 1


@pytest.mark.parametrize("scaled", [True, False])
def test_scaling_keeps_small_gradients_from_becoming_zero(tmp_path, monkeypatch, scaled, capsys):
    """The loss is divided by 2**14, as a batch of so many more tokens would."""

    def shrink(trainer):
        scale = trainer.scaler.scaled
        trainer.scaler.scaled = lambda loss: scale(loss * 2.0**-14)

    monkeypatch.setattr(loop, "Trainer", _with(shrink))
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


# ---- Resuming --------------------------------------------------------------------------------------------------------


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
        patch.setattr(loop, "Trainer", _with(lambda trainer: _fail_at(trainer, 5)))
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


def _with(change):
    """A Trainer that `change` is applied to."""

    class Changed(Trainer):
        def __init__(self, *args):
            super().__init__(*args)
            change(self)

    return Changed


def _fail_at(trainer, at):
    step = trainer.step

    def failing(number, count_zeros=False):
        if number == at:
            raise RuntimeError("pulled the plug")
        return step(number, count_zeros)

    trainer.step = failing


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
    monkeypatch.setattr(loop, "Trainer", _with(lambda trainer: _poison_at(trainer, at)))
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

    monkeypatch.setattr(loop, "Trainer", _with(spoil))
    summary = train(make_config(tmp_path))
    assert summary.status == "stopped"
    assert "the gradients' norm is inf at step 1, with a loss of 5." in summary.reason


# ---- Metrics ---------------------------------------------------------------------------------------------------------


def test_metrics_survive_a_cut_last_line_and_drop_what_will_come_again(tmp_path):
    path = tmp_path / METRICS
    with MetricsFile(path) as metrics:
        metrics.write("run", step=0)
        for step in (1, 2, 3):
            metrics.write("train", step=step, loss=math.nan if step == 3 else 0.5)
    assert read_metrics(path)[-1]["loss"] == "nan"
    with path.open("a") as file:
        file.write('{"kind": "train", "st')
    assert len(read_metrics(path)) == 4
    MetricsFile(path, after_step=2).close()
    assert [line.get("step") for line in read_metrics(path)] == [0, 1, 2]
    MetricsFile(path).close()
    assert read_metrics(path) == []


@pytest.mark.parametrize("bad", [b'{"kind": "tr', b"\xff", b"", b"3", b'{"step": 1}'])
def test_a_bad_line_within_metrics_is_named(tmp_path, bad):
    path = tmp_path / METRICS
    path.write_bytes(b'{"kind": "run"}\n' + bad + b'\n{"kind": "train"}\n')
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))}, line 2: is no line of metrics \("):
        read_metrics(path)


def test_a_picture_is_drawn_of_any_run(tmp_path):
    for precision in ("fp32", "fp16"):
        config = make_config(tmp_path, steps=2, precision=precision)
        train(config)
        plot_metrics(config.out / METRICS, tmp_path / f"{precision}.png")
        assert (tmp_path / f"{precision}.png").stat().st_size > 10_000
    MetricsFile(config.out / METRICS).close()
    plot_metrics(config.out / METRICS, tmp_path / "nothing.png")
    assert not (tmp_path / "nothing.png").exists()


# ---- The config ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ctx": 0}, "ctx=0: must be at least 1"),
        ({"steps": 0}, "steps=0: must be at least 1"),
        ({"keep_checkpoints": 0}, "keep_checkpoints=0: must be at least 1"),
        ({"warmup_steps": 9}, "warmup_steps=9: must be 0 to 8"),
        ({"learning_rate": 0}, "learning_rate=0: must be above 0"),
        ({"min_learning_rate": 1.0}, "min_learning_rate=1.0: must be between 0 and 0.01"),
        ({"clip_norm": -1}, "clip_norm=-1: must be above 0"),
        ({"validation_share": 1.0}, "validation_share=1.0: must be between 0 and 1"),
        ({"precision": "fp8"}, "precision='fp8': must be one of fp32, tf32, bf16, fp16"),
        ({"precision": "tf32"}, "precision='tf32': is a mode of NVIDIA's tensor cores"),
        ({"precision": "fp16", "device": "mps"}, "precision='fp16': needs a gradient scaler"),
        ({"loss_scaling": False}, "loss_scaling=False: only fp16 scales the loss, and precision='fp32'"),
        ({"device": "gpu"}, "device='gpu': must be auto, cpu, mps, cuda or cuda:N"),
        ({"parallel": "pipeline"}, "parallel='pipeline': must be one of none, ddp, bucketed, fsdp"),
        ({"processes": 2}, "processes=2: goes with --parallel"),
        ({"parallel": "ddp", "processes": 0}, "processes=0: must be at least 1"),
        ({"parallel": "ddp", "device": "cuda:1"}, "device='cuda:1': each rank takes the card of its number"),
        ({"sharded_optimizer": True}, "sharded_optimizer=True: goes with --parallel ddp or bucketed"),
        ({"parallel": "fsdp", "sharded_optimizer": True}, "sharded_optimizer=True: goes with --parallel ddp or"),
        ({"parallel": "fsdp", "compile": "blocks"}, "compile='blocks': must be off with --parallel fsdp"),
        ({"bucket_size_mb": 0}, "bucket_size_mb=0: must be above 0"),
        ({"size": "huge"}, "size='huge': must be one of tiny"),
        ({"size": "tiny"}, "d_model=16: goes with --size custom; 'tiny' has its own"),
        ({"num_heads": None}, "num_heads=None: --size custom needs it"),
        ({"num_heads": 3}, "num_heads=3: must divide d_model=16"),
        ({"token_dtype": "float32"}, "token_dtype='float32': must be one of uint8, uint16"),
        ({"seed": -1}, "seed=-1: must be between 0"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        TrainConfig(**{**QUICK, **changes})


def test_the_batch_must_divide():
    config = TrainConfig(**{**QUICK, "batch_size": 12, "accumulation_steps": 2})
    config.check_world_size(3)
    with pytest.raises(ValueError, match=r"batch_size=12: must be a multiple of 8: 4 processes with 2 micro-batches"):
        config.check_world_size(4)


def test_the_vocabulary_is_the_datas(tmp_path):
    assert TrainConfig().model_config().vocab_size == 256
    assert TrainConfig(data=tmp_path / "a.py").model_config().vocab_size == 256
    assert TrainConfig(data=tmp_path / "a.npy").model_config().vocab_size == 10_000
    assert TrainConfig(data=tmp_path / "a.bin", vocab_size=50_257).model_config().vocab_size == 50_257


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


def test_a_short_run_warms_up_for_a_tenth_of_it():
    """So that `--steps 4` alone is a run, and not an error that names a flag nobody gave."""
    assert [TrainConfig(steps=steps).rising_steps for steps in (4, 50, 300, 1000)] == [0, 5, 20, 20]
    assert TrainConfig(steps=50, warmup_steps=7).rising_steps == 7
