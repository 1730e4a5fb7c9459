"""Types of results for operators over symbolic sizes, where sizes alone tell them.

PyTorch's own rules take such an operator apart, and ask of every part what is known of its sizes: tens of milliseconds
a call, and the answers are conditions on the program. In: arguments, some of which have symbols. Out: the result on a
fake tensor, or None where PyTorch's rule is asked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tessera.ir.types import SYMBOLIC, Size, contiguous_strides, row_major, size_key


def _symbolic(sizes: Sequence[Size]) -> bool:
    return any(isinstance(n, SYMBOLIC) for n in sizes)


def _equal(a: Size, b: Size) -> bool:
    return size_key(a) == size_key(b)


def matmul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor | None:
    """Rows times a matrix, and batches times batches, give rows. Vectors, and a matrix times batches, may not."""
    rows = y.ndim == 2 <= x.ndim or min(x.ndim, y.ndim) > 2
    if not rows or not _symbolic((*x.shape, *y.shape)) or x.dtype != y.dtype or x.device != y.device:
        return None
    batch = _broadcast(x.shape[:-2], y.shape[:-2])
    if batch is None or not _equal(x.shape[-1], y.shape[-2]):
        return None
    return x.new_empty((*batch, x.shape[-2], y.shape[-1]))


def _broadcast(a: Sequence[Size], b: Sequence[Size]) -> list[Size] | None:
    rank = max(len(a), len(b))
    pairs = zip((1,) * (rank - len(a)) + tuple(a), (1,) * (rank - len(b)) + tuple(b), strict=True)
    sizes = [x if size_key(y) == 1 or _equal(x, y) else y if size_key(x) == 1 else None for x, y in pairs]
    return None if None in sizes else sizes  # type: ignore[return-value]


def reshaped(x: torch.Tensor, size: Sequence[Size]) -> torch.Tensor | None:
    """Rows without gaps are rows of any other length."""
    if not _symbolic((*x.shape, *size)) or -1 in map(size_key, size) or not row_major(x.shape, x.stride()):
        return None
    if not _equal(math.prod(x.shape), math.prod(size)):
        return None
    return x.as_strided(list(size), contiguous_strides(size), x.storage_offset())


def left_over(shape: Sequence[Size], target: Sequence[Size]) -> list[Size]:
    """The sizes of a reshape, with -1 as what the other sizes leave over, where they cancel without a division."""
    named = [n for n in target if not (isinstance(n, int) and n == -1)]
    if len(named) != len(target) - 1 or not _symbolic((*shape, *named)):
        return list(target)
    symbols = [n for n in shape if isinstance(n, SYMBOLIC)]
    for n in named:
        if isinstance(n, SYMBOLIC):
            place = next((i for i, m in enumerate(symbols) if _equal(m, n)), None)
            if place is None:
                return list(target)
            del symbols[place]
    have, taken = (math.prod(n for n in sizes if isinstance(n, int)) for sizes in (shape, named))
    if taken == 0 or have % taken:
        return list(target)
    rest = math.prod(symbols) * (have // taken)
    return [rest if isinstance(n, int) and n == -1 else n for n in target]
