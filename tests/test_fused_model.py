"""The model with fused kernels beside the plain one, in float32: loss, gradients, training steps, state dicts."""

import copy
import dataclasses
import json
import math
import pickle
import subprocess
import sys
import textwrap

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")

from cs336_basics.model import BasicsTransformerLM
from cs336_basics.nn_utils import cross_entropy
from cs336_systems.attention import implementations
from cs336_systems.benchmarking.model_benchmark import BenchmarkRow, cell_label, table_columns
from cs336_systems.configs import named_cell
from cs336_systems.kernels.adamw import FusedAdamW
from cs336_systems.kernels.fused_model import FusedTransformerLM, recompute_elementwise, use_fused_kernels
from cs336_systems.records import Unsupported, read_results
from cs336_systems.training.loop import train_rank
from cs336_systems.training.run import check_run
from cs336_systems.training.trainer import Trainer
from cs336_systems.workload import Workload
from tests.attention_helpers import IGNORE_INTERPRETER
from tests.distributed_helpers import run_gloo
from tests.example_rows import RUN
from tests.training_helpers import lines, make_config, tokens_of, train

pytestmark = IGNORE_INTERPRETER

VOCAB, CONTEXT = 53, 12


@pytest.fixture
def models(device):
    plain = BasicsTransformerLM(VOCAB, CONTEXT, d_model=24, num_layers=1, num_heads=2, d_ff=40, device=device)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if "ln" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))  # all ones would hide an error
    return plain, use_fused_kernels(copy.deepcopy(plain))


def draw(device, batch=2, seq=5):
    return (torch.randint(VOCAB, (batch, seq), device=device) for _ in range(2))


def loss_of(plain, inputs, targets):
    return cross_entropy(plain(inputs), targets)


def gradients(loss, model):
    return torch.autograd.grad(loss, list(model.parameters()))


def assert_equal_gradients(ours, theirs):
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-4, atol=1e-6)


def test_logits_loss_and_gradients_are_the_plain_models(models, device):
    plain, fused = models
    inputs, targets = draw(device)
    logits = fused(inputs)
    expected = plain(inputs)
    torch.testing.assert_close(logits, expected)
    loss, expected_loss = fused(inputs, targets), cross_entropy(expected, targets)
    torch.testing.assert_close(loss, expected_loss)
    expected_gradients = gradients(expected_loss, plain)
    assert_equal_gradients(gradients(loss, fused), expected_gradients)
    assert_equal_gradients(gradients(cross_entropy(logits, targets), fused), expected_gradients)


@pytest.mark.parametrize("autocast", [False, True])
def test_what_blocks_make_again_is_what_they_made(models, device, autocast):
    _, fused = models
    inputs, targets = draw(device)
    results = []
    for recomputes in (False, True):
        if recomputes:
            recompute_elementwise(fused.layers[0])
        with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
            loss = fused(inputs, targets)
        results.append([loss, *gradients(loss, fused)])
    assert all(map(torch.equal, *results))


def test_only_the_loss(models, device):
    plain, fused = models
    with_loss = use_fused_kernels(copy.deepcopy(plain), only_loss=True)
    assert {type(module) for module in with_loss.layers.modules()} == {
        type(module) for module in plain.layers.modules()
    }
    inputs, targets = draw(device)
    torch.testing.assert_close(with_loss(inputs, targets), fused(inputs, targets))
    assert torch.equal(with_loss(inputs), plain(inputs))


def test_state_dicts_go_both_ways_and_parameters_are_the_same_objects(models):
    plain, fused = models
    assert list(plain.state_dict()) == list(fused.state_dict())
    fused.load_state_dict(plain.state_dict())
    plain.load_state_dict(fused.state_dict())
    parameters = list(plain.parameters())
    assert all(a is b for a, b in zip(parameters, use_fused_kernels(plain).parameters(), strict=True))


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_has_all_of_its_own(again, models, device):
    _, fused = models
    recompute_elementwise(fused.layers[0])
    inputs, targets = draw(device, batch=1, seq=2)
    copied = again(fused)
    assert copied.layers[0].recomputes
    assert copied.layers[0].ffn.recomputes
    expected = fused(inputs, targets)
    torch.nn.init.zeros_(fused.lm_head.weight)
    assert fused(inputs, targets).item() == pytest.approx(math.log(VOCAB))
    assert torch.equal(copied(inputs, targets), expected)


def test_it_generates_what_the_plain_model_does(models, device):
    plain, fused = models
    prompt, _ = draw(device, seq=3)
    assert torch.equal(fused.generate(prompt, 3, temperature=0), plain.generate(prompt, 3, temperature=0))


@pytest.mark.parametrize("shape", [(9,), (2, 9), (1, 9)])
def test_positions_as_the_attention_passes_them(shape, models, device):
    plain, fused = models
    x, positions = torch.randn(2, 9, 24, device=device), torch.randint(CONTEXT, shape, device=device)
    torch.testing.assert_close(fused.layers[0].attn(x, positions), plain.layers[0].attn(x, positions))


