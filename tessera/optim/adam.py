"""Adam and AdamW, with and without AMSGrad, as torch.optim's.

Bias corrections depend on the step alone: they are numbers of the host, not arithmetic of every element.
"""

from __future__ import annotations

import torch

from tessera.ir.builder import aten
from tessera.ir.equation import Value
from tessera.optim.rule import Form, Group, New, Rule, register, signed


def _form(group: Group) -> Form:
    decays = "" if group["weight_decay"] == 0 else "decoupled" if group["decoupled_weight_decay"] else "coupled"
    return decays, group["amsgrad"], group["maximize"]


def _state(form: Form) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if form[1] else ("exp_avg", "exp_avg_sq")


def _numbers(group: Group, form: Form, age: int) -> dict[str, float]:
    lr, (beta1, beta2) = float(group["lr"]), map(float, group["betas"])
    decay = group["weight_decay"]
    return {
        "one_minus_beta1": 1 - beta1,
        "beta2": beta2,
        "one_minus_beta2": 1 - beta2,
        "root_correction": (1 - beta2**age) ** 0.5,
        "eps": group["eps"],
        "step_size": lr / (1 - beta1**age),
        "decay": 1 - lr * decay if form[0] == "decoupled" else decay,
    }


def _update(form: Form, p: Value, g: Value, state: dict[str, Value], n: dict[str, Value]) -> New:
    decays, amsgrad, maximize = form
    g = signed(g, bool(maximize))
    if decays == "decoupled":
        p = p * n["decay"]
    elif decays:
        g = g + p * n["decay"]
    mean = state["exp_avg"] + (g - state["exp_avg"]) * n["one_minus_beta1"]
    square = state["exp_avg_sq"] * n["beta2"] + g * g * n["one_minus_beta2"]
    new = {"exp_avg": mean, "exp_avg_sq": square}
    largest = square
    if amsgrad:
        largest = new["max_exp_avg_sq"] = aten.maximum(state["max_exp_avg_sq"], square)
    below = aten.sqrt(largest) / n["root_correction"] + n["eps"]
    return p - mean / below * n["step_size"], new


ADAM = register(Rule("adam", (torch.optim.Adam, torch.optim.AdamW), _form, _state, _numbers, _update, ages="step"))
