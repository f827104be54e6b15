"""Hopper's own kernels, run on a CPU by a simulator (gluon_simulation.py), and launched by the project's host code:
they are right whoever works when, and the simulator reports the faults that it is there for."""

import functools

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from cs336_systems.attention import hopper_plan, triton_launch, triton_plan
from cs336_systems.attention.flash_hopper import hopper_backward, hopper_forward
from cs336_systems.attention.hopper_backward import _add as add_dq
from cs336_systems.attention.hopper_backward import _consume as backward_consume
from cs336_systems.attention.hopper_backward import _step as backward_step
from cs336_systems.attention.hopper_backward import hopper_backward_kernel
from cs336_systems.attention.hopper_bulk import add_shared_to_global, wait_for_writes
from cs336_systems.attention.hopper_dq import _consume as dq_consume
from cs336_systems.attention.hopper_dq import _step as dq_step
from cs336_systems.attention.hopper_dq import hopper_dq_kernel
from cs336_systems.attention.hopper_forward import _consume as forward_consume
from cs336_systems.attention.hopper_forward import _step as forward_step
from cs336_systems.attention.hopper_forward import hopper_forward_kernel
from cs336_systems.attention.hopper_ring import fetch, fetch_with_row, make_ring, release, send, tile_of, wait_for
from cs336_systems.attention.triton_tuning import Gpu, KernelConfig
from tests.attention_helpers import IGNORE_INTERPRETER, oracle, two_passes
from tests.gluon_machine import Fault
from tests.gluon_simulation import SimulatedKernel

pytestmark = [
    IGNORE_INTERPRETER,
    pytest.mark.skipif(
        not triton.knobs.runtime.interpret, reason="the other kernels are compiled here: test_flash_hopper.py runs all"
    ),
]

RUNS = [(seed, 1 + seed % 3) for seed in range(3)]  # and how many programs run at a time


@pytest.fixture
def simulate(monkeypatch):
    """Has Hopper's kernels simulated, in `hopper_forward` and `hopper_backward` of short problems on a CPU."""
    monkeypatch.setattr(triton_launch, "INTERPRETER", Gpu("H100", 90, 1, 232448))
    monkeypatch.setattr(triton_plan, "MEMORY_BOUND", KernelConfig(128, 16, 4, 1))  # few programs for the interpreter
    monkeypatch.setattr(triton_plan, "wants_tma", lambda problem, is_backward: True)
    monkeypatch.setitem(hopper_plan._MIN_KEYS, 64, 1)
    monkeypatch.setattr(triton_plan, "choose_backward", two_passes)
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda x, **options: empty_like(x, **options).fill_(torch.nan))

    def choose(depth=None, heads_at_once=None, **options):
        triton_launch._plans.clear()
        monkeypatch.setattr(hopper_plan, "_heads_at_once", lambda *args: heads_at_once)
        if depth is not None:
            monkeypatch.setattr(hopper_plan, "_RING_DEPTH", depth)
        for kernel in (hopper_forward_kernel, hopper_dq_kernel, hopper_backward_kernel):
            monkeypatch.setattr(hopper_plan, kernel.fn.__name__, SimulatedKernel(kernel, **options))

    yield choose
    triton_launch._plans.clear()


def draw(batch, heads, kv_heads, n_queries, n_keys, head_dim, dtype) -> list[Tensor]:
    """q, k, v, do."""
    shapes = [(heads, n_queries), (kv_heads, n_keys), (kv_heads, n_keys), (heads, n_queries)]
    return [torch.randn(batch, *shape, head_dim).to(dtype) for shape in shapes]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def check_one_pass(q, k, v, do, is_causal) -> list[Tensor]:
    """dq, dk and dv."""
    o, *expected, lse = oracle(q, k, v, do, is_causal)
    gradients = hopper_backward(do, q, k, v, o.to(q.dtype), lse.float(), is_causal, q.shape[-1] ** -0.5)
    for actual, reference in zip(gradients, expected, strict=True):  # the interpreter, which rounds dq, cuts bfloat16
        assert relative_error(actual, reference) < 0.75 * torch.finfo(q.dtype).eps
    return list(gradients)


