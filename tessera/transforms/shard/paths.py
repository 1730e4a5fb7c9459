"""Changes of placement: the collectives that lead from one to another.

In: where a value lies and where it shall lie. Out: steps, each a collective with its arguments and where the value lies
after it. Summands are combined first, while values are small; then axes leave dimensions, from the innermost on; then
axes come, which costs nothing. An axis that leaves one dimension for another is an all-to-all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tessera.ir.dist import EXCHANGES, exchange_bytes
from tessera.ir.placement import Placement
from tessera.ir.types import size_hint


@dataclass(frozen=True)
class Step:
    name: str  # of the collective
    args: tuple  # behind the value
    before: Placement
    after: Placement
    axis: str

    def elements(self) -> int:
        """What a rank gives to it."""
        count = 1
        for size in self.before.local_shape:
            count *= size_hint(size)
        return count

    def sent(self, itemsize: int) -> float:
        """Bytes that a rank sends."""
        if self.name not in EXCHANGES:
            return 0.0
        return exchange_bytes(self.name, self.elements() * itemsize, self.before.mesh.size(self.axis))


def path(a: Placement, b: Placement) -> list[Step]:
    """The steps from one placement to another of the same value. Where axes cut a dimension as they shall but for their
    marks, those may be changed first: then summands can be scattered inside of what is cut anew."""
    direct = _walked(a, b)
    there = _marked_as(a, b)
    if there is None:
        return direct
    return min(direct, [*_walked(a, there), *_walked(there, b)], key=lambda steps: sum(s.sent(1) for s in steps))


def _marked_as(a: Placement, b: Placement) -> Placement | None:
    """One place with the marks of another; None where they are the same, or the axes are not."""
    marks = [(axis, b.mark(axis)) for axis in a.axes if a.how(axis) is None]
    same = all(axes == b.splits[dim][: len(axes)] for dim, axes in enumerate(a.splits))
    if not a.parts or not same or all(a.mark(axis) == mark for axis, mark in marks):
        return None
    return replace(a, marks=tuple(marks))


def _walked(a: Placement, b: Placement) -> list[Step]:
    walk = _Path(a, b)
    walk.combine()
    walk.leave()
    walk.enter()
    walk.part()
    assert walk.at == b, f"from {a} to {b} one came to {walk.at}"
    return walk.steps


def cost(steps: list[Step], itemsize: int, price: Callable[[Step], float]) -> float:
    """What the steps cost, at a price for a byte that depends on the step."""
    return sum(step.sent(itemsize) * price(step) for step in steps)


class _Path:
    def __init__(self, a: Placement, b: Placement) -> None:
        self.at, self.to = a, b
        self.steps: list[Step] = []

    def step(self, name: str, args: tuple, after: Placement, axis: str) -> None:
        self.steps.append(Step(name, args, self.at, after, axis))
        self.at = after

    def next_in(self, axis: str) -> int | None:
        """The dimension that the axis shall split, where it can do so now: as the innermost so far."""
        dim = self.to.dim_of(axis)
        if dim is None:
            return None
        have, want = self.at.entries(dim), self.to.entries(dim)
        return dim if want[: len(have) + 1] == (*have, (axis, self.to.mark(axis))) else None

    def combine(self) -> None:
        gone = [(axis, how) for axis, how in self.at.parts if self.to.how(axis) != how]
        scattered = True
        while scattered:
            scattered = False
            for axis, how in list(gone):
                dim = self.next_in(axis)
                if how == "sum" and dim is not None:
                    after = self.at.without_part(axis).with_axis(dim, axis, self.to.mark(axis))
                    self.step("reduce_scatter", (dim, axis), after, axis)
                    gone.remove((axis, how))
                    scattered = True
        for axis, how in gone:
            args = (axis,) if how == "sum" else (axis, how)
            self.step("all_reduce", args, self.at.without_part(axis), axis)

    def leave(self) -> None:
        for dim in range(len(self.at.shape)):
            while self.at.entries(dim) != self.to.entries(dim)[: len(self.at.splits[dim])]:
                *rest, axis = self.at.splits[dim]
                after = self.at.with_split(dim, tuple(rest))
                levels = self.at.levels(dim)
                even = str(levels[-1] * self.at.mesh.size(axis)) == str(levels[-2])
                size = () if even else (levels[-2],)
                other = self.next_in(axis)
                if other is None or other == dim:
                    self.step("all_gather", (dim, axis, *size), after, axis)
                else:
                    after = after.with_axis(other, axis, self.to.mark(axis))
                    self.step("all_to_all", (other, dim, axis, *size), after, axis)

    def enter(self) -> None:
        for dim, axes in enumerate(self.to.splits):
            for axis in axes[len(self.at.splits[dim]) :]:
                self.step("slice", (dim, axis), self.at.with_axis(dim, axis, self.to.mark(axis)), axis)

    def part(self) -> None:
        for axis, how in self.to.parts:
            if self.at.how(axis) is None:
                after = self.at.with_part(axis, how)
                if how == "sum":
                    self.step("once", (axis,), after, axis)
                else:
                    self.at = after  # the largest of equal ones is each of them
        if set(self.at.parts) == set(self.to.parts):
            self.at = replace(self.at, parts=self.to.parts)
