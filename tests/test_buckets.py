"""Buckets: their assignment, the order of launching, gradients as views, and gradients that travel in bfloat16."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from cs336_systems.distributed.buckets import BYTES_PER_MB, END_BUCKET_MB, FlatBucket, assign_buckets
from cs336_systems.distributed.ddp_bucketed import BucketedDDP
from cs336_systems.distributed.launch_order import LaunchOrder
from cs336_systems.distributed.process_group import RankContext
from tests.ddp_cases import SMALL_MB
from tests.distributed_helpers import CountedCollectives, batch, finish, loss_of, make_model, part, run_gloo
from tests.script_helpers import wait_until

DTYPES = (torch.float32, torch.float64, torch.bfloat16)


# Assignment


@given(
    st.lists(st.tuples(st.integers(0, 300), st.sampled_from(DTYPES)), max_size=20),
    st.integers(1, 2000),
)
def test_each_parameter_is_in_one_bucket_of_its_dtype_and_no_bucket_is_too_large(
    shapes: list, limit_bytes: int
) -> None:
    parameters = [torch.empty(size, dtype=dtype) for size, dtype in shapes]
    buckets = assign_buckets(parameters, limit_bytes / BYTES_PER_MB)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(parameters)))
    for bucket in buckets:
        assert len({parameters[index].dtype for index in bucket}) == 1
        n_bytes = sum(parameters[index].numel() * parameters[index].element_size() for index in bucket)
        assert len(bucket) == 1 or n_bytes <= limit_bytes * (1 + 1e-9)
        assert bucket == sorted(bucket, reverse=True)
    firsts = [min(bucket) for bucket in buckets]
    assert firsts == sorted(firsts, reverse=True)  # the bucket that waits for the earliest layer comes last


def test_buckets_are_filled_from_the_last_parameter_on() -> None:
    quarter_mb = [torch.empty(62_500) for _ in range(6)]  # float32: 0.25 MB each
    assert assign_buckets(quarter_mb, 0.5) == [[5, 4], [3, 2], [1, 0]]
    assert assign_buckets(quarter_mb, 0.6) == [[5, 4], [3, 2], [1, 0]]
    assert assign_buckets(quarter_mb, 1.0) == [[5, 4, 3, 2], [1, 0]]
    assert assign_buckets(quarter_mb, 0.2) == [[5], [4], [3], [2], [1], [0]]
    assert assign_buckets([], 1.0) == []


def _sizes_mb(sizes_mb: list[float], bucket_size_mb: float) -> list[float]:
    """The buckets' sizes, for float32 parameters of these sizes, last first."""
    parameters = [torch.empty(int(mb * 250_000), device="meta") for mb in reversed(sizes_mb)]
    buckets = assign_buckets(parameters, bucket_size_mb)
    return [sum(parameters[index].numel() for index in bucket) / 250_000 for bucket in buckets]


def test_large_buckets_are_small_at_both_ends() -> None:
    assert _sizes_mb([25.0] * 16, 100.0) == [25, 100, 100, 75, 50, 25, 25]
    assert _sizes_mb([5.0] * 80, 1000.0) == [25, 185, 95, 45, 25, 25]
    assert _sizes_mb([5.0] * 10, END_BUCKET_MB) == [25, 25]  # already that small: as they would be without ends
    assert _sizes_mb([64.0, 40.0, 40.0, 64.0], 100.0) == [64, 40, 40, 64]


@given(st.lists(st.floats(0.1, 80.0), min_size=1, max_size=60), st.floats(1.0, 1000.0))
def test_what_is_left_for_the_last_bucket_is_small(sizes_mb: list[float], bucket_size_mb: float) -> None:
    buckets = _sizes_mb(sizes_mb, bucket_size_mb)
    largest_parameter = max(sizes_mb)
    for end in (buckets[0], buckets[-1]):
        assert end <= max(min(END_BUCKET_MB, bucket_size_mb), largest_parameter) * (1 + 1e-6)
    for i, bucket in enumerate(buckets):  # nor does a bucket hold more than half of what was left when it was opened
        assert bucket <= max(END_BUCKET_MB, largest_parameter, sum(buckets[i:]) / 2) * (1 + 1e-6)


