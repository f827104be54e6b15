"""AdamW against torch.optim.AdamW over many steps, and the learning-rate schedule."""

import copy
import itertools
import math

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from cs336_basics.optimizer import AdamW, get_cosine_lr

N_STEPS = 60


def _model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, scheduler=None) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 6, generator=generator)
        y = torch.randn(8, 3, generator=generator)
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def _assert_same(ours: nn.Module, torchs: nn.Module) -> None:
    """Equal to float32 rounding, which grows over the steps, and moved well away from the start."""
    for a, b, start in zip(ours.parameters(), torchs.parameters(), _model().parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)
        assert (a - start).abs().max() > 1e-2


def _groups(model: nn.Module) -> list[dict]:
    """Three groups: with a weight decay and lr of its own, with betas and eps of its own, with the defaults."""
    return [
        {"params": model[0].parameters(), "lr": 3e-3, "weight_decay": 0.0},
        {"params": model[2].parameters(), "betas": (0.8, 0.95), "eps": 1e-3},
        {"params": model[4].parameters()},
    ]


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"lr": 1e-2, "weight_decay": 0.3},
        {"lr": 5e-3, "betas": (0.5, 0.7), "eps": 1e-2, "weight_decay": 0.0},
        {"lr": 5e-3, "betas": (0.0, 0.9)},
    ],
)
@pytest.mark.parametrize("grouped", [False, True])
def test_matches_torch_over_many_steps(kwargs, grouped):
    ours, torchs = _model(), _model()
    kwargs = {"lr": 1e-3, "weight_decay": 0.01, **kwargs}
    _train(ours, AdamW(_groups(ours) if grouped else ours.parameters(), **kwargs), range(N_STEPS))
    _train(torchs, torch.optim.AdamW(_groups(torchs) if grouped else torchs.parameters(), **kwargs), range(N_STEPS))
    _assert_same(ours, torchs)


def test_defaults_are_torchs():
    defaults = torch.optim.AdamW(_model().parameters()).defaults
    assert AdamW(_model().parameters()).defaults == {
        name: defaults[name] for name in ("lr", "betas", "eps", "weight_decay")
    }


def test_weight_decay_is_decoupled():
    # With no gradient signal at all only the decay is left: θ·(1 − lr·λ)ᵗ, not scaled by Adam's normalisation.
    parameter = nn.Parameter(torch.tensor([2.0, -4.0]))
    optimizer = AdamW([parameter], lr=0.1, weight_decay=0.5)
    for _ in range(3):
        parameter.grad = torch.zeros(2)
        optimizer.step()
    torch.testing.assert_close(parameter.detach(), torch.tensor([2.0, -4.0]) * 0.95**3)


def test_first_step_moves_by_the_learning_rate():
    # m̂ = g and v̂ = g² at t = 1, so the step is lr·sign(g), whatever the gradient's size.
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([1e-3, -5.0, 200.0])
    AdamW([parameter], lr=0.25, weight_decay=0.0).step()
    torch.testing.assert_close(parameter.detach(), torch.tensor([-0.25, 0.25, -0.25]), rtol=1e-4, atol=0)


@pytest.mark.parametrize("make_scheduler", [
    lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=N_STEPS),
    lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda it: get_cosine_lr(it, 1.0, 0.1, warmup_iters=10, cosine_cycle_iters=50)
    ),
], ids=["CosineAnnealingLR", "LambdaLR"])  # fmt: skip
def test_learning_rate_schedulers_work(make_scheduler):
    ours, torchs = _model(), _model()
    for model, optimizer_class in ((ours, AdamW), (torchs, torch.optim.AdamW)):
        optimizer = optimizer_class(_groups(model), lr=1e-2)
        _train(model, optimizer, range(N_STEPS), make_scheduler(optimizer))
    _assert_same(ours, torchs)


@pytest.mark.parametrize(("first", "second"), [
    (AdamW, AdamW), (AdamW, torch.optim.AdamW), (torch.optim.AdamW, AdamW),
], ids=["ours to ours", "ours to torch's", "torch's to ours"])  # fmt: skip
def test_training_goes_on_from_a_state_dict(first, second, tmp_path):
    whole, resumed = _model(), _model()
    _train(whole, AdamW(whole.parameters(), lr=1e-2), range(40))
    optimizer = first(resumed.parameters(), lr=1e-2)
    _train(resumed, optimizer, range(20))
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    # The learning rate given here is not the one to go on with.
    optimizer = second(resumed.parameters(), lr=1.0)
    optimizer.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    _train(resumed, optimizer, range(20, 40))
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)


