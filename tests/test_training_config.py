"""What a training run may be asked for, and what follows from it."""

import pytest

from cs336_systems.training.config import TrainConfig
from tests.training_helpers import QUICK


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


def test_a_short_run_warms_up_for_a_tenth_of_it():
    """So that `--steps 4` alone is a run, and not an error that names a flag nobody gave."""
    assert [TrainConfig(steps=steps).rising_steps for steps in (4, 50, 300, 1000)] == [0, 5, 20, 20]
    assert TrainConfig(steps=50, warmup_steps=7).rising_steps == 7
