"""Rectangles in maps.

In: a map of rows and columns. Out: rectangles of it that are rectangles of a home, as they lie or turned. Every
element of the map is in exactly one. What a tile reads is found so, whatever views led to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tessera.spatial.maps import Home, Map, Piece, joined


@dataclass(frozen=True)
class Rectangle:
    """`height` × `width` elements of the map at (row, column), from (home_row, home_column) of a home on; a turned
    one goes down the home's rows along the map's columns. No home: zeros."""

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

    @property
    def box(self) -> tuple[int, int, int, int]:
        """In the map."""
        return self.row, self.row + self.height, self.column, self.column + self.width


def rectangles(m: Map) -> list[Rectangle]:
    """The rectangles of a map, few rather than many."""
    return [r for p in joined(m.shape, list(m.pieces)).pieces for r in _of(p)]


def _of(p: Piece) -> Iterator[Rectangle]:
    (top, bottom), (left, right) = p.box
    height, width = bottom - top, right - left
    if p.home is None:
        yield Rectangle(None, 0, 0, top, left, height, width)
        return
    for turned in (False, True):
        if (at := _corner(p.home, p.offset, (height, width), p.strides, turned)) is not None:
            yield Rectangle(p.home, *at, top, left, height, width, turned)
            return
    for part in _halves(p):
        yield from _of(part)


def _corner(
    home: Home, offset: int, shape: tuple[int, int], strides: tuple[int, ...], turned: bool
) -> tuple[int, int] | None:
    """Where a piece begins in its home, if it is a rectangle of it."""
    (height, width), (down, along) = (shape[::-1], strides[::-1]) if turned else (shape, strides)
    row, column = divmod(offset, home.columns)
    fits = (height == 1 or down == home.columns) and (width == 1 or along == 1) and column + width <= home.columns
    return (row, column) if fits else None


def _halves(p: Piece) -> Iterator[Piece]:
    """A piece that is no rectangle in parts: where a run of neighbours ends with its home's row, or line by line."""
    assert p.home is not None
    (rows, columns), (down, along) = p.box, p.strides
    height, width = p.shape
    dim = 0 if height > 1 and (width == 1 or along == 1 or down != 1) else 1
    (low, high), stride = (rows, down) if dim == 0 else (columns, along)
    other = width if dim == 0 else height
    runs = stride == 1 and other == 1
    at = low
    while at < high:
        left = p.home.columns - (p.offset + at - low) % p.home.columns if runs else 1
        stop = min(high, at + left)
        box = ((at, stop), columns) if dim == 0 else (rows, (at, stop))
        strides = (down if dim or stop - at > 1 else 0, along if not dim or stop - at > 1 else 0)
        yield Piece(box, p.home, p.offset + (at - low) * stride, strides)
        at = stop
