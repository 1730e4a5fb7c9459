"""Where results lie of an operator that was cut along something else than its operands came split along.

In: an equation, its rule and how it is cut. Out: for its results the place that operands had: an axis that left what
must be whole for another factor goes back there. So attention re-lays a sequence to heads, and leaves a sequence.
"""

from __future__ import annotations

from collections.abc import Callable

from tessera.ir.equation import Equation, Value
from tessera.ir.placement import Mark, Placement
from tessera.ops.factors.rule import Dims, Factors, tensors
from tessera.transforms.shard.choose import Choice


def back_again(
    eqn: Equation, rule: Factors, choice: Choice, place_of: Callable[[Value], Placement]
) -> dict[Value, Placement]:
    axes = {axis for factor in rule.instead for axis in choice.axes.get(factor, ())}
    came: dict[str, list[tuple[str, Mark]]] = {}  # of factors that must be whole, the axes that split them
    for v, dims in zip(tensors(eqn), rule.operands, strict=True):
        for dim, names in enumerate(dims):
            entries = [(axis, mark) for axis, mark in place_of(v).entries(dim) if axis in axes]
            if entries and names and names[0] in rule.whole:
                came.setdefault(names[0], entries)
    results = zip(eqn.outputs, rule.results, choice.results, strict=True)
    return {
        v: _returned(place, dims, came)
        for v, dims, place in results
        if v is not None and dims is not None and place is not None
    }


def _returned(place: Placement, dims: Dims, came: dict[str, list[tuple[str, Mark]]]) -> Placement:
    for dim, names in enumerate(dims):
        for axis, mark in came.get(names[0], ()) if names else ():
            left = place.dim_of(axis)
            if left is not None:
                rest = tuple(a for a in place.splits[left] if a != axis)
                place = place.with_split(left, rest).with_axis(dim, axis, mark)
    return place
