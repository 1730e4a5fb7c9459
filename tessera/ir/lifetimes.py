"""How long the values of a program live."""

from __future__ import annotations

from tessera.ir.equation import Value, values_in
from tessera.ir.trace import Trace


def lifetimes(trace: Trace, inputs: bool = False) -> dict[int, list[Value]]:
    """Equation index -> the values that nothing reads after it; those of inputs too where asked."""
    kept = {*values_in(trace.outputs), *trace.mutations, *trace.mutations.values()}
    last: dict[Value, int] = {}
    for index, eqn in enumerate(trace.equations):
        for v in eqn.outputs:
            if v is not None:
                last[v] = index
        for v in eqn.inputs():
            last[v] = index
    own = {v for eqn in trace.equations for v in eqn.outputs}
    if inputs:
        own.update(trace.inputs)
    dead: dict[int, list[Value]] = {}
    for v, index in last.items():
        if v in own and v not in kept:
            dead.setdefault(index, []).append(v)
    return dead
