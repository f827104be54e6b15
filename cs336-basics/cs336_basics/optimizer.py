"""AdamW (Loshchilov & Hutter, "Decoupled Weight Decay Regularization") and the cosine learning-rate schedule.

One readable loop over the parameters; PyTorch's fused AdamW is what it is measured against.
"""

import math
from collections.abc import Callable, Iterable

import torch

Loss = torch.Tensor | float


def get_cosine_lr(
    it: int,
    max_learning_rate: float,
    min_learning_rate: float,
    warmup_iters: int,
    cosine_cycle_iters: int,
) -> float:
    """The learning rate of iteration `it` (from 0): linear warm-up, half a cosine, then the minimum.

    It rises from 0 to `max_learning_rate` at `warmup_iters`, falls to `min_learning_rate` at `cosine_cycle_iters` and
    stays there (SGDR, Loshchilov & Hutter 2017, section 3, with one cycle).

    Raises:
        ValueError: a negative count, or a cycle that ends before the warm-up does.
    """
    if it < 0 or warmup_iters < 0:
        raise ValueError(f"it is {it} and warmup_iters is {warmup_iters}; neither may be negative")
    if cosine_cycle_iters < warmup_iters:
        raise ValueError(
            f"cosine_cycle_iters is {cosine_cycle_iters}; it must be at least warmup_iters, {warmup_iters}"
        )
    if it < warmup_iters:
        return max_learning_rate * it / warmup_iters
    if it >= cosine_cycle_iters:
        return min_learning_rate
    progress = (it - warmup_iters) / (cosine_cycle_iters - warmup_iters)
    return min_learning_rate + 0.5 * (1 + math.cos(math.pi * progress)) * (max_learning_rate - min_learning_rate)


class AdamW(torch.optim.Optimizer):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, algorithm 2).

    Per parameter θ with gradient g, at its step t = 1, 2, …:

        θ ← θ − lr·λ·θ
        m ← β₁·m + (1 − β₁)·g
        v ← β₂·v + (1 − β₂)·g²
        θ ← θ − lr · (m / (1 − β₁ᵗ)) / (√(v / (1 − β₂ᵗ)) + ε)

    The state of a parameter, made at its first step, is `step` (int), `exp_avg` (m) and `exp_avg_sq` (v), the last two
    with the parameter's shape, dtype and device; a state dict can be handed to and from `torch.optim.AdamW`. A step
    allocates one temporary, of the parameter's size.

    Args:
        params: parameters, or dicts of parameter groups, as any `torch.optim.Optimizer` takes them.
        lr, betas, eps: as in the paper; each group may have its own.
        weight_decay: λ, applied to every parameter of the group.

    Raises:
        ValueError: a hyperparameter, a group's included, is outside its range.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict) -> None:
        """Add a group of parameters; what it leaves out of lr, betas, eps and weight_decay is the optimizer's own."""
        group = {**self.defaults, **param_group}
        for name in ("lr", "eps", "weight_decay"):
            if not group[name] >= 0:
                raise ValueError(f"{name} is {group[name]}; it must be at least 0")
        if len(group["betas"]) != 2 or not all(0 <= beta < 1 for beta in group["betas"]):
            raise ValueError(f"betas is {group['betas']}; it must be two numbers in [0, 1)")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Loss] | None = None) -> Loss | None:  # ty: ignore[incompatible-method-override]
        """Update every parameter that has a gradient; returns what `closure`, if given, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        for group in self.param_groups:
            lr, (beta1, beta2), eps = group["lr"], group["betas"], group["eps"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                state["step"] += 1

                if group["weight_decay"] != 0:
                    parameter.mul_(1 - lr * group["weight_decay"])
                state["exp_avg"].lerp_(parameter.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
                # Both bias corrections are folded into scalars (Kingma & Ba 2015, end of section 2).
                correction1 = 1 - beta1 ** state["step"]
                correction2_sqrt = math.sqrt(1 - beta2 ** state["step"])
                denominator = state["exp_avg_sq"].sqrt().add_(eps * correction2_sqrt)
                parameter.addcdiv_(state["exp_avg"], denominator, value=-lr * correction2_sqrt / correction1)
        return loss
