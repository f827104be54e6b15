"""What a fused block keeps, against what autograd saves and a checkpoint leaves alive; and the plan made of it."""

import gc
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")

from cs336_systems.accounting import memory_plan
from cs336_systems.accounting.memory_plan import fused_block_saved_tensors, plan_memory, predict_memory
from cs336_systems.attention.model_attention import use_attention
from cs336_systems.checkpointing import checkpoint_blocks
from cs336_systems.configs import MODEL_SIZES, ModelConfig
from cs336_systems.kernels.fused_model import recompute_elementwise
from cs336_systems.profiling.storage_trace import StorageTrace
from cs336_systems.workload import build_model
from tests.attention_helpers import IGNORE_INTERPRETER
from tests.test_accounting_memory import bytes_kept_for_backward

pytestmark = IGNORE_INTERPRETER

# Odd sizes, so that no two products of them agree by accident.
TINY = ModelConfig(d_model=24, d_ff=56, num_layers=2, num_heads=3, vocab_size=37, context_length=9)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def model_and_input(precision, device):
    dtype = DTYPES[precision]
    model = build_model(TINY, device, "fused").to(dtype)
    return model, torch.randn(2, 9, 24, device=device, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("attention", ["flash-pytorch", pytest.param("flash-triton", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_a_fused_block_keeps_for_backward(precision, attention, device):
    model, x = model_and_input(precision, device)
    block = model.layers[0]
    with use_attention(attention):
        kept = bytes_kept_for_backward(lambda: block(x), but_for=[*block.parameters(), *block.buffers()])
    assert kept == sum(fused_block_saved_tensors(TINY, 18, precision).values())


@pytest.mark.parametrize("attention", ["flash-pytorch", pytest.param("flash-triton", marks=pytest.mark.gpu)])
def test_what_a_block_keeps_that_makes_elementwise_results_again(attention, device):
    model, x = model_and_input("bf16", device)
    block = model.layers[0]
    recompute_elementwise(block)
    known = [*block.parameters(), *block.buffers()]
    with use_attention(attention), StorageTrace([x, *known], has_stacks=False) as trace:
        y = block(x)
    gc.collect()
    kept = trace.live_bytes - sum(tensor.nbytes for tensor in (y, *known))
    saved = fused_block_saved_tensors(TINY, 18, "bf16")
    assert kept == sum(size for name, size in saved.items() if name not in memory_plan.ELEMENTWISE)


def test_what_a_checkpointed_fused_block_leaves_alive():
    model, x = model_and_input("bf16", "cpu")
    checkpoint_blocks(model, 1, keep_attention=True)
    block = model.layers[0]
    known = [*block.parameters(), *block.buffers()]
    with use_attention("flash-pytorch"), StorageTrace([x, *known], has_stacks=False) as trace:
        y = block(x)
    gc.collect()
    kept = trace.live_bytes - y.nbytes - sum(tensor.nbytes for tensor in known)
    saved = fused_block_saved_tensors(TINY, 18, "bf16")
    assert kept == sum(saved[name] for name in memory_plan.KEPT_IN_CHECKPOINT)


def test_blocks_by_hand():
    saved = {name: size / 2**20 for name, size in fused_block_saved_tensors(MODEL_SIZES["8b"], 32_768).items()}
    assert saved["ln1 input"] == saved["q"] == saved["w1, w3 input"] == 256  # 32,768 × 4,096 × 2 bytes
    assert saved["w1 output"] == saved["w2 input"] == 688
    assert saved["attention logsumexp"] == 4
    assert sum(saved.values()) == 8 * 256 + 3 * 688 + 4 + 2 / 8


def test_the_plan_keeps_as_much_as_fits():
    model, ranks = (MODEL_SIZES["8b"], 32_768), 2
    counts = []
    for memory_gib in (48.0, 60.0, 75.0, 100.0, 120.0, 200.0):
        plan = plan_memory(*model, ranks, memory_gib)
        assert plan.n_kept + plan.n_checkpointed == 34
        assert plan.fits == (plan.peak_bytes <= memory_gib * 2**30)
        assert plan.fits or plan.n_kept == 0
        if plan.n_kept < 34:
            assert not predict_memory(*model, ranks, plan.n_kept + 1, memory_gib).fits
        counts.append(plan.n_kept)
    assert counts == sorted(set(counts))
    assert (counts[0], counts[-1]) == (0, 34)
    # 7.57 GiB of weights on each of two ranks, twice as much of moments.
    parts = {name: size / 2**30 for name, size in plan.parts.items()}
    assert parts["weights"] == pytest.approx(8_125_698_048 / 2**30, rel=1e-6)
    assert parts["AdamW's moments"] == 2 * parts["weights"]
    assert sum(float(gib) for _, gib in plan.rows()[:-1]) == pytest.approx(plan.peak_bytes / 2**30, abs=0.05)


def test_more_ranks_and_fewer_tokens_leave_room_for_more_blocks():
    config = MODEL_SIZES["8b"]
    n_kept = plan_memory(config, 32_768, 2, 75.0).n_kept
    assert plan_memory(config, 32_768, 4, 75.0).n_kept > n_kept
    assert plan_memory(config, 16_384, 2, 75.0).n_kept > n_kept
    assert plan_memory(config, 32_768, 2, 75.0, "fp32").n_kept == 0


def test_without_activations_the_peak_is_weights_states_and_gradients():
    config = MODEL_SIZES["xl"]
    plan = predict_memory(config, 1, 1, config.num_layers, precision="fp32")
    assert plan.peak_bytes == pytest.approx(16 * 1_998_235_200, rel=0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 2, 75.0), "tokens_per_rank=0: must be above 0"),
        ((8, 0, 75.0), "world_size=0"),
        ((8, 2, -1.0), "memory_gib=-1"),
    ],
)
def test_numbers_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan_memory(TINY, *arguments)


def test_blocks_that_are_not_there():
    with pytest.raises(ValueError, match="n_kept=3: must be between 0 and 2"):
        predict_memory(TINY, 8, 2, 3)
    with pytest.raises(ValueError, match="precision='fp8'"):
        plan_memory(TINY, 8, 2, 1.0, "fp8")  # ty: ignore[invalid-argument-type]
    shape = SimpleNamespace(**{name: getattr(TINY, name) for name in TINY.__dataclass_fields__})
    assert predict_memory(shape, 8, 2, 1) == predict_memory(TINY, 8, 2, 1)  # anything with these attributes
