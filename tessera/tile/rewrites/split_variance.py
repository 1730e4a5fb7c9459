"""Sums of squares about a mean, in parts that read their data once.

    before:  t = sum over r < n of (x[r] - c)^2, where c comes from a sum over x: a variance
    -->
    part:    k = x at the part's first place; a = sum of x - k, b = sum of (x - k)^2 over its m places
             off = a / m;  left = b - a^2 / m
    whole:   t = sum over parts of left + m (k - c + off)^2

What cancels in b - a^2 / m is the distance of one element from the mean of its part, which is at most m times the
variance of the part; how far the mean lies from zero does not matter. For the same reason k and off stay two numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.ir import SSAValue

from tessera.tile.dialect.build import KernelBuilder
from tessera.tile.dialect.index import Index
from tessera.tile.dialect.ops import ApplyOp, KernelOp, ReduceOp
from tessera.tile.dialect.types import axes_of, element_of
from tessera.tile.rewrites.copying import Copy, needed_for, op_axes


@dataclass(frozen=True)
class Variance:
    """sum over the axis of (x - centre)^2."""

    x: SSAValue
    centre: SSAValue


def variances(kernel: KernelOp, axis: str) -> dict[ReduceOp, Variance]:
    """The sums of squares along an axis, by the operation that takes each."""
    by_sum = {}
    for op in kernel.block.ops:
        if isinstance(op, ReduceOp) and op.kind.data == "sum" and op.axis.data == axis:
            square = _applied(op.arg, "mul")
            left = None if square is None or square.args[0] is not square.args[1] else _applied(square.args[0], "sub")
            if left is not None and axis in axes_of(left.args[0]) and axis not in axes_of(left.args[1]):
                by_sum[op] = Variance(left.args[0], left.args[1])
    return by_sum


def _applied(v: SSAValue, fn: str) -> ApplyOp | None:
    return v.owner if isinstance(v.owner, ApplyOp) and v.owner.fn.data == fn else None


@dataclass(frozen=True)
class Parts:
    """How the positions of an axis are divided: `part` of them each from `start` on, the last ones perhaps fewer."""

    axis: str
    size: Index
    part: Index
    start: Index
    exact: bool  # all parts are full

    def _inside(self, k: KernelBuilder) -> SSAValue | None:
        """Whether the part has any positions; None where all have."""
        return None if self.exact else k.apply("lt", k.iota(self.start), k.iota(self.size))

    def members(self, k: KernelBuilder, like: SSAValue) -> SSAValue:
        """How many positions the part has, as a number like another."""
        many = k.iota(self.part)
        if not self.exact:
            rest = k.apply("maximum", k.apply("sub", k.iota(self.size), k.iota(self.start)), k.iota(0))
            many = k.apply("minimum", rest, many)
        return k.cast(many, element_of(like))

    def first(self, kernel: KernelOp, x: SSAValue, copy: Copy) -> SSAValue:
        """x at the first position of the part, zero in a part without any."""
        inside = self._inside(copy.k)
        at = Copy(copy.k, copy.values, {self.axis: self.start})
        wanted = needed_for(kernel, [x.owner])  # type: ignore[list-item]
        for op in kernel.block.ops:
            if op in wanted and self.axis in op_axes(op):
                at(op, inside)
        if inside is None:
            return at.values[x]
        return copy.k.apply("select", inside, at.values[x], copy.k.constant(0, element_of(x)))


@dataclass(frozen=True)
class Middle:
    """What one part knows of x: its total, its first element and how far the mean is off that, the squares about it."""

    total: SSAValue
    first: SSAValue
    off: SSAValue
    left: SSAValue


def part_of(kernel: KernelOp, x: SSAValue, copy: Copy, parts: Parts, inside: SSAValue | None) -> Middle:
    """In the kernel of parts, where `copy` has written x already."""
    k, element = copy.k, element_of(x)
    first = parts.first(kernel, x, copy)
    deviation = k.apply("sub", copy.values[x], first)
    if inside is not None:
        deviation = k.apply("select", inside, deviation, k.constant(0, element))
    a, b = (k.reduce("sum", v, parts.axis) for v in (deviation, k.apply("mul", deviation, deviation)))
    many = parts.members(k, first)
    some = many if parts.exact else k.apply("maximum", many, k.constant(1, element))
    off = k.apply("div", a, some)
    left = k.apply("maximum", k.apply("sub", b, k.apply("mul", a, off)), k.constant(0, element))
    return Middle(k.apply("add", a, k.apply("mul", first, many)), first, off, left)


def share_of(
    k: KernelBuilder, first: SSAValue, off: SSAValue, left: SSAValue, centre: SSAValue, parts: Parts
) -> SSAValue:
    """In the kernel of the whole: what a part adds to the sum of squares about the centre."""
    deviation = k.apply("add", k.apply("sub", first, centre), off)
    return k.apply("add", left, k.apply("mul", parts.members(k, left), k.apply("mul", deviation, deviation)))