def check(q, k, v, do, is_causal) -> tuple[Tensor, Tensor, Tensor]:
    """o, lse and dq; their errors are those of rounding P, dS and the results to the tensors' dtype."""
    scale = q.shape[-1] ** -0.5
    expected_o, expected_dq, _, _, expected_lse = oracle(q, k, v, do, is_causal)
    o, lse = hopper_forward(q, k, v, is_causal, scale)
    dq, _, _ = hopper_backward(do, q, k, v, o, lse, is_causal, scale, needs=(True, False, False))
    assert relative_error(o, expected_o) < 0.5 * torch.finfo(q.dtype).eps
    assert relative_error(dq, expected_dq) < 0.5 * torch.finfo(q.dtype).eps
    assert (lse - expected_lse).abs().max() < 1e-5
    return o, lse, dq


def check_whoever_works_when(simulate, check, inputs, is_causal, heads_at_once=(None, None, None)) -> None:
    runs = []
    for (seed, n_resident), at_once in zip(RUNS, heads_at_once, strict=True):
        simulate(heads_at_once=at_once, seed=seed, n_resident=n_resident)
        runs.append(check(*inputs, is_causal))
    for x, *others in zip(*runs, strict=True):
        assert all(torch.equal(x, y) for y in others)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1, 1, 1, 130, 517, 128), torch.bfloat16),
        ((1, 4, 1, 333, 70, 128), torch.float16),
        ((2, 2, 2, 65, 200, 80), torch.bfloat16),
        ((1, 2, 1, 200, 400, 64), torch.float16),  # three consumers
    ],
)
def test_results_are_right_and_the_same_whoever_works_when(simulate, shape, dtype, is_causal):
    check_whoever_works_when(simulate, check, draw(*shape, dtype), is_causal)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1, 1, 1, 130, 517, 128), torch.bfloat16),
        ((1, 4, 1, 333, 70, 128), torch.float16),
        ((3, 2, 1, 65, 200, 80), torch.bfloat16),
    ],
)
def test_one_pass_is_right_and_the_same_whoever_works_when(simulate, shape, dtype, is_causal):
    check_whoever_works_when(simulate, check_one_pass, draw(*shape, dtype), is_causal, (1, 2, 3))


def test_probabilities_of_keys_that_are_not_there_do_not_overflow(simulate):
    """All scores are below -128 in units of log2, so that exp2(0 - lse), what a key of zeros would have, is inf."""
    q, k, v, do = draw(1, 1, 1, 150, 200, 128, torch.float16)
    q, k = 3.5 + 0.3 * q, -3.5 + 0.3 * k
    simulate()
    o, lse = hopper_forward(q, k, v, False, 0.1)
    assert lse.max() < -128
    *_, expected_dq, _, _, _ = oracle(q, k, v, do, False, 0.1)
    dq, _, _ = hopper_backward(do, q, k, v, o, lse, False, 0.1, needs=(True, False, False))
    assert relative_error(dq, expected_dq) < 5e-3


@pytest.mark.parametrize("depth", [2, 3])
def test_any_depth_and_narrow_heads(simulate, monkeypatch, depth):
    monkeypatch.setitem(hopper_plan._ONE_PASS, 64, hopper_plan._ONE_PASS[128])  # it runs, and gains nothing
    simulate(depth=depth)
    check(*draw(1, 2, 1, 100, 450, 64, torch.float16), True)
    simulate(depth=depth, heads_at_once=1)
    check_one_pass(*draw(1, 2, 1, 300, 250, 64, torch.float16), True)


def test_a_ring_of_one_tile_is_enough_for_dq_and_not_for_the_forward_pass(simulate):
    q, k, v, do = draw(1, 1, 1, 128, 300, 128, torch.float16)
    simulate()
    o, lse, dq = check(q, k, v, do, False)
    simulate(depth=1)
    assert torch.equal(hopper_backward(do, q, k, v, o, lse, False, 128**-0.5, needs=(True, False, False))[0], dq)
    with pytest.raises(Fault, match=r"deadlock: .*_produce 3 of program 0 waits for the end of a phase"):
        hopper_forward(q, k, v, False, 128**-0.5)


# ---- What the simulator is there for ---------------------------------------------------------------------------------

