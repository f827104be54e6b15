"""Fused kernels by name, `--kernels fused`: a workload's steps, training on one rank and several, rows, refusals."""

import dataclasses
import json
import subprocess
import sys
import textwrap

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")

from cs336_systems.attention import implementations
from cs336_systems.benchmarking.model_benchmark import BenchmarkRow, cell_label, table_columns
from cs336_systems.configs import named_cell
from cs336_systems.kernels.adamw import FusedAdamW
from cs336_systems.kernels.fused_model import FusedTransformerLM
from cs336_systems.records import Unsupported, read_results
from cs336_systems.training.loop import train_rank
from cs336_systems.training.run_checks import check_run
from cs336_systems.training.trainer import Trainer
from cs336_systems.workload import Workload
from tests.attention_helpers import IGNORE_INTERPRETER
from tests.distributed_helpers import run_gloo
from tests.example_rows import RUN
from tests.training_helpers import lines, make_config, tokens_of, train

pytestmark = IGNORE_INTERPRETER


def _cell(**parameters):
    shape = {"d_model": 24, "d_ff": 40, "num_heads": 2, "num_layers": 1, "vocab_size": 53, "batch_size": 2}
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
