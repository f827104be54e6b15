"""The memory formulas against what autograd keeps and the optimizer holds, and against numbers worked out by hand."""

import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import cs336_basics.model
from cs336_basics.model import BasicsTransformerLM
from cs336_basics.nn_utils import cross_entropy
from cs336_basics.optimizer import AdamW
from cs336_systems.accounting import memory, training_memory
from cs336_systems.benchmarking.model_benchmark import BenchmarkRow
from cs336_systems.configs import MODEL_SIZES, ModelConfig
from cs336_systems.records import read_results

# Odd sizes, so that no two products of them agree by accident.
TINY = ModelConfig(d_model=24, d_ff=56, num_layers=3, num_heads=3, vocab_size=37, context_length=40)
WIDE = ModelConfig(d_model=96, d_ff=40, num_layers=2, num_heads=2, vocab_size=300, context_length=64)


def build(config: ModelConfig, device: str = "cpu") -> BasicsTransformerLM:
    shape = (config.vocab_size, config.context_length, config.d_model, config.num_layers, config.num_heads, config.d_ff)
    return BasicsTransformerLM(*shape, device=device)


def attention_of(name: str):
    """What goes into the model's place for attention; None leaves the plain one there."""
    if name == "naive":
        return None
    if name == "sdpa":
        function = torch.nn.functional.scaled_dot_product_attention

        def attention(q, k, v, mask):
            return function(q, k, v, is_causal=True)
    else:
        from cs336_systems.attention.flash_pytorch import FlashAttentionPyTorch

        def attention(q, k, v, mask):
            return FlashAttentionPyTorch.apply(q, k, v, True)

    attention.is_causal = True
    return attention


def bytes_kept_for_backward(function, *, but_for) -> int:
    """Of everything that autograd saves while `function` runs: each storage once, those of `but_for` left out."""
    left_out = {tensor.untyped_storage().data_ptr() for tensor in but_for}
    sizes, alive = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in left_out:
            sizes[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)  # so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function()
    return sum(sizes.values())


@pytest.fixture(params=["naive", "sdpa", "flash-pytorch"])
def attention(request, monkeypatch):
    function = attention_of(request.param)
    if function is not None:
        monkeypatch.setattr(cs336_basics.model, "scaled_dot_product_attention", function)
    return request.param


def autocast(precision: str, device: str = "cpu"):
    return torch.autocast(device, dtype=torch.bfloat16) if precision == "bf16" else nullcontext()


def forward_loss(model, tokens, precision, checkpoint_every):
    """The model's loss, with its blocks in checkpointed segments if that is asked for."""
    with autocast(precision, tokens.device.type):
        x = model.token_embeddings(tokens)
        every = checkpoint_every or 1
        for first in range(0, len(model.layers), every):
            segment = torch.nn.Sequential(*model.layers[first : first + every])
            x = segment(x) if checkpoint_every is None else checkpoint(segment, x, use_reentrant=False)
        return cross_entropy(model.lm_head(model.ln_final(x)), tokens)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("config", [TINY, WIDE], ids=["tiny", "wide"])
def test_what_a_block_keeps_for_backward(config, precision, attention):
    block = build(config).layers[0]
    x = torch.randn(2, 40, config.d_model, requires_grad=True)

    def forward():
        with autocast(precision):
            block(x)

    kept = bytes_kept_for_backward(forward, but_for=[*block.parameters(), *block.buffers()])
    matrices = sum(parameter.numel() for parameter in block.parameters() if parameter.ndim == 2)
    copies = 2 * matrices if precision == "bf16" else 0
    saved = memory.block_saved_tensors(config, 2, 40, precision, attention)
    assert sum(saved.values()) == kept - copies


