"""The opt-in measurement of kernel configurations: what it tries, what it remembers, when it leaves things alone."""

import json
from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")

from triton.runtime.errors import OutOfResources

from cs336_systems.attention import triton_autotune
from cs336_systems.attention.triton_tuning import Gpu, KernelConfig, Problem

DEFAULT = KernelConfig(64, 64, 4, 2)


def problem(arch: int = 80, head_dim: int = 64, shared_kib: int = 163, **changes) -> Problem:
    settings = {
        "batch": 1, "heads": 1, "group": 1, "n_queries": 1024, "n_keys": 1024, "head_dim": head_dim,
        "block_d": head_dim, "dtype": torch.bfloat16, "is_causal": True, "scale": 0.125, "dropout_p": 0.0,
        "dropout_scale": 1.0, "precision": "ieee", "gpu": Gpu("a card", arch, 108, shared_kib * 1024),
    }  # fmt: skip
    return Problem(**{**settings, **changes})


@dataclass
class Clock:
    """Times a configuration by a made rule, and counts how often it is asked."""

    asked: int = 0

    def __call__(self, config: KernelConfig) -> float:
        self.asked += 1
        if config.block_own == 128:
            raise OutOfResources(1, 0, "shared memory")
        return abs(config.block_own - 32) + config.num_stages


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "cs336_systems" / "attention.json"


def test_it_is_off_unless_asked_for(monkeypatch):
    monkeypatch.delenv("CS336_AUTOTUNE", raising=False)
    assert not triton_autotune.is_enabled(problem())
    monkeypatch.setenv("CS336_AUTOTUNE", "1")
    assert triton_autotune.is_enabled(problem())
    assert not triton_autotune.is_enabled(problem(arch=0))  # the interpreter has nothing to tune


def test_the_fastest_that_runs_is_chosen_and_remembered(cache):
    clock = Clock()
    best = triton_autotune.tuned_config("forward", problem(), DEFAULT, clock)
    assert (best.block_own, best.num_stages) == (32, 1)
    assert clock.asked > 20
    assert list(json.loads(cache.read_text()).values()) == [list(best)]
    later = Clock()
    assert triton_autotune.tuned_config("forward", problem(), DEFAULT, later) == best
    assert later.asked == 0


@pytest.mark.parametrize(
    "other",
    [{"is_causal": False}, {"dtype": torch.float16}, {"head_dim": 32}, {"dropout_p": 0.1}, {"precision": "fp16x3"}],
)
def test_another_kind_of_problem_is_measured_by_itself(other):
    triton_autotune.tuned_config("forward", problem(), DEFAULT, Clock())
    clock = Clock()
    triton_autotune.tuned_config("forward", problem(**other), DEFAULT, clock)
    assert clock.asked > 0


def test_lengths_share_what_was_measured():
    triton_autotune.tuned_config("dq", problem(), DEFAULT, Clock())
    clock = Clock()
    triton_autotune.tuned_config("dq", problem(n_queries=77, n_keys=3000), DEFAULT, clock)
    assert clock.asked == 0


@pytest.mark.parametrize("name", ["forward", "dkdv", "dq", "fused"])
def test_candidates_fit_the_cards_shared_memory(name):
    small, large = (set(triton_autotune.candidates(name, problem(shared_kib=kib), False)) for kib in (48, 227))
    assert small < large
    own_tiles = 1 if name == "forward" else 2
    for config in small:
        stages = 2 * config.num_stages * config.block_step
        assert (own_tiles * config.block_own + stages) * 64 * 2 <= 48 * 1024


def test_ranks_of_a_job_do_not_measure(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    clock = Clock()
    assert triton_autotune.tuned_config("forward", problem(), DEFAULT, clock) == DEFAULT
    assert clock.asked == 0


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", "null"])
def test_a_spoilt_cache_is_measured_anew(cache, content):
    cache.parent.mkdir(parents=True)
    cache.write_text(content)
    best = triton_autotune.tuned_config("forward", problem(), DEFAULT, Clock())
    assert list(json.loads(cache.read_text()).values()) == [list(best)]
