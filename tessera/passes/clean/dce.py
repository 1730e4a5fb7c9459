"""Dead code elimination.

In: any trace. Out: the same trace without equations, constants and symbols that nothing needs. Kept: what
outputs and mutations depend on, operators with effects (random ones draw from the generator, assertions
may fail, writes write), and equations whose results bind a size that is mentioned later, or that a type has: taken
apart, an operator mentions the sizes of what it gives.
"""

from __future__ import annotations

from collections.abc import Iterable

from tessera.ir.equation import Arg, Value, symbols_in, values_in
from tessera.ir.schema import has_effect
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType


def dce(trace: Trace) -> Trace:
    """Drop every equation whose results nothing reads."""
    live: set[Value] = set(values_in(trace.outputs))
    live.update(trace.mutations.values())
    binds, given = trace.symbols, {*trace.inputs}
    late = {s: v for s, (v, _) in trace.symbols.items() if v not in given}

    def need(read: Iterable[Value], tree: Arg) -> None:
        live.update(read)
        if late:
            live.update(late[s] for s in mentioned(tree) if s in late)

    need((), trace.outputs)
    kept = []
    for eqn in reversed(trace.equations):
        if any(v in live for v in eqn.outputs) or has_effect(eqn):
            need(eqn.inputs(), (eqn.args, eqn.kwargs))
            if late:
                need((), tuple(v.shape for v in eqn.results() if isinstance(v.type, TensorType)))
            kept.append(eqn)
    constants = {v: t for v, t in trace.constants.items() if v in live}
    if len(kept) == len(trace.equations) and len(constants) == len(trace.constants):
        return trace
    there = {*trace.inputs, *constants, *(v for eqn in kept for v in eqn.outputs)}
    symbols = {s: where for s, where in binds.items() if where[0] in there}
    return trace.with_(equations=tuple(reversed(kept)), constants=constants, symbols=symbols)


def mentioned(tree: Arg) -> set[str]:
    """Symbols in a structure of arguments, those of its sub-traces among them."""
    symbols = symbols_in(tree)
    for item in tree if isinstance(tree, (tuple, list)) else (tree,):
        if isinstance(item, Trace):
            inner = (*((e.args, e.kwargs) for e in item.equations), item.outputs)
            symbols |= mentioned(inner) - set(item.symbols)
        elif isinstance(item, (tuple, list)):
            symbols |= mentioned(item)
        elif isinstance(item, dict):
            symbols |= mentioned(tuple(item.values()))
    return symbols
