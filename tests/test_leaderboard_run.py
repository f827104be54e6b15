"""From the leaderboard step's arguments to its rows: the plan for memory, what the card has of it, refusals."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")

from cs336_systems import feasibility
from cs336_systems.accounting.flops import train_step_flops
from cs336_systems.attention import model_attention
from cs336_systems.benchmarking import run_leaderboard_step as run_module
from cs336_systems.benchmarking.isolation import Outcome
from cs336_systems.benchmarking.leaderboard_cells import LeaderboardRow, cell_label
from cs336_systems.benchmarking.sweep import make_row, unmeasured
from cs336_systems.configs import MODEL_SIZES, ModelConfig
from cs336_systems.records import read_results

RUN: dict[str, Any] = {
    "size": "tiny",
    "ctx": 3,
    "batch_size": 1,
    "processes": (2,),
    "implementation": ("torch",),
    "precision": "fp32",
    "memory_gib": None,
    "kept_blocks": (),
    "max_ctas": (0,),
    "high_priority": ("off",),
    "warmup": 0,
    "steps": 2,
    "seed": 0,
    "device": "cpu",
}
SMALLEST = ModelConfig(d_model=6, d_ff=5, num_layers=2, num_heads=1, vocab_size=7)  # rows that two divide unevenly


@pytest.fixture
def smallest(monkeypatch):
    monkeypatch.setitem(MODEL_SIZES, "tiny", SMALLEST)


def test_rows_of_a_run(smallest, tmp_path, capsys):
    (row,) = run_module.run_leaderboard_step("", **RUN, out=tmp_path)
    _, (stored,), _ = read_results(tmp_path / "leaderboard_step.json", LeaderboardRow)
    assert stored == row
    assert (row.status, row.implementation, row.attention, row.kernels) == ("ok", "torch", "sdpa", "plain")
    assert (row.kept_blocks, row.checkpoint_every) == (2, 0)  # no limit on a CPU
    assert row.step_min_ms <= row.step_median_ms
    assert min(row.forward_ms, row.backward_ms, row.optimizer_ms, row.synchronization_ms) > 0
    assert row.tokens_per_s == pytest.approx(2 * 3 / row.step_median_ms * 1e3)
    flops = train_step_flops(SMALLEST, 1, 3, attention="causal")
    assert row.tflops == pytest.approx(flops / row.step_median_ms * 1e3 / 1e12)
    assert row.peak_share is row.peak_memory_gib is row.predicted_gib is None
    shown = capsys.readouterr().out
    assert shown.index("0 blocks keep their input, the last 2 everything") < shown.index("tokens/s")
    assert (tmp_path / "leaderboard_step.md").exists()


@pytest.fixture
def swept(monkeypatch):
    """The cells that a run would measure, of which all but the last run out of memory."""
    cells = []

    def sweep(asked, measure, results, label, timeout_s, known):
        for cell in asked:
            cells.append(cell)
            outcome = Outcome("ok") if cell is asked[-1] else Outcome("oom", reason="CUDA out of memory")
            results.append(make_row(LeaderboardRow, cell, outcome, {}))

    monkeypatch.setattr(run_module, "run_rank_sweep", sweep)
    monkeypatch.setattr(feasibility, "machine_memory", lambda: feasibility.Memory(2**50, 2**50))  # for 8b on a CPU
    return cells


def run_for_8b(tmp_path, **changed):
    settings: dict[str, Any] = {"size": "8b", "ctx": 32_768, "precision": "bf16", "memory_gib": 75.0}
    both: dict[str, Any] = {"implementation": ("fused", "torch")}
    return run_module.run_leaderboard_step("", **(RUN | settings | both | changed), out=tmp_path)


def test_plans_are_shown_and_followed(swept, tmp_path, capsys):
    rows = run_for_8b(tmp_path)
    fused, torchs = swept
    assert 0 < torchs.kept_blocks < fused.kept_blocks < 34  # theirs keep everything, and more than the formula says
    assert fused.predicted_gib < 75 < fused.predicted_gib + 4
    assert torchs.predicted_gib is None
    assert (fused.kernels, fused.optimizer, fused.attention) == ("fused", "adamw", "flash-pytorch")
    assert (torchs.kernels, torchs.optimizer, torchs.attention) == ("plain", "adamw-fused", "sdpa")
    shown = capsys.readouterr().out
    n_checkpointed = 34 - fused.kept_blocks
    assert f"{n_checkpointed} blocks keep their input and attention's output, the last {fused.kept_blocks} all" in shown
    assert f"{34 - torchs.kept_blocks} blocks keep their input, the last {torchs.kept_blocks} everything" in shown
    assert f"| {fused.predicted_gib:.2f} |" in shown
    assert "more than" not in shown
    assert [(row.status, row.predicted_gib) for row in rows] == [("oom", fused.predicted_gib), ("ok", None)]
    assert re.search(rf"\| fused .*\| +{fused.kept_blocks} \|.* oom \[1\] ", shown)
    assert "\n- [1] CUDA out of memory" in shown
    assert cell_label(fused) == f"fused ×2, {fused.kept_blocks} of 34 blocks kept"


def test_numbers_of_blocks_take_the_plans_place(swept, tmp_path, capsys):
    run_for_8b(tmp_path, kept_blocks=(0, 20, 20), implementation=("fused",))
    assert [cell.kept_blocks for cell in swept] == [0, 20]  # 20 once, and so its plan below
    assert swept[0].predicted_gib < 75 < swept[1].predicted_gib
    assert capsys.readouterr().out.count("That is more than the 75.00 GiB") == 1


def test_the_whole_card_is_not_the_plans(swept, tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "_card", lambda device, n_cards: (139.8, "flash-hopper"))
    run_for_8b(tmp_path, memory_gib=None)
    assert swept[0].memory_gib == pytest.approx(0.95 * 139.8)
    assert swept[0].attention == "flash-hopper"


@pytest.mark.parametrize(
    ("free_gib", "n_cards", "left_gib"),
    [((139.2, 139.1), 2, 139.8), ((139.2, 9.0), 2, 10.0), ((30.5, 139.1), 1, 31.5), ((30.5, 139.1), 0, 139.8)],
)
def test_what_other_processes_hold_is_not_the_plans(monkeypatch, capsys, free_gib, n_cards, left_gib):
    memory = [(int(gib * 2**30), int(139.8 * 2**30)) for gib in free_gib]
    monkeypatch.setattr(torch.cuda, "mem_get_info", memory.__getitem__)
    card = SimpleNamespace(total_memory=memory[0][1])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    monkeypatch.setattr(model_attention, "why_not", lambda name, device: None)
    monkeypatch.setattr(run_module, "run_isolated", lambda ask, n: Outcome("ok", value=ask(n)))
    assert run_module._card("cuda", n_cards) == (left_gib, "flash-hopper")
    told = f"Other processes hold {139.8 - left_gib:.1f} of the card's 139.8 GiB" if left_gib < 139.8 else ""
    assert capsys.readouterr().err == (f"{told}: the plan leaves it.\n" if told else "")


@pytest.mark.parametrize(("rank", "n_asked"), [(0, 1), (1, 0)])
def test_of_launched_ranks_only_rank_0_asks_its_card(monkeypatch, rank, n_asked):
    asked = []
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(run_module, "_ask_card", lambda n: asked.append(n) or (139.8, 139.8, "flash-triton"))
    assert run_module._card("cuda", 2) == (139.8, "flash-triton")
    assert asked == [n_asked]


def test_a_card_that_cannot_be_asked_is_refused(monkeypatch):
    monkeypatch.setattr(run_module, "run_isolated", lambda *_: Outcome("oom", reason="CUDA out of memory"))
    with pytest.raises(ValueError, match=r"device='cuda': cannot be looked at \(CUDA out of memory\)"):
        run_module._card("cuda", 2)


def test_rows_are_kept_for_a_run_of_the_same_workload(swept, tmp_path, capsys):
    run_for_8b(tmp_path, kept_blocks=(0,))
    rows = run_for_8b(tmp_path, kept_blocks=(20,), resume=True)
    assert [row.kept_blocks for row in rows] == [0, 0, 20, 20]
    with pytest.raises(SystemExit):
        run_for_8b(tmp_path, ctx=16_384, resume=True)
    assert "its rows have ctx 32768, and this run 16384" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"size": "huge"}, "--size huge: must be one of"),
        ({"implementation": ("naive",)}, "--implementation naive: must be one of fused, torch"),
        ({"implementation": ()}, "--implementation"),
        ({"precision": "fp16"}, "--precision fp16: must be bf16 or fp32"),
        ({"processes": (0,)}, "--processes 0: must be at least 1"),
        ({"kept_blocks": (3,)}, "--kept-blocks 3: must be between 0 and 2"),
        ({"memory_gib": 0.0}, "--memory-gib 0.0: must be above 0"),
        ({"ctx": 0}, "--ctx 0: must be between 1"),
        ({"batch_size": 0}, "--batch-size 0: must be between 1"),
        ({"steps": 0}, "--steps 0: must be at least 1"),
        ({"max_ctas": (4,)}, "--max-ctas 4"),
        ({"timeout_s": 0.0}, "--timeout-s 0.0: must be between 1"),
    ],
)
def test_bad_input_is_refused(changed, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as error:
        run_module.run_leaderboard_step("", **RUN | changed, out=tmp_path)
    assert error.value.code == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_fused_kernels_need_triton(swept, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(run_module, "_why_not_fused", lambda device: "no Triton here")
    with pytest.raises(SystemExit):
        run_for_8b(tmp_path, implementation=("fused",))
    for_a_look = f"For a look: {run_module.ON_A_CPU}"
    assert capsys.readouterr().err == f"error: --implementation fused: no Triton here. {for_a_look}\n"
    left = []
    monkeypatch.setattr(
        run_module, "run_rank_sweep", lambda cells, _, file, *__, **___: left.extend(unmeasured(cells, file))
    )
    with pytest.raises(SystemExit, match="1"):  # as nothing is measured here
        run_for_8b(tmp_path)
    assert [cell.implementation for cell in left] == ["torch"]
    _, rows, _ = read_results(tmp_path / "leaderboard_step.json", LeaderboardRow)
    reason = f"implementation='fused': no Triton here. {for_a_look}"
    assert [(row.implementation, row.status, row.reason) for row in rows] == [("fused", "unsupported", reason)]
    shown = capsys.readouterr().out
    assert "The plan of torch" in shown
    assert "The plan of fused" not in shown


def test_what_does_not_fit_names_the_options_that_help(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(feasibility, "machine_memory", lambda: feasibility.Memory(24 * 2**30, 24 * 2**30))
    for kept_blocks, helps in (((3,), ", fewer --kept-blocks or a smaller --memory-gib"), ((0,), "")):
        with pytest.raises(SystemExit):
            run_for_8b(tmp_path, kept_blocks=kept_blocks, implementation=("torch",))
        error = capsys.readouterr().err
        assert error.startswith("error: --size 8b: a train-step of batch 1 and context 32768 on each of 2 ranks takes ")
        assert error.endswith(f"fewer --processes{helps}, or a GPU. For a look: {run_module.ON_A_CPU}\n")