@pytest.mark.parametrize("checkpoint_every", [None, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_the_model_and_its_loss_keep_for_backward(precision, checkpoint_every, attention):
    model = build(TINY)
    tokens = torch.randint(37, (2, 40))

    def forward():
        forward_loss(model, tokens, precision, checkpoint_every)

    kept = bytes_kept_for_backward(forward, but_for=[*model.parameters(), *model.buffers(), tokens])
    copies = memory.autocast_weight_bytes(TINY, precision)
    if checkpoint_every is not None:  # only lm_head's is outside the checkpoints
        copies = 2 * 37 * 24 if precision == "bf16" else 0
    predicted = memory.saved_activation_bytes(TINY, 2, 40, precision, attention, checkpoint_every)
    assert predicted == kept - copies


def test_what_a_block_keeps_by_hand():
    # small, batch 4, context 256, float32: rows of 768 are 3 MiB, of 3072 12 MiB, (4, 12, 256, 256) scores 12 MiB.
    saved = memory.block_saved_tensors(MODEL_SIZES["small"], 4, 256)
    mib = {name: size / 2**20 for name, size in saved.items()}
    assert mib["ln1 input"] == mib["q"] == mib["output_proj input"] == 3
    assert mib["w1 output"] == mib["w2 input"] == 12
    assert mib["attention exponentials"] == mib["attention probabilities"] == 12
    assert sum(mib.values()) == pytest.approx(4 * 3 + 2 * 3 + 4 * 3 + 2 * 12 + 5 * 12, abs=0.15)
    assert memory.residual_stream_bytes(MODEL_SIZES["2.7b"], 4, 128) == 5 * 2**20


def test_the_peak_with_checkpoints_by_hand():
    config = replace(TINY, num_layers=5)
    stream = 2 * 40 * 24 * 4
    block = sum(memory.block_saved_tensors(config, 2, 40).values())
    head = sum(memory.head_saved_tensors(config, 2, 40).values())
    # Segments of 2, 2 and 1: the last first, with two inputs before it; then two blocks with one before them.
    assert memory.peak_activation_bytes(config, 2, 40, checkpoint_every=2) == 2 * block + stream
    assert memory.peak_activation_bytes(config, 2, 40, checkpoint_every=5) == 5 * block
    assert memory.peak_activation_bytes(config, 2, 40) == 5 * block + head
    many_words = replace(config, vocab_size=10_000)
    head = sum(memory.head_saved_tensors(many_words, 2, 40).values())
    assert memory.peak_activation_bytes(many_words, 2, 40, checkpoint_every=1) == 5 * stream + head


def test_the_best_checkpoint_spacing():
    best = memory.best_checkpoint_every(MODEL_SIZES["2.7b"], 4, 2048)
    peaks = [memory.peak_activation_bytes(MODEL_SIZES["2.7b"], 4, 2048, checkpoint_every=k) for k in range(1, 33)]
    assert peaks[best - 1] == min(peaks)
    # With enough layers, sqrt(layers · input / block): a block of TINY keeps about 47 times its input.
    deep = replace(TINY, num_layers=5000)
    ratio = sum(memory.block_saved_tensors(deep, 2, 40).values()) / memory.residual_stream_bytes(deep, 2, 40)
    assert memory.best_checkpoint_every(deep, 2, 40) == pytest.approx(math.sqrt(5000 / ratio), abs=1)


def test_weights_gradients_and_moments_are_the_optimizers_own():
    model = build(WIDE)
    optimizer = AdamW(model.parameters())
    model(torch.randint(300, (1, 8))).sum().backward()
    optimizer.step()

    def size(tensors) -> int:
        return sum(tensor.nbytes for tensor in tensors)

    predicted = training_memory.training_memory(WIDE, 1, 8)
    assert predicted.parameters == size(model.parameters())
    assert predicted.gradients == size(p.grad for p in model.parameters())
    moments = [x for state in optimizer.state.values() for x in state.values() if torch.is_tensor(x) and x.ndim]
    assert predicted.optimizer_state == size(moments)


def test_sharding_divides_what_it_says():
    config, whole = MODEL_SIZES["xl"], training_memory.training_memory(MODEL_SIZES["xl"], 4, 512)
    one_of_two = {
        name: training_memory.training_memory(config, 4, 512, sharding=name, num_devices=2)
        for name in ("none", "optimizer", "gradients", "fsdp")
    }
    assert one_of_two["none"] == whole
    halved = {"optimizer": (1, 1, 2), "gradients": (1, 2, 2), "fsdp": (2, 2, 2)}
    for name, divisors in halved.items():
        found = one_of_two[name]
        parts = (found.parameters, found.gradients, found.optimizer_state)
        wholes = (whole.parameters, whole.gradients, whole.optimizer_state)
        assert [round(b / a) for a, b in zip(parts, wholes, strict=True)] == list(divisors)
        assert found.activations == whole.activations
    # The norms, 97 vectors of 1600, stay whole.
    assert one_of_two["fsdp"].parameters * 2 - whole.parameters == pytest.approx(4 * 97 * 1600, abs=8)
    # The last block's w3 and w2 and then lm_head, 10,000 x 1600, are the largest three layers in a row.
    assert one_of_two["fsdp"].weight_copies == (2 * 1600 * 6400 + 10_000 * 1600) * 4
    assert training_memory.fsdp_gathered_bytes(config, "bf16", layers_ahead=0) == 10_000 * 1600 * 2
    assert training_memory.fsdp_gathered_bytes(TINY, "fp32", layers_ahead=2) == 3 * 24 * 56 * 4  # w1, w3, w2
    everything = training_memory.fsdp_gathered_bytes(replace(TINY, num_layers=1), "fp32", layers_ahead=100)
    assert everything == (2 * 37 * 24 + 4 * 24 * 24 + 3 * 24 * 56) * 4


def test_the_peak_of_a_step():
    # xl, batch 4, context 512, float32, plain attention, AdamW: 49.9 GiB were measured on an H200.
    predicted = training_memory.training_memory(MODEL_SIZES["xl"], 4, 512)
    assert predicted.peak / 2**30 == pytest.approx(49.9, rel=0.02)
    # 57.3 GiB on an H100 with gradients in buckets, 50.0 with half of the moments.
    bucketed = training_memory.training_memory(MODEL_SIZES["xl"], 4, 512, keeps_gradients=True)
    assert bucketed.peak / 2**30 == pytest.approx(57.3, rel=0.02)
    sharded = training_memory.training_memory(
        MODEL_SIZES["xl"], 4, 512, sharding="optimizer", num_devices=2, keeps_gradients=True
    )
    assert sharded.peak / 2**30 == pytest.approx(50.0, rel=0.02)
    # Without activations to speak of, the optimizer's step is the peak: 16 bytes a parameter.
    assert training_memory.training_memory(MODEL_SIZES["xl"], 1, 1).peak == 16 * 1_998_235_200


def test_the_peaks_that_were_measured_on_a_card():
    """Every train step of results/benchmark/sizes that fitted: five sizes, four contexts, float32 and bfloat16."""
    file = Path(__file__).resolve().parents[1] / "results" / "benchmark" / "sizes" / "benchmark.json"
    rows = [row for row in read_results(file, BenchmarkRow)[1] if row.status == "ok"]
    assert len(rows) > 30
    for row in rows:
        predicted = training_memory.training_memory(
            row.model_config(), row.batch_size, row.ctx, row.precision, row.attention
        )
        ratio = predicted.peak / 2**30 / row.peak_memory_gib
        # The rest is the allocator's rounding and cuBLAS's workspace, which larger steps dwarf.
        least = 0.94 if row.peak_memory_gib < 40 else 0.985
        assert least < ratio <= 1, row


@pytest.mark.gpu
@pytest.mark.parametrize("checkpoint_every", [None, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("attention", ["naive", "sdpa"], indirect=True)
def test_what_a_card_holds_after_forward(attention, precision, checkpoint_every):
    config = replace(MODEL_SIZES["small"], context_length=512)
    model = build(config, device="cuda")
    tokens = torch.randint(config.vocab_size, (4, 512), device="cuda")
    with autocast(precision, "cuda"):  # whatever is made once and kept (cuBLAS's workspace)
        cross_entropy(model(tokens), tokens).backward()
    model.zero_grad(set_to_none=True)
    before = torch.cuda.memory_allocated()
    loss = forward_loss(model, tokens, precision, checkpoint_every)
    kept = torch.cuda.memory_allocated() - before
    assert loss.requires_grad
    copies = 0
    if precision == "bf16":
        checkpointed = config.vocab_size * config.d_model * 2
        copies = memory.autocast_weight_bytes(config, precision) if checkpoint_every is None else checkpointed
    predicted = memory.saved_activation_bytes(config, 4, 512, precision, attention, checkpoint_every)
    assert predicted == pytest.approx(kept - copies, rel=0.05)
