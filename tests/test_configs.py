"""Named sizes and benchmark cells: the handout's numbers, and what is refused."""

import pytest

from cs336_systems.configs import MODEL_SIZES, BenchmarkCell, ModelConfig, named_cell


@pytest.mark.parametrize(
    ("size", "d_model", "d_ff", "num_layers", "num_heads"),
    [
        ("small", 768, 3072, 12, 12),
        ("medium", 1024, 4096, 24, 16),
        ("large", 1280, 5120, 36, 20),
        ("xl", 1600, 6400, 48, 25),
        ("2.7b", 2560, 10240, 32, 32),
        ("10b", 4608, 12288, 50, 36),
        ("8b", 4096, 11008, 34, 32),
    ],
)
def test_named_sizes_are_the_handouts(size, d_model, d_ff, num_layers, num_heads):
    config = MODEL_SIZES[size]
    assert (config.d_model, config.d_ff, config.num_layers, config.num_heads) == (d_model, d_ff, num_layers, num_heads)


def test_the_leaderboards_model_has_its_own_vocabulary_and_context():
    assert (MODEL_SIZES["8b"].vocab_size, MODEL_SIZES["8b"].context_length) == (151_936, 32_768)
    assert MODEL_SIZES["2.7b"].vocab_size == 10_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 3}, r"num_heads=3: must divide d_model=128"),
        ({"num_heads": 128}, r"num_heads=128: gives head_dim 1, .*even"),
        ({"d_ff": 0}, r"d_ff=0: must be between 1 and 2147483647"),
        ({"num_layers": -1}, r"num_layers=-1: must be between 1 and"),
    ],
)
def test_a_model_that_cannot_be_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{"d_model": 128, "d_ff": 512, "num_layers": 2, "num_heads": 4, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": "huge"}, r"size='huge': must be one of tiny, small"),
        ({"ctx": 0}, r"ctx=0: must be between 1 and"),
        ({"ctx": 2**62}, r"ctx=4611686018427387904: must be between 1 and 2147483647"),
        ({"vocab_size": 10**20}, r"vocab_size=1.*: must be between 1 and"),
        ({"mode": "train"}, r"mode='train': must be one of forward, forward-backward, train-step"),
        ({"precision": "fp8"}, r"precision='fp8': must be one of fp32"),
        ({"precision": "tf32"}, r"precision='tf32': .*NVIDIA"),
        ({"precision": "fp16", "device": "mps"}, r"precision='fp16': .*mps"),
        ({"attention": "linear"}, r"attention='linear': must be one of naive"),
        ({"warmup": -1}, r"warmup=-1: must be 0 or more"),
        ({"steps": 0}, r"steps=0: must be at least 1"),
        ({"batch_size": 0}, r"batch_size=0: must be between 1 and"),
        ({"device": "gpu"}, r"device='gpu': must be cpu, mps, cuda or cuda:N"),
        ({"seed": -1}, r"seed=-1: must be between"),
        ({"num_heads": 5}, r"num_heads=5: must divide d_model=128"),
        ({"master_weights": "on"}, r"master_weights='on': needs precision='bf16', and precision='fp32'"),
        ({"master_weights": "on", "precision": "bf16"}, r"needs kernels='loss' or 'fused', and kernels='plain'"),
        (
            {"master_weights": "on", "precision": "bf16", "kernels": "fused", "mode": "forward"},
            r"master_weights='on': needs mode='train-step', and mode='forward'",
        ),
    ],
)
def test_a_cell_that_cannot_run_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        BenchmarkCell(**{"size": "tiny", "ctx": 16, **change})


def test_a_named_cell_takes_the_sizes_hyperparameters():
    cell = named_cell("xl", 512, mode="forward", vocab_size=77)
    assert (cell.d_model, cell.num_heads, cell.vocab_size, cell.mode) == (1600, 25, 77, "forward")
    assert cell.model_config().context_length == 512
