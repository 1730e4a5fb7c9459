"""SGD with momentum, Nesterov's or plain, dampening and weight decay, as torch.optim.SGD."""

from __future__ import annotations

import torch

from tessera.ir.equation import Value
from tessera.optim.rule import Form, Group, New, Rule, register, signed


def _form(group: Group) -> Form:
    moves = group["momentum"] != 0
    return moves, moves and group["nesterov"], group["weight_decay"] != 0, group["maximize"]


def _state(form: Form) -> tuple[str, ...]:
    return ("momentum_buffer",) if form[0] else ()


def _numbers(group: Group, form: Form, age: int) -> dict[str, float]:
    # The first step copies the gradient: a buffer of zeros that takes all of it does the same.
    taken = 1.0 - group["dampening"] if age else 1.0
    return {"lr": group["lr"], "decay": group["weight_decay"], "momentum": group["momentum"], "taken": taken}


def _update(form: Form, p: Value, g: Value, state: dict[str, Value], n: dict[str, Value]) -> New:
    moves, nesterov, decays, maximize = form
    g = signed(g, bool(maximize))
    if decays:
        g = g + p * n["decay"]
    if not moves:
        return p - g * n["lr"], {}
    buffer = state["momentum_buffer"] * n["momentum"] + g * n["taken"]
    g = g + buffer * n["momentum"] if nesterov else buffer
    return p - g * n["lr"], {"momentum_buffer": buffer}


SGD = register(Rule("sgd", (torch.optim.SGD,), _form, _state, _numbers, _update, ages="fresh"))
