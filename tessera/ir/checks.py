"""What a program claims about numbers known only when it runs, checked when it runs.

In: a condition over the symbols of a program that is being recorded, as `torch._check` or an operator's own rule gives
it, or a shape environment that has taken such conditions for granted. Out: equations `tessera.check(text, message,
u0=(value, dim), …)`, which raise where the text does not hold. The text is kept, not the symbolic condition: an
environment that relies on a condition says of it ever after that it is true.
"""

from __future__ import annotations

import sympy
import torch

from tessera.ir.builder import Builder
from tessera.ir.check import CHECK
from tessera.ir.equation import Equation, Value
from tessera.ir.expression import text_of


def record_check(builder: Builder, condition: object, message: str, kind: str = "RuntimeError") -> None:
    """Note a condition of the program at hand, where it says something that is not known yet."""
    if isinstance(condition, torch.SymBool):
        _record(builder, condition.node.expr, message, kind)


def record_assumptions(builder: Builder) -> None:
    """Check what recording took for granted (this size is that one, a number is no less than 0), each right after the
    numbers it is about are known: what comes later was recorded for numbers of which it holds."""
    env = builder.mode.shape_env
    if env is None:
        return
    for assumed in [a for some in env.deferred_runtime_asserts.values() for a in some]:
        if _record(builder, assumed.expr, f"expected {assumed.expr}, on which the program relies"):
            _put_early(builder.equations)


def _record(builder: Builder, expr: sympy.Basic, message: str, kind: str = "RuntimeError") -> bool:
    names = sorted(str(s) for s in expr.free_symbols)
    if not names or any(n not in builder.symbols for n in names):
        return False  # known already, or about numbers of another recording
    text = text_of(expr)
    if any(e.op is CHECK and e.args[0] == text for e in builder.equations):
        return False
    builder.record(CHECK, (text, message, kind), {n: builder.symbols[n] for n in names}, [])
    return True


def _put_early(equations: list[Equation]) -> None:
    """Move the last equation to right after the last that it reads."""
    last = equations.pop()
    read = set(last.inputs())
    places = [i for i, e in enumerate(equations) if any(isinstance(v, Value) and v in read for v in e.outputs)]
    equations.insert(max(places, default=-1) + 1, last)
