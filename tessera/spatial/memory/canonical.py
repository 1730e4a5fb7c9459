"""Addresses by a search over canonical layouts.

In: spans and a height. Out: addresses within that height; None, which is a proof that there are none; or `Unknown`
where the budget of nodes ran out.

Every set that fits has a layout in which no buffer could lie lower: each lies at 0 or right on another one, its
*support*. The search builds such layouts from the bottom up and asks one question at a time: does the buffer that can
lie lowest lie there? If so, whatever lives beside it lies above it. If not, it waits: its support is not placed yet,
so that it lies on one that still is to come. Both answers raise how low buffers may lie, and three rules refuse them:
a *clique* (a maximal set of buffers that live at once) needs more than what is left above the lowest of its buffers;
a buffer that waits can no longer be supported; or it could lie where it did not, whatever the others do. A buffer
below which nothing else fits, and beside which nothing must lie lower than its end, is placed without a question.

What falls apart in time is solved part by part. A search that goes astray seldom comes back, and layouts are mostly
found with few wrong answers, so there are many short tries, each with another preference among buffers that can lie
equally low. Between them long ones double, for proofs.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Sequence

import numpy as np

from tessera.spatial.memory.span import Span


class Unknown(Exception):
    """The budget ran out before an answer."""


LARGEST = 2000  # spans
SHORT = 3  # nodes of a short try, for each span
LONG = 0.5  # of the nodes of short tries, what long ones take
NOISE = 0.4  # the most by which a preference is changed, as a power of e


def fit(spans: Sequence[Span], height: int, nodes: int, seed: int = 0) -> list[int] | None:
    """Addresses within a height, or None where there are none; raises `Unknown` after so many nodes."""
    with _deep(len(spans)):
        return _tries(_Search(spans, height), nodes, np.random.default_rng(seed))


def _tries(search: _Search, nodes: int, chance: np.random.Generator) -> list[int] | None:
    short = SHORT * len(search.size)
    long, owed = 2 * short, 0.0
    for preference in search.preferences(chance):
        allowed = short
        if owed >= long:
            allowed, long, owed = long, 2 * long, owed - long
        else:
            owed += LONG * short
        try:
            return search.run(preference, min(allowed, nodes - search.visited))
        except Unknown:
            if search.visited >= nodes:
                raise
    raise AssertionError("preferences end nowhere")


class _Search:
    """Addresses and sizes are in units of what all sizes are multiples of. Placed buffers stand at `never`, where they
    are in nobody's way."""

    def __init__(self, spans: Sequence[Span], height: int) -> None:
        self.unit = math.gcd(*(s.size for s in spans))
        self.height = height // self.unit
        kind = np.int32 if self.height < 1 << 28 else np.int64  # half as many bytes to go through
        self.never = int(np.iinfo(kind).max // 4)
        self.size = np.array([s.size // self.unit for s in spans], dtype=kind)
        start, end = (np.array(times, dtype=np.int64) for times in ([s.start for s in spans], [s.end for s in spans]))
        self.length = end - start
        self.meets = (start[:, None] < end) & (start < end[:, None])
        np.fill_diagonal(self.meets, False)
        self.apart = np.where(self.meets, 0, self.never).astype(kind)
        live = _cliques(start, end)
        self.first = live.argmax(1)
        self.last = live.shape[1] - 1 - live[:, ::-1].argmax(1)
        self.absent = np.where(live, 0, self.never).astype(kind)
        self.bytes = (live * self.size[:, None]).sum(0)
        self.visited = 0
        self.stop = 0
        self.preference = np.zeros(len(spans))
        self.address = np.zeros(len(spans), dtype=np.int64)

    def preferences(self, chance: np.random.Generator) -> Iterator[np.ndarray]:
        """Whom to ask first among those that could lie equally low: long lives, and more or less large ones."""
        length, size = self.length / self.length.max(), self.size / self.size.max()
        yield length
        yield length * size
        while True:
            noise = chance.normal(0, NOISE * chance.random(), len(size))
            yield length * size ** chance.random() * np.exp(noise)

    def run(self, preference: np.ndarray, nodes: int) -> list[int] | None:
        self.preference, self.stop = preference, self.visited + nodes
        nobody = np.zeros(0, dtype=np.int64)
        found = self.parts(np.arange(len(preference)), np.zeros_like(self.size), nobody, self.bytes)
        return (self.address * self.unit).tolist() if found else None

    def parts(self, left: np.ndarray, floor: np.ndarray, waiting: np.ndarray, needed: np.ndarray) -> bool:
        """Place all that is left, part by part. `floor` is the lowest free address of each buffer, `waiting` are those
        that do not lie there, `needed` is what is left of each clique."""
        if not len(left):
            return True
        left = left[np.argsort(self.first[left], kind="stable")]
        reach = np.maximum.accumulate(self.last[left])
        cuts = np.nonzero(self.first[left][1:] > reach[:-1])[0] + 1
        if not len(cuts):
            return self.part(left, floor, waiting, needed)
        # The small ones first: a part that has no layout is known sooner.
        for part in sorted(np.split(left, cuts), key=len):
            if not self.part(part, floor, waiting[np.isin(waiting, part)], needed):
                return False
        return True

    def part(self, left: np.ndarray, floor: np.ndarray, waiting: np.ndarray, needed: np.ndarray) -> bool:
        low, high = self.first[left].min(), self.last[left].max() + 1
        absent, needs = self.absent[left, low:high], needed[low:high]
        while True:
            if self.visited >= self.stop:
                raise Unknown
            self.visited += 1
            at = self.lowest(floor, waiting)
            if at is None:
                return False
            here = at[left]
            if ((absent + here[:, None]).min(0) + needs)[needs > 0].max() > self.height:
                return False
            # One that waits lies higher than its support, so the lowest do not wait.
            lowest = left[here == here.min()]
            i = int(lowest[self.preference[lowest].argmax()])
            if self.placed(i, left, floor, waiting, needed):
                return True
            if (self.apart[i] + at).min() >= at[i] + self.size[i]:
                return False  # wherever it lies, it could lie here
            waiting = np.append(waiting, i)

    def lowest(self, floor: np.ndarray, waiting: np.ndarray) -> np.ndarray | None:
        """How low each may lie: one that waits lies on another one. None where it cannot."""
        if not len(waiting):
            return floor
        at, beside, before = floor.copy(), self.apart[waiting], None
        while before is None or (at[waiting] > before).any():
            before = at[waiting]
            at[waiting] = np.maximum(before, (beside + (at + self.size)).min(1))
            if (at[waiting] + self.size[waiting] > self.height).any():
                return None
        could = (beside + at).min(1) >= floor[waiting] + self.size[waiting]
        return None if could.any() else at

    def placed(self, i: int, left: np.ndarray, floor: np.ndarray, waiting: np.ndarray, needed: np.ndarray) -> bool:
        """Place one at its floor, then the others."""
        self.address[i] = floor[i]
        above = np.maximum(floor, floor[i] + self.size[i], where=self.meets[i], out=floor.copy())
        above[i] = self.never
        rest = needed.copy()
        rest[self.first[i] : self.last[i] + 1] -= self.size[i]
        still = waiting[above[waiting] == floor[waiting]]
        return self.parts(left[left != i], above, still, rest)


@contextlib.contextmanager
def _deep(spans: int) -> Iterator[None]:
    """Three calls a buffer are open at once; they take no room but the interpreter's own."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(before + 4 * spans)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


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
