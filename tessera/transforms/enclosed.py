"""Values that lie inside of others.

What was padded lies in the padded copy, and what was concatenated in the concatenation. A convolution or a norm behind
it saves the larger one for backward. Then the smaller one, which a gradient may want as well, is neither saved too nor
computed again: backward reads it where it lies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tessera.ir.builder import aten
from tessera.ir.equation import Equation, Value, values_in
from tessera.ir.relayout import Relayout
from tessera.ir.starts import has_known_sizes
from tessera.ir.trace import Trace

Cut = tuple[int, int, int]  # of a dimension, from here to there


@dataclass(frozen=True)
class Place:
    """Where a value lies: what is left of another one, cut by cut."""

    whole: Value
    cuts: tuple[Cut, ...]


def enclosed(whole: Value, makers: Mapping[Value, Equation]) -> dict[Value, Place]:
    """What lies in a value."""
    places: dict[Value, Place] = {}
    stack: list[tuple[Value, tuple[Cut, ...]]] = [(whole, ())]
    while stack:
        v, cuts = stack.pop()
        for x, more in _inside(makers[v]).items() if v in makers else ():
            if x not in places:
                places[x] = Place(whole, (*cuts, *more))
                stack.append((x, places[x].cuts))
    return places


def _inside(eqn: Equation) -> dict[Value, list[Cut]]:
    """What lies whole in an equation's result, and where."""
    if eqn.opname not in ("constant_pad_nd", "cat") or not all(map(has_known_sizes, (*eqn.inputs(), eqn.out))):
        return {}
    inside = _padded(eqn) if eqn.opname == "constant_pad_nd" else _joined(eqn)
    return {x: cuts for x, cuts in inside.items() if x.dtype == eqn.out.dtype}


def _padded(eqn: Equation) -> dict[Value, list[Cut]]:
    x, pads = eqn.args[:2]
    assert isinstance(x, Value) and isinstance(pads, (list, tuple))
    if not all(isinstance(n, int) and n >= 0 for n in pads):
        return {}
    starts = zip(reversed(range(x.ndim)), pads[::2], strict=False)  # pairs, of the last dimension first
    return {x: [(d, start, start + x.shape[d]) for d, start in starts if x.shape[d] != eqn.out.shape[d]]}  # type: ignore[operator,misc]


def _joined(eqn: Equation) -> dict[Value, list[Cut]]:
    dim = int(eqn.bound()[0][1]) % eqn.out.ndim  # type: ignore[call-overload]
    inside: dict[Value, list[Cut]] = {}
    start = 0
    for x in values_in(eqn.args[0]):
        if x.ndim == eqn.out.ndim:  # an empty vector joins anything
            inside.setdefault(x, [(dim, start, start + x.shape[dim])])  # type: ignore[operator,list-item]
            start += x.shape[dim]  # type: ignore[operator,assignment]
    return inside


def read_inside(trace: Trace, held: Mapping[Value, Place]) -> Trace:
    """The trace with some inputs read where they lie in others. One that a reader needs as it lay stays. What another
    one lies in comes before it."""
    if not held or not trace.equations:
        return trace
    rewrite = Relayout(trace)
    for x, place in held.items():
        with rewrite.at(trace.equations[0].with_(tags=frozenset())):
            view = rewrite.renamed.get(place.whole, place.whole)
            for dim, start, end in place.cuts:
                view = aten.slice(view, dim, start, end)
        rewrite.copied(x, view)
    for eqn in rewrite:
        if rewrite.moved(eqn):
            rewrite.type_again(eqn)
    new = rewrite.finish()
    read = {v for eqn in new.equations for v in eqn.inputs()} | set(values_in(new.outputs))
    return new.with_(inputs=tuple(v for v in new.inputs if v not in held or v in read))
