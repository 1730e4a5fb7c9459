"""Addresses by a search over canonical layouts.

In: spans and a height. Out: addresses within that height; None, which is a proof that there are none; or `Unknown`
where the budget of nodes ran out.

Buffers are placed from the bottom up: each at the lowest address that is free above all placed before it, and never
below the last one. Every set that fits has such a layout. Three rules cut the search. Moments whose buffers all live
at another moment are dropped, so only the maximal sets of buffers that live at once, *cliques*, are left. A clique
fails when the buffers that cannot lie below an address need more than what is left above it. And a buffer is not
placed above the end of a hole that another, still unplaced one would fit in. What falls apart in time is solved part by
part. A search that goes astray seldom comes back, so it is begun again with other preferences.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence

import numpy as np

from tessera.spatial.memory.span import Span


class Unknown(Exception):
    """The budget ran out before an answer."""


LARGEST = 2000  # spans
FIRST_TRY = 500  # nodes
GROWTH = 1.5  # of a try's nodes, after a try with every preference
NOISE = 0.3


def fit(spans: Sequence[Span], height: int, nodes: int, seed: int = 0) -> list[int] | None:
    """Addresses within a height, or None where there are none; raises `Unknown` after so many nodes."""
    with _deep(len(spans)):
        return _fit(_Search(spans, height), nodes, np.random.default_rng(seed))


def _fit(search: _Search, nodes: int, chance: np.random.Generator) -> list[int] | None:
    allowed = FIRST_TRY
    noise = 0.0
    while True:
        for preference in search.preferences():
            if search.visited >= nodes:
                raise Unknown
            weights = preference * np.exp(chance.normal(0, noise, len(preference)))
            try:
                return search.run(weights, min(allowed, nodes - search.visited))
            except Unknown:
                continue
        noise, allowed = NOISE, int(allowed * GROWTH)


class _Search:
    def __init__(self, spans: Sequence[Span], height: int) -> None:
        self.height = height
        self.size = np.array([s.size for s in spans], dtype=np.int64)
        self.start = np.array([s.start for s in spans], dtype=np.int64)
        self.end = np.array([s.end for s in spans], dtype=np.int64)
        self.meets = (self.start[:, None] < self.end) & (self.start < self.end[:, None])
        live = _cliques(self.start, self.end)
        self.first = live.argmax(1)
        self.last = live.shape[1] - 1 - live[:, ::-1].argmax(1)
        self.bytes = live * self.size[:, None]
        self.visited = 0
        self.stop = 0
        self.weights = np.zeros(len(spans))
        self.address = np.zeros(len(spans), dtype=np.int64)

    def preferences(self) -> Iterator[np.ndarray]:
        """Whom to place first among those that could lie equally low: tight moments, long lives, many bytes."""
        length = _share(self.end - self.start)
        area = _share(length * self.size)
        tight = _share(np.where(self.bytes > 0, self.bytes.sum(0), 0).max(1))
        yield 1e6 * tight + 1e3 * area + length
        yield 1e6 * tight + 1e3 * length + area
        yield 1e6 * length + 1e3 * area + tight
        yield area
        yield _share(self.size)

    def run(self, weights: np.ndarray, nodes: int) -> list[int] | None:
        self.weights, self.stop = weights, self.visited + nodes
        count = len(weights)
        return self.address.tolist() if self.parts(np.arange(count), np.zeros(count, dtype=np.int64), 0) else None

    def parts(self, left: np.ndarray, floor: np.ndarray, low: int) -> bool:
        """Place all that is left, part by part; `floor` is the lowest free address of each, `low` the last one's."""
        if not len(left):
            return True
        order = np.argsort(self.first[left], kind="stable")
        left, floor = left[order], floor[order]
        reach = np.maximum.accumulate(self.last[left])
        cuts = np.nonzero(self.first[left][1:] > reach[:-1])[0] + 1
        if not len(cuts):
            return self.part(left, floor, low)
        # The small ones first: a part that has no layout is known sooner.
        for part in sorted(np.split(np.arange(len(left)), cuts), key=len):
            if not self.part(left[part], floor[part], low):
                return False
        return True

    def part(self, left: np.ndarray, floor: np.ndarray, low: int) -> bool:
        if self.visited >= self.stop:
            raise Unknown
        self.visited += 1
        at = np.maximum(floor, low)
        if not self.hopeful(left, at):
            return False
        size = self.size[left]
        candidates = np.nonzero(at < (floor + size).min())[0]
        for k in candidates[np.lexsort((-self.weights[left[candidates]], at[candidates]))]:
            i, address = left[k], at[k]
            rest, above = np.delete(left, k), np.delete(floor, k)
            above = np.where(self.meets[i, rest], np.maximum(above, address + size[k]), above)
            self.address[i] = address
            if self.parts(rest, above, int(address)):
                return True
        return False

    def hopeful(self, left: np.ndarray, at: np.ndarray) -> bool:
        """In every clique, those that cannot lie below an address fit between it and the height."""
        order = np.argsort(-at, kind="stable")
        needed = self.bytes[left[order], self.first[left].min() : self.last[left].max() + 1]
        tops = np.where(needed > 0, np.cumsum(needed, axis=0) + at[order][:, None], 0)
        return bool(tops.max() <= self.height)


@contextlib.contextmanager
def _deep(spans: int) -> Iterator[None]:
    """Two calls a buffer are open at once; they take no room but the interpreter's own."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(before + 3 * spans)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def _share(values: np.ndarray) -> np.ndarray:
    return values / values.max()


def _cliques(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """[buffers, cliques]: who lives at each moment that counts, in order of time."""
    kept: list[np.ndarray] = []
    for moment in np.unique(start):
        live = (start <= moment) & (moment < end)
        if kept and not (live & ~kept[-1]).any():
            continue
        while kept and not (kept[-1] & ~live).any():
            kept.pop()
        kept.append(live)
    return np.stack(kept, axis=1)
