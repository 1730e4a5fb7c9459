"""Maps: which element of which home stands where.

A *home* is a matrix that is filled once. A *map* has a shape and covers it with pieces: boxes in each of which the
element of a home is an affine function of the place. So a transpose, a slice, a concatenation or a window is no
computation: it is another map over the same homes, and its cost does not depend on how many elements there are.
Invariant: the boxes of a map's pieces are disjoint and cover it. A piece without a home is zeros.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from tessera.ir.equation import NOWHERE, Source

Extent = tuple[int, int]  # from, to
Shape = tuple[int, ...]


@dataclass(eq=False)
class Home:
    """A matrix that is filled once; its elements count row by row."""

    name: str
    dtype: torch.dtype
    rows: int
    columns: int
    base: int = 0  # the number of its first element, where elements of several homes are numbered through
    source: Source = NOWHERE

    @property
    def size(self) -> int:
        return self.rows * self.columns

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


@dataclass(frozen=True)
class Piece:
    """The element at the first corner of the box, and how far apart its neighbours are along each dimension."""

    box: tuple[Extent, ...]
    home: Home | None
    offset: int
    strides: tuple[int, ...]

    @property
    def shape(self) -> Shape:
        return tuple(high - low for low, high in self.box)


def piece(box: Sequence[Extent], home: Home | None, offset: int, strides: Sequence[int]) -> Piece:
    """In the one form that each piece has: dimensions of one element have no stride, and zeros lie nowhere."""
    if home is None:
        return Piece(tuple(box), None, 0, (0,) * len(box))
    steps = tuple(s if high - low > 1 else 0 for (low, high), s in zip(box, strides, strict=True))
    return Piece(tuple(box), home, offset, steps)


@dataclass(frozen=True)
class Map:
    shape: Shape
    pieces: tuple[Piece, ...]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def homes(self) -> list[Home]:
        return list(dict.fromkeys(p.home for p in self.pieces if p.home is not None))

    @property
    def only(self) -> Home | None:
        """The home that this map is, row by row and whole."""
        home = self.pieces[0].home if len(self.pieces) == 1 else None
        return home if home is not None and self == whole(home, self.shape) else None

    # --- what views do ---

    def permute(self, *dims: int) -> Map:
        pieces = [
            Piece(tuple(p.box[d] for d in dims), p.home, p.offset, tuple(p.strides[d] for d in dims))
            for p in self.pieces
        ]
        return Map(tuple(self.shape[d] for d in dims), tuple(pieces))

    def transpose(self, a: int, b: int) -> Map:
        dims = list(range(self.ndim))
        dims[a], dims[b] = dims[b], dims[a]
        return self.permute(*dims)

    def expand(self, *shape: int) -> Map:
        """As PyTorch's: new dimensions in front, and those of one element repeated."""
        if not math.prod(shape):
            return Map(tuple(shape), ())
        wide = self.reshape(*(1,) * (len(shape) - self.ndim), *self.shape)
        if wide.shape == tuple(shape):
            return wide
        pieces = []
        for p in wide.pieces:
            box = [e if n == m else (0, n) for e, n, m in zip(p.box, shape, wide.shape, strict=True)]
            pieces.append(Piece(tuple(box), p.home, p.offset, p.strides))
        return Map(tuple(shape), tuple(pieces))

    def view(self, shape: Shape, starts: Sequence[int], steps: Sequence[Sequence[int]]) -> Map:
        """The map whose element at `o` is this one's at `starts[d] + sum(steps[d][i] * o[i])`."""
        if not math.prod(shape):
            return Map(tuple(shape), ())
        pieces = [
            q for p in self.pieces for q in _pulled(p, [(0, n) for n in shape], list(starts), [list(s) for s in steps])
        ]
        return joined(shape, pieces)

    def reshape(self, *shape: int) -> Map:
        if tuple(shape) == self.shape:
            return self
        if not self.size:
            return Map(tuple(shape), ())
        groups = list(_groups(self.shape, shape))
        pieces = []
        for p in self.pieces:
            choices = []
            for old, new in groups:
                flat = _merged([(self.shape[d], p.box[d], p.strides[d]) for d in old])
                choices.append([s for run in flat for s in _split(run, [shape[d] for d in new])])
            for parts in itertools.product(*choices):
                box: list[Extent] = [(0, 1)] * len(shape)
                strides = [0] * len(shape)
                for (_, new), (inner, _, steps) in zip(groups, parts, strict=True):
                    for d, extent, step in zip(new, inner, steps, strict=True):
                        box[d], strides[d] = extent, step
                pieces.append(piece(box, p.home, p.offset + sum(delta for _, delta, _ in parts), strides))
        return joined(tuple(shape), pieces)

    def block(self, *box: Extent) -> Map:
        """A box of the map; its corner becomes the origin."""
        pieces = []
        for p in self.pieces:
            inner: list[Extent] = []
            offset = p.offset
            for (low, high), (a, b), stride in zip(p.box, box, p.strides, strict=True):
                first, last = max(low, a), min(high, b)
                if first >= last:
                    break
                offset += (first - low) * stride
                inner.append((first - a, last - a))
            else:
                pieces.append(piece(inner, p.home, offset, p.strides))
        return Map(tuple(b - a for a, b in box), tuple(pieces))

    def matrix(self, number: int, rows: Extent, columns: Extent) -> Map:
        """A block of one of a batch of matrices."""
        block = self.block((number, number + 1), rows, columns)
        pieces = [Piece(p.box[1:], p.home, p.offset, p.strides[1:]) for p in block.pieces]
        return Map(block.shape[1:], tuple(pieces))

    def uniform(self) -> Map:
        """Without what broadcasting repeats: one element along dimensions along which all are the same."""
        extents: list[Extent] = []
        for d, n in enumerate(self.shape):
            repeats = n > 1 and all(p.strides[d] == 0 and p.box[d] == (0, n) for p in self.pieces)
            extents.append((0, 1 if repeats else n))
        return self.block(*extents) if any(e != (0, n) for e, n in zip(extents, self.shape, strict=True)) else self

    def moved_to(self, home: Home) -> Map:
        """The same places of another home of the same size."""
        return Map(self.shape, tuple(Piece(p.box, home, p.offset, p.strides) for p in self.pieces))


