"""What the tests of the sharded optimizer share: optimizers to wrap, parameters, gradients, and equality."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from cs336_basics.optimizer import AdamW

# Large and small, one row, no dimension, nothing at all.
SHAPES = ((60, 51), (16, 33), (1, 7), (), (0, 4), (30, 40), (9,))
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "adamw-for-loop": (torch.optim.AdamW, {"lr": 0.01, "foreach": False}),
    "adamw-foreach": (torch.optim.AdamW, {"lr": 0.01, "foreach": True, "amsgrad": True}),
    "adamw-fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "adamw-project": (AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "sgd-momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.05}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
    "partial": (partial(torch.optim.AdamW, betas=(0.8, 0.9)), {"lr": 0.01}),
}
# PyTorch's Adafactor divides by the number of elements.
WITHOUT_GRADIENT = {"adafactor": (4,)}


def make_parameters(shapes: tuple[tuple[int, ...], ...] = SHAPES, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def set_gradients(parameters: list[nn.Parameter], step: int, missing: tuple[int, ...] = ()) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for i, parameter in enumerate(parameters):
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = gradient.to(parameter.dtype) if parameter.requires_grad and i not in missing else None


def assert_equal(theirs: list[nn.Parameter], expected: list[nn.Parameter]) -> None:
    for i, (a, b) in enumerate(zip(theirs, expected, strict=True)):
        assert torch.equal(a, b), f"parameter {i}: {(a - b).abs().max()}"


def compare_state(theirs: dict[str, Any], expected: dict[str, Any]) -> None:
    """Two state dicts agree exactly, wherever their tensors lie."""
    assert theirs["param_groups"] == expected["param_groups"]
    assert theirs["state"].keys() == expected["state"].keys()
    for number, state in expected["state"].items():
        assert theirs["state"][number].keys() == state.keys()
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(theirs["state"][number][name]), torch.as_tensor(value)), (number, name)
