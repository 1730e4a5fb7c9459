"""Reading by indices: gathers of every kind, and what is chosen by values."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tessera.exporters.onnx.forms.common import axis, need, summing
from tessera.exporters.onnx.forms.elementwise import convert
from tessera.exporters.onnx.graph import Graph, Ref, broadcast, same
from tessera.exporters.onnx.registry import form


@form("index_select")
def index_select(g: Graph, x: Ref, dim: int, index: Ref) -> Ref:
    if not x.ndim:
        return g.reshape(x, g.result.shape)
    index = index if index.ndim else g.reshape(index, [1])
    return g.op("Gather", x, index, axis=axis(dim, x.ndim))


@form("gather")
def gather(g: Graph, x: Ref, dim: int, index: Ref, **_: object) -> Ref:
    """Along other dimensions an index may be shorter than what it reads, for ONNX too."""
    index = g.cast(index, torch.int64)
    if not x.ndim or not index.ndim:
        rank = max(x.ndim, index.ndim)
        data = g.reshape(x, [1]) if not x.ndim else x
        places = g.reshape(index, [1]) if not index.ndim else index
        need(rank <= 1)
        return g.reshape(g.op("GatherElements", data, places, axis=0, shape=places.shape), g.result.shape)
    d = axis(dim, x.ndim)
    for i in range(x.ndim):  # a runtime may insist on equal sizes
        if i != d and not same(x.sizes[i], index.sizes[i]):
            x = Ref(g.slice(x, i, 0, index.sizes[i]).name, x.dtype, x.shape)
    return g.op("GatherElements", x, index, axis=d)


@form("take")
def take(g: Graph, x: Ref, index: Ref) -> Ref:
    return g.op("Gather", g.op("Reshape", x, g.ints([-1])), index, axis=0)


@form("nonzero")
def nonzero(g: Graph, x: Ref) -> Ref:
    if not x.ndim:  # one row of no places, or none
        rows = g.op("Concat", g.one(convert(g, x, torch.bool)), g.ints([0]), axis=0)
        return g.op("ConstantOfShape", rows, value=torch.tensor([0]), dtype=torch.int64)
    return g.op("Transpose", g.op("NonZero", convert(g, x, torch.bool), dtype=torch.int64), perm=[1, 0])


@form("masked_select")
def masked_select(g: Graph, x: Ref, mask: Ref) -> Ref:
    shape = broadcast([x.sizes, mask.sizes])
    x, mask = g.expand(x, shape), g.expand(mask, shape)
    return g.op("Compress", g.op("Reshape", x, g.ints([-1])), g.op("Reshape", mask, g.ints([-1])), axis=0)


class Places:
    """Indices as `x[a, :, b]` gives them: which dimensions they stand at, and the tuples that they make."""

    def __init__(self, g: Graph, x: Ref, indices: Sequence[Ref | None]) -> None:
        need(any(i is not None for i in indices) and not x.dtype.is_complex)
        masks = [i for i in indices if i is not None and i.dtype in (torch.bool, torch.uint8)]
        need(not masks or (len(masks) == 1 and sum(i is not None for i in indices) == 1))
        self.g, self.masked = g, bool(masks)
        self.dims: list[int] = []
        self.given: list[Ref] = []
        at = 0
        for i in indices:
            span = 1 if i is None or not masks else i.ndim
            if i is not None:
                self.dims += range(at, at + span)
                self.given.append(i)
            at += span
        rest = [d for d in range(x.ndim) if d not in self.dims]
        self.order = [*self.dims, *rest]
        self.rest = [x.sizes[d] for d in rest]
        adjacent = self.dims == list(range(self.dims[0], self.dims[0] + len(self.dims)))
        self.first = self.dims[0] if adjacent else 0
        self.rank = 1 if self.masked else max(i.ndim for i in self.given)  # of the places

    def tuples(self) -> Ref:
        """All indices beside each other, in a last dimension."""
        g = self.g
        if self.masked:
            return g.op("Transpose", g.op("NonZero", self.given[0], dtype=torch.int64), perm=[1, 0])
        shape = broadcast([i.sizes for i in self.given])
        columns = [g.expand(g.cast(i, torch.int64), shape) for i in self.given]
        return g.op("Concat", *(g.unsqueeze(c, len(shape)) for c in columns), axis=-1)

    def outward(self) -> list[int]:
        """Where the dimensions of a gathered tensor, places first, belong in the result."""
        before, rank = self.first, self.rank
        total = rank + len(self.rest)
        return [*range(rank, rank + before), *range(rank), *range(rank + before, total)]


@form("index.Tensor _unsafe_index.Tensor")
def index(g: Graph, x: Ref, indices: Sequence[Ref | None]) -> Ref:
    places = Places(g, x, indices)
    if len(places.given) == 1 and not places.masked:
        return g.op("Gather", x, places.given[0], axis=places.dims[0])
    out = g.op("GatherND", g.permute(x, places.order), places.tuples())
    order = places.outward()
    return out if order == sorted(order) else g.op("Transpose", out, perm=order)


@form("index_put _unsafe_index_put")
def index_put(
    g: Graph, x: Ref, indices: Sequence[Ref | None], values: Ref, accumulate: bool = False, *_: object
) -> Ref:
    places = Places(g, x, indices)
    need(not accumulate or g.opset >= 18 or x.is_float)
    if places.masked and not accumulate and values.ndim == 0 and places.dims[0] == 0:
        mask = places.given[0]
        mask = g.reshape(mask, [*mask.sizes, *[1] * (x.ndim - mask.ndim)])
        return g.op("Where", g.cast(mask, torch.bool), g.cast(values, x.dtype), x, dtype=x.dtype)
    turned = g.permute(x, places.order)
    tuples = places.tuples()
    order = places.outward()
    # What is written stands where `x[indices]` would: it is brought to that shape, and its places first.
    if places.masked:
        count = g.op("Shape", tuples, start=0, end=1, dtype=torch.int64)
        where: list = [count]
    else:
        where = broadcast([i.sizes for i in places.given])
    shape = [*places.rest[: places.first], *where, *places.rest[places.first :]]
    source = g.op("Expand", g.cast(values, x.dtype), g.ints(shape))
    if order != sorted(order):
        source = g.op("Transpose", source, perm=[order.index(i) for i in range(len(order))])
    wide = g.cast(turned, summing(x.dtype)) if accumulate else turned
    out = g.op("ScatterND", wide, tuples, g.cast(source, wide.dtype), reduction="add" if accumulate else None)
    out = g.cast(out, x.dtype)
    if places.order == sorted(places.order):
        return out
    return g.op("Transpose", out, perm=[places.order.index(i) for i in range(x.ndim)])


@form("as_strided as_strided_copy")
def as_strided(g: Graph, x: Ref, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Ref:
    """Recorded over a vector, the memory: the places of its elements are known."""
    need(x.ndim == 1 and all(isinstance(n, int) for n in (*size, *stride, offset or 0)))
    return g.op("Gather", x, g.tensor(addresses(size, stride, offset or 0)), axis=0)


def addresses(size: Sequence[int], stride: Sequence[int], offset: int) -> torch.Tensor:
    places = torch.full((), offset)
    for n, step in zip(size, stride, strict=True):
        places = places.unsqueeze(-1) + torch.arange(n) * step
    return places
