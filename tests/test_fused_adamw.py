"""AdamW in one launch beside the readable loop and float64 arithmetic, through Triton's interpreter on a CPU and
compiled on a GPU."""

import copy
import pickle

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")

from cs336_basics.optimizer import AdamW
from cs336_systems.kernels import adamw_launch as module
from cs336_systems.kernels.adamw import FusedAdamW
from cs336_systems.kernels.adamw_launch import TILE
from tests.attention_helpers import IGNORE_INTERPRETER

pytestmark = IGNORE_INTERPRETER

SHAPES = [(1,), (), (7, 5), (TILE,), (TILE - 1,), (2, TILE + 1), (0, 3)]
NARROW = [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def make_parameters(device, dtype=torch.float32, shapes=SHAPES):
    return [torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes]


def copies(parameters, dtype=None):
    return [p.detach().to(dtype or p.dtype, copy=True).requires_grad_() for p in parameters]


def set_gradients(*models, without=(), scale=1.0):
    """The same random gradients for each model, in its own dtype; None for the indices in `without`."""
    for index, parameters in enumerate(zip(*models, strict=True)):
        gradient = scale * torch.randn(parameters[0].shape, device=parameters[0].device)
        gradient = gradient.to(parameters[0].dtype)
        for parameter in parameters:
            parameter.grad = None if index in without else gradient.to(parameter.dtype)


def assert_equal_to_1e_6(ours, theirs):
    """Of the largest value that there is: a single one may lie next to 0."""
    for our, their in zip(ours, theirs, strict=True):
        if our.numel():
            assert (our - their).abs().max() <= 1e-6 * their.abs().max()


def in_groups(parameters):
    return [
        {"params": parameters[:3], "lr": 3e-3, "weight_decay": 0.1},
        {"params": parameters[3:], "betas": (0.8, 0.95), "eps": 1e-6},
    ]


def test_the_same_as_the_loop_over_many_steps(device):
    ours = make_parameters(device)
    theirs = copies(ours)
    our_optimizer, their_optimizer = FusedAdamW(in_groups(ours)), AdamW(in_groups(theirs))
    for step in range(16):
        set_gradients(ours, theirs, without={step % 5, 6 - step % 3}, scale=10.0 ** (step % 4 - 2))
        for group, other in zip(our_optimizer.param_groups, their_optimizer.param_groups, strict=True):
            group["lr"] = other["lr"] = 1e-3 * (1 + step)
        our_optimizer.step()
        their_optimizer.step()
    assert_equal_to_1e_6(ours, theirs)
    for our, their in zip(ours, theirs, strict=True):
        if our.numel():
            assert our_optimizer.state[our]["step"] == their_optimizer.state[their]["step"]
            for name in ("exp_avg", "exp_avg_sq"):
                assert_equal_to_1e_6([our_optimizer.state[our][name]], [their_optimizer.state[their][name]])


@pytest.mark.parametrize("state_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_narrow_parameters_are_updated_in_float32_and_rounded_once(dtype, state_dtype, device):
    ours = make_parameters(device, dtype, [(300,), (2, 40)])
    optimizer = FusedAdamW(ours, lr=0.1, weight_decay=0.1, state_dtype=state_dtype)
    eps = torch.finfo(dtype).eps
    for _ in range(3):
        exact = copies(ours, torch.float64)
        exact_optimizer = AdamW(exact, lr=0.1, weight_decay=0.1)
        for our, their in zip(ours, exact, strict=True):
            if our in optimizer.state:  # each step is judged by itself, from the same state
                saved = optimizer.state[our]
                exact_optimizer.state[their] = {
                    name: value.double() if isinstance(value, torch.Tensor) else value for name, value in saved.items()
                }
        set_gradients(ours, exact)
        optimizer.step()
        exact_optimizer.step()
        for our, their in zip(ours, exact, strict=True):
            state, exact_state = optimizer.state[our], exact_optimizer.state[their]
            pairs = [(our, their), *((state[name], exact_state[name]) for name in ("exp_avg", "exp_avg_sq"))]
            for rounded, true in pairs:
                # Half a unit in the last place, and float32's own roundings of terms that may cancel.
                unit = 0.5 * eps if rounded.dtype == dtype else 0.0
                allowed = unit * true.abs() + 1e-6 * true.abs().max() + torch.finfo(dtype).tiny
                assert ((rounded.double() - true).abs() <= allowed).all()
            assert state["exp_avg"].dtype == (state_dtype or dtype)


def test_all_tensors_of_a_dtype_are_one_launch(device, monkeypatch):
    launches = []
    original = module.launch

    def launch(*args, **options):
        launches.append(options["P_DTYPE"])
        original(*args, **options)

    monkeypatch.setattr(module, "launch", launch)
    parameters = [*make_parameters(device), *make_parameters(device, torch.float16)]
    optimizer = FusedAdamW(parameters)
    set_gradients(parameters)
    optimizer.step()
    assert len(launches) == 2


@pytest.mark.parametrize("view", [lambda x: x.T, lambda x: x[:, 1::2], lambda x: x[1:, 3:], lambda x: x[1:4]])
def test_parameters_and_gradients_of_any_strides(view, device):
    base = torch.randn(9, 12, device=device)
    untouched = base.clone()
    ours = view(base).requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    our_optimizer, their_optimizer = FusedAdamW([ours], lr=0.1), AdamW([theirs], lr=0.1)
    for step in range(3):
        gradient = torch.randn(ours.shape, device=device)
        theirs.grad = gradient
        ours.grad = gradient if step else gradient.T.contiguous().T
        our_optimizer.step()
        their_optimizer.step()
    assert_equal_to_1e_6([ours], [theirs])
    with torch.no_grad():
        view(untouched).copy_(ours)
    assert torch.equal(base, untouched)


def test_memory_that_is_not_aligned(device):
    memory = torch.zeros(4 * 20, device=device)
    ours = memory[1:18].copy_(torch.arange(17.0)).requires_grad_()
    theirs = torch.arange(17.0, device=device, requires_grad=True)
    ours.grad, theirs.grad = memory[21:38].fill_(0.5), torch.full_like(theirs, 0.5)
    FusedAdamW([ours]).step()
    AdamW([theirs]).step()
    assert_equal_to_1e_6([ours], [theirs])
    assert memory[0] == 0
    assert memory[18:21].tolist() == [0.0] * 3


def test_offsets_pass_2_to_the_31(device):
    """The end of a tensor of 2**31 elements and more, of which only that end exists."""
    p, g, m, v = (torch.rand(TILE + 100, device=device) + 0.1 for _ in range(4))
    expected = p.clone().requires_grad_()
    expected.grad = g
    optimizer = AdamW([expected])
    optimizer.state[expected] = {"step": 4, "exp_avg": m.clone(), "exp_avg_sq": v.clone()}
    optimizer.step()
    missing_tiles = 2**31 // TILE
    addresses = [*(x.data_ptr() - 4 * 2**31 for x in (p, g, m, v)), 0]
    scalars = module.packed_scalars(optimizer.param_groups[0], 5)
    row = [*addresses, 2**31 + p.numel(), -missing_tiles, *scalars]
    table = torch.tensor([row], device=device)
    float32 = module.tl.float32
    module.launch(
        module._adamw_kernel, 2, table, torch.zeros(2, dtype=torch.int32, device=device), P_DTYPE=float32,
        G_DTYPE=float32, M_DTYPE=float32, V_DTYPE=float32, W_DTYPE=None, WIDEST=32, ALIGNMENT=16,
        ROW=module._ROW, TILE=TILE,
    )  # fmt: skip
    assert_equal_to_1e_6([p, m, v], [expected, *(optimizer.state[expected][x] for x in ("exp_avg", "exp_avg_sq"))])


@pytest.mark.parametrize("dtypes", [(torch.float32, None), (torch.float16, torch.float32)], ids=str)
def test_a_state_dict_goes_there_and_back(dtypes, device):
    dtype, state_dtype = dtypes
    shapes = [(3, 4), (5,)]
    ours = make_parameters(device, dtype, shapes)
    optimizer = FusedAdamW(ours, lr=0.1, state_dtype=state_dtype)
    set_gradients(ours)
    optimizer.step()
    again = copies(ours)
    loaded = FusedAdamW(again, state_dtype=state_dtype)
    loaded.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    for our, other in zip(ours, again, strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[our][name], loaded.state[other][name])
            assert loaded.state[other][name].dtype == (state_dtype or dtype)
    set_gradients(ours, again)
    optimizer.step()
    loaded.step()
    assert all(torch.equal(our, other) for our, other in zip(ours, again, strict=True))


@pytest.mark.parametrize("other_class", [AdamW, torch.optim.AdamW])
def test_states_are_exchanged_with_the_other_adamws(other_class, device):
    ours = make_parameters(device, shapes=[(3, 4), (5,)])
    theirs = copies(ours)
    our_optimizer, their_optimizer = FusedAdamW(ours), other_class(theirs, weight_decay=0.01)
    set_gradients(ours, theirs)
    their_optimizer.step()
    with torch.no_grad():
        for our, their in zip(ours, theirs, strict=True):
            our.copy_(their)
    our_optimizer.load_state_dict(their_optimizer.state_dict())
    if other_class is AdamW:
        their_optimizer.load_state_dict(copy.deepcopy(our_optimizer.state_dict()))  # it would share the tensors
    for _ in range(2):
        set_gradients(ours, theirs)
        our_optimizer.step()
        their_optimizer.step()
    assert_equal_to_1e_6(ours, theirs)


def test_a_state_that_someone_replaced_is_the_one_that_is_used(device):
    ours = make_parameters(device, shapes=[(3, 4)])
    theirs = copies(ours)
    our_optimizer, their_optimizer = FusedAdamW(ours), AdamW(theirs)
    for name in ("exp_avg", "exp_avg_sq", "exp_avg", "exp_avg_sq"):
        set_gradients(ours, theirs)
        our_optimizer.step()
        their_optimizer.step()
        for state in (our_optimizer.state[ours[0]], their_optimizer.state[theirs[0]]):
            state[name] = 2 * state[name] if state["step"] < 3 else 2 * state[name].T.contiguous().T
    assert_equal_to_1e_6(ours, theirs)


def test_a_copied_optimizer_goes_on(device):
    parameters = make_parameters(device, shapes=[(3, 4)])
    optimizer = FusedAdamW(parameters, state_dtype=torch.float32)
    set_gradients(parameters)
    optimizer.step()
    copied, copied_parameters = copy.deepcopy((optimizer, parameters))
    set_gradients(parameters, copied_parameters)
    optimizer.step()
    copied.step()
    assert torch.equal(parameters[0], copied_parameters[0])
    assert copied.state_dtype == torch.float32


def test_a_closure_and_no_gradients_at_all(device):
    (parameter,) = make_parameters(device, shapes=[(3,)])
    optimizer = FusedAdamW([parameter])
    before = parameter.detach().clone()
    assert optimizer.step() is None
    assert torch.equal(parameter, before)
    assert not optimizer.state_dict()["state"]

    def closure():
        loss = parameter.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == before.square().sum()
    assert not torch.equal(parameter, before)


def test_autograd_notices_that_a_graph_has_old_weights(device):
    (parameter,) = make_parameters(device, shapes=[(3,)])
    optimizer = FusedAdamW([parameter])
    loss = parameter.square().sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_bad_input(device):
    parameter = torch.ones(3, dtype=torch.float64, requires_grad=True)
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ValueError, match=r"a parameter is torch\.float64; it must be float32"):
        FusedAdamW([parameter]).step()
    with pytest.raises(ValueError, match=r"state_dtype is torch\.int32; it must be float32"):
        FusedAdamW([parameter], state_dtype=torch.int32)
    with pytest.raises(ValueError, match="lr is -1"):
        FusedAdamW([parameter], lr=-1)
    with pytest.raises(ValueError, match="betas is"):
        FusedAdamW([{"params": [parameter], "betas": (0.9, 1.0)}])
    embedding = torch.nn.Embedding(4, 3, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r"a gradient is torch\.sparse_coo; it must be dense"):
        FusedAdamW(embedding.parameters()).step()


def test_a_cpu_without_the_interpreter_is_told_what_to_set(monkeypatch):
    from cs336_systems.attention import implementations

    monkeypatch.setattr(implementations, "_TRITON_IS_INTERPRETED", False)
    parameters = make_parameters("cpu", shapes=[(3,)])
    set_gradients(parameters)
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        FusedAdamW(parameters).step()


@pytest.mark.gpu
def test_a_step_on_a_gpu_allocates_nothing_and_does_not_wait():
    parameters = [torch.randn(1024, 1024, device="cuda", requires_grad=True) for _ in range(8)]
    optimizer = FusedAdamW(parameters)
    set_gradients(parameters)
    optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.max_memory_allocated() - before < 2**16  # the table
