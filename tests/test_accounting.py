"""The formulas for parameters and FLOPs against what PyTorch counts, and against numbers worked out by hand."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from cs336_basics.model import BasicsTransformerLM
from cs336_systems.accounting import flops, memory, training_memory
from cs336_systems.accounting.report import model_report
from cs336_systems.configs import MODEL_SIZES, ModelConfig

# Odd sizes, so that no two products of them agree by accident.
TINY = ModelConfig(d_model=24, d_ff=56, num_layers=3, num_heads=3, vocab_size=37, context_length=40)
WIDE = ModelConfig(d_model=96, d_ff=40, num_layers=2, num_heads=2, vocab_size=300, context_length=64)
ROOT = Path(__file__).resolve().parents[1]


def build(config: ModelConfig, device: str = "cpu") -> BasicsTransformerLM:
    shape = (config.vocab_size, config.context_length, config.d_model, config.num_layers, config.num_heads, config.d_ff)
    return BasicsTransformerLM(*shape, device=device)


# ---- Parameters and FLOPs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", MODEL_SIZES)
def test_parameters_are_the_models_own(size, monkeypatch):
    monkeypatch.setattr(torch.nn.init, "trunc_normal_", lambda tensor, **bounds: tensor)  # slow on "meta"
    config = MODEL_SIZES[size]
    model = build(config, device="meta")
    assert flops.num_parameters(config) == model.get_num_params()
    assert flops.num_parameters(config, input_embedding=False) == model.get_num_params(non_embedding=True)
    assert flops.num_block_parameters(config) == sum(p.numel() for p in model.layers[0].parameters())
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "embeddings" not in name)
    assert memory.num_matrix_parameters(config) == matrices


def test_parameters_by_hand():
    # small: two tables of 10,000 x 768, twelve blocks of 4 x 768², 3 x 768 x 3072 and two norms, one norm.
    assert flops.num_parameters(MODEL_SIZES["small"]) == 15_360_000 + 12 * (2_359_296 + 7_077_888 + 1_536) + 768
    assert round(flops.num_parameters(MODEL_SIZES["8b"], input_embedding=False) / 1e9, 1) == 7.5


@pytest.mark.parametrize("config", [TINY, WIDE, replace(TINY, num_layers=1, num_heads=1)], ids=["tiny", "wide", "one"])
@pytest.mark.parametrize(("batch_size", "length"), [(1, 1), (2, 40), (3, 17)])
def test_flops_equal_what_torch_counts(config, batch_size, length):
    model = build(config)
    tokens = torch.randint(config.vocab_size, (batch_size, length))
    with FlopCounterMode(display=False) as counter:
        logits = model(tokens)
    assert flops.matmul_flops_forward(config, batch_size, length) == counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        logits.sum().backward()
    forward_backward = flops.train_step_flops(config, batch_size, length)
    assert forward_backward - flops.matmul_flops_forward(config, batch_size, length) == counter.get_total_flops()


def test_flops_with_recomputed_blocks_equal_what_torch_counts():
    model = build(TINY)
    for layer in model.layers[:2]:
        forward = layer.forward
        # Early stop would leave out the last product, whose result backward does not need.
        layer.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False, early_stop=False)
    with FlopCounterMode(display=False) as counter:
        model(torch.randint(37, (2, 40))).sum().backward()
    assert flops.train_step_flops(TINY, 2, 40, recomputed_blocks=2) == counter.get_total_flops()


def test_flops_by_hand():
    # (m, k, n) of each product of TINY on 2 sequences of 40 tokens; the counter above sees only their sum.
    parts = flops.matmul_flops_by_part(TINY, 2, 40)
    assert parts["qkv_proj"] == 3 * 3 * 2 * (80 * 24 * 24)
    assert parts["attention_scores"] == 3 * (2 * 3) * 2 * (40 * 8 * 40)
    assert parts["attention_values"] == 3 * (2 * 3) * 2 * (40 * 40 * 8)
    assert parts["output_proj"] == 3 * 2 * (80 * 24 * 24)
    assert parts["ffn"] == 3 * 3 * 2 * (80 * 24 * 56)
    assert parts["lm_head"] == 2 * (80 * 24 * 37)
    causal = flops.matmul_flops_by_part(TINY, 2, 40, attention="causal")
    assert {name for name in parts if causal[name] != parts[name]} == {"attention_scores", "attention_values"}
    assert 2 * causal["attention_scores"] == parts["attention_scores"]
    assert flops.softmax_flops_forward(TINY, 2, 40) == 5 * (3 * 2 * 3 * 40 * 40)
    with_flash = flops.train_step_flops(TINY, 2, 40, flash_backward=True)
    assert with_flash - flops.train_step_flops(TINY, 2, 40) == parts["attention_scores"]


def test_the_8b_leaderboard_step():
    # 6 · 7.5e9 parameters · 65,536 tokens, and 3 · 2·N²·d a layer and sequence: 4.74e15.
    step = flops.train_step_flops(MODEL_SIZES["8b"], 2, 32_768, attention="causal")
    assert step == pytest.approx(4.74e15, rel=2e-3)


def test_attention_flops_are_torchs_and_the_papers():
    shape = (2, 4, 128, 64)
    full = flops.attention_flops(2, 4, 128, 64, is_causal=False)
    assert full["forward"] == sdpa_flop_count(shape, shape, shape)
    assert full["backward"] == sdpa_backward_flop_count(shape, shape, shape, shape)
    assert full["both"] == full["forward"] + full["backward"]
    # 16 heads of 64, length 16,384, causal: 281 TFLOP/s are 1.96 ms.
    forward = flops.attention_flops(1, 16, 16_384, 64, is_causal=True)["forward"]
    assert forward / 281e12 == pytest.approx(1.96e-3, rel=5e-3)


@pytest.mark.parametrize(
    ("name", "fp32", "tf32", "bf16", "fp16"),
    [
        ("NVIDIA H100 80GB HBM3", 66.9, 494.7, 989.4, 989.4),
        ("NVIDIA H100 PCIe", 51.2, 378, 756, 756),
        ("NVIDIA H100 NVL", 60, 417.5, 835.5, 835.5),
        ("NVIDIA H200", 66.9, 494.7, 989.4, 989.4),
        ("NVIDIA B200", 75, 1100, 2250, 2250),
        ("NVIDIA A100-SXM4-80GB", 19.5, 156, 312, 312),
        ("NVIDIA A100-SXM4-40GB", 19.5, 156, 312, 312),
        ("A100-PCIE-40GB", 19.5, 156, 312, 312),
        ("NVIDIA A100 80GB PCIe", 19.5, 156, 312, 312),
        ("NVIDIA L4", 30.3, 60, 121, 121),
        ("NVIDIA L40S", 91.6, 183, 362, 362),
        ("Tesla T4", 8.1, None, None, 65),
        ("NVIDIA GeForce RTX 4090", 82.6, 82.6, 165.2, 165.2),
        ("NVIDIA GeForce RTX 3090", 35.6, 35.6, 71, 71),
        # Other chips, and a part of one: nothing rather than a wrong number.
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None, None, None, None),
        ("NVIDIA GeForce RTX 4090 D", None, None, None, None),
        ("NVIDIA GeForce RTX 3090 Ti", None, None, None, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None, None, None, None),
        ("NVIDIA A10", None, None, None, None),
        ("AMD Instinct MI300X", None, None, None, None),
        ("", None, None, None, None),
    ],
)
def test_peaks_by_the_names_that_torch_reports(name, fp32, tf32, bf16, fp16):
    found = {precision: flops.peak_tflops(name, precision) for precision in ("fp32", "tf32", "bf16", "fp16")}
    assert found == {"fp32": fp32, "tf32": tf32, "bf16": bf16, "fp16": fp16}
    assert fp32 is None or flops.gpu_peak(name).source


def test_model_flops_utilization():
    assert flops.model_flops_utilization(989.4e12, seconds=2, peak_tflops=989.4) == pytest.approx(0.5)
    # The 2026 leaderboard's best: 3.837 s on two B200.
    step = flops.train_step_flops(MODEL_SIZES["8b"], 2, 32_768, attention="causal")
    assert flops.model_flops_utilization(step, 3.837, 2250, num_gpus=2) == pytest.approx(0.275, abs=0.005)


# ---- All of it -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda: flops.matmul_flops_forward(TINY, 0, 8),
        lambda: flops.matmul_flops_forward(TINY, 1, 8, attention="half"),
        lambda: flops.train_step_flops(TINY, 1, 8, recomputed_blocks=4),
        lambda: flops.peak_tflops("NVIDIA H200", "fp8"),
        lambda: flops.model_flops_utilization(1.0, 0.0, 989.4),
        lambda: memory.block_saved_tensors(TINY, 1, 0),
        lambda: memory.block_saved_tensors(TINY, 1, 8, precision="fp8"),
        lambda: memory.block_saved_tensors(TINY, 1, 8, attention="linear"),
        lambda: memory.saved_activation_bytes(TINY, 1, 8, checkpoint_every=4),
        lambda: memory.saved_activation_bytes(TINY, 1, 8, checkpoint_every=0),
        lambda: training_memory.training_memory(TINY, 1, 8, sharding="zero"),
        lambda: training_memory.training_memory(TINY, 1, 8, num_devices=0),
        lambda: training_memory.fsdp_gathered_bytes(TINY, "fp32", layers_ahead=-1),
        lambda: model_report(TINY, 1, 8, bandwidth_gb_per_s=0),
    ],
)
def test_bad_input_names_the_argument(call):
    with pytest.raises(ValueError, match=r"^\w+=.*: must be "):
        call()


def test_report_shows_the_formulas_numbers():
    report = model_report(MODEL_SIZES["xl"], 4, 512, "bf16", gpu="NVIDIA H200", bandwidth_gb_per_s=450)
    assert "| all | 1,998,235,200 |" in report
    step = flops.train_step_flops(MODEL_SIZES["xl"], 4, 512)
    assert f"| forward and backward | {step / 1e12:.4g} | 300.0% |" in report
    assert f"| AdamW's moments | {2 * 4 * 1998235200 / 2**30:.3f} |" in report
    assert "### Where communication takes over" in report


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "foo"], "--gpu foo: must be a card whose peak is known"),
        (
            ["--gpu", "Tesla T4", "--precision", "bf16"],
            "--precision bf16: must be one that gpu='Tesla T4' has a unit for",
        ),
        (["--bandwidth-gb-per-s", "450"], "--bandwidth-gb-per-s 450.0: must be given with gpu"),
        (["--handout", "--size", "large"], "--size large: is not of the exercise; --handout goes without other flags"),
        (["--size", "custom"], "--size custom: must be one of"),
    ],
)
def test_what_would_be_ignored_is_refused(run_script, arguments, message):
    status, shown, errors = run_script("accounting", *arguments)
    assert (status, shown) == (2, "")
    assert f"error: {message}" in errors


def test_script_needs_no_torch():
    code = (
        "import sys; sys.argv = ['accounting.py', '--size', 'tiny', '--ctx', '64']; sys.path.insert(0, 'scripts');"
        "import accounting; accounting.main(); assert not {'torch', 'numpy', 'triton'} & set(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "| all | 3,084,928 |" in result.stdout


def test_docs_show_the_formulas_numbers():
    text = (ROOT / "docs" / "accounting.md").read_text(encoding="utf-8")
    for size, config in MODEL_SIZES.items():
        plain = training_memory.training_memory(config, 4, 512)
        flash = training_memory.training_memory(config, 4, 512, attention="flash-triton")
        gib = (
            plain.parameters,
            plain.parameters + plain.gradients + plain.optimizer_state,
            plain.activations,
            flash.activations,
        )
        forward = flops.matmul_flops_forward(config, 4, 512) / 1e12
        cells = [size, f"{flops.num_parameters(config):,}", f"{forward:.4g}", *(f"{x / 2**30:.2f}" for x in gib)]
        assert f"| {' | '.join(cells)} |" in text, size
