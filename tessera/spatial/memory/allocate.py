"""Addresses for buffers with lifetimes.

In: sizes and lifetimes. Out: an address for each, so that buffers that live at the same time lie apart, and how many
bytes that takes. Several orders of the greedy rule are tried, then a search that moves a buffer at fault to the
front, then one in which all at fault become more urgent from round to round. What is still higher than it must be goes
to CP-SAT where it is small and ortools is installed, and to the search over canonical layouts otherwise.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from tessera.spatial.memory import canonical, exact
from tessera.spatial.memory.span import Span, pressure
from tessera.spatial.solvers import missing

NODES = 40_000  # of the canonical search, all heights together: some seconds
URGENCY = (0.1, 0.02, 0.005)  # how far a buffer that stands too high moves to the front at most, of all of them


@dataclass(frozen=True)
class Placed:
    addresses: list[int]
    height: int
    proven: bool = False  # no layout is lower


def allocate(
    spans: Sequence[Span], capacity: int | None = None, seed: int = 0, tries: int = 60, nodes: int = NODES
) -> Placed:
    """Addresses of least height, or of any that a capacity allows. Sizes are taken to be aligned."""
    if not spans:
        return Placed([], 0, True)
    neighbours = _neighbours(spans)
    goal = pressure(spans)
    enough = goal if capacity is None else max(goal, capacity)
    laid = [(placed, order) for order in _orders(spans) if (placed := _greedy(spans, order, neighbours)) is not None]
    best, order = min(laid, key=lambda pair: pair[0].height)
    if capacity is not None and goal > capacity:
        return best  # no layout fits
    if best.height > enough:
        best = _search(spans, order, neighbours, best, enough, random.Random(seed), tries)
    if best.height > enough:
        best = _urgent(spans, neighbours, best, enough, random.Random(seed), tries)
    if best.height > enough and len(spans) <= exact.LARGEST and not missing("ortools"):
        best = _solved(spans, goal, best)
    if best.height > enough and not best.proven and len(spans) <= canonical.LARGEST:
        best = _lower(spans, enough, best, nodes, seed, any_height=capacity is None)
    return Placed(best.addresses, best.height, best.proven or best.height == goal)


def _solved(spans: Sequence[Span], goal: int, best: Placed) -> Placed:
    """By CP-SAT."""
    addresses, proven = exact.solve(spans, goal, best.height)
    return Placed(best.addresses, best.height, proven) if addresses is None else _placed(spans, addresses, proven)


def _lower(spans: Sequence[Span], enough: int, best: Placed, nodes: int, seed: int, any_height: bool) -> Placed:
    """By the canonical search: the height that is wanted, then ever halfway between what failed and the best."""
    unit = math.gcd(*(s.size for s in spans))
    low, high, proven = enough // unit, best.height // unit, True
    wanted = low
    while low < high:
        nodes = max(nodes // 2, 1) if any_height else nodes
        try:
            addresses = canonical.fit(spans, wanted * unit, nodes, seed)
        except canonical.Unknown:
            addresses, proven = None, False
        if addresses is None:
            low = wanted + 1
        else:
            best = _placed(spans, addresses, False)
            high = best.height // unit
        if not any_height:
            break
        wanted = (low + high) // 2
    return Placed(best.addresses, best.height, proven and any_height)


def _placed(spans: Sequence[Span], addresses: list[int], proven: bool) -> Placed:
    return Placed(addresses, max(a + s.size for a, s in zip(addresses, spans, strict=True)), proven)


def _orders(spans: Sequence[Span]) -> list[list[int]]:
    every = list(range(len(spans)))
    keys = (
        lambda i: (-spans[i].size, spans[i].start),
        lambda i: (-(spans[i].end - spans[i].start), -spans[i].size),
        lambda i: (-(spans[i].end - spans[i].start) * spans[i].size, spans[i].start),
        lambda i: (spans[i].start, -spans[i].size),
        lambda i: (-spans[i].end, -spans[i].size),
    )
    return [sorted(every, key=key) for key in keys]


def _neighbours(spans: Sequence[Span]) -> list[list[int]]:
    """Who lives at the same time."""
    order = sorted(range(len(spans)), key=lambda i: spans[i].start)
    meeting: list[list[int]] = [[] for _ in spans]
    live: list[int] = []
    for i in order:
        live = [j for j in live if spans[j].end > spans[i].start]
        for j in live:
            if spans[i].meets(spans[j]):
                meeting[i].append(j)
                meeting[j].append(i)
        live.append(i)
    return meeting


def _greedy(
    spans: Sequence[Span], order: Sequence[int], neighbours: list[list[int]], before: Placed | None = None,
    first: int = 0,
) -> Placed | None:  # fmt: skip
    """Each buffer in turn at the lowest address that is free all its life. After `before`, an order that is the same up
    to `first` need not be begun anew, and one that becomes higher is given up: None."""
    addresses = [-1] * len(spans)
    if before is not None:
        for i in order[:first]:
            addresses[i] = before.addresses[i]
    height = max((addresses[i] + spans[i].size for i in order[:first]), default=0)
    for i in order[first:]:
        size = spans[i].size
        taken = sorted([(addresses[j], addresses[j] + spans[j].size) for j in neighbours[i] if addresses[j] >= 0])
        at = 0
        for low, high in taken:
            if low - at >= size:
                break
            at = max(at, high)
        addresses[i] = at
        height = max(height, at + size)
        if before is not None and height > before.height:
            return None
    return Placed(addresses, height)


def _search(
    spans: Sequence[Span], order: list[int], neighbours: list[list[int]], best: Placed, enough: int,
    chance: random.Random, tries: int,
) -> Placed:  # fmt: skip
    """Move a buffer that stands too high, or one below it, to another place in the order."""
    for _ in range(tries):
        if best.height <= enough:
            break
        top = [i for i in range(len(spans)) if best.addresses[i] + spans[i].size == best.height]
        around = sorted({*top, *(j for i in top for j in neighbours[i])})
        other = list(order)
        moved = chance.choice(top if chance.random() < 0.6 else around)
        other.remove(moved)
        first = chance.randrange(order.index(moved) + 1)
        other.insert(first, moved)
        if chance.random() < 0.3 and len(around) > 1:
            a, b = chance.sample(around, 2)
            i, j = other.index(a), other.index(b)
            other[i], other[j] = other[j], other[i]
            first = min(first, i, j)
        if (placed := _greedy(spans, other, neighbours, best, first)) is not None:
            best, order = placed, other
    return best


def _urgent(
    spans: Sequence[Span], neighbours: list[list[int]], best: Placed, enough: int, chance: random.Random, tries: int
) -> Placed:
    """Whatever stands too high becomes more urgent, and all are placed anew; what is urgent stays so. How much more
    decides how far a set gets, so several steps are tried from several orders."""
    orders = _orders(spans)
    ways = [(order, step) for step in URGENCY for order in (orders[0], orders[3])]
    for order, step in ways:
        urgency = [0.0] * len(spans)
        for place, i in enumerate(order):
            urgency[i] = float(-place)
        for _ in range(max(tries // len(ways), 1)):
            if best.height <= enough:
                return best
            order = sorted(range(len(spans)), key=lambda i: -urgency[i])  # noqa: B023
            placed = _greedy(spans, order, neighbours)
            assert placed is not None
            if placed.height < best.height:
                best = placed
            for i, s in enumerate(spans):
                if placed.addresses[i] + s.size > enough:
                    urgency[i] += chance.random() * step * len(spans)
    return best
