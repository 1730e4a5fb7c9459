"""Lion: steps by the sign of an interpolated momentum, one state tensor a parameter.

`Lion` is an ordinary torch.optim.Optimizer that runs eagerly; `LION` is the same update as formulas.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tessera.ir.builder import aten
from tessera.ir.equation import Value
from tessera.optim.rule import Form, Group, New, Rule, register, signed
from tessera.util.errors import OptionError


class Lion(torch.optim.Optimizer):
    """Decoupled weight decay; `betas` weigh the momentum in the step and in the momentum kept."""

    def __init__(
        self,
        params: object,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        maximize: bool = False,
    ) -> None:
        if lr < 0 or weight_decay < 0:
            raise OptionError(f"expected lr and weight_decay of at least 0, got {lr} and {weight_decay}")
        if not all(0 <= b < 1 for b in betas):
            raise OptionError(f"expected betas in [0, 1), got {betas}")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.grad.is_sparse:
                    raise RuntimeError("Lion does not take sparse gradients")
                grad = -p.grad if group["maximize"] else p.grad
                state = self.state[p]
                if "exp_avg" not in state:
                    state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                mean = state["exp_avg"]
                if group["weight_decay"] != 0:
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(torch.lerp(mean, grad, 1 - beta1).sign_(), alpha=-group["lr"])
                mean.lerp_(grad, 1 - beta2)
        return loss


def _form(group: Group) -> Form:
    return group["weight_decay"] != 0, group["maximize"]


def _state(form: Form) -> tuple[str, ...]:
    return ("exp_avg",)


def _numbers(group: Group, form: Form, age: int) -> dict[str, float]:
    beta1, beta2 = group["betas"]
    lr = float(group["lr"])
    return {"lr": lr, "now": 1 - beta1, "kept": 1 - beta2, "decay": 1 - lr * group["weight_decay"]}


def _update(form: Form, p: Value, g: Value, state: dict[str, Value], n: dict[str, Value]) -> New:
    decays, maximize = form
    g = signed(g, bool(maximize))
    mean = state["exp_avg"]
    if decays:
        p = p * n["decay"]
    change = g - mean
    return p - aten.sign(mean + change * n["now"]) * n["lr"], {"exp_avg": mean + change * n["kept"]}


LION = register(Rule("lion", (Lion,), _form, _state, _numbers, _update))
