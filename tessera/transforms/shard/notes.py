"""What had to be gathered because no sharding rule allows what is split; `explain` tells it."""

from __future__ import annotations

from dataclasses import dataclass

from tessera.ir.equation import Equation, Source, Value
from tessera.ops.factors.rule import tensors
from tessera.transforms.shard.choose import Choice
from tessera.transforms.shard.values import Values, placement_of


@dataclass(frozen=True)
class Note:
    """An equation for which values were gathered."""

    operator: str
    source: Source
    bytes: float


def noted(values: Values, eqn: Equation, choice: Choice) -> list[Note]:
    """What moves to where an equation wants its operands; nothing where they lie there."""
    moved = 0.0
    for v, to in zip(tensors(eqn), choice.operands, strict=True):
        _, copy = values.nearest(v, to)
        steps = values.path(placement_of(copy), to)
        moved += sum(step.sent(v.dtype.itemsize) for step in steps if _unasked(values, v, step.axis))
    return [Note(str(eqn.op), eqn.source, moved)] if moved else []


def _unasked(values: Values, v: Value, axis: str) -> bool:
    """Moving it is not what the axis is for, as gathering weights is what zero3 is for."""
    return not (values.kinds[v] == "weights" and values.stays.get(axis) == "activations")
