"""Derivatives that functions bring along: does a row's gradient depend on other rows?

In: an equation of a function with a derivative of its own, over a microbatch and over the whole batch. Out: whether its
backward does for each row alone what it does for the whole batch. Gradients of what has no rows, such as a weight, are
sums over rows; those of all microbatches are added up.
"""

from __future__ import annotations

from tessera.ir.equation import Equation, Value
from tessera.ir.schema import is_view
from tessera.ir.trace import Trace
from tessera.ops.custom import AUTOGRAD_FUNCTION, CUSTOM_VJP, backward_of
from tessera.ops.factors.rule import tensors
from tessera.transforms.pipelined.rows import How, Rows, inside, meet
from tessera.transforms.subtrace import floats
from tessera.util.names import names

LINEAR = names("neg _to_copy clone add sub mul div")  # of one operand alone


def pulled_apart(eqn: Equation, whole: Equation, rows: Rows) -> bool:
    """True, too, of what brings no derivative along."""
    if eqn.op not in (AUTOGRAD_FUNCTION, CUSTOM_VJP):
        return True
    part, over_all = _backward(eqn), _backward(whole)
    return meet(part, over_all, rows) and _apart(part, over_all, rows)


def _backward(eqn: Equation) -> Trace:
    if eqn.op is CUSTOM_VJP:
        return eqn.args[2]  # type: ignore[return-value]
    results, _, bwd, _, _, *operands = eqn.args
    needs = tuple(map(floats, operands))
    return backward_of(bwd, needs, (True,) * results)  # type: ignore[arg-type, operator, return-value]


def _apart(part: Trace, whole: Trace, rows: Rows) -> bool:
    summed: set[Value] = set()
    for a, b in zip(part.equations, whole.equations, strict=True):
        way = inside(a, b, rows)
        sums = [v for v in tensors(a) if v in summed]
        if way == How.SUM or (sums and way == How.APART and _linear(a)):
            summed.update(a.results())
        elif sums or way != How.APART:
            return False
    return True


def _linear(eqn: Equation) -> bool:
    return is_view(eqn.op) or (eqn.opname in LINEAR and len(tensors(eqn)) == 1)