def test_parameters_without_gradient_are_skipped_and_state_is_lazy():
    used, unused, late = (nn.Parameter(torch.ones(2)) for _ in range(3))
    optimizer = AdamW([used, unused, late], lr=0.1)
    assert len(optimizer.state) == 0
    used.grad = torch.ones(2)
    optimizer.step()
    late.grad = torch.ones(2)
    optimizer.step()
    assert torch.equal(unused, torch.ones(2))
    assert unused not in optimizer.state
    assert optimizer.state[used]["step"] == 2
    assert optimizer.state[late]["step"] == 1, "a parameter's own steps are counted, for its bias correction"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_state_has_the_parameters_shape_and_dtype(dtype):
    parameter = nn.Parameter(torch.ones(2, 3, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    optimizer = AdamW([parameter])
    optimizer.step()
    for name in ("exp_avg", "exp_avg_sq"):
        assert optimizer.state[parameter][name].dtype == dtype
        assert optimizer.state[parameter][name].shape == (2, 3)


def test_closure_is_called_with_gradients_on_and_its_loss_returned():
    parameter = nn.Parameter(torch.tensor([3.0]))
    optimizer = AdamW([parameter], lr=0.5, weight_decay=0.0)

    def closure():
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 9.0
    assert parameter.item() == pytest.approx(2.5)
    assert optimizer.step() is None


class _NewMemory(TorchFunctionMode):
    """Counts the bytes of every new tensor that an operation returns."""

    n_bytes = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        old = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        is_attribute = getattr(func, "__name__", None) == "__get__"
        if isinstance(result, torch.Tensor) and not is_attribute and result.untyped_storage().data_ptr() not in old:
            self.n_bytes += result.untyped_storage().nbytes()
        return result


def test_a_step_makes_one_temporary_a_parameter():
    parameter = nn.Parameter(torch.randn(1000))
    parameter.grad = torch.randn(1000)
    optimizer = AdamW([parameter])
    with _NewMemory() as first:
        optimizer.step()
    with _NewMemory() as second:
        optimizer.step()
    assert first.n_bytes == 3 * parameter.nbytes, "the two moments and the temporary"
    assert second.n_bytes == parameter.nbytes


class _NoWaiting(TorchFunctionMode):
    """Fails on what makes the host wait for a tensor's value."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        reads = (torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__bool__, torch.Tensor.__float__)
        assert func not in reads, "the host reads a tensor's value"
        return func(*args, **(kwargs or {}))


def test_a_step_does_not_make_the_host_wait():
    parameter = nn.Parameter(torch.randn(4))
    parameter.grad = torch.randn(4)
    optimizer = AdamW([parameter])
    with _NoWaiting():
        optimizer.step()
        optimizer.step()


@pytest.mark.gpu
def test_steps_on_a_gpu_match_torch_and_do_not_wait_for_it():
    ours, torchs = _model().cuda(), _model().cuda()
    for model, optimizer in ((ours, AdamW(ours.parameters())), (torchs, torch.optim.AdamW(torchs.parameters()))):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(3)).cuda()
        for _ in range(N_STEPS):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            torch.cuda.set_sync_debug_mode("error")
            try:
                optimizer.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
    for a, b in zip(ours.parameters(), torchs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", -1e-3),
        ("lr", float("nan")),
        ("eps", -1e-8),
        ("weight_decay", -0.1),
        ("betas", (1.0, 0.999)),
        ("betas", (0.9, -0.1)),
        ("betas", (0.9, 1.0)),
    ],
)
def test_hyperparameters_out_of_range_are_rejected(name, value):
    parameter = nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match=f"{name} is "):
        AdamW([parameter], **{name: value})
    with pytest.raises(ValueError, match=f"{name} is "):
        AdamW([{"params": [parameter], name: value}])


def test_an_optimizer_can_be_copied():
    model = _model()
    optimizer = AdamW(model.parameters())
    _train(model, optimizer, range(2))
    assert copy.deepcopy(optimizer).state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()


def test_cosine_lr_rises_falls_and_stays():
    schedule = [get_cosine_lr(it, 1.0, 0.1, warmup_iters=4, cosine_cycle_iters=12) for it in range(16)]
    assert schedule[:5] == pytest.approx([0.0, 0.25, 0.5, 0.75, 1.0])
    assert schedule[8] == pytest.approx(0.55), "half-way down"
    assert schedule[6] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    assert schedule[12:] == [0.1] * 4
    assert all(a > b for a, b in itertools.pairwise(schedule[4:13]))


def test_cosine_lr_matches_torchs_schedulers():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30, eta_min=0.2)
    for it in range(30):
        ours = get_cosine_lr(5 + it, 2.0, 0.2, warmup_iters=5, cosine_cycle_iters=35)
        assert ours == pytest.approx(cosine.get_last_lr()[0])
        optimizer.step()
        cosine.step()


@pytest.mark.parametrize(("warmup", "cycle", "expected"), [(0, 10, 1.0), (0, 0, 0.1), (1, 1, 0.0)])
def test_cosine_lr_starts_right_without_warm_up_or_cycle(warmup, cycle, expected):
    assert get_cosine_lr(0, 1.0, 0.1, warmup, cycle) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((-1, 1.0, 0.1, 5, 10), "it is -1"), ((0, 1.0, 0.1, -2, 10), "warmup_iters is -2"), ((0, 1.0, 0.1, 5, 4), "is 4")],
)
def test_cosine_lr_rejects_what_makes_no_schedule(arguments, message):
    with pytest.raises(ValueError, match=message):
        get_cosine_lr(*arguments)
