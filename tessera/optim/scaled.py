"""RMSprop, Adadelta, Adamax and RAdam as torch.optim's: each element is scaled by its own past gradients."""

from __future__ import annotations

import torch

from tessera.ir.builder import aten
from tessera.ir.equation import Value
from tessera.optim.rule import Form, Group, New, Rule, register, signed

Values = dict[str, Value]


def _gradient(form: Form, p: Value, g: Value, n: Values) -> Value:
    """With its sign, and coupled weight decay; these two are last in a form."""
    decays, maximize = form[-2:]
    g = signed(g, bool(maximize))
    return g + p * n["decay"] if decays else g


def _squares(square: Value, g: Value, n: Values) -> Value:
    return square * n["kept"] + g * g * n["taken"]


# --- RMSprop ---


def _rmsprop_form(group: Group) -> Form:
    return group["momentum"] > 0, group["centered"], group["weight_decay"] != 0, group["maximize"]


def _rmsprop_state(form: Form) -> tuple[str, ...]:
    names = {"square_avg": True, "momentum_buffer": form[0], "grad_avg": form[1]}
    return tuple(name for name, there in names.items() if there)


def _rmsprop_numbers(group: Group, form: Form, age: int) -> dict[str, float]:
    alpha, lr = group["alpha"], float(group["lr"])
    return {
        "kept": alpha,
        "taken": 1 - alpha,
        "eps": group["eps"],
        "momentum": group["momentum"],
        "lr": lr,
        "decay": group["weight_decay"],
    }


def _rmsprop(form: Form, p: Value, g: Value, state: Values, n: Values) -> New:
    moves, centered, *_ = form
    g = _gradient(form, p, g, n)
    square = variance = _squares(state["square_avg"], g, n)
    new = {"square_avg": square}
    if centered:
        mean = new["grad_avg"] = state["grad_avg"] + (g - state["grad_avg"]) * n["taken"]
        variance = square - mean * mean
    scaled = g / (aten.sqrt(variance) + n["eps"])
    if moves:
        scaled = new["momentum_buffer"] = state["momentum_buffer"] * n["momentum"] + scaled
    return p - scaled * n["lr"], new


# --- Adadelta ---


def _form(group: Group) -> Form:
    return group["weight_decay"] != 0, group["maximize"]


def _adadelta_numbers(group: Group, form: Form, age: int) -> dict[str, float]:
    rho, lr = group["rho"], float(group["lr"])
    return {"kept": rho, "taken": 1 - rho, "eps": group["eps"], "lr": lr, "decay": group["weight_decay"]}


def _adadelta(form: Form, p: Value, g: Value, state: Values, n: Values) -> New:
    g = _gradient(form, p, g, n)
    square = _squares(state["square_avg"], g, n)
    delta = aten.sqrt(state["acc_delta"] + n["eps"]) / aten.sqrt(square + n["eps"]) * g
    return p - delta * n["lr"], {"square_avg": square, "acc_delta": _squares(state["acc_delta"], delta, n)}


# --- Adamax ---


def _adamax_numbers(group: Group, form: Form, age: int) -> dict[str, float]:
    beta1, beta2 = map(float, group["betas"])
    return {
        "one_minus_beta1": 1 - beta1,
        "beta2": beta2,
        "eps": group["eps"],
        "step_size": float(group["lr"]) / (1 - beta1**age),
        "decay": group["weight_decay"],
    }


def _adamax(form: Form, p: Value, g: Value, state: Values, n: Values) -> New:
    g = _gradient(form, p, g, n)
    mean = state["exp_avg"] + (g - state["exp_avg"]) * n["one_minus_beta1"]
    largest = aten.maximum(state["exp_inf"] * n["beta2"], aten.abs(g) + n["eps"])
    return p - mean / largest * n["step_size"], {"exp_avg": mean, "exp_inf": largest}


# --- RAdam ---


def _radam_form(group: Group) -> Form:
    decays = group["weight_decay"] != 0
    return decays and group["decoupled_weight_decay"], decays, group["maximize"]


def _radam_numbers(group: Group, form: Form, age: int) -> dict[str, float]:
    """The first steps are not scaled by squares, whose variance is not bounded yet: `unscaled` is 1 then."""
    lr, (beta1, beta2) = float(group["lr"]), map(float, group["betas"])
    correction, most = 1 - beta2**age, 2 / (1 - beta2) - 1
    length = most - 2 * age * beta2**age / correction
    scaled = length > 5
    share = (length - 4) * (length - 2) * most / ((most - 4) * (most - 2) * length) if scaled else 0.0
    decay = group["weight_decay"]
    return {
        "one_minus_beta1": 1 - beta1,
        "kept": beta2,
        "taken": 1 - beta2,
        "eps": group["eps"],
        "step_size": lr / (1 - beta1**age),
        "rectified": (share * correction) ** 0.5,
        "unscaled": 0.0 if scaled else 1.0,
        "decay": 1 - lr * decay if form[0] else decay,
    }


def _radam(form: Form, p: Value, g: Value, state: Values, n: Values) -> New:
    if form[0]:
        p, g = p * n["decay"], signed(g, bool(form[-1]))
    else:
        g = _gradient(form, p, g, n)
    mean = state["exp_avg"] + (g - state["exp_avg"]) * n["one_minus_beta1"]
    square = _squares(state["exp_avg_sq"], g, n)
    scale = n["rectified"] / (aten.sqrt(square) + n["eps"]) + n["unscaled"]
    return p - mean * n["step_size"] * scale, {"exp_avg": mean, "exp_avg_sq": square}


# Counters of steps are kept by all of them, also where no number depends on one.
RMSPROP = register(
    Rule("rmsprop", (torch.optim.RMSprop,), _rmsprop_form, _rmsprop_state, _rmsprop_numbers, _rmsprop, ages="step")
)
ADADELTA = register(
    Rule(
        "adadelta", (torch.optim.Adadelta,), _form, lambda form: ("square_avg", "acc_delta"), _adadelta_numbers,
        _adadelta, ages="step",
    )
)  # fmt: skip
ADAMAX = register(
    Rule(
        "adamax", (torch.optim.Adamax,), _form, lambda form: ("exp_avg", "exp_inf"), _adamax_numbers, _adamax,
        ages="step",
    )
)  # fmt: skip
RADAM = register(
    Rule(
        "radam", (torch.optim.RAdam,), _radam_form, lambda form: ("exp_avg", "exp_avg_sq"), _radam_numbers, _radam,
        ages="step",
    )
)  # fmt: skip
