"""Which sharding rule an equation has."""

from __future__ import annotations

from tessera.ir.equation import Equation
from tessera.ir.schema import draws, is_pointwise
from tessera.ops.factors.pointwise import broadcast
from tessera.ops.factors.rule import FACTORS, Factors, names_of


def factors_of(eqn: Equation) -> Factors | None:
    """The declared rule, or that of elementwise operators; None where there is none, or it does not speak of such
    arguments."""
    if draws(eqn.op, eqn.args, eqn.kwargs):  # every rank draws the same, whole
        return None
    for name in names_of(eqn):
        if name in FACTORS:
            return FACTORS[name](eqn)
    return broadcast(eqn) if is_pointwise(eqn.op) else None
