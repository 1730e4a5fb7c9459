"""Rectangles in maps.

In: a map, a matrix of the numbers of elements. Out: rectangles of it that are rectangles of a home, as they lie or
turned. Every element of the map is in exactly one. What a tile reads is found so, whatever views led to it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tessera.spatial.graph import ZERO, Graph, Home


@dataclass(frozen=True)
class Piece:
    """`height` × `width` elements of the map at (row, column), from (home_row, home_column) of a home on; a turned
    piece goes down the home's rows along the map's columns. No home: zeros."""

    home: Home | None
    home_row: int
    home_column: int
    row: int
    column: int
    height: int
    width: int
    turned: bool = False

    @property
    def home_box(self) -> tuple[int, int, int, int]:
        """Rows from, to, columns from, to."""
        down, along = (self.width, self.height) if self.turned else (self.height, self.width)
        return self.home_row, self.home_row + down, self.home_column, self.home_column + along


def pieces(index: np.ndarray, graph: Graph) -> list[Piece]:
    """The rectangles of a map, few rather than many."""
    for turned in (False, True):
        if (only := _single(index.T if turned else index, graph)) is not None:
            row, column = only
            home = graph.home_at(int(index[0, 0]))
            return [Piece(home, row, column, 0, 0, *index.shape, turned)]
    if min(index.shape) > 1 and _breaks(index.T) < _breaks(index):
        found = _rectangles(np.ascontiguousarray(index.T), graph)
        return [Piece(p.home, p.home_row, p.home_column, p.column, p.row, p.width, p.height, True) for p in found]
    return _rectangles(index, graph)


def _breaks(index: np.ndarray) -> int:
    """About how many rectangles a map has: steps that lead elsewhere than to a neighbour."""
    along = int((index[:, 1:] - index[:, :-1] != 1).any(axis=0).sum()) + 1
    below = index[1:, 0] - index[:-1, 0]
    return along * (int((below[1:] != below[:-1]).sum()) + 1)


def _single(index: np.ndarray, graph: Graph) -> tuple[int, int] | None:
    """Where a map begins in its home, if it is one rectangle of it: asked first, since most are."""
    first, last = int(index[0, 0]), int(index[-1, -1])
    if first < 0:
        return None
    home = graph.home_at(first)
    row, column = divmod(first - home.base, home.columns)
    rows, columns = index.shape
    if column + columns > home.columns or last != first + (rows - 1) * home.columns + columns - 1:
        return None
    if last >= home.base + home.size:
        return None
    expected = first + np.arange(rows)[:, None] * home.columns + np.arange(columns)
    return (row, column) if (index == expected).all() else None


def _rectangles(index: np.ndarray, graph: Graph) -> list[Piece]:
    """Runs along rows, then equal runs of rows below each other."""
    rows, columns = index.shape
    bases = np.asarray(graph.bases)
    widths = np.asarray([max(h.columns, 1) for h in graph.homes])
    number = np.searchsorted(bases, index, "right") - 1  # of homes; -1 for zeros
    inside = np.where(index == ZERO, 0, index - bases[number])
    wide = np.where(index == ZERO, 1, widths[number])
    down, along = inside // wide, inside % wide
    step = (number[:, 1:] == number[:, :-1]) & (
        (number[:, 1:] < 0) | ((down[:, 1:] == down[:, :-1]) & (along[:, 1:] == along[:, :-1] + 1))
    )
    cuts = [0, *(np.flatnonzero(~step.all(axis=0)) + 1).tolist(), columns]
    found: list[Piece] = []
    for left, right in zip(cuts[:-1], cuts[1:], strict=True):
        n, d, a = number[:, left], down[:, left], along[:, left]
        below = (n[1:] == n[:-1]) & ((n[1:] < 0) | ((d[1:] == d[:-1] + 1) & (a[1:] == a[:-1])))
        starts = [0, *(np.flatnonzero(~below) + 1).tolist(), rows]
        for top, bottom in zip(starts[:-1], starts[1:], strict=True):
            home = graph.homes[n[top]] if n[top] >= 0 else None
            found.append(Piece(home, int(d[top]), int(a[top]), top, left, bottom - top, right - left))
    return _joined(found)


def _joined(found: list[Piece]) -> list[Piece]:
    """Neighbours from left to right that are one rectangle, where other rows forced a cut."""
    at: dict[tuple, Piece] = {}
    for p in found:
        key = (p.row, p.height, p.column)
        before = at.pop(("end", p.row, p.height, p.column), None)
        if (
            before is not None
            and before.home is p.home
            and (
                p.home is None or (before.home_row == p.home_row and before.home_column + before.width == p.home_column)
            )
        ):
            joined = Piece(
                p.home, before.home_row, before.home_column, p.row, before.column, p.height, before.width + p.width
            )
            del at[(before.row, before.height, before.column)]
            p, key = joined, (joined.row, joined.height, joined.column)
        elif before is not None:
            at[("end", p.row, p.height, p.column)] = before
        at[key] = p
        at[("end", p.row, p.height, p.column + p.width)] = p
    return [p for k, p in at.items() if k[0] != "end"]


def uniform(index: np.ndarray) -> np.ndarray:
    """A map without what broadcasting repeats: one row where all are the same, and one column likewise."""
    if index.shape[0] > 1 and (index[1:] == index[:1]).all():
        index = index[:1]
    if index.shape[1] > 1 and (index[:, 1:] == index[:, :1]).all():
        index = index[:, :1]
    return index
