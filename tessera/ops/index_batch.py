"""Batching of `x[i, :, j]` and of writes there.

In: x, indices and values, each with or without the batch at dimension 0. Out: the result with the batch at
dimension 0. An index that differs between examples is joined by one more index, the number of the example. Indices
beside each other leave their dimensions where the first of them stood; others leave them in front. Which of the two
holds is decided for one example: where the batch would change it, dimensions are moved.

A mask that differs between examples picks out a different number of places in each. Writing one value there is
choosing; anything else is `NotImplemented` here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tessera.ir.builder import aten
from tessera.ir.equation import Value
from tessera.ir.types import Size
from tessera.ops.families import carry, is_one, pad_rank, select

Indices = Sequence[Value | None]


def is_mask(v: Value) -> bool:
    return v.dtype in (torch.bool, torch.uint8)


@dataclass(frozen=True)
class Places:
    """What a list of indices means for one example."""

    indices: tuple[Value | None, ...]  # None stands for a whole dimension
    on: tuple[bool, ...]  # whether each carries the batch
    width: int  # how many dimensions the indices put into the result
    taken: int  # how many of x they take away
    first: int  # where in the result theirs stand
    adjacent: bool

    @property
    def mask_on(self) -> bool:
        return any(b and v is not None and is_mask(v) for v, b in zip(self.indices, self.on, strict=True))


def places(indices: Indices, on: object) -> Places:
    flags = tuple(map(bool, on)) if isinstance(on, (list, tuple)) else (False,) * len(indices)
    ranks = {i: v.ndim - flags[i] for i, v in enumerate(indices) if v is not None}
    masks = {i for i in ranks if is_mask(indices[i])}  # type: ignore[arg-type]
    at = sorted(ranks)
    adjacent = at == list(range(at[0], at[-1] + 1))
    return Places(
        tuple(indices),
        flags,
        max(1 if i in masks else rank for i, rank in ranks.items()),
        sum(rank if i in masks else 1 for i, rank in ranks.items()),
        at[0] if adjacent else 0,
        adjacent,
    )


def _padded(p: Places) -> list[Value | None]:
    """Indices of their own for every example, along a common first dimension."""
    return [pad_rank(v, p.width + 1) if v is not None and b else v for v, b in zip(p.indices, p.on, strict=True)]


def _numbered(p: Places, size: Size, x: Value) -> list[Value | None]:
    """Indices into a batched `x`: in front of the others, the number of the example."""
    numbers = aten.arange(size, device=x.tensor.device)
    return [aten.reshape(numbers, [size, *[1] * p.width]), *_padded(p)]


def _moved(t: Value, source: int, to: int, count: int) -> Value:
    """`count` neighbouring dimensions moved, in their order."""
    if source == to or not count:
        return t
    return aten.movedim(t, list(range(source, source + count)), list(range(to, to + count)))


def batch_read(read: Callable) -> Callable:
    def batch(size: Size, on: Sequence[object], x: Value, indices: Indices) -> object:
        p = places(indices, on[1])
        if p.mask_on:
            return NotImplemented
        if not any(p.on):
            out = read(x, [None, *p.indices])
            return out if p.adjacent else aten.movedim(out, p.width, 0)
        if on[0]:
            return _moved(read(x, _numbered(p, size, x)), 1, p.first + 1, p.width)
        return _moved(read(x, _padded(p)), p.first, 0, 1)

    return batch


def batch_write(write: Callable) -> Callable:
    def batch(size: Size, on: Sequence[object], x: Value, indices: Indices, values: Value, accumulate: bool) -> object:
        p = places(indices, on[1])
        x = carry(x, bool(on[0]), size)
        if p.mask_on:
            return _write_chosen(p, x, values, bool(on[2]), accumulate)
        rank = x.ndim - 1 - p.taken + p.width  # of what is written for one example
        values = pad_rank(values, rank + 1, 1 if on[2] else 0)
        if any(p.on):
            return write(x, _numbered(p, size, x), _moved(values, p.first + 1, 1, p.width), accumulate)
        if not p.adjacent:
            values = aten.movedim(values, 0, p.width)
        return write(x, [None, *p.indices], values, accumulate)

    return batch


# --- a mask for every example -----------------------------------------------------------------------


@dataclass(frozen=True)
class Mask:
    """A single mask, shaped to choose from a batched x; for one example it covers `count` dimensions from `first`."""

    mask: Value
    first: int
    count: int
    after: int  # dimensions of x behind those it covers

    def one_value(self, shape: Sequence[Size]) -> bool:
        """Values of that shape are the same at all places the mask picks out."""
        return len(shape) <= self.after or is_one(shape[-1 - self.after])


def _single_mask(p: Places, x: Value) -> Mask | None:
    there = [v for v in p.indices if v is not None]
    if len(there) != 1:
        return None
    (mask,) = there
    after = x.ndim - 1 - p.first - p.taken
    mask = mask if mask.dtype == torch.bool else aten.ne(mask, 0)
    for _ in range(after):
        mask = aten.unsqueeze(mask, mask.ndim)
    return Mask(pad_rank(mask, x.ndim), p.first, p.taken, after)


def _write_chosen(p: Places, x: Value, values: Value, on: bool, accumulate: bool) -> object:
    m = _single_mask(p, x)
    if m is None or not m.one_value(values.shape[on:]):
        return NotImplemented
    if values.ndim - on > m.after:  # the dimension of the places becomes those that the mask covers
        at = values.ndim - 1 - m.after
        values = aten.squeeze(values, at)
        values = pad_rank(values, values.ndim + m.count, at)
    values = pad_rank(values, x.ndim) if on else values
    return aten.add(x, select(m.mask, values)) if accumulate else aten.where(m.mask, values, x)


def batch_masked_read(size: Size, on: Sequence[object], x: Value, indices: Indices, shape: Sequence[Size]) -> object:
    """What the mask picks out, summed to `shape`: of all places together, so only their sum is needed."""
    p = places(indices, on[1])
    x = carry(x, bool(on[0]), size)
    m = _single_mask(p, x) if p.mask_on else None
    if m is None or not m.one_value(shape):
        return NotImplemented
    wanted = [*[1] * (x.ndim - m.count - len(shape)), *shape]  # one dimension for the places of the mask
    covered = list(range(1 + m.first, 1 + m.first + m.count))
    kept = [d for d in range(1, x.ndim) if d not in covered]
    sizes = [s for i, s in enumerate(wanted) if i != m.first]
    dims = [d for d, s in zip(kept, sizes, strict=True) if is_one(s) and not is_one(x.shape[d])]
    chosen = select(m.mask, x)
    total = aten.sum(chosen, [*covered, *dims], True) if covered or dims else chosen
    return aten.reshape(total, [size, *shape])
