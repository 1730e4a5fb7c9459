"""Two programs that become one: the second reads what the first gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tessera.ir import fake
from tessera.ir.builder import Builder
from tessera.ir.equation import Equation, Special, Value, map_values
from tessera.ir.mode import mode_of
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.ir.verify import same_type


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


def over(trace: Trace, inputs: Sequence[Value]) -> Trace:
    """An edited half has inputs of its own: they meet by position."""
    pairs = zip(trace.inputs, inputs, strict=True)
    return renamed(trace, {a: b for a, b in pairs if a is not b})


def relaid(trace: Trace, given: Mapping[Value, Value]) -> Trace:
    """The same program over other inputs, whose strides may be others: types follow from them, places stay."""
    rename, mode = dict(given), mode_of(trace)
    if all(same_type(a.type, b.type) for a, b in given.items()):
        return renamed(trace, rename)
    equations = []
    for eqn in trace.equations:
        here = eqn.substitute(rename)
        made = fake.infer(here.op, here.args, here.kwargs, mode)
        types = made if isinstance(made, list) else [made]
        for v, type_ in zip(eqn.outputs, types, strict=True):
            if v is not None and isinstance(type_, TensorType) and not same_type(v.type, type_):
                rename[v] = Value(v.name, type_.placed(v.tensor.placement))
        equations.append(eqn.renamed(rename))
    return renamed(trace, rename).with_(equations=tuple(equations))


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
