"""Common subexpression elimination.

In: a functional trace. Out: the same trace where an equation that repeats an earlier one, argument for
argument, is gone and its results are the earlier one's. Not merged: random operators and others with
effects, equations with different tags (`no_grad`, `recompute` are there for a reason), results that would
make two outputs share memory which are separate in the program as written, and what only the program computes with an
output, where a gradient reads it: the caller may write to that before the gradient is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

from tessera.ir.equation import Arg, Equation, Value, values_in
from tessera.ir.rewrite import Rewrite
from tessera.ir.schema import has_effect
from tessera.ir.trace import Trace
from tessera.ir.types import SYMBOLIC, number_text
from tessera.passes.memory.alias import escaping, roots, shown


def cse(trace: Trace, wrt: Sequence[Value] = ()) -> Trace:
    """Compute equal things once. `wrt`: the inputs that will be differentiated."""
    if len({eqn.op for eqn in trace.equations}) == len(trace.equations):  # no operator comes twice
        return trace
    shared = _Shared(trace, bool(wrt))
    seen: dict[tuple, Equation] = {}
    rewrite = Rewrite(trace)
    for eqn in rewrite:
        if has_effect(eqn):
            continue
        earlier = seen.setdefault((eqn.op, key_of(eqn.args), key_of(eqn.kwargs), eqn.tags), eqn)
        if earlier is eqn or not shared.mergeable(earlier, eqn):
            continue
        rewrite.erase()
        for old, new in zip(eqn.outputs, earlier.outputs, strict=True):
            if old is not None and new is not None:
                rewrite.rename(old, new)
                shared.merge(old, new)
    return rewrite.finish()


class _Shared:
    """Who sees a value's memory: the caller, and gradients that are computed later."""

    def __init__(self, trace: Trace, differentiated: bool) -> None:
        self.differentiated = differentiated  # later: whatever floats may be read then
        self.of = roots(trace)
        self.outside = escaping(trace, self.of)
        self.given = set(values_in(trace.outputs))
        later = (v for eqn in trace.equations if eqn.source.note for v in eqn.inputs())
        self.read_later = shown(later, self.of)

    def mergeable(self, earlier: Equation, eqn: Equation) -> bool:
        pairs = [pair for pair in zip(eqn.outputs, earlier.outputs, strict=True) if pair[0] is not None]
        return all(new is not None and self.may_be_one(old, new) for old, new in pairs)  # type: ignore[arg-type]

    def may_be_one(self, old: Value, new: Value) -> bool:
        if self.of[old] == self.of[new] and new not in self.of[new]:
            return not (old in self.given and new in self.given)  # two views of the same memory, but two objects
        reach = self.escapes(old), self.escapes(new)
        if all(reach):
            return False  # the caller may write to one of them
        return not any(reach) or not self.later(new if reach[0] else old)

    def escapes(self, v: Value) -> bool:
        return not self.of[v].isdisjoint(self.outside)

    def later(self, v: Value) -> bool:
        """A gradient reads it, maybe after the caller wrote to what he was given."""
        return v.is_differentiable if self.differentiated else not self.of[v].isdisjoint(self.read_later)

    def merge(self, old: Value, new: Value) -> None:
        if old in self.given:
            self.given.add(new)
        if self.escapes(old):  # the earlier one's memory is now the caller's too
            self.outside |= self.of[new]
        if self.later(old):
            self.read_later |= self.of[new]


def key_of(a: Arg) -> object:
    """Hashable, equal for equal arguments: values by identity, numbers by kind and bits."""
    if isinstance(a, Value):
        return a
    if isinstance(a, (tuple, list)):
        return (type(a), *map(key_of, a))
    if isinstance(a, dict):
        return tuple((k, key_of(v)) for k, v in a.items())
    if isinstance(a, SYMBOLIC):
        return ("symbolic", number_text(a))
    if isinstance(a, (float, complex)):
        return (type(a), repr(a))  # -0.0 is not 0.0, nan is nan
    if isinstance(a, slice):
        return (slice, key_of((a.start, a.stop, a.step)))
    return (type(a), a) if a.__hash__ is not None else (type(a), id(a))
