"""Addresses for buffers with lifetimes.

In: sizes and lifetimes. Out: an address for each, so that buffers that live at the same time lie apart, and how many
bytes that takes. Several orders of the greedy rule are tried, then a search that moves the buffers at fault to the
front; small sets that still do not reach their least are given to a solver where it is installed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tessera.spatial.memory import exact


@dataclass(frozen=True)
class Span:
    """Bytes that are needed from one cycle until another."""

    size: int
    start: int
    end: int

    def meets(self, other: Span) -> bool:
        return self.start < other.end and other.start < self.end


@dataclass(frozen=True)
class Placed:
    addresses: list[int]
    height: int


def pressure(spans: Sequence[Span]) -> int:
    """The most bytes that live at once: no layout needs less."""
    changes = sorted([(s.start, 1, s.size) for s in spans] + [(s.end, 0, -s.size) for s in spans])
    live = most = 0
    for _, _, size in changes:
        live += size
        most = max(most, live)
    return most


def allocate(spans: Sequence[Span], capacity: int | None = None, seed: int = 0, tries: int = 60) -> Placed:
    """Addresses of least height, or of any that a capacity allows. Sizes are taken to be aligned."""
    if not spans:
        return Placed([], 0)
    neighbours = _neighbours(spans)
    goal = max(pressure(spans), 0)
    enough = goal if capacity is None else max(goal, capacity)
    best: Placed | None = None
    for order in _orders(spans):
        placed = _greedy(spans, order, neighbours)
        if best is None or placed.height < best.height:
            best, kept = placed, order
        if best.height <= enough:
            return best
    assert best is not None
    best = _search(spans, kept, neighbours, best, enough, random.Random(seed), tries)
    if best.height > enough and len(spans) <= exact.LARGEST:
        solved = exact.solve(spans, goal, best.height)
        if solved is not None:
            best = Placed(solved, max(a + s.size for a, s in zip(solved, spans, strict=True)))
    return best


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
    found: list[list[int]] = [[] for _ in spans]
    live: list[int] = []
    for i in order:
        live = [j for j in live if spans[j].end > spans[i].start]
        for j in live:
            if spans[i].meets(spans[j]):
                found[i].append(j)
                found[j].append(i)
        live.append(i)
    return found


def _greedy(spans: Sequence[Span], order: Sequence[int], neighbours: list[list[int]]) -> Placed:
    """Each buffer in turn at the lowest address that is free all its life."""
    addresses = [-1] * len(spans)
    height = 0
    for i in order:
        taken = sorted((addresses[j], addresses[j] + spans[j].size) for j in neighbours[i] if addresses[j] >= 0)
        at = 0
        for low, high in taken:
            if low - at >= spans[i].size:
                break
            at = max(at, high)
        addresses[i] = at
        height = max(height, at + spans[i].size)
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
        other.insert(chance.randrange(order.index(moved) + 1), moved)
        if chance.random() < 0.3 and len(around) > 1:
            a, b = chance.sample(around, 2)
            i, j = other.index(a), other.index(b)
            other[i], other[j] = other[j], other[i]
        placed = _greedy(spans, other, neighbours)
        if placed.height <= best.height:
            best, order = placed, other
    return best
