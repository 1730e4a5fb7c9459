"""Parts of tensors: which elements a reference names, where they lie, and the tensor's view of them.

In: a reference and the type of what it refers to. Out: a `Tile`, or a `Bad` with the kind of violation. A tile is a
product of ranges, one a dimension, so that two of them are compared exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from tessera.spatial.listing.types import SIZES, Index, Ref, Span, TensorType


class Bad(Exception):
    def __init__(self, kind: str, why: str) -> None:
        self.kind, self.why = kind, why


@dataclass(frozen=True, eq=False)
class Tile:
    """Elements of a tensor of this type; `rows` is the buffer of indices, if one chooses along a dimension."""

    ref: Ref
    type: TensorType
    ranges: tuple[range, ...]
    shape: tuple[int, ...]  # with the rows chosen, and turned
    rows: str | None = None
    along: int = 0  # the dimension of the view along which rows are chosen

    @property
    def dtype(self) -> str:
        return self.type.dtype

    @cached_property
    def count(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def bytes(self) -> int:
        return self.count * SIZES[self.type.dtype]

    @cached_property
    def extent(self) -> tuple[int, int]:
        """The first byte and the last, from the tensor's beginning."""
        first, last, stride = 0, SIZES[self.type.dtype] - 1, SIZES[self.type.dtype]
        for of, size in zip(reversed(self.ranges), reversed(self.type.shape), strict=True):
            first, last, stride = first + of[0] * stride, last + of[-1] * stride, stride * size
        return first, last

    def meets(self, other: Tile) -> bool:
        """Whether two tiles of one tensor have an element in common."""
        return all(_meet(a, b) for a, b in zip(self.ranges, other.ranges, strict=True))

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elements, with all rows of a table; neither chosen nor turned."""
        index = tuple(map(_python, self.ref.index))
        return tensor[index] if index else tensor


def _python(index: Index) -> int | slice:
    match index:
        case int():
            return index
        case Span(start, stop, step):
            return slice(start, stop, step)
    return slice(None)


def _meet(a: range, b: range) -> bool:
    if max(a[0], b[0]) > min(a[-1], b[-1]):
        return False
    if a.step == b.step == 1:
        return True
    few, many = (a, b) if len(a) <= len(b) else (b, a)
    return any(x in many for x in few)


def tile(ref: Ref, of: TensorType, rows: int | None = None) -> Tile:
    """What a reference names in a tensor; `rows` is the length of the buffer of indices that it names."""
    if len(ref.index) > len(of.shape):
        raise Bad("bounds", f"expected at most {len(of.shape)} dimensions of {ref.name} {of}")
    ranges: list[range] = []
    shape: list[int] = []
    chosen, along = None, 0
    for size, index in zip(of.shape, ref.index + (None,) * (len(of.shape) - len(ref.index)), strict=True):
        match index:
            case int():
                ranges.append(range(index, index + 1))
            case Span(start, stop, step):
                ranges.append(range(start, stop, step))
                shape.append(len(ranges[-1]))
            case _:
                ranges.append(range(size))
                if isinstance(index, str):
                    chosen, along = index, len(shape)
                shape.append(size if index is None else rows or 0)
        stop = index.stop if isinstance(index, Span) else ranges[-1].stop
        if not ranges[-1] or stop > size:
            raise Bad("bounds", f"expected a part of {ref.name} {of}; got {stop} of {size}")
    if ref.transposed:
        if len(shape) < 2 or chosen:
            raise Bad("shape", f"expected two dimensions to turn; {ref.name} has {len(shape)}")
        shape[-2:] = shape[-1], shape[-2]
    return Tile(ref, of, tuple(ranges), tuple(shape), chosen, along)