def whole(home: Home, shape: Sequence[int]) -> Map:
    """A home, row by row, in a shape."""
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    pieces = (piece([(0, n) for n in shape], home, 0, strides),) if home.size else ()
    return Map(tuple(shape), pieces)


def zeros(shape: Sequence[int]) -> Map:
    pieces = (piece([(0, n) for n in shape], None, 0, ()),) if math.prod(shape) else ()
    return Map(tuple(shape), pieces)


def concatenated(maps: Sequence[Map], dim: int) -> Map:
    at, pieces = 0, []
    for m in maps:
        for p in m.pieces:
            low, high = p.box[dim]
            box = (*p.box[:dim], (low + at, high + at), *p.box[dim + 1 :])
            pieces.append(Piece(box, p.home, p.offset, p.strides))
        at += m.shape[dim]
    first = maps[0].shape
    return joined((*first[:dim], at, *first[dim + 1 :]), pieces)


def padded(m: Map, sides: Sequence[int]) -> Map:
    """Zeros around, or elements cut off: pairs of before and behind, from the last dimension on, as PyTorch has it."""
    for i in range(len(sides) // 2):
        d = m.ndim - 1 - i
        before, behind = sides[2 * i], sides[2 * i + 1]
        m = m.block(*((max(0, -before), n + min(0, behind)) if e == d else (0, n) for e, n in enumerate(m.shape)))
        ends = [zeros([n if e != d else max(0, side) for e, n in enumerate(m.shape)]) for side in (before, behind)]
        m = concatenated([ends[0], m, ends[1]], d)
    return m


def joined(shape: Shape, pieces: list[Piece]) -> Map:
    """Pieces that continue each other become one."""
    for d in reversed(range(len(shape))):
        if len(pieces) < 2:
            break
        rows: dict[tuple, list[Piece]] = {}
        for p in pieces:
            others = (p.box[:d], p.box[d + 1 :], p.strides[:d], p.strides[d + 1 :])
            rows.setdefault((p.home, others), []).append(p)
        pieces = [q for row in rows.values() for q in _continued(row, d)]
    return Map(tuple(shape), tuple(pieces))


def _continued(row: list[Piece], d: int) -> Iterator[Piece]:
    """Pieces that differ in nothing but where they lie along a dimension."""
    row.sort(key=lambda p: p.box[d])
    last = row[0]
    for p in row[1:]:
        (low, high), (a, b) = last.box[d], p.box[d]
        step = (p.offset - last.offset) // (high - low)
        follows = high == a and last.offset + step * (high - low) == p.offset
        if follows and (high - low == 1 or last.strides[d] == step) and (b - a == 1 or p.strides[d] == step):
            box = (*last.box[:d], (low, b), *last.box[d + 1 :])
            last = piece(box, last.home, last.offset, (*last.strides[:d], step, *last.strides[d + 1 :]))
        else:
            yield last
            last = p
    yield last


# --- views: boxes pulled back through an affine function ---


def _pulled(p: Piece, box: list[Extent], starts: list[int], steps: list[list[int]]) -> Iterator[Piece]:
    """What of a piece is seen through `starts[d] + sum(steps[d][i] * o[i])`, for places `o` of a box."""
    for d, (low, high) in enumerate(p.box):
        used = [i for i, k in enumerate(steps[d]) if k and box[i][1] - box[i][0] > 1]
        fixed = starts[d] + sum(k * box[i][0] for i, k in enumerate(steps[d]) if i not in used)
        if not used:
            if not low <= fixed < high:
                return
        elif len(used) == 1:
            i = used[0]
            inside = _preimage(low - fixed, high - fixed, steps[d][i])
            box = [*box[:i], (max(box[i][0], inside[0]), min(box[i][1], inside[1])), *box[i + 1 :]]
            if box[i][0] >= box[i][1]:
                return
        elif not _within(fixed, [(steps[d][i], box[i]) for i in used], low, high):
            # Two dimensions of a window walk along one: the shorter of them is taken element by element.
            i = min(used, key=lambda i: box[i][1] - box[i][0])
            for at in range(*box[i]):
                yield from _pulled(p, [*box[:i], (at, at + 1), *box[i + 1 :]], starts, steps)
            return
    offset, strides = p.offset, [0] * len(box)
    for d, stride in enumerate(p.strides):
        first = starts[d] + sum(k * box[i][0] for i, k in enumerate(steps[d]))
        offset += stride * (first - p.box[d][0])
        for i, k in enumerate(steps[d]):
            strides[i] += stride * k
    yield piece(box, p.home, offset, strides)


def _preimage(low: int, high: int, step: int) -> Extent:
    """The `o` for which `low <= step * o < high`."""
    if step > 0:
        return -(-low // step), -(-high // step)
    return -((high - 1) // -step), low // step + 1


def _within(fixed: int, terms: list[tuple[int, Extent]], low: int, high: int) -> bool:
    ends = [(k * e[0], k * (e[1] - 1)) for k, e in terms]
    return low <= fixed + sum(map(min, ends)) and fixed + sum(map(max, ends)) < high


# --- reshapes: dimensions merged into runs, runs split over dimensions ---


def _groups(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Dimensions of two shapes that hold the same elements; those of one element are left out."""
    a, b = ([d for d, n in enumerate(shape) if n != 1] for shape in (old, new))
    i = j = 0
    while i < len(a) or j < len(b):
        first, second = i, j
        left, right = old[a[i]], new[b[j]]
        i, j = i + 1, j + 1
        while left != right:
            if left < right:
                left, i = left * old[a[i]], i + 1
            else:
                right, j = right * new[b[j]], j + 1
        yield a[first:i], b[second:j]


def _merged(dims: list[tuple[int, Extent, int]]) -> list[tuple[Extent, int, int]]:
    """Dimensions (size, extent, stride), outermost first, as runs: where, how far from the first element, stride."""
    size, extent, stride = dims[-1]
    runs = [(extent, 0, stride)]
    for outer, (low, high), step in reversed(dims[:-1]):
        ((a, b), _, inner), alone = runs[0], len(runs) == 1
        if high - low == 1:
            runs = [((low * size + a, low * size + b), delta, inner) for (a, b), delta, inner in runs]
        elif alone and (a, b) == (0, size) and step == inner * size:
            runs = [((low * size, high * size), 0, inner)]
        else:
            runs = [
                ((at * size + a, at * size + b), (at - low) * step + delta, inner)
                for at in range(low, high)
                for (a, b), delta, inner in runs
            ]
        size *= outer
    return runs


def _split(run: tuple[Extent, int, int], sizes: list[int]) -> list[tuple[list[Extent], int, list[int]]]:
    """A run as boxes over dimensions: the box, how far its corner is from the run's beginning, strides."""
    (low, high), delta, stride = run
    if len(sizes) == 1:
        return [([(low, high)], delta, [stride])]
    inner = math.prod(sizes[1:])
    boxes: list[tuple[list[Extent], int, list[int]]] = []
    at = low
    while at < high:
        row, place = divmod(at, inner)
        if place == 0 and high - at >= inner:  # whole rows
            stop = high // inner
            steps = [math.prod(sizes[d + 1 :]) * stride for d in range(len(sizes))]
            boxes.append(([(row, stop), *((0, n) for n in sizes[1:])], delta + (at - low) * stride, steps))
            at = stop * inner
            continue
        stop = min(high, (row + 1) * inner)
        part = ((place, place + stop - at), delta + (at - low) * stride, stride)
        boxes += [([(row, row + 1), *box], far, [0, *steps]) for box, far, steps in _split(part, sizes[1:])]
        at = stop
    return boxes
