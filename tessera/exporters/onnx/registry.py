"""Which function writes which operator.

A form is `fn(g, *args, **kwargs)`: a graph that is being written (`graph.py`) and the operator's arguments, bound to
its schema, with a `Ref` for every tensor. It gives the Ref of the result, or a list. It raises `NoForm` where it does
not hold; the operator is then decomposed. Forms say since which opset they hold; the latest that the file's opset has
wins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tessera.torch_internals.operators import OpOverload, op_name, overload_name
from tessera.util.names import names

OLDEST = 17
Form = Callable[..., Any]
# Of PyTorch's primitives those that take what ATen's operator takes.
_SAME_IN_PRIMS = names(
    """
    abs acos acosh asin asinh atan atanh ceil cos cosh erf exp expm1 floor log log1p log2 log10 neg reciprocal round
    sign signbit sin sinh sqrt tan tanh trunc atan2 div eq ge gt le lt maximum minimum mul ne pow remainder sub where
    bitwise_and bitwise_not bitwise_or bitwise_xor isfinite hypot
    """
)


@dataclass(frozen=True)
class Declared:
    since: int
    fn: Form
    draws: bool = False


_FORMS: dict[str, list[Declared]] = {}


def form(declared: str, since: int = OLDEST, draws: bool = False) -> Callable[[Form], Form]:
    """Declare how operators of these names are written: `add`, or `add.Tensor` for one overload alone. A call that
    draws random numbers is written by a form that says so, and by no other."""

    def declare(fn: Form) -> Form:
        for name in declared.split():
            _FORMS.setdefault(name, []).append(Declared(since, fn, draws))
        return fn

    return declare


def forms_of(op: OpOverload, opset: int, of_complex: bool = False, draws: bool = False) -> list[Form]:
    """The functions that may write an operator, best first; over complex numbers those declared for them alone."""
    own = [f"complex.{name}" for name in _names(op)] if of_complex else _names(op)
    return declared_forms(own, opset, draws)


def declared_forms(called: Sequence[str], opset: int, draws: bool = False) -> list[Form]:
    """Those declared under these names, best first."""
    declared = [d for name in called for d in _FORMS.get(name, ()) if d.draws == draws]
    return [d.fn for d in sorted(declared, key=lambda d: -d.since) if d.since <= opset]


def has_form(op: OpOverload) -> bool:
    return any(name in _FORMS for name in _names(op))


def _names(op: OpOverload) -> tuple[str, str]:
    """`add.Tensor` and `add`; of namespaces but aten with their own, unless the operator is one of ATen's by the same
    name."""
    name = op_name(op)
    if op.namespace == "prims" and name in _SAME_IN_PRIMS:
        return f"{name}.default", name
    if op.namespace != "aten":
        name = f"{op.namespace}.{name}"
    return f"{name}.{overload_name(op)}", name
