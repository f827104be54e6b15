"""Training over ranks: the same losses as one process, whichever scheme, and checkpoints that any of them can go on
from."""

import dataclasses
import shutil

import pytest
import torch

from cs336_systems.training import parallel
from cs336_systems.training.checkpoints import checkpoint_path, load_checkpoint
from cs336_systems.training.loop import Summary, train_rank
from cs336_systems.training.parallel import check_importable
from tests.distributed_helpers import run_gloo
from tests.example_rows import RUN
from tests.training_helpers import lines, make_config, tokens_of, train

SCHEMES = {
    "ddp": {"parallel": "ddp"},
    "bucketed": {"parallel": "bucketed", "bucket_size_mb": 0.01},
    "ddp sharded": {"parallel": "ddp", "sharded_optimizer": True},
    "bucketed sharded": {"parallel": "bucketed", "sharded_optimizer": True},
    "fsdp": {"parallel": "fsdp"},
}


def _available(name):
    try:
        check_importable(dataclasses.replace(_CONFIG, **SCHEMES[name]))
    except ValueError:
        return False
    return True


_CONFIG = parallel.TrainConfig()
_SCHEMES = [
    pytest.param(name, marks=() if _available(name) else pytest.mark.skip(reason=f"{name} is not in this version"))
    for name in SCHEMES
]


def _train_over_ranks(config, world_size=2) -> Summary:
    config.out.mkdir(parents=True, exist_ok=True)
    return run_gloo(train_rank, config, tokens_of(config), "cpu", RUN, world_size=world_size)[0]


def _losses(config, kind="train"):
    return [line["loss"] for line in lines(config, kind)]


@pytest.mark.parametrize("name", _SCHEMES)
def test_ranks_train_as_one_process_does(tmp_path, name):
    single = make_config(tmp_path, out=tmp_path / "single", accumulation_steps=2)
    train(single)
    spread = make_config(tmp_path, out=tmp_path / "spread", accumulation_steps=2, **SCHEMES[name])
    summary = _train_over_ranks(spread)
    assert summary.status == "finished"
    assert _losses(spread) == pytest.approx(_losses(single), rel=1e-4)
    assert _losses(spread, "validation") == pytest.approx(_losses(single, "validation"), rel=1e-4)
    norms = [[line["gradient_norm"] for line in lines(config, "train")] for config in (spread, single)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)
    weights = [load_checkpoint(checkpoint_path(config.out, 8)).state["model"] for config in (spread, single)]
    assert weights[0].keys() == weights[1].keys()
    for key, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][key], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "name",
    [
        *(scheme for scheme in _SCHEMES if scheme.values[0] in ("bucketed sharded", "fsdp")),
        pytest.param("ddp", marks=pytest.mark.slow),
    ],
)
def test_ranks_resume_to_the_same_losses(tmp_path, name):
    whole = make_config(tmp_path, out=tmp_path / "whole", precision="fp16", **SCHEMES[name])
    _train_over_ranks(whole)
    stopped = dataclasses.replace(whole, out=tmp_path / "resumed")
    shutil.copytree(whole.out, stopped.out)
    _forget(stopped, step=8)
    _train_over_ranks(dataclasses.replace(stopped, resume=True))
    assert lines(stopped, "train") == lines(whole, "train")
    assert [line["step"] for line in lines(stopped, "run")] == [0, 6]


@pytest.mark.parametrize("name", [scheme for scheme in _SCHEMES if scheme.values[0] in ("bucketed sharded", "fsdp")])
def test_one_process_goes_on_from_two_ranks_checkpoint(tmp_path, name):
    spread = make_config(tmp_path, **SCHEMES[name])
    _train_over_ranks(spread)
    expected = _losses(spread)
    _forget(spread, step=8)
    alone = dataclasses.replace(spread, parallel="none", sharded_optimizer=False, resume=True)
    train(alone)
    assert _losses(alone) == pytest.approx(expected, rel=1e-4)


def _forget(config, step):
    path = checkpoint_path(config.out, step)
    path.unlink()
    path.with_suffix(".json").unlink()


def _overflow_on_one_rank(context, config, tokens):
    """Only rank 1's gradients overflow; all ranks must skip, and go on alike."""
    from cs336_systems.training.trainer import Trainer

    trainer = Trainer(config, tokens, context.device)
    finish = trainer.model.finish_gradients

    def finish_and_spoil():
        finish()
        if context.rank == 1 and trainer.scaler.scale > 2.0**15:
            trainer.model.bare.lm_head.weight.grad[0] = float("inf")  # under fsdp, of a row that rank 0 does not have

    trainer.model.finish_gradients = finish_and_spoil
    results = [trainer.step(step) for step in (1, 2, 3)]
    return [(result.is_skipped, result.loss_scale, result.loss) for result in results]


@pytest.mark.parametrize("name", [scheme for scheme in _SCHEMES if scheme.values[0] in ("ddp", "ddp sharded", "fsdp")])
def test_all_ranks_skip_a_step_that_overflows_on_one(tmp_path, name):
    config = make_config(tmp_path, precision="fp16", **SCHEMES[name])
    first, second = run_gloo(_overflow_on_one_rank, config, tokens_of(config))
    assert first == second
    assert [skipped for skipped, _, _ in first] == [True, False, False]
    assert [scale for _, scale, _ in first] == [2.0**16, 2.0**15, 2.0**15]


def test_a_scheme_that_is_not_there_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setitem(parallel._SCHEMES, "fsdp", ("cs336_systems.distributed.nowhere", "Nothing"))
    with pytest.raises(ValueError, match=r"parallel='fsdp': cs336_systems\.distributed\.nowhere\.Nothing cannot be"):
        check_importable(make_config(tmp_path, parallel="fsdp"))
    monkeypatch.setattr(parallel, "_SHARDED_OPTIMIZER", ("cs336_systems.training.parallel", "Nothing"))
    with pytest.raises(ValueError, match=r"sharded_optimizer=True: .*Nothing cannot be imported"):
        check_importable(make_config(tmp_path, parallel="ddp", sharded_optimizer=True))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs, one a rank")
@pytest.mark.parametrize("name", _SCHEMES)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_two_gpus_train_as_one_does(tmp_path, name, precision):
    from cs336_systems.distributed.process_group import GroupOptions, spawn_ranks

    changes = {"device": "cuda", "precision": precision, "d_model": 64, "d_ff": 96, "ctx": 64}
    single = make_config(tmp_path, out=tmp_path / "single", **changes)
    single.out.mkdir()
    train_rank(None, single, tokens_of(single), "cuda", RUN)
    spread = make_config(tmp_path, out=tmp_path / "spread", **changes, **SCHEMES[name])
    spread.out.mkdir()
    spawn_ranks(train_rank, spread, tokens_of(spread), "cuda", RUN, world_size=2, options=GroupOptions("cuda"))
    assert _losses(spread) == pytest.approx(_losses(single), rel=1e-4 if precision == "fp32" else 1e-2)
