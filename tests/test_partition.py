"""The division of parameters over ranks, by arithmetic: every row once, in balance, and portions of bounded size."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cs336_systems.accounting.flops import num_parameters
from cs336_systems.configs import MODEL_SIZES
from cs336_systems.distributed.partition import Slice, divide, fill_buckets, whole

KIB = 2**10


def n_bytes(slices: list[Slice]) -> int:
    return sum(piece.n_bytes for piece in slices)


def model_parameters(size: str) -> list[Slice]:
    config = MODEL_SIZES[size]
    d, d_ff, vocabulary = config.d_model, config.d_ff, (config.vocab_size, config.d_model)
    block = [(d, d)] * 4 + [(d_ff, d), (d, d_ff), (d_ff, d), (d,), (d,)]
    shapes = [vocabulary, *(block * config.num_layers), (d,), vocabulary]
    assert sum(math.prod(shape) for shape in shapes) == num_parameters(config)
    return [whole(i, shape, 4) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("size", ["small", "medium", "large", "xl", "2.7b", "10b"])
def test_named_sizes_balance(size: str) -> None:
    """An elementwise optimizer's state is in proportion to its rank's parameter bytes."""
    parameters = model_parameters(size)
    for world_size in range(2, 9):
        loads = [n_bytes(slices) for slices in divide(parameters, [0] * world_size, can_cut=True)]
        assert sum(loads) == n_bytes(parameters)
        assert max(loads) / (sum(loads) / world_size) <= 1.02
        # Whole parameters balance nearly as well, but not for the smallest model on the most ranks.
        loads = [n_bytes(slices) for slices in divide(parameters, [0] * world_size, can_cut=False)]
        assert max(loads) / (sum(loads) / world_size) <= 1.03


def test_worked_example() -> None:
    """Sizes 5, 4, 3, 3 over two ranks: 5 to the first, 4 to the second, 3 to the second (4 < 5), 3 to the first."""
    parameters = [whole(i, (size,), 4) for i, size in enumerate((3, 5, 3, 4))]
    assert divide(parameters, [0, 0], can_cut=True) == [
        [Slice(1, 0, 5, 20), Slice(2, 0, 3, 12)],
        [Slice(3, 0, 4, 16), Slice(0, 0, 3, 12)],
    ]
    # What was divided before counts.
    assert [n_bytes(slices) for slices in divide(parameters, [1000, 0], can_cut=False)] == [0, 60]


def test_cuts_by_rows() -> None:
    """One parameter of 300 rows of 1 KiB, three ranks: a hundred rows each."""
    owned = divide([whole(0, (300, 256), 4)], [0, 0, 0], can_cut=True)
    assert sorted((slices[0].start, slices[0].stop) for slices in owned) == [(0, 100), (100, 200), (200, 300)]
    assert [n_bytes(slices) for slices in owned] == [100 * KIB] * 3
    assert divide([whole(0, (300, 256), 4)], [0, 0, 0], can_cut=False)[1:] == [[], []]
    # One row cannot be cut, and what is small is not worth it.
    assert divide([whole(0, (1, 10**6), 4)], [0, 0], can_cut=True)[1] == []
    assert divide([whole(0, (100, 10), 4)], [0, 0], can_cut=True)[1] == []


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.tuples(st.integers(0, 400), st.integers(1, 400)), max_size=12),
    st.integers(1, 9),
    st.booleans(),
    st.data(),
)
def test_every_row_once(shapes: list[tuple[int, int]], world_size: int, can_cut: bool, data: st.DataObject) -> None:
    loads = data.draw(st.lists(st.integers(0, 10**6), min_size=world_size, max_size=world_size))
    parameters = [whole(i, shape, 4) for i, shape in enumerate(shapes)]
    owned = divide(parameters, loads, can_cut)
    pieces = sorted(piece for slices in owned for piece in slices)
    if not can_cut:
        assert pieces == parameters
    for parameter, shape in zip(parameters, shapes, strict=True):
        mine = [piece for piece in pieces if piece.parameter == parameter.parameter]
        assert mine[0].start == 0
        assert mine[-1].stop == shape[0]
        assert all(a.stop == b.start for a, b in itertools.pairwise(mine))
        assert all(piece.n_bytes == piece.n_rows * shape[1] * 4 for piece in mine)
    after = [load + n_bytes(slices) for load, slices in zip(loads, owned, strict=True)]
    assert max(after) <= max(max(loads), sum(after) / world_size + max((p.n_bytes for p in parameters), default=0))
    limit = data.draw(st.integers(1, 10**6))
    buckets = fill_buckets(owned, limit)
    for rank, slices in enumerate(owned):
        assert [piece for bucket in buckets for piece in bucket[rank]] == slices
    assert all(n_bytes(part) <= limit or len(part) == 1 for bucket in buckets for part in bucket)


def test_nobody_to_divide_among() -> None:
    with pytest.raises(ValueError, match=r"loads_bytes=\[\]"):
        divide([], [], can_cut=True)
