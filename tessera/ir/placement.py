"""Where a value lies on a mesh.

    [8/dp, 4096/tp, 1024] +tp

In: the value's whole sizes. For each dimension the axes that split it, outermost first; then the axes along which ranks
hold parts of every element, and how those are combined (`+tp` are summands, `max:tp` the largest counts). Along all
other axes the ranks hold the same. Out: sizes on one rank, text both ways.

An axis of n ranks cuts a dimension into n chunks of ceil(size / n), as DTensor does. On every rank the local size is a
whole chunk; where the size is no multiple of it the last chunks end in padding that holds anything. So one program
serves all ranks. Of several axes each cuts the chunks of the one before.

Two marks say that an axis cuts otherwise, always evenly. `[32/dp/cp:4]` are 4 rows of 8, of which dp has cut the rows
and cp each row: the dimension was made of two. `[32/cp:zigzag]` cuts twice as many chunks; a rank has one from the
start and its mirror from the end, so that all have the same work where later elements look at earlier ones.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Self

import torch

from tessera.ir.mesh import Mesh
from tessera.util.errors import OptionError

Size = int | torch.SymInt
Axes = tuple[str, ...]

ZIGZAG = "zigzag"

_TEXT = re.compile(r"^\s*\[(?P<dims>[^\]]*)\](?P<parts>.*)$", re.DOTALL)
_MARK = re.compile(rf"(\w+)(?::(\d+))?(:{ZIGZAG})?(?![\w:])")
_PART = re.compile(r"\s*(?:\+|(?P<how>max|min):)(?P<axis>\w+)")


def chunk(size: Size, ranks: int) -> Size:
    """The size of one of so many chunks."""
    if ranks == 1:
        return size
    return -(-size // ranks) if isinstance(size, int) else (size + ranks - 1) // ranks


@dataclass(frozen=True)
class Mark:
    """How an axis cuts a dimension."""

    blocks: int = 1  # it cuts each of so many equal blocks
    zigzag: bool = False  # into chunks of which a rank has two

    def within(self, blocks: int) -> Mark:
        """The same inside of each of so many blocks."""
        return replace(self, blocks=self.blocks * blocks)

    def __str__(self) -> str:
        return (f":{self.blocks}" if self.blocks > 1 else "") + (f":{ZIGZAG}" if self.zigzag else "")


PLAIN = Mark()
Entries = Sequence[tuple[str, Mark]]  # axes that split a dimension, each with its mark


def folded(size: Size, entries: Entries) -> list[tuple[Size, Axes]]:
    """A dimension as the ones it is made of, each with the axes that split it."""
    starts = sorted({1, *(mark.blocks for _, mark in entries)})
    sizes = [*(b // a for a, b in itertools.pairwise(starts)), size // starts[-1]]
    groups = [tuple(axis for axis, mark in entries if mark.blocks == start) for start in starts]
    return list(zip(sizes, groups, strict=True))


def cuts_evenly(mesh: Mesh, size: Size, entries: Entries) -> bool:
    """Axes cut a dimension evenly, those of fewer blocks first."""
    blocks, chunks = [mark.blocks for _, mark in entries], {a: 2 if m.zigzag else 1 for a, m in entries}
    if not isinstance(size, int) or blocks != sorted(blocks) or size % max(blocks, default=1):
        return False
    return all(n % prod(mesh.size(a) * chunks[a] for a in axes) == 0 for n, axes in folded(size, entries))  # type: ignore[operator]


@dataclass(frozen=True, eq=False)
class Placement:
    mesh: Mesh
    shape: tuple[Size, ...]  # of the whole value
    splits: tuple[Axes, ...]  # the axes that split each dimension, outermost first
    parts: tuple[tuple[str, str], ...] = ()  # axes whose ranks hold parts, each with how to combine them
    marks: tuple[tuple[str, Mark], ...] = ()  # axes that do not cut plainly

    def __post_init__(self) -> None:
        if len(self.splits) != len(self.shape):
            raise OptionError(f"expected a split for each of {len(self.shape)} dimensions, got {len(self.splits)}")
        used = self.axes
        for axis in used:
            self.mesh.size(axis)
        if twice := next((axis for axis in used if used.count(axis) > 1), None):
            raise OptionError(f"{self}: expected every axis once, got {twice} twice")
        if self.marks:
            there = {axis for axes in self.splits for axis in axes}
            kept = tuple(sorted(((a, m) for a, m in self.marks if a in there and m != PLAIN), key=lambda pair: pair[0]))
            object.__setattr__(self, "marks", kept)
            for dim in range(len(self.shape)):
                self._check_marks(dim)

    def _check_marks(self, dim: int) -> None:
        entries = self.entries(dim)
        if any(mark != PLAIN for _, mark in entries) and not cuts_evenly(self.mesh, self.shape[dim], entries):
            raise OptionError(f"{self}: expected marked axes that divide dimension {dim}, those of fewer blocks first")

    @classmethod
    def whole(cls, mesh: Mesh, shape: Sequence[Size]) -> Self:
        """The same on all ranks."""
        return cls(mesh, tuple(shape), ((),) * len(shape))

    @cached_property
    def axes(self) -> list[str]:
        """All axes it mentions."""
        return [*(axis for axes in self.splits for axis in axes), *(axis for axis, _ in self.parts)]

    @property
    def is_whole(self) -> bool:
        return not self.axes

    def dim_of(self, axis: str) -> int | None:
        """The dimension that an axis splits."""
        return next((dim for dim, axes in enumerate(self.splits) if axis in axes), None)

    def how(self, axis: str) -> str | None:
        """How the parts along an axis are combined; None where it holds none."""
        return dict(self.parts).get(axis)

    def mark(self, axis: str) -> Mark:
        return next((mark for name, mark in self.marks if name == axis), PLAIN) if self.marks else PLAIN

    def entries(self, dim: int) -> tuple[tuple[str, Mark], ...]:
        """The axes that split a dimension, each with its mark."""
        return tuple((axis, self.mark(axis)) for axis in self.splits[dim])

    def key(self) -> tuple:
        """What equal placements share. What symbols say may still change: it is kept where sizes are numbers."""
        return self._key if self._of_numbers else self._key_now()

    @cached_property
    def _of_numbers(self) -> bool:
        return all(type(n) is int for n in self.shape)

    def _key_now(self) -> tuple:
        return self.mesh, tuple(map(str, self.shape)), self.splits, frozenset(self.parts), self.marks

    @cached_property
    def _key(self) -> tuple:
        return self._key_now()

    @cached_property
    def _digest(self) -> int:
        """The same for equal placements: a symbol may turn out to be some number."""
        return hash((self.mesh, len(self.shape), self.splits, frozenset(self.parts), self.marks))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Placement) and self._digest == other._digest and self.key() == other.key()

    def __hash__(self) -> int:
        return self._digest

    # --- sizes ---

    def local(self, dim: int) -> Size:
        """The size of a dimension on one rank."""
        return self.levels(dim)[-1]

    def levels(self, dim: int) -> list[Size]:
        """The size of a dimension: whole, then as each axis cuts it."""
        sizes = [self.shape[dim]]
        for axis in self.splits[dim]:
            sizes.append(chunk(sizes[-1], self.mesh.size(axis)))
        return sizes

    def unfolded(self) -> Self:
        """The same value with a dimension for each that a dimension is made of."""
        pieces = [piece for dim, n in enumerate(self.shape) for piece in folded(n, self.entries(dim))]
        marks = tuple((axis, replace(mark, blocks=1)) for axis, mark in self.marks)
        return replace(self, shape=tuple(n for n, _ in pieces), splits=tuple(axes for _, axes in pieces), marks=marks)

    @cached_property
    def local_shape(self) -> tuple[Size, ...]:
        return tuple(map(self.local, range(len(self.shape))))

    @cached_property
    def padded(self) -> tuple[int, ...]:
        """The dimensions along which ranks may have padding."""
        return tuple(dim for dim, axes in enumerate(self.splits) if axes and not self.is_even(dim))

    def is_even(self, dim: int) -> bool:
        """No rank has padding along a dimension."""
        levels = self.levels(dim)
        return all(
            str(small * self.mesh.size(axis)) == str(big)
            for big, small, axis in zip(levels[:-1], levels[1:], self.splits[dim], strict=True)
        )

    # --- others ---

    def with_split(self, dim: int, axes: Axes) -> Self:
        return replace(self, splits=tuple(axes if d == dim else old for d, old in enumerate(self.splits)))

    def with_axis(self, dim: int, axis: str, mark: Mark = PLAIN) -> Self:
        """Split further, by one axis more."""
        splits = tuple((*old, axis) if d == dim else old for d, old in enumerate(self.splits))
        return replace(self, splits=splits, marks=(*self.marks, (axis, mark)))

    def cuts_further(self, dim: int, axis: str, mark: Mark = PLAIN) -> bool:
        """Whether an axis more cuts a dimension evenly, within what others have cut."""
        return cuts_evenly(self.mesh, self.shape[dim], [*self.entries(dim), (axis, mark)])

    def with_part(self, axis: str, how: str = "sum") -> Self:
        return replace(self, parts=(*self.parts, (axis, how)))

    def without_part(self, axis: str) -> Self:
        return replace(self, parts=tuple(part for part in self.parts if part[0] != axis))

    def without_parts(self) -> Self:
        return replace(self, parts=())

    # --- text ---

    def __str__(self) -> str:
        texts = [[f"{axis}{self.mark(axis)}" for axis in axes] for axes in self.splits]
        dims = ", ".join("/".join((str(n), *axes)) for n, axes in zip(self.shape, texts, strict=True))
        parts = "".join(f" +{axis}" if how == "sum" else f" {how}:{axis}" for axis, how in self.parts)
        return f"[{dims}]{parts}"

    @classmethod
    def parse(cls, text: str, mesh: Mesh) -> Self:
        """What `str` wrote."""
        match = _TEXT.match(text)
        if match is None:
            raise OptionError(f"expected a placement such as [8/dp, 1024] +tp, got {text!r}")
        dims, marks = _marked(match["dims"])
        names, splits = parse_splits(dims)
        if not all(name.isdigit() for name in names):
            raise OptionError(f"expected sizes in numbers, as in [8/dp, 1024], got {text!r}")
        parts, rest = [], match["parts"].rstrip()
        while rest:
            part = _PART.match(rest)
            if part is None:
                raise OptionError(f"expected +axis, max:axis or min:axis behind the sizes, got {rest.strip()!r}")
            parts.append((part["axis"], part["how"] or "sum"))
            rest = rest[part.end() :]
        return cls(mesh, tuple(map(int, names)), splits, tuple(parts), marks)


def _marked(text: str) -> tuple[str, tuple[tuple[str, Mark], ...]]:
    """Dimensions without their marks, and the marks."""
    marks = [(axis, Mark(int(blocks or 1), bool(zigzag))) for axis, blocks, zigzag in _MARK.findall(text)]
    return _MARK.sub(r"\1", text), tuple(marks)


def parse_splits(text: str) -> tuple[list[str], tuple[Axes, ...]]:
    """`f/tp, d` as the words for the dimensions and the axes that split each."""
    dims = [dim.strip() for dim in text.split(",")] if text.strip() else []
    words, splits = [], []
    for dim in dims:
        word, *axes = (part.strip() for part in dim.split("/"))
        if not word or not all(axis.isidentifier() for axis in axes):
            raise OptionError(f"expected dimensions such as b/dp, s, d, got {text!r}")
        words.append(word)
        splits.append(tuple(axes))
    return words, tuple(splits)
