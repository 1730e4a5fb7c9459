"""Addresses by moving buffers apart.

In: spans, who lives at the same time, a height, addresses to begin with. Out: addresses within that height, or None
after so many moves.

Buffers may overlap while it searches. One that does goes to where its overlaps weigh least: right above or below
another, or to an end of memory. Where no place is better, the overlaps that it has become heavier, so that the search
does not come back to them (guided local search). So it finds places in tight sets that no order of the greedy rule
leads to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tessera.spatial.memory.span import Span


def separate(
    spans: Sequence[Span], neighbours: list[list[int]], height: int, begin: Sequence[int], moves: int, seed: int = 0
) -> list[int] | None:
    return _Search(spans, neighbours, height, begin, seed).run(moves)


class _Search:
    def __init__(
        self, spans: Sequence[Span], neighbours: list[list[int]], height: int, begin: Sequence[int], seed: int
    ) -> None:
        self.chance = np.random.default_rng(seed)
        self.size = np.array([s.size for s in spans], dtype=np.int64)
        self.height = height - height % math.gcd(*(s.size for s in spans))  # addresses stay aligned as sizes are
        self.at = np.minimum(np.array(begin, dtype=np.int64), self.height - self.size)
        self.beside = [np.array(others, dtype=np.int64) for others in neighbours]
        self.place = [{j: k for k, j in enumerate(others)} for others in neighbours]  # of j among i's neighbours
        self.weight = [np.ones(len(others)) for others in neighbours]

    def run(self, moves: int) -> list[int] | None:
        if (self.at < 0).any():
            return None
        left = {i for i in range(len(self.at)) if (self.depths(i, self.at[i : i + 1]) > 0).any()}
        for _ in range(moves):
            if not left:
                return self.at.tolist()
            i = sorted(left)[self.chance.integers(len(left))]
            left.update(self.move(i))
            if not (self.depths(i, self.at[i : i + 1]) > 0).any():
                left.discard(i)
        return None

    def depths(self, i: int, places: np.ndarray) -> np.ndarray:
        """How far buffer i, at each of these places, would have to move to be apart from each neighbour."""
        low = self.at[self.beside[i]]
        high = low + self.size[self.beside[i]]
        here = places[:, None]
        return np.maximum(np.minimum(here + self.size[i] - low, high - here), 0)

    def move(self, i: int) -> list[int]:
        """Move a buffer to where its overlaps weigh least; whom it overlaps there."""
        others, weight = self.beside[i], self.weight[i]
        now = self.depths(i, self.at[i : i + 1])[0]
        low = self.at[others]
        ends = np.array([0, self.height - self.size[i]])
        places = np.concatenate((ends, low + self.size[others], low - self.size[i]))
        places = places[(places >= 0) & (places <= ends[1])]
        depths = self.depths(i, places)
        cost = depths @ weight
        least = cost.min()
        if least >= now @ weight:
            self.blame(i, now)
        chosen = self.chance.choice(np.nonzero(cost == least)[0])
        self.at[i] = places[chosen]
        return others[depths[chosen] > 0].tolist()

    def blame(self, i: int, depths: np.ndarray) -> None:
        """Overlaps become heavier, the deepest by one."""
        for k in np.nonzero(depths)[0]:
            more, j = depths[k] / depths.max(), self.beside[i][k]
            self.weight[i][k] += more
            self.weight[j][self.place[j][i]] += more
