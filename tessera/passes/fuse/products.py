"""What a matrix product's kernel takes along.

A product takes what is computed from it, point by point, into its kernel where the bytes saved are worth more than the
rate that a library's product has over ours; what is computed before it only where few tiles would compute it again.
"""

from __future__ import annotations

from collections.abc import Callable

from tessera.ir.equation import Value
from tessera.ir.types import size_hint
from tessera.passes.fuse.compiler import POINTWISE, REDUCE, SCAN, Compiler, Work
from tessera.passes.fuse.flow import Flow

MOST_STEPS = 4  # of arithmetic that a reduction takes along
NARROW = 512  # columns of a product up to which its left operand may be computed on the way
SLACK = 4.0  # instructions a point that may be computed again: a cast and a scale; an activation took longer so


class Products:
    """`cost(group)` gives the instructions a point of a group, also where it is one equation."""

    def __init__(self, flow: Flow, compiler: Compiler, work: dict[int, Work], cost: Callable[[int], float]) -> None:
        self.flow, self.compiler, self.work, self.cost = flow, compiler, work, cost
        self.groups, self.equations, self.kinds = flow.groups, flow.trace.equations, flow.kinds

    def refusal(self, a: int, b: int, members: set[int], beside: bool) -> str:
        """Why a kernel with a matrix product should not be made of these two groups; `a` computes, `b` reads."""
        one, two = self.work[a], self.work[b]
        if one.reduces or two.reduces:
            return "a product's kernel reduces nothing else"
        if beside:
            return "its neighbour is a product with work of its own"
        products = [*one.products, *two.products]
        if len(products) > 2 or any(self.flow.before(i, members) & {*products} for i in products):
            return "one product needs the other first"
        if len(products) == 2 and len({self.equations[i].inputs()[0] for i in products}) == 2:
            return "its neighbours multiply different things"
        if any(self.groups.of[j] == a for i in two.products for j in self.flow.sources(i)):
            if why := self._prologue(a, b):
                return why
        elif one.products and one.points != two.points:
            return "its neighbours have other sizes"
        elif not one.products and (one.points > two.points or self.flow.leaves(a, b)):
            return "its neighbours have other sizes" if one.points > two.points else "others read it too"
        saved = self._saved(a, b)
        if saved <= 0:
            return "a kernel after it moves as little"
        body = self.flow.body(sorted(members))
        first = all(self.groups.members[self.groups.of[i]] == [i] for i in products)
        return self.compiler.loses([self.equations[i] for i in products], body, saved if first else None)

    def _prologue(self, a: int, b: int) -> str:
        """Group a computes an operand of b's product: every column of tiles would do it again."""
        columns = max(size_hint(self.equations[i].out.shape[-1]) for i in self.work[b].products)
        if self.work[a].products or self.flow.leaves(a, b):
            return "others read it too"
        bias = self.work[a].points <= columns
        if not bias and (columns > NARROW or self.cost(a) > SLACK):
            return "every column of tiles of the product would compute it again"
        return ""

    def _saved(self, a: int, b: int) -> int:
        """Bytes that one kernel moves less: what group a computes is not written for b and read again.

        But what b computes for a kernel after it, which could compute it itself, is then written and read."""
        saved = 0
        for v in self.flow.results(a):
            if any(self.groups.of[r] == b for r in self.flow.read_by(v)):
                saved += v.tensor.nbytes() * (2 if self.flow.stays(v, (a, b)) else 1)
        for v in self.flow.results(b):
            if self._for_others(v, b):
                written = v in self.flow.escapes or not all(self._no_epilogue(r) for r in self.flow.read_by(v))
                saved -= v.tensor.nbytes() * (1 if written else 2)
        return saved

    def _for_others(self, v: Value, group: int) -> bool:
        return any(self._no_epilogue(r) for r in self.flow.read_by(v) if self.groups.of[r] != group)

    def _no_epilogue(self, i: int) -> bool:
        """What no product's kernel takes along: a reduction, arithmetic that leads straight to one, or that reads
        something else as large as its result."""
        steps = 0
        while self.kinds[i] == POINTWISE and steps < MOST_STEPS:
            eqn = self.equations[i]
            least = eqn.results()[0].tensor.nbytes() / 8
            if len({v for v in eqn.inputs() if v.tensor.nbytes() > least}) > 1:
                return True
            i, steps = next(self.flow.read_by(eqn.results()[0]), i), steps + 1
        return self.kinds[i] in (REDUCE, SCAN)
