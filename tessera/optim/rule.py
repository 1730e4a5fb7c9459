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


# What a subclass may write anew without changing what a step computes. `step` and `zero_grad` are not settled here:
# they can also be replaced on the object, so whoever relies on them looks at the functions that are really there.
_HARMLESS = ("add_param_group", "state_dict", "load_state_dict", "step", "zero_grad")


def described_by(kind: type) -> type | None:
    """The optimizer whose rule holds for this class: itself, or a base of which it changes nothing that counts."""
    for place, base in enumerate(kind.__mro__):
        if base in _rules:
            changed = {name for above in kind.__mro__[:place] for name in vars(above) if hasattr(base, name)}
            counts = [name for name in changed if name not in _HARMLESS and not name.startswith("__")]
            return None if counts else base
    return None


def rule_of(optimizer: torch.optim.Optimizer) -> Rule | None:
    """The rule of an optimizer's class, or None where none describes it."""
    known = described_by(type(optimizer))
    return _rules[known] if known is not None else None


def signed(grad: Value, maximize: bool) -> Value:
    return -grad if maximize else grad