UNORDERED = "and nothing puts that after what"
UNFENCED = "and there is no fence_async_shared after what"
MISCOUNTED = f"more arrivals than|deadlock|{UNORDERED}"  # whichever this run comes to first
FAULTS = {
    "slots are filled before they are empty": (
        fetch, "    mbarrier.wait(empty.index(slot), (i // DEPTH & 1) ^ 1)\n", "", MISCOUNTED,
    ),
    "the producer waits for the wrong phase": (fetch, " ^ 1)", ")", "deadlock"),
    "half of a tile's bytes are announced": (fetch, "nbytes +", "nbytes // 2 +", "deadlock: .* 0 arrivals, -.* bytes"),
    "consumers do not wait for a tile": (wait_for, "pred=is_there", "pred=False", UNORDERED),
    "consumers wait for the wrong phase": (wait_for, "(i % DEPTH), i", "(i % DEPTH), 1 + i", MISCOUNTED),
    "consumers look at another slot": (tile_of, "(i % DEPTH)", "((i + 1) % DEPTH)", UNORDERED),
    "slots are not released": (release, "count=1", "count=1, pred=i == 0", "deadlock"),
    "one consumer's release is enough": (make_ring, "count=N_CONSUMERS", "count=1", MISCOUNTED),
    "a release counts for all consumers": (release, "count=1", "count=2", MISCOUNTED),
    "the results are not fenced": (send, "    fence_async_shared()\n", "", f"a TMA store .* reads .*{UNFENCED}"),
    "the mbarriers are not fenced": (None, "    fence_async_shared()\n", "", f"a TMA load .* reads .*{UNFENCED}"),
}  # fmt: skip
ENDS_EARLY = ("    tma.store_wait(0)", "    pass", "ends, and a TMA store of .* has not been waited for")
WAIT_FOR_PV = "    acc, p, next_p, correction = warpgroup_mma_wait(0, deps=(acc, p, next_p, correction))\n"
RELEASE_V = "    release(v_ring, i - 1)\n"
WAIT_FOR_DQ, RELEASE_K = "    dq, _ = warpgroup_mma_wait(0, deps=(dq, ds))\n", "    release(k_ring, i)\n"
FORWARD_FAULTS = FAULTS | {
    "V is released while P V reads it": (forward_step, WAIT_FOR_PV + RELEASE_V, RELEASE_V + WAIT_FOR_PV, UNORDERED),
    "S is used before its wait": (forward_step, "wait(1,", "wait(2,", "an accumulator is used of one of the last 2"),
    "P's registers are not kept": (forward_step, "(acc, p, next_", "(acc, next_p, next_", "does not keep them alive"),
    "V is not waited for": (forward_step, "    wait_for(v_ring, i - 1, True)\n", "", UNORDERED),
    "a program ends while its results are read": (forward_consume, *ENDS_EARLY),
}
DQ_FAULTS = FAULTS | {
    "K is released while dQ reads it": (dq_step, WAIT_FOR_DQ + RELEASE_K, RELEASE_K + WAIT_FOR_DQ, UNORDERED),
    "dO is not waited for": (dq_consume, "    wait_for(do_ring, CONSUMER, True)\n", "", UNORDERED),
    "rows are read past their end": (dq_consume, "load(rows_ptr + rows)", "load(rows_ptr + rows * 9)", "offsets up to"),
    "a program ends while its results are read": (dq_consume, *ENDS_EARLY),
}
WAIT_FOR_EMPTY = "    mbarrier.wait(empty.index(slot), (i // DEPTH & 1) ^ 1)\n"
WAIT_FOR_DK, RELEASE_Q = "    dk, _ = warpgroup_mma_wait(0, deps=(dk, ds_operand))\n", "    release(q_ring, i)\n"
FENCE, EXCHANGE = "    fence_async_shared()\n", "    mbarrier.arrive(exchanged.index(slot), count=1)\n"
STORED = "    tma.store_wait(0)\n"
ONE_PASS_FAULTS = {
    "Q and dO are fetched before there is room": (fetch, WAIT_FOR_EMPTY, "", MISCOUNTED),
    "the rows' bytes are not announced": (
        fetch_with_row, ", rows_descriptor.block_type.nbytes", "", f"deadlock: .* 0 arrivals, -.* bytes|{UNORDERED}",
    ),
    "Q is released while dK reads it": (backward_step, WAIT_FOR_DK + RELEASE_Q, RELEASE_Q + WAIT_FOR_DK, UNORDERED),
    "dS is not fenced": (backward_step, FENCE + EXCHANGE, EXCHANGE, UNFENCED),
    "the other's dS is not waited for": (
        backward_step, "    mbarrier.wait(exchanged.index(slot), i // 2 & 1)\n", "", UNORDERED,
    ),
    "dS has one place for all steps": (backward_step, "    slot = i % 2\n", "    slot = 0\n", MISCOUNTED),
    "dQ is written while its adder reads": (
        backward_step, "    mbarrier.wait(dq_ring[2].index(0), (i & 1) ^ 1)\n", "", MISCOUNTED,
    ),
    "dQ's adder does not wait for it": (add_dq, "            wait_for(dq_ring, i, True)\n", "", UNORDERED),
    "dQ's adder gives its tile back too early": (add_dq, f"        {STORED}", "", UNORDERED),
    "additions take no turns": (add_dq, "                pass\n", "                break\n", UNORDERED),
    "a turn ends before memory is written": (add_dq, "            wait_for_writes()\n", "", f"{UNORDERED}|ends, and"),
    "turns are not released": (add_dq, 'sem="release"', 'sem="relaxed"', UNORDERED),
    "turns are not acquired": (add_dq, 'sem="acquire"', 'sem="relaxed"', UNORDERED),
    "V is not waited for": (backward_consume, "    wait_for(v_ring, CONSUMER, True)\n", "", UNORDERED),
    "dK takes dV's place while that is read": (
        backward_consume, f"dv.to(dtype), v)\n{STORED}", "dv.to(dtype), v)\n", f"{UNORDERED}|{UNFENCED}",
    ),
    "a program ends while dK is read": (
        backward_consume, f"(dk * scale).to(dtype), v)\n{STORED}", "(dk * scale).to(dtype), v)\n", "ends, and a TMA",
    ),
}  # fmt: skip


