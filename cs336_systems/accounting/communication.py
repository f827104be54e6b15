"""What communication costs: the line through measured all-reduces, and the overhead of data parallelism that follows.

Handout, section on DDP with bucketed gradients. Pure arithmetic, in seconds and bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LinearCost:
    """The cost of a collective of s bytes: call_cost_s + s / bandwidth_bytes_per_s (o and w in the handout)."""

    call_cost_s: float
    bandwidth_bytes_per_s: float

    def time_s(self, n_bytes: float) -> float:
        """Seconds for `n_bytes`."""
        return self.call_cost_s + n_bytes / self.bandwidth_bytes_per_s


def fit_linear_cost(n_bytes: Sequence[float], times_s: Sequence[float]) -> LinearCost:
    """The `LinearCost` nearest to measured times, by least squares of the relative errors.

    Relative, because the sizes span three orders of magnitude: absolute errors of the largest would drown the call
    cost, which shows in the smallest.

    Raises:
        ValueError: fewer than two different sizes, a time that is not positive, or times that do not grow with size.
    """
    if len(n_bytes) != len(times_s) or len(set(n_bytes)) < 2:
        raise ValueError(f"n_bytes={list(n_bytes)}: must be at least two different sizes, one for each of times_s")
    if min(times_s) <= 0:
        raise ValueError(f"times_s={list(times_s)}: must be more than 0")
    # Minimise Σ ((o + b·x − t) / t)², that is the line through (x, t) with weights 1/t²; b = 1/w.
    weights = [1 / time**2 for time in times_s]
    total = sum(weights)
    mean_x = sum(weight * x for weight, x in zip(weights, n_bytes, strict=True)) / total
    mean_t = sum(weight * t for weight, t in zip(weights, times_s, strict=True)) / total
    covariance = sum(w * (x - mean_x) * (t - mean_t) for w, x, t in zip(weights, n_bytes, times_s, strict=True))
    slope = covariance / sum(w * (x - mean_x) ** 2 for w, x in zip(weights, n_bytes, strict=True))
    call_cost = mean_t - slope * mean_x
    if call_cost < 0:  # a call costs no less than nothing: the best line through the origin
        call_cost = 0.0
        ratios = [x / t for x, t in zip(n_bytes, times_s, strict=True)]
        slope = sum(ratios) / sum(ratio**2 for ratio in ratios)
    if slope <= 0:
        raise ValueError(f"times_s={list(times_s)}: must grow with n_bytes={list(n_bytes)}")
    return LinearCost(call_cost, 1 / slope)


def all_reduce_bus_bytes(n_bytes: float, world_size: int) -> float:
    """Bytes that each rank sends, and receives, in a ring all-reduce of `n_bytes`: 2(n − 1)/n times as many.

    A reduce-scatter and an all-gather move (n − 1)/n of the buffer each. Divided by the time it is the bus bandwidth,
    which can be set beside a link's, whatever the number of ranks; `n_bytes` over time is the algorithm bandwidth.
    """
    return n_bytes * 2 * (world_size - 1) / world_size


def ddp_overhead_s(total_bytes: float, n_buckets: int, cost: LinearCost) -> float:
    """By how much communication makes a step of bucketed data parallelism longer: s/(w·n) + n·o seconds.

    The model assumes that computing a bucket's gradients takes as long as communicating it. Then every bucket but the
    last travels while the next one is computed; the last, s/(w·n), is exposed, and each call costs o.

    Args:
        total_bytes: s, all gradients.
        n_buckets: n.
        cost: o and w.
    """
    return total_bytes / (cost.bandwidth_bytes_per_s * n_buckets) + n_buckets * cost.call_cost_s


def best_bucket_bytes(total_bytes: float, cost: LinearCost) -> float:
    """The bucket size at which `ddp_overhead_s` is least: sqrt(o·s·w), or 0 if calls cost nothing.

    With b = s/n bytes a bucket the overhead is b/w + s·o/b, whose derivative 1/w − s·o/b² is zero there.
    """
    return math.sqrt(cost.call_cost_s * total_bytes * cost.bandwidth_bytes_per_s)
