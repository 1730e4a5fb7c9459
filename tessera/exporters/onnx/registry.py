"""Which function writes which operator.

A form is `fn(g, *args, **kwargs)`: a graph that is being written (`graph.py`) and the operator's arguments, bound to
its schema, with a `Ref` for every tensor. It gives the Ref of the result, or a list. It raises `NoForm` where it does
not hold; the operator is then decomposed. Forms say since which opset they hold; the latest that the file's opset has
wins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tessera.torch_internals.operators import OpOverload, op_name, overload_name

OLDEST = 17
Form = Callable[..., Any]


@dataclass(frozen=True)
class Declared:
    since: int
    fn: Form
    draws: bool = False


_FORMS: dict[str, list[Declared]] = {}


def form(names: str, since: int = OLDEST, draws: bool = False) -> Callable[[Form], Form]:
    """Declare how operators of these names are written: `add`, or `add.Tensor` for one overload alone. A call that
    draws random numbers is written by a form that says so, and by no other."""

    def declare(fn: Form) -> Form:
        for name in names.split():
            _FORMS.setdefault(name, []).append(Declared(since, fn, draws))
        return fn

    return declare


def forms_of(op: OpOverload, opset: int, of_complex: bool = False, draws: bool = False) -> list[Form]:
    """The functions that may write an operator, best first; over complex numbers those declared for them alone."""
    names = [f"complex.{name}" for name in _names(op)] if of_complex else _names(op)
    declared = [d for name in names for d in _FORMS.get(name, ()) if d.draws == draws]
    return [d.fn for d in sorted(declared, key=lambda d: -d.since) if d.since <= opset]


def has_form(op: OpOverload) -> bool:
    return any(name in _FORMS for name in _names(op))


def _names(op: OpOverload) -> tuple[str, str]:
    """`add.Tensor` and `add`; of namespaces but aten with their own."""
    name = op_name(op) if op.namespace == "aten" else f"{op.namespace}.{op_name(op)}"
    return f"{name}.{overload_name(op)}", name