def fails(simulate, run, kernel, fault, **options) -> None:
    function, old, new, message = fault
    for seed in range(2):
        simulate(**options, seed=seed, edits=[(function or kernel, old, new)])
        with pytest.raises(Fault, match=message):
            run()


@pytest.mark.parametrize("head_dim", [128, 64])
@pytest.mark.parametrize("fault", FORWARD_FAULTS.values(), ids=FORWARD_FAULTS)
def test_a_fault_in_the_forward_pass_is_reported(simulate, fault, head_dim):
    q, k, v, _ = draw(1, 1, 1, 192, 600, head_dim, torch.float16)
    fails(simulate, lambda: hopper_forward(q, k, v, False, 0.1), hopper_forward_kernel, fault)


@pytest.mark.parametrize("fault", DQ_FAULTS.values(), ids=DQ_FAULTS)
def test_a_fault_in_dq_is_reported(simulate, fault):
    q, k, v, do = draw(1, 1, 1, 128, 320, 128, torch.float16)
    lse = torch.zeros(q.shape[:-1])
    run = functools.partial(hopper_backward, do, q, k, v, q, lse, False, 0.1, needs=(True, False, False))
    fails(simulate, run, hopper_dq_kernel, fault)


@pytest.mark.parametrize("fault", ONE_PASS_FAULTS.values(), ids=ONE_PASS_FAULTS)
def test_a_fault_in_the_one_pass_is_reported(simulate, fault):
    q, k, v, do = draw(1, 1, 1, 320, 256, 128, torch.float16)
    lse = torch.zeros(q.shape[:-1])
    run = functools.partial(hopper_backward, do, q, k, v, q, lse, False, 0.1)
    fails(simulate, run, hopper_backward_kernel, fault, heads_at_once=2)


@gluon.jit
def _add_in_turn(sum_ptr, terms_ptr, turn_ptr, last_first):
    turn = gl.program_id(0)
    if last_first:
        turn = 3 - turn
    columns = gl.arange(0, 64, layout=gl.BlockedLayout([1], [32], [4], [0]))
    terms = gl.load(terms_ptr + turn * 64 + columns)
    while gl.atomic_add(turn_ptr, 0, sem="acquire", scope="gpu") < turn:
        pass
    gl.atomic_add(sum_ptr + columns, terms, sem="relaxed", scope="gpu")
    gl.thread_barrier()
    gl.atomic_add(turn_ptr, 1, sem="release", scope="gpu")


def add_in_turn(seed, last_first=False, **options) -> Tensor:
    sums, turn = torch.zeros(64), torch.zeros(1, dtype=torch.int32)
    terms = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    SimulatedKernel(_add_in_turn, seed=seed, **options)[(4,)](sums, terms, turn, last_first)
    assert turn == 4
    return sums