@pytest.mark.parametrize("bucket_size_mb", [0.0, -1.0, float("nan")])
def test_bucket_sizes_that_are_not_positive_are_refused(bucket_size_mb: float) -> None:
    with pytest.raises(ValueError, match=r"bucket_size_mb=.*: must be more than 0"):
        assign_buckets([], bucket_size_mb)


# Launch order


@given(st.permutations(range(7)), st.integers(0, 7), st.randoms(use_true_random=False))
def test_portions_are_launched_in_order_as_early_as_that_allows(
    ready_order: list[int], n_ready: int, randomness: random.Random
) -> None:
    portions: list[list[int]] = [[] for _ in range(3)]
    for parameter in range(7):
        portions[randomness.randrange(3)].append(parameter)
    portions = [portion for portion in portions if portion]
    launched: list[int] = []
    order = LaunchOrder(portions)
    for _ in range(2):  # reset makes it as new
        for n_marked, parameter in enumerate(ready_order[:n_ready], start=1):
            assert not order.is_ready(parameter)
            launched += order.mark_ready(parameter)
            assert order.is_ready(parameter)
            done = set(ready_order[:n_marked])
            complete = [set(portion) <= done for portion in portions]
            assert launched == list(range([*complete, False].index(False)))
        launched += order.rest()
        assert launched == list(range(len(portions)))
        order.reset()
        launched.clear()


# Views


def _views(context: RankContext) -> None:
    wrapped = BucketedDDP(make_model(0), SMALL_MB)
    flat = [bucket for bucket in wrapped._buckets if isinstance(bucket, FlatBucket)]
    assert len(flat) == wrapped.n_buckets == 4
    storages = {bucket.buffer.untyped_storage().data_ptr() for bucket in flat}
    assert len(storages) == 1  # one allocation, in which the buckets lie side by side
    starts = [bucket.buffer.data_ptr() for bucket in flat]
    ends = [start + bucket.buffer.nbytes for start, bucket in zip(starts, flat, strict=True)]
    assert starts[1:] == ends[:-1]
    mine = [part(tensor, context.rank, 2) for tensor in batch(0)]

    def gradients() -> dict[str, torch.Tensor]:
        return {name: p.grad for name, p in wrapped.module.named_parameters() if p.grad is not None}

    # Gradients that autograd made anew are copied once and become views.
    loss_of(wrapped, *mine).backward()
    finish(wrapped)
    first = gradients()
    assert "unused.weight" not in first
    expected = {name: gradient.clone() for name, gradient in first.items()}
    for gradient in first.values():
        assert gradient.untyped_storage().data_ptr() in storages
        assert gradient.data_ptr() % 16 == 0
    # Zeroed with either zero_grad, they stay the same views, and autograd adds to them.
    for zero in (
        lambda: wrapped.zero_grad(set_to_none=False),
        lambda: torch.optim.SGD(wrapped.parameters()).zero_grad(set_to_none=False),
    ):
        zero()
        assert all(not gradient.any() for gradient in gradients().values())
        loss_of(wrapped, *mine).backward()
        finish(wrapped)
        for name, gradient in gradients().items():
            if name in expected:
                torch.testing.assert_close(gradient, expected[name])
                assert gradient.data_ptr() == first[name].data_ptr()
            else:
                assert not gradient.any()
    # Set to None, they leave the buckets, and a parameter without a gradient stays without.
    wrapped.zero_grad()
    assert gradients() == {}
    loss_of(wrapped, *mine).backward()
    finish(wrapped)
    assert gradients().keys() == expected.keys()
    for name, gradient in gradients().items():
        torch.testing.assert_close(gradient, expected[name])


def test_gradients_are_views_into_their_buckets() -> None:
    run_gloo(_views)


def _is_freed_without_collector(context: RankContext) -> bool:
    module = make_model(0)
    gc.collect()
    gc.disable()
    wrapped = BucketedDDP(module, SMALL_MB)
    loss_of(wrapped, *(part(tensor, context.rank, 2) for tensor in batch(0))).backward()
    finish(wrapped)
    wrapped.remove_hooks()
    freed = weakref.ref(wrapped)
    del wrapped
    return freed() is None


def test_a_wrapper_that_is_dropped_gives_its_memory_back_at_once() -> None:
    """As many bytes as the parameters have: it must be in no reference cycle."""
    assert run_gloo(_is_freed_without_collector) == [True, True]


