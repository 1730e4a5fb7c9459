"""Values that are made where they are wanted rather than moved there.

In: equations that make values from nothing, repeat them at no cost, or spread small ones over a large result, such as
which class is which row's label. Out: such a value in parts, made by the rank that needs them.
"""

from __future__ import annotations

from math import prod

from tessera.ir.equation import Equation, Value
from tessera.ir.placement import Placement
from tessera.ir.types import size_hint
from tessera.ops.factors.rule import Factors, tensors
from tessera.transforms.shard.choose import Choice
from tessera.transforms.shard.local import local
from tessera.transforms.shard.values import Values


class Makers:
    def __init__(self, values: Values) -> None:
        self.values = values
        self.of: dict[Value, tuple[Equation, Factors]] = {}

    def spreads(self, eqn: Equation, rule: Factors) -> bool:
        """Elements of a result are made of those of smaller values, or of others that are made so."""
        if len(eqn.results()) != 1 or rule.reduced or rule.whole or rule.local is not None:
            return False
        count = _count(eqn.out)
        return all(v in self.of or _count(v) < count for v in tensors(eqn))

    def made(self, v: Value, to: Placement) -> Value | None:
        """A value that is made from nothing, or repeated, is made in parts rather than cut."""
        choice = self.way(v, to)
        if choice is None:
            return None
        eqn, rule = self.of[v]
        return local(self.values, eqn, rule, choice)[0]

    def way(self, v: Value, to: Placement) -> Choice | None:
        """How a value is made there: of operands that lie where they must, or can be made there in turn."""
        if v not in self.of or to.parts:
            return None
        eqn, rule = self.of[v]
        (dims,) = rule.results
        assert dims is not None
        if to.marks and (rule.local is not None or any(len(names) > 1 for names in dims)):
            return None
        axes = {names[0]: split for names, split in zip(dims, to.splits, strict=True) if names and split}
        split = [bool(split) for split in to.splits]
        if split != [bool(names) and names[0] in axes for names in dims]:
            return None
        if any(not rule.splittable(f) or f in rule.reduced or (rule.shares(f) and not rule.cheap) for f in axes):
            return None
        operands = []
        for x, names in zip(tensors(eqn), rule.operands, strict=True):
            splits = tuple(axes.get(name[0], ()) if name else () for name in names)
            operands.append(Placement(to.mesh, x.shape, splits, marks=to.marks))
            there = any(copy.tensor.placement == operands[-1] for copy in self.values.held[x])
            if not there and self.way(x, operands[-1]) is None:
                return None
        return Choice(axes, tuple(operands), (to,), dict(to.marks))


def _count(v: Value) -> int:
    return prod(map(size_hint, v.shape))