def test_programs_that_take_turns_add_in_one_order():
    results = [add_in_turn(seed, n_resident=1 + seed % 4) for seed in range(8)]
    assert all(torch.equal(x, results[0]) for x in results)


@pytest.mark.parametrize(
    ("old", "new"), [("    gl.thread_barrier()\n", ""), ('sem="release"', 'sem="relaxed"'), ("pass", "break")]
)
def test_without_turns_or_their_order_the_sums_differ(old, new):
    results = [add_in_turn(seed, n_resident=4, edits=[(_add_in_turn, old, new)]) for seed in range(20)]
    assert not all(torch.equal(x, results[0]) for x in results)


@gluon.jit
def _add_tiles_in_turn(sum_desc, turn_ptr):
    turn = gl.program_id(0)
    tile = gl.allocate_shared_memory(gl.float32, [1, 64], gl.NVMMASharedLayout(0, 32, rank=2))
    tile.store(gl.full((1, 64), 1.0, gl.float32, gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0])))
    fence_async_shared()
    while gl.atomic_add(turn_ptr, 0, sem="acquire", scope="gpu") < turn:
        pass
    add_shared_to_global(sum_desc, [0, 0], tile)
    wait_for_writes()
    gl.atomic_add(turn_ptr, 1, sem="release", scope="gpu")


def add_tiles_in_turn(seed, **options) -> Tensor:
    sums, turn = torch.zeros(1, 100), torch.zeros(1, dtype=torch.int32)
    descriptor = TensorDescriptor(sums, [1, 100], [100, 1], [1, 64], gl.NVMMASharedLayout(0, 32, rank=2))
    SimulatedKernel(_add_tiles_in_turn, seed=seed, **options)[(4,)](descriptor, turn)
    return sums


def test_programs_that_take_turns_add_by_tma():
    for seed in range(8):
        sums = add_tiles_in_turn(seed, n_resident=1 + seed % 4)
        assert torch.equal(sums, torch.tensor([[4.0] * 64 + [0.0] * 36]))


TURN_FAULTS = {
    "no turns": ("pass", "break", UNORDERED),
    "no acquire": ("acquire", "relaxed", UNORDERED),
    "no release": ("release", "relaxed", UNORDERED),
    "no wait": ("    wait_for_writes()\n", "", f"{UNORDERED}|ends, and a TMA store of .* has not been waited for"),
}


@pytest.mark.parametrize(("old", "new", "message"), TURN_FAULTS.values(), ids=TURN_FAULTS)
def test_additions_by_tma_that_nothing_orders_are_reported(old, new, message):
    for seed in range(4):
        with pytest.raises(Fault, match=message):
            add_tiles_in_turn(seed, n_resident=4, edits=[(_add_tiles_in_turn, old, new)])


def test_programs_that_wait_for_one_that_cannot_start_are_a_deadlock():
    with pytest.raises(Fault, match=r"deadlock: _add_in_turn 0 of program 0 waits for memory that holds 0 to change"):
        add_in_turn(0, last_first=True, n_resident=3)
    add_in_turn(0, last_first=True, n_resident=4)


def test_what_is_not_simulated_is_an_error():
    with pytest.raises(NotImplementedError, match="histogram is not simulated"):
        add_in_turn(0, edits=[(_add_in_turn, "gl.thread_barrier()", "gl.histogram(columns, 4)")])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_drawn_shapes(simulate, seed):
    generator = torch.Generator().manual_seed(seed)

    def draw_from(*choices):
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    kv_heads, group = draw_from(1, 2), draw_from(1, 1, 3)
    lengths = [int(torch.randint(1, 700, (), generator=generator)) for _ in range(2)]
    head_dim, dtype = draw_from(128, 72), draw_from(torch.float16, torch.bfloat16)
    inputs = draw(draw_from(1, 2), kv_heads * group, kv_heads, *lengths, head_dim, dtype)
    n_resident, depth, is_causal = draw_from(1, 2, 3, 5), draw_from(2, 2, 3, 4), draw_from(False, True)
    simulate(seed=seed, n_resident=n_resident, depth=depth)
    check(*inputs, is_causal)
    simulate(heads_at_once=draw_from(1, 2, 4), seed=seed, n_resident=n_resident, depth=depth)
    check_one_pass(*inputs, is_causal)
