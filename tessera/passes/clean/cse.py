"""Common subexpression elimination.

In: a functional trace. Out: the same trace where an equation that repeats an earlier one, argument for
argument, is gone and its results are the earlier one's. Not merged: random operators and others with
effects, equations with different tags (`no_grad`, `recompute` are there for a reason), results that would
make two outputs share memory which are separate in the program as written, and what a gradient computes with an output
of the forward: the caller may write to that before the gradient is asked for.
"""

from __future__ import annotations

from collections import Counter

from tessera.ir.equation import Arg, Equation, Value, map_values, values_in
from tessera.ir.schema import has_effect
from tessera.ir.trace import Trace
from tessera.ir.types import SYMBOLIC
from tessera.passes.memory.alias import Roots, escaping, roots


def cse(trace: Trace) -> Trace:
    """Compute equal things once."""
    seen: dict[tuple, Equation] = {}
    names: dict[Value, Value] = {}
    kept: list[Equation] = []
    if not _repeats(trace):
        return trace
    of = roots(trace)
    outside = escaping(trace, of)
    given = set(values_in(trace.outputs))
    for eqn in trace.equations:
        if names and any(v in names for v in eqn.inputs()):
            eqn = eqn.with_(args=rename(eqn.args, names), kwargs=rename(eqn.kwargs, names))
        if has_effect(eqn):
            kept.append(eqn)
            continue
        key = (eqn.op, key_of(eqn.args), key_of(eqn.kwargs), eqn.tags)
        earlier = seen.get(key)
        if earlier is None or not _mergeable(earlier, eqn, of, outside, given):
            seen.setdefault(key, eqn)
            kept.append(eqn)
            continue
        for old, new in zip(eqn.outputs, earlier.outputs, strict=True):
            if old is not None and new is not None:
                names[old] = new
                if old in given:
                    given.add(new)
                if not of[old].isdisjoint(outside):  # the earlier one's memory is now the caller's too
                    outside |= of[new]
    if not names:
        return trace
    return renamed(trace, kept, names)


def _repeats(trace: Trace) -> bool:
    """Some operator comes twice with arguments of equal text: the cheap test for having nothing to do."""
    counts = Counter(eqn.op for eqn in trace.equations)
    return any(n > 1 for n in counts.values())


def _mergeable(earlier: Equation, eqn: Equation, of: Roots, outside: set[Value], given: set[Value]) -> bool:
    for old, new in zip(eqn.outputs, earlier.outputs, strict=True):
        if old is None or new is None:
            if old is not None:
                return False
            continue
        if of[old] == of[new] and new not in of[new]:
            if old in given and new in given:
                return False  # two views of the same memory, but two objects
        elif not of[new].isdisjoint(outside) and (not of[old].isdisjoint(outside) or _later(eqn, earlier)):
            return False  # both reach the caller, who may write to one of them, or does so before the other is read
    return True


def _later(eqn: Equation, earlier: Equation) -> bool:
    """A gradient's equation beside one of the forward."""
    return bool(eqn.source.note) and not earlier.source.note


def rename(tree: Arg, names: dict[Value, Value]) -> Arg:
    return map_values(tree, lambda v: names.get(v, v))


def renamed(trace: Trace, equations: list[Equation], names: dict[Value, Value]) -> Trace:
    """The trace with other equations, and its outputs, mutations and symbols under their new names."""
    there = {*trace.inputs, *trace.constants, *(v for eqn in equations for v in eqn.outputs)}
    symbols = {s: (names.get(v, v), dim) for s, (v, dim) in trace.symbols.items()}
    return trace.with_(
        equations=tuple(equations),
        outputs=rename(trace.outputs, names),
        mutations={target: names.get(v, v) for target, v in trace.mutations.items()},
        symbols={s: where for s, where in symbols.items() if where[0] in there},
    )


def key_of(a: Arg) -> object:
    """Hashable, equal for equal arguments: values by identity, numbers by kind and bits."""
    if isinstance(a, Value):
        return a
    if isinstance(a, (tuple, list)):
        return (type(a), *map(key_of, a))
    if isinstance(a, dict):
        return tuple((k, key_of(v)) for k, v in a.items())
    if isinstance(a, SYMBOLIC):
        return ("symbolic", str(a.node.expr))
    if isinstance(a, (float, complex)):
        return (type(a), repr(a))  # -0.0 is not 0.0, nan is nan
    if isinstance(a, slice):
        return (slice, key_of((a.start, a.stop, a.step)))
    return (type(a), a) if a.__hash__ is not None else (type(a), id(a))