class _CountedCopies(TorchDispatchMode):
    """The sizes of what copy_ copies in the block."""

    def __init__(self) -> None:
        super().__init__()
        self.n_elements: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.n_elements.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def _copies(context: RankContext, views: bool) -> list[list[int]]:
    model = BucketedDDP(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 6)), 1.0, gradient_as_bucket_view=views)
    x = torch.ones(2, 4)
    copied = []
    for set_to_none in (True, False):
        model.zero_grad(set_to_none=set_to_none)
        with _CountedCopies() as copies:
            model(x).sum().backward()
            finish(model)
        copied.append(sorted(copies.n_elements))
        assert all(parameter.grad.data_ptr() % 16 == 0 for parameter in model.parameters())
    return copied


def test_a_gradient_is_copied_only_where_it_must_be() -> None:
    """Four parameters of 20, 5, 30 and 6 elements, and in a buffer the four flags."""
    assert run_gloo(_copies, True) == [[[4, 5, 6, 20, 30], [4]]] * 2
    assert run_gloo(_copies, False) == [[[], []]] * 2


def _no_views(context: RankContext) -> None:
    wrapped = BucketedDDP(make_model(0), SMALL_MB, gradient_as_bucket_view=False)
    loss_of(wrapped, *(part(tensor, context.rank, 2) for tensor in batch(0))).backward()
    made_by_autograd = {name: p.grad.data_ptr() for name, p in wrapped.named_parameters() if p.grad is not None}
    finish(wrapped)
    assert made_by_autograd == {name: p.grad.data_ptr() for name, p in wrapped.named_parameters() if p.grad is not None}
    gradient = weakref.ref(wrapped.module.first.weight.grad)
    wrapped.zero_grad(set_to_none=False)
    assert not wrapped.module.first.weight.grad.any()
    wrapped.zero_grad()
    # Nothing else holds on to it; gloo's thread drops what it has sent a moment after it says so.
    wait_until(lambda: gradient() is None)


def test_without_views_gradients_stay_where_autograd_put_them() -> None:
    run_gloo(_no_views)


# Communication in another dtype


def _communicate_in(context: RankContext, views: bool, comm_dtype: torch.dtype) -> list[tuple[int, int]]:
    def wrap(dtype: torch.dtype | None) -> BucketedDDP:
        return BucketedDDP(
            make_model(0, torch.float32), SMALL_MB, gradient_as_bucket_view=views, bucket_comm_dtype=dtype
        )

    rounded, exact = wrap(comm_dtype), wrap(None)
    mine = [part(tensor, context.rank, 2) for tensor in batch(0)]
    for _ in range(2):
        for model in (rounded, exact):
            model.zero_grad()
            with _SentBytes() as sent:
                loss_of(model, *mine).backward()
                finish(model)
            if model is rounded:
                sent_rounded = sent.n_bytes
        differs = False
        for parameter, reference in zip(rounded.parameters(), exact.parameters(), strict=True):
            assert (parameter.grad is None) == (reference.grad is None)
            if reference.grad is not None:
                assert parameter.grad.dtype == torch.float32
                differs |= not torch.equal(parameter.grad, reference.grad)
                torch.testing.assert_close(parameter.grad, reference.grad, rtol=2e-2, atol=2e-4)
                copies = [torch.empty_like(parameter.grad) for _ in range(2)]
                dist.all_gather(copies, parameter.grad)
                assert torch.equal(copies[0], copies[1])  # the ranks stay equal
        assert differs  # it did travel rounded
    return [(sent_rounded, sent.n_bytes)]


class _SentBytes(CountedCollectives):
    def __init__(self) -> None:
        super().__init__()
        self.n_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.n_bytes += sum(t.numel() * t.element_size() for t in args[0])
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize("views", [True, False])
@pytest.mark.parametrize("comm_dtype", [torch.bfloat16, torch.float16])
def test_gradients_can_travel_in_half_the_bytes(views: bool, comm_dtype: torch.dtype) -> None:
    for ((half, full),) in run_gloo(_communicate_in, views, comm_dtype):
        assert half == full / 2


def test_communication_dtypes_that_are_not_floating_are_refused() -> None:
    with pytest.raises(ValueError, match=r"bucket_comm_dtype=torch.int8: must be a floating dtype"):
        BucketedDDP(nn.Linear(1, 1), 1.0, bucket_comm_dtype=torch.int8)
