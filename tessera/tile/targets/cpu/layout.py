"""What a kernel's memory accesses say about its axes: which may be one, and what a step along one costs.

`Layout` is a kernel seen through joined axes: parallel axes that every access reads as if they were one row are one
axis, so that a contiguous tensor is a single loop. Expressions and the axes that values vary over are asked here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from xdsl.ir import Operation, SSAValue

from tessera.tile.dialect.functions import FUNCTIONS
from tessera.tile.dialect.index import Index, Name, Quotient
from tessera.tile.dialect.ops import (
    ApplyOp,
    ContractOp,
    IotaOp,
    KernelOp,
    LoadOp,
    RandomOp,
    ReduceExpOp,
    ReduceOp,
    ScanOp,
    StoreOp,
)
from tessera.tile.dialect.types import ValueType
from tessera.tile.schedules.schedule import reduced_axis

MOST_CHUNKS = 256  # of a piece of the reduced axis, which is summed without a break


@dataclass
class Layout:
    kernel: KernelOp
    reduced: str | None
    sizes: dict[str, Index]  # by axis, in order; joined axes are gone
    at: dict[Operation, Index] = field(default_factory=dict)
    joined: dict[str, str] = field(default_factory=dict)  # axis: the one that stands for it

    @property
    def parallel(self) -> list[str]:
        return [a for a in self.sizes if a != self.reduced]

    @property
    def sequential(self) -> str | None:
        return self.kernel.sequential_axis

    def axes_of(self, v: SSAValue) -> frozenset[str]:
        if not isinstance(v.type, ValueType):
            return frozenset()
        return frozenset(self._standing(a) for a in v.type.axis_names)

    def axes_of_op(self, op: Operation) -> frozenset[str]:
        """The axes an operation runs along: its result's, or those of a store's address and values."""
        if isinstance(op, StoreOp):
            axes = {n for n in self.at[op].names() if n in self.sizes}
            return frozenset(axes.union(*(self.axes_of(v) for v in op.operands)))
        return self.axes_of(op.results[0])

    def _standing(self, axis: str) -> str:
        while axis in self.joined:
            axis = self.joined[axis]
        return axis


def layout(kernel: KernelOp) -> Layout:
    sizes = {a.axis.data: a.size.expr for a in kernel.axes}
    at = {op: op.at.expr for op in kernel.block.ops if isinstance(op, (LoadOp, StoreOp, IotaOp))}
    seen = Layout(kernel, reduced_axis(kernel), sizes, at)
    while pair := _joinable(seen):
        outer, inner = pair
        for op in at:
            at[op] = at[op].substitute({outer: 0})
        sizes[inner] = sizes[outer] * sizes[inner]
        del sizes[outer]
        seen.joined[outer] = inner
    return seen


def _joinable(seen: Layout) -> tuple[str, str] | None:
    """Two parallel axes such that a step along one is, for every access, all the steps along the other."""
    free = [a for a in seen.parallel if a != seen.sequential]
    for outer in free:
        for inner in free:
            if outer != inner and all(_row(e, outer, inner, seen.sizes[inner]) for e in seen.at.values()):
                return outer, inner
    return None


def _row(expr: Index, outer: str, inner: str, size: Index) -> bool:
    far, near = expr.stride(outer), expr.stride(inner)
    return far is not None and near is not None and far == near * size


def chunk_stride(expr: Index, axis: str, lanes: int) -> Index | None:
    """What a step along `axis` adds within a run of `lanes` that starts at a multiple of `lanes`.

    Within such a run x // n stays the same and x % n grows by one, if n and all of x but the axis are multiples
    of `lanes`.
    """
    plain: dict = {}
    extra = Index(())
    for product, c in expr.terms:
        quotients = [a for a in product if isinstance(a, Quotient) and a.mentions(axis)]
        if not quotients:
            plain[product] = c
            continue
        others = [a for a in product if a not in quotients]
        if not all(_aligned(q, axis, lanes) for q in quotients):
            return None
        moving = [q for q in quotients if q.kind == "%"]
        if any(isinstance(a, Name) and a.name == axis for a in others) or len(moving) > 1:
            return None
        if moving:
            rest = tuple(a for a in product if a not in moving)
            extra = extra + Index(((rest, c),))
    straight = Index._from(plain).stride(axis)
    return None if straight is None else straight + extra


def _aligned(q: Quotient, axis: str, lanes: int) -> bool:
    right = q.right.constant
    stride = q.left.stride(axis)
    if right is None or right % lanes or stride is None or stride.constant != 1:
        return False
    rest = q.left.substitute({axis: 0})
    return all(c % lanes == 0 for _, c in rest.terms)


def piece_of(seen: Layout, lanes: int, least: int) -> int:
    """Pieces of the reduced axis in which all accesses step evenly, where chunks of `lanes` would cross their ends.

    The pixels of an image, say, where all images are summed: i * 196 + r % 196 + r // 196 * 25088 has pieces of 196.
    0 where chunks fit, or where there are no such pieces of a useful length.
    """
    axis = seen.reduced or ""
    size = seen.sizes[axis].constant if seen.reduced is not None and seen.sequential is None else None
    if size is None or any(isinstance(op, (ScanOp, ContractOp, RandomOp)) for op in seen.kernel.block.ops):
        return 0
    if all(chunk_stride(expr, axis, lanes) is not None for expr in seen.at.values()):
        return 0
    divisors = [q.right.constant for expr in seen.at.values() for q in _quotients(expr, axis)]
    piece = min((n for n in divisors if n is not None), default=0)
    if not least <= piece <= MOST_CHUNKS * lanes or size % piece:
        return 0
    return piece if all(chunk_stride(expr, axis, piece) is not None for expr in seen.at.values()) else 0


def _quotients(expr: Index, axis: str) -> Iterator[Quotient]:
    for product, _ in expr.terms:
        for atom in product:
            if isinstance(atom, Quotient) and atom.mentions(axis):
                yield atom


def bound(expr: Index, sizes: dict[str, int]) -> int | None:
    """No part of the expression is larger than this in size; None where a name's range is not known."""
    total = 0
    for product, c in expr.terms:
        part = abs(c)
        for atom in product:
            if isinstance(atom, Name):
                if atom.name not in sizes:
                    return None
                part *= max(sizes[atom.name] - 1, 1)
                continue
            left, right = bound(atom.left, sizes), atom.right.constant
            if left is None or right is None:
                return None
            total = max(total, left)
            part *= max(left, 1)
        total += part
    return total


