"""What a step is called with: all its numbers in one flat piece of memory, which goes to the device in one copy.

Sizes 0 and 1 would be programs of their own: so every size is at least 2, and steps are padded with tokens of nobody,
which write to block 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tessera.serve.cache import Table

LEAST = 2  # of every size
STEADY = 16  # mixed steps on a GPU are multiples of this: Triton compiles kernels anew for sizes that are not
# Tokens of a mixed step that is replayed: multiples of the first, and no more than the second.
SHORT, MOST_REPLAYED = 64, 1024
CROWDS = 48, 112  # its sequences and rows: never as many as tokens, which kernels take for one token each


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
TRIED = {"mixed": Sizes(11, 3, 5, 7), "decode": Sizes(5, 5, 7, 5), "few": Sizes(5, 5, 7, 5), "one": Sizes(1, 1, 7, 1)}
BOUNDS = {"one": 1, "few": 16}  # sequences of a decode step, at most: then kernels for few rows read the weights


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
    """A step that is ready to run: its inputs, in memory of the host. `again`: its sizes are some that come again."""

    sizes: Sizes
    flat: Tensor
    again: bool = False


def first_call(name: str, groups: int) -> Filled:
    """A program's first step, of tokens of nobody. Every sequence has one but the last, which has the rest."""
    sizes = TRIED[name]
    flat = torch.zeros(sizes.length(groups), dtype=torch.int64)
    starts = Inputs.of(flat, sizes, groups).starts
    starts[:] = torch.arange(sizes.sequences + 1)
    starts[-1] = sizes.tokens
    return Filled(sizes, flat)


class Tables:
    """The tables of a step's sequences, side by side, kept for the next step: most rows are the same again."""

    def __init__(self, groups: int):
        self._arrays = [np.zeros((0, 0), dtype=np.int64)] * groups
        self._seen: list[tuple[Table, int]] = []

    def of(self, tables: Sequence[Table], columns: int) -> list[np.ndarray]:
        """An array for every group. What stands in a row beyond its table is nobody's business."""
        height, width = self._arrays[0].shape
        if len(tables) > height or columns > width:
            shape = max(len(tables), height), max(_aligned(columns), width)
            self._arrays = [np.zeros(shape, dtype=np.int64) for _ in self._arrays]
            self._seen.clear()
        seen, known = self._seen, len(self._seen)
        for i, table in enumerate(tables):
            if i < known and seen[i][0] is table and seen[i][1] == table.changes:
                continue
            for array, blocks in zip(self._arrays, table.blocks, strict=True):
                array[i, : len(blocks)] = blocks
            seen[i : i + 1] = [(table, table.changes)]
        return [array[: len(tables), :columns] for array in self._arrays]


def _aligned(count: int) -> int:
    """Parts begin at multiples of 128 bytes."""
    return -(-count // 16) * 16


def bucket(rows: int) -> int:
    """Rows of a decode step that is replayed: few sizes, and little that is computed for nobody."""
    return 1 << (rows - 1).bit_length() if rows <= 8 else -(-rows // 8) * 8 if rows <= 64 else -(-rows // 16) * 16


def short(tokens: int, sequences: int, columns: int, rows: int) -> Sizes | None:
    """The sizes of a mixed step that is replayed, with room for a sequence of nobody; None: it is so long that the host
    launches it faster than the device carries it out."""
    tokens = max(STEADY, 1 << (tokens - 1).bit_length()) if tokens <= SHORT else -(-tokens // SHORT) * SHORT
    crowd = next((most for most in CROWDS if sequences < most and rows <= most), None)
    return None if crowd is None or tokens > MOST_REPLAYED else Sizes(tokens, crowd, wide(columns), crowd)


def padded(size: int) -> int:
    return -(-size // STEADY) * STEADY


def wide(columns: int) -> int:
    """Columns of the tables of a step that is replayed: 128, 512, 2048, …"""
    return 128 if columns <= 128 else 4 * wide(-(-columns // 4))
