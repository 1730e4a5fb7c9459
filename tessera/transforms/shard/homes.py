"""Weights that are read elsewhere than they lie.

In: where some weights shall be when products read them. Each is brought there when the first product, or a view of it,
is reached, so that it is not held before. Where it was given stays its own place, and there it is updated. A weight
that is made narrower first is brought afterwards.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tessera.ir.equation import Equation, Value
from tessera.ir.placement import Placement
from tessera.ir.schema import is_view
from tessera.transforms.shard.values import Values
from tessera.util.names import names

CAST = "_to_copy"
PRODUCTS = names("linear mm addmm matmul bmm baddbmm")


class Homes:
    def __init__(self, values: Values, homes: Mapping[Value, Placement], weights: Collection[Value]) -> None:
        self.values = values
        self.later = {v: home for v, home in homes.items() if v in weights}
        self.there: set[Value] = set()  # weights that were brought, and views of them

    def settle(self, eqn: Equation) -> None:
        """Bring what an equation reads."""
        for v in eqn.inputs():
            if v in self.later and eqn.opname == CAST:
                self.later[eqn.out] = self.later[v]
            elif v in self.later and (eqn.opname in PRODUCTS or is_view(eqn.op)):
                self.bring(eqn, v)
            if v in self.there and is_view(eqn.op):
                self.there.update(eqn.results())

    def bring(self, eqn: Equation, v: Value) -> None:
        held = list(self.values.held[v])
        with self.values.builder.at(eqn):
            home = self.values.bring(v, self.later.pop(v))
        self.values.held[v] = [*held, home]  # what it was gathered to on the way is for nobody else
        self.there.add(v)

    def copies(self, eqn: Equation, v: Value) -> list[Value]:
        """The copies of a value; of those that cost the same the first is taken, and in a product that is home."""
        held = self.values.held[v]
        return held[::-1] if v in self.there and eqn.opname in PRODUCTS else held
