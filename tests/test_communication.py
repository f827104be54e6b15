"""The line through all-reduce times, and the overhead model of data parallelism."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cs336_systems.accounting.communication import (
    LinearCost,
    all_reduce_bus_bytes,
    best_bucket_bytes,
    ddp_overhead_s,
    fit_linear_cost,
)

SIZES = [1e6, 1e7, 1e8, 1e9]


@given(st.floats(1e-7, 1e-2), st.floats(1e7, 1e12))
def test_the_fit_finds_the_line_that_made_the_times(call_cost_s: float, bandwidth: float) -> None:
    cost = LinearCost(call_cost_s, bandwidth)
    fit = fit_linear_cost(SIZES, [cost.time_s(size) for size in SIZES])
    for size in SIZES:
        assert fit.time_s(size) == pytest.approx(cost.time_s(size), rel=1e-6)
    assert fit.bandwidth_bytes_per_s == pytest.approx(bandwidth, rel=1e-3)


def test_the_fit_of_known_times_by_hand() -> None:
    """Three points that no line meets: t = 2 at 1, 2 at 2, 4 at 4. The minimum of Σ ((o + b·x − t)/t)²."""
    fit = fit_linear_cost([1, 2, 4], [2.0, 2.0, 4.0])

    def loss(o: float, b: float) -> float:
        return sum(((o + b * x - t) / t) ** 2 for x, t in [(1, 2), (2, 2), (4, 4)])

    o, b = fit.call_cost_s, 1 / fit.bandwidth_bytes_per_s
    for d_o, d_b in [(1e-3, 0), (-1e-3, 0), (0, 1e-3), (0, -1e-3), (1e-3, -1e-3)]:
        assert loss(o, b) < loss(o + d_o, b + d_b)


def test_small_sizes_count_as_much_as_large_ones() -> None:
    """1% more time at 1 GB moves the call cost by little: an unweighted fit would move it by milliseconds."""
    cost = LinearCost(30e-6, 300e9)
    times = [cost.time_s(size) for size in SIZES]
    fit = fit_linear_cost(SIZES, [*times[:-1], times[-1] * 1.01])
    assert fit.call_cost_s == pytest.approx(30e-6, rel=0.05)


def test_a_call_never_costs_less_than_nothing() -> None:
    fit = fit_linear_cost([1, 2, 4], [1.0, 2.5, 6.0])
    assert fit.call_cost_s == 0
    assert 1.0 < 1 / fit.bandwidth_bytes_per_s < 1.5


@pytest.mark.parametrize(
    ("n_bytes", "times_s", "name"),
    [
        ([1e6], [1.0], "n_bytes"),
        ([1e6, 1e6], [1.0, 2.0], "n_bytes"),
        ([1e6, 2e6], [1.0], "n_bytes"),
        ([1e6, 2e6], [1.0, 0.0], "times_s"),
        ([1e6, 2e6], [2.0, 1.0], "times_s"),
    ],
)
def test_times_that_determine_no_line_are_refused(n_bytes: list, times_s: list, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=.*: must"):
        fit_linear_cost(n_bytes, times_s)


def test_bus_bytes() -> None:
    assert all_reduce_bus_bytes(100, 1) == 0
    assert all_reduce_bus_bytes(100, 2) == 100
    assert all_reduce_bus_bytes(100, 4) == 150


def test_overhead_by_hand() -> None:
    """8 GB at 100 GB/s in 80 buckets of 50 µs a call: 1 ms for the last bucket, 4 ms for the calls."""
    assert ddp_overhead_s(8e9, 80, LinearCost(50e-6, 100e9)) == pytest.approx(1e-3 + 4e-3)


@given(st.floats(1e6, 1e11), st.floats(1e-7, 1e-2), st.floats(1e7, 1e12), st.floats(0.05, 20))
def test_no_bucket_size_beats_the_best(total: float, call_cost_s: float, bandwidth: float, factor: float) -> None:
    cost = LinearCost(call_cost_s, bandwidth)
    best = best_bucket_bytes(total, cost)
    assert best == pytest.approx(math.sqrt(call_cost_s * total * bandwidth))

    def overhead(bucket: float) -> float:  # the model in real numbers of buckets
        return total / (bandwidth * (total / bucket)) + total / bucket * call_cost_s

    assert overhead(best) <= overhead(best * factor) * (1 + 1e-9)