def vector_axis(seen: Layout, sizes: dict[str, int], native: int) -> str | None:
    """The axis whose neighbours are neighbours in memory for most accesses; None if there is no axis.

    `native` is how many lanes a register has.
    """
    if seen.sequential is not None:
        return seen.reduced  # sums along the sequential axis are kept as rows
    best, least = None, float("inf")
    piece = piece_of(seen, 2 * native, native)
    for axis in seen.sizes:
        run = piece if piece and axis == seen.reduced else native
        price = sum(_price(seen, op, axis, sizes, run) for op in seen.at)
        short = sizes.get(axis, 1024)
        price = price + 1 + (8.0 / max(short, 1)) * (1 + len(seen.at))  # a short axis leaves lanes empty
        if axis == seen.reduced:
            price += 0.01  # among equals, no reduction across lanes
        if price < least:
            best, least = axis, price
    return best


def _price(seen: Layout, op: Operation, axis: str, sizes: dict[str, int], run: int) -> float:
    if isinstance(op, IotaOp):
        return 0.0
    points = 1.0
    for a in seen.axes_of_op(op):
        points *= sizes.get(a, 1024)
    everything = 1.0
    for a in seen.sizes:
        everything *= sizes.get(a, 1024)
    share = points / max(everything, 1.0)
    stride = chunk_stride(seen.at[op], axis, run)
    if stride is not None and stride.constant == 0:
        return 0.1 * share
    if stride is not None and stride.constant == 1:
        return 1.0 * share
    return (14.0 if isinstance(op, StoreOp) else 12.0) * share  # a load can be turned, see `transpose`


def numbers(seen: Layout, symbols: dict[str, int]) -> dict[str, int]:
    """Sizes of the axes, where the symbols' values give them."""
    extents = {}
    for axis, size in seen.sizes.items():
        if size.names() <= symbols.keys():
            extents[axis] = int(size.evaluate(symbols.__getitem__, int))
    return extents


def cost(kernel: KernelOp) -> int:
    """Rough instructions for one point."""
    total = 0
    for op in kernel.block.ops:
        match op:
            case ApplyOp():
                total += FUNCTIONS[op.fn.data].cost
            case LoadOp() | StoreOp() | ReduceOp():
                total += 1
            case ReduceExpOp():
                total += 6 + FUNCTIONS[op.fn.data].cost
    return total
