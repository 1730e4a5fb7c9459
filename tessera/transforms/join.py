"""Two programs that become one: the second reads what the first gives."""

from __future__ import annotations

from tessera.ir.builder import Builder
from tessera.ir.equation import Equation, Special, Value, map_values
from tessera.ir.mode import mode_of
from tessera.ir.trace import Trace


def renamed(trace: Trace, rename: dict[Value, Value]) -> Trace:
    """The same program over other inputs."""
    if not rename:
        return trace

    def look(v: Value) -> Value:
        return rename.get(v, v)

    return trace.with_(
        inputs=tuple(map(look, trace.inputs)),
        equations=tuple(e.substitute(rename) for e in trace.equations),
        outputs=map_values(trace.outputs, look),
        mutations={look(t): look(v) for t, v in trace.mutations.items()},
        symbols={s: (look(v), d) for s, (v, d) in trace.symbols.items()},
    )


def joined(forward: Trace, backward: Trace, results: int, name: str) -> Trace:
    """One program of two, the second reading what the first gives.

    What both define (backward computes it again) gets another name in the second.
    """
    taken = {v.name: v for v in forward.values()}
    builder = Builder(name, mode_of(forward))
    builder.reserve(list(forward.values()))
    builder.reserve(list(backward.values()))
    computed = [v for eqn in backward.equations for v in eqn.results()]  # in order: names are the same in all processes
    rename = {v: Value(builder.fresh(v.name), v.type) for v in computed if v.name in taken}
    equations = []
    for eqn in backward.equations:
        eqn = eqn.substitute(rename)
        equations.append(eqn.with_(outputs=tuple(None if v is None else rename.get(v, v) for v in eqn.outputs)))
    available = set(forward.values())
    sizes = [v for v in backward.inputs if v not in available and v.name in forward.symbols]
    symbols = {**forward.symbols, **{v.name: (v, None) for v in sizes}}
    for symbol, (v, dim) in backward.symbols.items():
        symbols.setdefault(symbol, (rename.get(v, v), dim))
    return Trace(
        name,
        (*forward.inputs, *(v for v in backward.inputs if v not in available and v not in sizes)),
        (*(_size(forward, v) for v in sizes), *forward.equations, *equations),
        (*forward.outputs[:results], *map_values(backward.outputs, lambda v: rename.get(v, v))),  # type: ignore[misc]
        {**forward.mutations, **{t: rename.get(v, v) for t, v in backward.mutations.items()}},
        {**forward.constants, **backward.constants},
        symbols,
    )


SIZE = Special("size", lambda x, dim: x.shape[dim])


def _size(forward: Trace, v: Value) -> Equation:
    """A size of an input as a value of its own, which backward's regions take as an argument."""
    source, dim = forward.symbols[v.name]
    return Equation(SIZE, (source, dim), {}, (v,))
