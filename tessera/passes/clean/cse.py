"""Common subexpression elimination.

In: a functional trace. Out: the same trace where an equation that repeats an earlier one, argument for
argument, is gone and its results are the earlier one's. Not merged: random operators and others with
effects, equations with different tags (`no_grad`, `recompute` are there for a reason), results that would
make two outputs share memory which are separate in the program as written, and what a gradient computes with an output
of the forward: the caller may write to that before the gradient is asked for.
"""

from __future__ import annotations

from tessera.ir.equation import Arg, Equation, Value, values_in
from tessera.ir.rewrite import Rewrite
from tessera.ir.schema import has_effect
from tessera.ir.trace import Trace
from tessera.ir.types import SYMBOLIC
from tessera.passes.memory.alias import Roots, escaping, roots


def cse(trace: Trace) -> Trace:
    """Compute equal things once."""
    if len({eqn.op for eqn in trace.equations}) == len(trace.equations):  # no operator comes twice
        return trace
    of = roots(trace)
    outside = escaping(trace, of)
    given = set(values_in(trace.outputs))
    seen: dict[tuple, Equation] = {}
    rewrite = Rewrite(trace)
    for eqn in rewrite:
        if has_effect(eqn):
            continue
        earlier = seen.setdefault((eqn.op, key_of(eqn.args), key_of(eqn.kwargs), eqn.tags), eqn)
        if earlier is eqn or not _mergeable(earlier, eqn, of, outside, given):
            continue
        rewrite.erase()
        for old, new in zip(eqn.outputs, earlier.outputs, strict=True):
            if old is not None and new is not None:
                rewrite.rename(old, new)
                if old in given:
                    given.add(new)
                if not of[old].isdisjoint(outside):  # the earlier one's memory is now the caller's too
                    outside |= of[new]
    return rewrite.finish()


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
