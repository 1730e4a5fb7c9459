"""Reductions and scans: what is carried along an axis, how an element joins it, how two partial results join.

A `Kind` carries one or more parts, each a scalar or a vector; a vector's lanes are independent partial results until
`fold` joins them. NaN wins in max and min: on machines whose own maximum drops it, it is carried beside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tessera.tile.targets.cpu.code import SIZES, V
from tessera.tile.targets.cpu.elements import Element
from tessera.tile.targets.cpu.host import Host
from tessera.tile.targets.cpu.host import HostCode as Code
from tessera.util.errors import OptionError

NOWHERE = 2**63 - 1  # a position after every other
Parts = tuple[V, ...]


@dataclass(frozen=True)
class Kind:
    start: tuple[tuple[str, float | int], ...]  # element type and first value of every part
    neutral: float | int  # the element that changes nothing
    merge: Callable[[Code, Parts, Parts], Parts]
    lift: Callable[[Code, V, V | None], Parts] = lambda b, x, where: (x,)  # an element as parts
    finish: Callable[[Code, Parts], Parts] = lambda b, parts: parts[:1]  # the operation's results
    absorb: Callable[[Code, Parts, V], Parts] | None = None  # a cheaper way to merge one element
    cascade: bool = False  # long sums of floats go through several levels, to keep the error small
    join: Callable[[Code, Parts, int], Parts] | None = None  # a cheaper way to join lanes than half with half

    def step(self, b: Code, parts: Parts, x: V, where: V | None) -> Parts:
        return self.absorb(b, parts, x) if self.absorb else self.merge(b, parts, self.lift(b, x, where))


def _simple(op: str) -> Callable[[Code, Parts, Parts], Parts]:
    return lambda b, p, q: (b.bin(op, p[0], q[0]),)


def _intrinsic(name: str) -> Callable[[Code, Parts, Parts], Parts]:
    return lambda b, p, q: (b.call(name, p[0], q[0]),)


def _beside_nan(how: str) -> Callable[[Code, Parts, Parts], Parts]:
    def merge(b: Code, p: Parts, q: Parts) -> Parts:
        best = b.select(b.compare(how, q[0], p[0]), q[0], p[0])
        return best, b.select(b.compare("uno", q[1], q[1]), q[1], p[1])

    return merge


def _nan_or_best(b: Code, parts: Parts) -> Parts:
    return (b.select(b.compare("uno", parts[1], parts[1]), parts[1], parts[0]),)


def _first_best(how: str, is_float: bool) -> Callable[[Code, Parts, Parts], Parts]:
    """argmax, argmin: parts are the best element and its position; the earliest of equals wins, NaN before all."""

    def merge(b: Code, p: Parts, q: Parts) -> Parts:
        better = b.compare(how, q[0], p[0])
        same = b.compare("oeq" if is_float else "eq", q[0], p[0])
        if is_float:
            mine, yours = b.compare("uno", p[0], p[0]), b.compare("uno", q[0], q[0])
            better = b.bin("or", better, b.bin("and", yours, b.bin("xor", mine, b.like(mine, 1))))
            same = b.bin("or", same, b.bin("and", mine, yours))
        take = b.bin("or", better, b.bin("and", same, b.compare("slt", q[1], p[1])))
        return b.select(take, q[0], p[0]), b.select(take, q[1], p[1])

    return merge


def _position(b: Code, parts: Parts) -> Parts:
    return (b.select(b.compare("eq", parts[1], b.like(parts[1], NOWHERE)), b.like(parts[1], 0), parts[1]),)


def _where(b: Code, x: V, where: V | None) -> Parts:
    assert where is not None
    return tuple(b.match(x, where))


def kind(name: str, e: Element, host: Host) -> Kind:
    """How elements of type `e` combine; short floats come as float32."""
    elem = "float" if e.short else e.register
    is_float = e.is_float
    top, bottom = _range(elem, e)
    match name:
        case "sum" if elem == "i1":
            return Kind(((elem, 0),), 0, _simple("or"))
        case "prod" if elem == "i1":
            return Kind(((elem, 1),), 1, _simple("and"))
        case "sum":
            return Kind(((elem, 0),), 0, _simple("fadd" if is_float else "add"), cascade=is_float)
        case "prod":
            return Kind(((elem, 1),), 1, _simple("fmul" if is_float else "mul"))
        case "any" | "all":
            return Kind((("i1", name == "all"),), name == "all", _simple("or" if name == "any" else "and"))
        case "max" | "min":
            neutral = bottom if name == "max" else top
            if not is_float:
                return Kind(((elem, neutral),), neutral, _intrinsic(("u" if e.unsigned else "s") + name))
            if host.arm:
                return Kind(((elem, neutral),), neutral, _intrinsic(name + "imum"))
            merge = _beside_nan("ogt" if name == "max" else "olt")
            return Kind(((elem, neutral), (elem, 0)), neutral, merge, lambda b, x, _: (x, x), _nan_or_best)
        case "argmax" | "argmin":
            neutral = bottom if name == "argmax" else top
            letter = "o" if is_float else "u" if e.unsigned else "s"
            merge = _first_best(letter + ("gt" if name == "argmax" else "lt"), is_float)
            return Kind(((elem, neutral), ("i64", NOWHERE)), neutral, merge, _where, _position)
    raise OptionError(f"expected sum, prod, max, min, any, all, argmax or argmin, got {name!r}")


def _range(elem: str, e: Element) -> tuple[float | int, float | int]:
    if e.is_float:
        return float("inf"), float("-inf")
    if e.unsigned:
        return (1 << (1 if elem == "i1" else SIZES[elem] * 8)) - 1, 0
    return (1 << (SIZES[elem] * 8 - 1)) - 1, -(1 << (SIZES[elem] * 8 - 1))


class Carried:
    """The parts of one reduction in stack slots, while loops run: one set of slots for every level of a long sum."""

    def __init__(self, b: Code, kind: Kind, lanes: int, levels: int) -> None:
        self.b, self.kind, self.lanes = b, kind, lanes
        count = 1 + (levels if kind.cascade else 0)
        self.levels = [[b.slot(elem, lanes, "acc") for elem, _ in kind.start] for _ in range(count)]
        self.slots = self.levels[0]
        self._reset(self.levels[-1])

    def _reset(self, slots: Sequence[V]) -> None:
        for slot, (elem, first) in zip(slots, self.kind.start, strict=True):
            self.b.store(self.b.const(elem, first, self.lanes), slot)

    def _load(self, slots: Sequence[V]) -> Parts:
        return tuple(
            self.b.load(elem, self.lanes, slot) for slot, (elem, _) in zip(slots, self.kind.start, strict=True)
        )

    def _store(self, slots: Sequence[V], parts: Parts) -> None:
        for slot, part in zip(slots, parts, strict=True):
            self.b.store(part, slot)

    def begin_block(self, level: int) -> None:
        if level < len(self.levels) - 1:
            self._reset(self.levels[level])

    def end_block(self, level: int) -> None:
        """Move what a block gave to the next level."""
        if level < len(self.levels) - 1:
            low, high = self.levels[level], self.levels[level + 1]
            self._store(high, self.kind.merge(self.b, self._load(high), self._load(low)))

    def step(self, x: V, where: V | None, mask: V | None) -> None:
        b = self.b
        x = b.splat(x, self.lanes)
        if mask is not None:
            x = b.select(mask, x, b.like(x, self.kind.neutral))
            where = where and b.select(mask, where, b.const("i64", NOWHERE))
        if where is not None:
            where = b.splat(where, self.lanes)
        self._store(self.slots, self.kind.step(b, self._load(self.slots), x, where))

    def multiply_add(self, x: V, y: V) -> None:
        """sum += x * y in one rounding."""
        (total,) = self._load(self.slots)
        self._store(self.slots, (self.b.fma(self.b.splat(x, self.lanes), self.b.splat(y, self.lanes), total),))

    def scan(self, x: V, mask: V | None) -> V:
        """The running result at x. Lanes of x are neighbours if what is carried is a scalar, else independent."""
        if x.lanes == self.lanes or not x.lanes:
            self.step(x, None, None)
            return self.kind.finish(self.b, self._load(self.slots))[0]
        b, lanes = self.b, x.lanes
        if mask is not None:
            x = b.select(mask, x, b.like(x, self.kind.neutral))
        parts = self.kind.lift(b, x, None)
        distance = 1
        while distance < lanes:
            parts = self.kind.merge(b, tuple(self._moved(p, k, distance) for k, p in enumerate(parts)), parts)
            distance *= 2
        before = tuple(b.splat(p, lanes) for p in self._load(self.slots))
        parts = self.kind.merge(b, before, parts)
        self._store(self.slots, tuple(b.lane(p, lanes - 1) for p in parts))
        return self.kind.finish(b, parts)[0]

    def _moved(self, x: V, part: int, distance: int) -> V:
        """Every lane's neighbour `distance` before it; neutral where there is none."""
        elem, first = self.kind.start[part]
        picks = ", ".join(f"i32 {k - distance if k >= distance else x.lanes}" for k in range(x.lanes))
        neutral = self.b.const(elem, first, x.lanes)
        return self.b.value(f"shufflevector {x}, {neutral}, <{x.lanes} x i32> <{picks}>", elem, x.lanes)

    def parts(self) -> Parts:
        return self._load(self.levels[-1])


def fold(b: Code, kind: Kind, parts: Parts, lanes: int) -> Parts:
    """Join lanes until `lanes` are left (0: a scalar), halving them."""
    if kind.join is not None and parts[0].lanes > max(lanes, 1):
        parts = kind.join(b, parts, max(lanes, 1))
    parts = halved(b, kind.merge, parts, lanes)
    return tuple(b.lane(p, 0) for p in parts) if lanes == 0 and parts[0].lanes == 1 else parts


def halved(b: Code, merge: Callable[[Code, Parts, Parts], Parts], parts: Parts, lanes: int) -> Parts:
    """Merge half with half until `lanes` are left, one at the least."""
    while parts[0].lanes > max(lanes, 1):
        half = parts[0].lanes // 2
        parts = merge(b, tuple(b.part(p, 0, half) for p in parts), tuple(b.part(p, half, half) for p in parts))
    return parts
