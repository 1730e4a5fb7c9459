"""Maps element by element, for operators that move elements in no affine way.

In: a map. Out: a tensor of numbers, on which PyTorch itself runs the operator; and the map that such a tensor is.
-1 stands for zero. The cost grows with the elements, so that views, reshapes and concatenations have rules instead.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
import torch

from tessera.spatial.maps import Home, Map, Piece, joined, piece

ZERO = -1


def numbers(m: Map) -> torch.Tensor:
    """The number of every element."""
    out = np.full(m.shape, ZERO, dtype=np.int64)
    for p in m.pieces:
        if p.home is not None:
            out[tuple(slice(*e) for e in p.box)] = p.home.base + places(p)
    return torch.from_numpy(out)


def places(p: Piece) -> np.ndarray:
    """The elements of its home that a piece names."""
    every = np.asarray(p.offset)
    for n, stride in zip(p.shape, p.strides, strict=True):
        every = every[..., None] + np.arange(n) * stride
    return every


def from_numbers(index: torch.Tensor, homes: Sequence[Home]) -> Map:
    """Runs along the last dimension, joined with what continues them."""
    shape = tuple(index.shape)
    bases = [h.base for h in homes]
    rows = index.reshape(-1, shape[-1] if shape else 1).numpy()
    widths = np.asarray([*bases[1:], np.iinfo(np.int64).max])
    pieces: list[Piece] = []
    for outer, row in zip(np.ndindex(shape[:-1]), rows, strict=True):
        follows = (row[1:] - row[:-1] == 1) & (row[:-1] != ZERO) & (np.isin(row[1:], widths, invert=True))
        follows |= (row[1:] == ZERO) & (row[:-1] == ZERO)
        cuts = [0, *(np.flatnonzero(~follows) + 1).tolist(), len(row)]
        for low, high in zip(cuts[:-1], cuts[1:], strict=True):
            first = int(row[low])
            home = None if first == ZERO else homes[bisect_right(bases, first) - 1]
            box = [*((at, at + 1) for at in outer), *([(low, high)] if shape else [])]
            offset = 0 if home is None else first - home.base
            pieces.append(piece(box, home, offset, [0] * len(outer) + ([1] if shape else [])))
    return joined(shape, pieces)
