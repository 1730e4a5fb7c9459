"""What a step is called with: all its numbers in one flat piece of memory, which goes to the device in one copy.

Sizes 0 and 1 would be programs of their own: so every size is at least 2, and steps are padded with tokens of nobody,
which write to block 0.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

LEAST = 2  # of every size


class Sizes(NamedTuple):
    """How much a step holds."""

    tokens: int
    sequences: int
    columns: int  # of the tables
    rows: int

    def shapes(self, groups: int) -> list[tuple[int, ...]]:
        """Of the parts of `Inputs`, in order."""
        tokens, sequences, columns, rows = self
        tables = [(sequences, columns)] * groups
        return [(tokens,), (tokens,), (sequences + 1,), (rows,), *tables, *[(tokens,)] * groups]

    def length(self, groups: int) -> int:
        return sum(_aligned(math.prod(shape)) for shape in self.shapes(groups))


# Sizes of the first call. They all differ, so that none is taken for another one.
TRIED = {"mixed": Sizes(11, 3, 5, 7), "decode": Sizes(5, 5, 7, 5)}


class Inputs(NamedTuple):
    """The parts. `places` are a table for every group of layers, then the slots for every group."""

    tokens: Tensor
    positions: Tensor
    starts: Tensor
    rows: Tensor
    places: tuple[Tensor, ...]

    @classmethod
    def of(cls, flat: Tensor, sizes: Sizes, groups: int) -> Inputs:
        parts, at = [], 0
        for shape in sizes.shapes(groups):
            parts.append(flat[at : at + math.prod(shape)].view(shape))
            at += _aligned(math.prod(shape))
        tokens, positions, starts, rows, *places = parts
        return cls(tokens, positions, starts, rows, tuple(places))


class Filled(NamedTuple):
    """A step that is ready to run: its inputs, in memory of the host."""

    sizes: Sizes
    flat: Tensor


def _aligned(count: int) -> int:
    """Parts begin at multiples of 128 bytes."""
    return -(-count // 16) * 16


def bucket(rows: int) -> int:
    """Rows of a decode step that is replayed: few sizes, and little that is computed for nobody."""
    return 1 << (rows - 1).bit_length() if rows <= 8 else -(-rows // 8) * 8 if rows <= 64 else -(-rows // 16) * 16


def wide(columns: int) -> int:
    """Columns of the tables of a step that is replayed: 128, 512, 2048, …"""
    return 128 if columns <= 128 else 4 * wide(-(-columns // 4))
