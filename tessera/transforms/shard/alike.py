"""Elementwise equations whose operands lie alike: their results do too, and nothing needs to be asked.

In: an equation. Out: where all of its operands lie, as the only copy there is; numbers are whole. Most of an update is
such equations, and finding the cheapest way of each by its rule would take most of the partitioner's time.
"""

from __future__ import annotations

from tessera.ir.equation import Equation, Value, map_values
from tessera.ir.placement import Placement
from tessera.ir.schema import draws, is_pointwise
from tessera.ir.types import size_key
from tessera.ops.factors.rule import tensors
from tessera.torch_internals.operators import OpOverload
from tessera.transforms.shard.makers import Makers
from tessera.transforms.shard.values import Values


def alike(eqn: Equation, values: Values, makers: Makers) -> Placement | None:
    if not isinstance(eqn.op, OpOverload) or not is_pointwise(eqn.op) or len(eqn.results()) != 1 or eqn.many:
        return None
    place = None
    for v in tensors(eqn):
        copies = values.held[v]
        here = copies[0].tensor.placement
        if len(copies) > 1 or v in makers.of or here is None or here.parts or here.marks:
            return None
        if place is None or not place.shape:
            place = here
        elif here.shape and here != place:
            return None
    if place is None or len(eqn.outputs) != 1 or draws(eqn.op, eqn.args, eqn.kwargs):
        return None
    return place if [*map(size_key, place.shape)] == [*map(size_key, eqn.out.shape)] else None


def elementwise(eqn: Equation, values: Values, place: Placement) -> Value:
    """The equation over the parts of its operands."""
    with values.builder.at(eqn):
        args, kwargs = map_values((eqn.args, eqn.kwargs), lambda v: values.held[v][0])  # type: ignore[misc]
        (out,) = values.emit(eqn.op, args, kwargs, [place], [eqn.out.name])
    assert out is not None
    return out