def test_rotary_shapes_that_the_kernel_does_not_take(models, device):
    plain, fused = (model.positional_encoder for model in models)
    x, by_head = torch.randn(2, 3, 5, 12, device=device), torch.randint(CONTEXT, (2, 3, 5), device=device)
    torch.testing.assert_close(fused(x, by_head), plain(x, by_head))
    torch.testing.assert_close(fused(x[0]), plain(x[0]))
    with pytest.raises(ValueError, match="context_length allows at most 12"):
        fused(torch.randn(1, 1, 13, 12, device=device))
    with pytest.raises(ValueError, match="it must be 12"):
        fused(torch.randn(1, 1, 3, 10, device=device))


def test_under_autocast_gradients_are_as_near_as_the_plain_models(models, device):
    plain, fused = models
    inputs, targets = draw(device)
    exact_model = copy.deepcopy(plain).double()
    exact = gradients(loss_of(exact_model, inputs, targets), exact_model)
    with torch.autocast(device, dtype=torch.float16 if device == "cpu" else torch.bfloat16):
        ours, theirs = fused(inputs, targets), loss_of(plain, inputs, targets)
    for our, their, true in zip(gradients(ours, fused), gradients(theirs, plain), exact, strict=True):
        assert our.dtype == torch.float32
        assert (our - true).norm() <= 2 * (their - true).norm() + 1e-3 * true.norm()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["whole", "blocks"])
def test_compiled(how, models, device, annotations_unchecked):
    plain, fused = models
    inputs, targets = draw(device)
    for module in [fused] if how == "whole" else fused.layers:
        module.compile(backend="aot_eager", fullgraph=True)
    loss = fused(inputs, targets)
    expected = loss_of(plain, inputs, targets)
    torch.testing.assert_close(loss, expected)
    assert_equal_gradients(gradients(loss, fused), gradients(expected, plain))


def test_only_a_plain_model_is_changed(models):
    _, fused = models
    with pytest.raises(TypeError, match="model is a FusedTransformerLM; it must be a BasicsTransformerLM"):
        use_fused_kernels(fused)


# ---- By name: --kernels fused ----------------------------------------------------------------------------------------


def _cell(**parameters):
    shape = {"d_model": 24, "d_ff": 40, "num_heads": 2, "num_layers": 1, "vocab_size": VOCAB, "batch_size": 2}
    return named_cell("tiny", **{"ctx": 4, **shape, "kernels": "fused", **parameters})


