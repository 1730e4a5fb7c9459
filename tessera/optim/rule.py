"""What a compiled step must know about an optimizer, in one record per optimizer.

The equations of an update are decided by a parameter group's *form* (flags such as nesterov, which momentum is zero).
Every number (learning rate, betas, bias corrections) is computed on the host at each step and reaches the program as
an input, so that a schedule may change any of them without compiling again. State lies where the optimizer itself
keeps it, under its own names.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

from tessera.ir.equation import Value
from tessera.util.errors import OptionError

Group = dict
Form = tuple[Hashable, ...]
New = tuple[Value, dict[str, Value]]  # the parameter's new value, and that of its state


@dataclass(frozen=True)
class Rule:
    """`update(form, param, grad, state, numbers)` emits the equations of one parameter, in the dtype of its arguments.

    `ages` says how `numbers` depends on a parameter's past: "step", its state's counter after this step; "fresh", 0 at
    the first step and 1 afterwards; "", not at all.
    """

    name: str
    types: tuple[type[torch.optim.Optimizer], ...]
    form: Callable[[Group], Form]
    state: Callable[[Form], tuple[str, ...]]
    numbers: Callable[[Group, Form, int], dict[str, float]]
    update: Callable[[Form, Value, Value, dict[str, Value], dict[str, Value]], New]
    ages: str = ""


_rules: dict[type, Rule] = {}


def register(rule: Rule) -> Rule:
    for kind in rule.types:
        _rules[kind] = rule
    return rule


def rule_of(optimizer: torch.optim.Optimizer) -> Rule:
    """The rule of exactly this class: a subclass may do anything in its step."""
    rule = _rules.get(type(optimizer))
    if rule is None:
        known = ", ".join(dict.fromkeys(kind.__name__ for kind in _rules))
        raise OptionError(
            f"expected one of the optimizers {known}, got {type(optimizer).__name__}; with another one, compile the "
            "model with tessera.jit and call the optimizer yourself"
        )
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            raise OptionError(f"{type(optimizer).__name__}: differentiable=True is not compiled; leave it False")
        for p in group["params"]:
            if p.is_complex():
                raise OptionError(f"{type(optimizer).__name__}: expected real parameters, got one of {p.dtype}")
    return rule


def signed(grad: Value, maximize: bool) -> Value:
    return -grad if maximize else grad