def test_a_workload_takes_the_same_steps(device):
    fused, plain = (Workload(_cell(device=device, kernels=kernels)) for kernels in ("fused", "plain"))
    assert isinstance(fused.model, FusedTransformerLM)
    assert isinstance(fused.optimizer, FusedAdamW)
    phases = []
    for _ in range(2):
        fused.step(lambda name: (phases.append(name), torch.enable_grad())[1])
        plain.step(lambda name: torch.enable_grad())
        torch.testing.assert_close(fused.loss, plain.loss, rtol=1e-5, atol=1e-5)
    assert type(Workload(_cell(device=device, kernels="loss")).model) is FusedTransformerLM
    assert phases == ["forward", "loss", "backward", "optimizer"] * 2
    for our, their in zip(fused.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(our, their, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_checkpointed_blocks(device):
    cells = (_cell(device=device, mode="forward-backward", checkpoint_every=every) for every in (0, 1))
    workloads = [Workload(cell) for cell in cells]
    for workload in workloads:
        workload.step(lambda name: torch.enable_grad())
    for a, b in zip(*(workload.model.parameters() for workload in workloads), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_training_follows_the_plain_models_loss(tmp_path):
    configs = [
        make_config(tmp_path, ctx=4, batch_size=2, validation_batches=1, kernels=kernels)
        for kernels in ("plain", "fused")
    ]
    plain, fused = (Trainer(config, tokens_of(config), torch.device("cpu")) for config in configs)
    assert isinstance(fused.optimizer, FusedAdamW)
    ours, theirs = fused.step(1), plain.step(1)
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)
    assert ours.gradient_norm == pytest.approx(theirs.gradient_norm, rel=1e-4)
    assert fused.validation_loss() == pytest.approx(plain.validation_loss(), rel=1e-5)
    again = Trainer(configs[0], tokens_of(configs[0]), torch.device("cpu"), fused.state())  # plain goes on from fused
    assert again.step(2).loss == pytest.approx(fused.step(2).loss, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "scheme",
    [
        {"parallel": "bucketed", "bucket_size_mb": 0.01},
        {"parallel": "ddp", "sharded_optimizer": True},
        {"parallel": "fsdp"},
        {"parallel": "fsdp", "precision": "fp16"},
    ],
    ids=str,
)
def test_ranks_train_as_one_process_does(scheme, tmp_path):
    quick = {"ctx": 4, "validation_batches": 1, "steps": 5, "accumulation_steps": 2, "kernels": "fused"}
    precision = scheme.get("precision", "fp32")
    single = make_config(tmp_path, out=tmp_path / "single", precision=precision, **{**quick, "kernels": "plain"})
    train(single)
    spread = make_config(tmp_path, out=tmp_path / "spread", **quick, **scheme)
    spread.out.mkdir()
    run_gloo(train_rank, spread, tokens_of(spread), "cpu", RUN, world_size=2)
    for kind in ("train", "validation"):
        losses = [[line["loss"] for line in lines(config, kind)] for config in (spread, single)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4 if precision == "fp32" else 1e-2)


def test_where_the_kernels_cannot_run(tmp_path, monkeypatch):
    monkeypatch.setattr(implementations, "_TRITON_IS_INTERPRETED", False)
    with pytest.raises(Unsupported, match=r"kernels 'fused': .*TRITON_INTERPRET=1"):
        Workload(_cell())
    config = make_config(tmp_path, kernels="fused")
    with pytest.raises(Unsupported, match=r"kernels 'fused': .*TRITON_INTERPRET=1"):
        Trainer(config, tokens_of(config), torch.device("cpu"))
    with pytest.raises(ValueError, match=r"kernels='fused': .*TRITON_INTERPRET=1"):
        check_run(config)


def test_rows_from_before_there_was_a_choice_are_plain(tmp_path):
    path = tmp_path / "benchmark.json"
    row = {"run": 0, "size": "small", "ctx": 256}
    path.write_text(json.dumps({"runs": [dataclasses.asdict(RUN)], "rows": [row]}))
    _, rows, _ = read_results(path, BenchmarkRow)
    assert [row.kernels for row in rows] == ["plain"]


def test_a_table_tells_the_two_apart():
    rows = [BenchmarkRow(**vars(_cell(kernels=kernels))) for kernels in ("plain", "fused")]
    assert table_columns(rows)["kernels"] == "kernels"
    assert cell_label(_cell()) == "tiny ctx 4 train-step fp32 fused"
    with pytest.raises(ValueError, match="kernels='triton': must be one of plain, loss, fused"):
        _cell(kernels="triton")


@pytest.mark.slow
def test_without_triton_everything_imports_and_says_what_is_missing():
    code = """
        import sys
        sys.modules["triton"] = None  # `import triton` now raises ImportError
        import importlib.util
        found = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *args: None if name == "triton" else found(name, *args)
        import torch
        from cs336_systems.configs import named_cell
        from cs336_systems.kernels import adamw, fused_model, linear_cross_entropy, rms_norm, rope, swiglu
        from cs336_systems.records import Unsupported
        from cs336_systems.workload import Workload
        try:
            Workload(named_cell("tiny", 8, kernels="fused"))
        except Unsupported as error:
            print(error)
        try:
            rms_norm.rms_norm(torch.ones(2, 3), torch.ones(3))
        except ValueError as error:
            print(error)
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("the package triton is not installed") == 2


# ---- On a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_200_steps_of_training_follow_the_plain_models_loss(precision, tmp_path):
    shape = {"d_model": 64, "d_ff": 160, "num_layers": 2, "num_heads": 4, "ctx": 64, "steps": 200}
    # At a rate of 1e-2 weights that differ by 1e-6 give losses that differ by half in 60 steps; at this one, by 1e-6.
    shape |= {"learning_rate": 2e-3, "min_learning_rate": 2e-4}
    losses = []
    for kernels in ("plain", "fused"):
        config = make_config(tmp_path, kernels=kernels, precision=precision, device="cuda", **shape)
        trainer = Trainer(config, tokens_of(config), torch.device("cuda"))
        losses.append([trainer.step(step).loss for step in range(1, 201)])
    assert losses[0][-1] < losses[0][0] / 2
    assert losses[1] == pytest.approx(losses[0], rel=1e-2 if precision == "fp32" else 5e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", ["loss", "fused"])
@pytest.mark.parametrize("compile", ["off", "blocks", "on"])
@pytest.mark.parametrize("attention", ["flash-triton", "sdpa"])
def test_a_compiled_step_in_bfloat16(kernels, compile, attention, annotations_unchecked):
    shape = {"ctx": 64, "d_model": 64, "d_ff": 160, "num_layers": 2, "num_heads": 2, "precision": "bf16"}
    fused = Workload(_cell(device="cuda", kernels=kernels, compile=compile, attention=attention, **shape))
    for _ in range(2):
        fused.step(lambda name: torch.enable_grad())
    plain = Workload(_cell(device="cuda", kernels="plain", attention=attention, **shape))
    for _ in range(2):
        plain.step(lambda name: torch.enable_grad())
    torch.testing.assert_close(fused.loss, plain.loss, rtol=1e-2, atol=1e-2)
