"""Sorting and searching."""

from __future__ import annotations

import math

import torch

from tessera.exporters.onnx.forms.common import axis, need
from tessera.exporters.onnx.graph import INT64_MAX, Graph, Ref, same
from tessera.exporters.onnx.registry import form
from tessera.ir.types import Size


def best(g: Graph, x: Ref, k: object, dim: int, largest: bool) -> list[Ref]:
    """The k largest or smallest, in order; of equal ones the first comes first."""
    if not x.ndim:
        return [x, g.full(0, torch.int64)]
    wide = x
    if x.dtype == torch.bfloat16:
        wide = g.cast(x, torch.float32)
    elif not x.is_float and x.dtype not in (torch.int32, torch.int64):
        wide = g.cast(x, torch.int32)
    values, places = g.op(
        "TopK", wide, g.ints([k]), axis=axis(dim, x.ndim), largest=int(largest), outputs=2,
        dtype=[wide.dtype, torch.int64],
    )  # fmt: skip
    return [g.cast(values, x.dtype), places]


@form("topk")
def topk(g: Graph, x: Ref, k: object, dim: int = -1, largest: bool = True, sorted: bool = True) -> list[Ref]:
    return best(g, x, k, dim, largest)


@form("sort.default")
def sort(g: Graph, x: Ref, dim: int = -1, descending: bool = False) -> list[Ref]:
    return best(g, x, x.sizes[axis(dim, x.ndim)] if x.ndim else 1, dim, descending)


@form("sort.stable")
def sort_stable(g: Graph, x: Ref, *, stable: bool | None, dim: int = -1, descending: bool = False) -> list[Ref]:
    return sort(g, x, dim, descending)


@form("argsort.default")
def argsort(g: Graph, x: Ref, dim: int = -1, descending: bool = False) -> Ref:
    return sort(g, x, dim, descending)[1]


@form("argsort.stable")
def argsort_stable(g: Graph, x: Ref, *, stable: bool, dim: int = -1, descending: bool = False) -> Ref:
    return sort(g, x, dim, descending)[1]


@form("kthvalue")
def kthvalue(g: Graph, x: Ref, k: Size, dim: int = -1, keepdim: bool = False) -> list[Ref]:
    if not x.ndim:
        return best(g, x, k, dim, False)
    d = axis(dim, x.ndim)
    place = g.ints([k - 1]) if keepdim else g.scalar(k - 1, torch.int64)
    return [g.op("Gather", out, place, axis=d) for out in best(g, x, k, d, False)]


def _boundaries(g: Graph, x: Ref, edges: Ref, right: bool) -> Ref:
    """How many boundaries lie below: one row of them for all, or one for each row."""
    dtype = torch.promote_types(x.dtype, edges.dtype)
    kind = "GreaterOrEqual" if right else "Greater"
    if edges.ndim > 1:
        edges = g.unsqueeze(edges, edges.ndim - 1)
    above = g.op(kind, g.unsqueeze(g.cast(x, dtype), -1), g.cast(edges, dtype), dtype=torch.bool)
    return g.op("ReduceSum", g.cast(above, torch.int64), g.ints([-1]), keepdims=0)


@form("bucketize.Tensor")
def bucketize(g: Graph, x: Ref, edges: Ref, *, out_int32: bool = False, right: bool = False) -> Ref:
    return _boundaries(g, x, edges, right)


@form("searchsorted.Tensor")
def searchsorted(
    g: Graph, edges: Ref, x: Ref, *, out_int32: bool = False, right: bool = False, side: str | None = None,
    sorter: Ref | None = None,
) -> Ref:  # fmt: skip
    need(sorter is None)
    return _boundaries(g, x, edges, right or side == "right")


def _median(g: Graph, x: Ref, dim: int, keepdim: bool) -> list[Ref]:
    """The lower one of the two in the middle."""
    d = axis(dim, x.ndim)
    need(not same(x.sizes[d], 0))
    return kthvalue(g, x, (x.sizes[d] + 1) // 2, d, keepdim)


@form("median.dim")
def median(g: Graph, x: Ref, dim: int, keepdim: bool = False) -> list[Ref]:
    return _median(g, x, dim, keepdim) if x.ndim else [x, g.full(0, torch.int64)]


@form("median.default")
def median_all(g: Graph, x: Ref) -> Ref:
    return _median(g, g.reshape(x, [math.prod(x.sizes)]), 0, False)[0]


@form("isin.Tensor_Tensor")
def isin(g: Graph, x: Ref, among: Ref, *, assume_unique: bool = False, invert: bool = False) -> Ref:
    need(not x.dtype.is_complex and among.ndim == 1)
    dtype = torch.promote_types(x.dtype, among.dtype)
    equal = g.op("Equal", g.unsqueeze(g.cast(x, dtype), -1), g.cast(among, dtype), dtype=torch.bool)
    out = g.cast(g.reduce("ReduceMax", g.cast(equal, torch.int32), [-1], False), torch.bool)
    return g.op("Not", out) if invert else out


def _distinct(g: Graph, x: Ref, dim: int | None) -> list[Ref]:
    """In order, with where each element of the input went, and how many did."""
    if x.dtype not in (torch.float32, torch.float64, torch.int64):
        x = g.cast(x, torch.float32 if x.is_float else torch.int64)
    values, _, inverse, counts = g.op(
        "Unique", x, axis=dim, sorted=1, outputs=4, dtype=[x.dtype, torch.int64, torch.int64, torch.int64]
    )
    return [values, inverse, counts]


@form("_unique2")
def unique(
    g: Graph, x: Ref, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> list[Ref]:
    values, inverse, counts = _distinct(g, x, None)
    return [values, g.op("Reshape", inverse, g.ints(x.sizes)), counts]


@form("unique_dim")
def unique_dim(
    g: Graph, x: Ref, dim: int, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> list[Ref]:
    need(x.ndim > 0)
    return _distinct(g, x, axis(dim, x.ndim))


@form("unique_consecutive")
def unique_consecutive(
    g: Graph, x: Ref, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> list[Ref]:
    """What differs from the element before it stays, and the first does."""
    need((dim is None or x.ndim == 1) and not any(same(n, 0) for n in x.sizes))
    flat = g.op("Reshape", x, g.ints([-1]))
    before, after = g.slice(flat, 0, 0, -1), g.slice(flat, 0, 1, INT64_MAX)
    new = g.op("Not", g.op("Equal", after, before, dtype=torch.bool))
    starts = g.op("Concat", g.full(True, torch.bool, [1]), new, axis=0)
    values = g.op("Compress", flat, starts, axis=0)
    inverse = counts = g.tensor(torch.zeros(0, dtype=torch.int64))
    if return_inverse:
        numbers = g.op("CumSum", g.cast(starts, torch.int64), g.full(0, torch.int64))
        inverse = g.op("Reshape", g.op("Sub", numbers, g.full(1, torch.int64)), g.ints(x.sizes))
    if return_counts:
        places = g.op("Reshape", g.op("NonZero", starts, dtype=torch.int64), g.ints([-1]))
        ends = g.op("Concat", g.slice(places, 0, 1, INT64_MAX), g.op("Shape", flat, dtype=torch.int64), axis=0)
        counts = g.op("Sub", ends, places)
    return [values, inverse, counts]


@form("histc")
def histc(g: Graph, x: Ref, bins: int = 100, low: float = 0, high: float = 0) -> Ref:
    """How many elements fall into each bin; the last one has its end, too."""
    need(isinstance(bins, int) and low < high)
    dtype = g.result.dtype
    wide = dtype if dtype.is_floating_point else torch.float32
    flat = g.cast(g.op("Reshape", x, g.ints([-1])), wide)
    first, last = g.full(low, wide), g.full(high, wide)
    place = g.op("Floor", g.op("Mul", g.op("Sub", flat, first), g.full(bins / (high - low), wide)))
    place = g.op("Min", place, g.full(bins - 1, wide))
    above = g.op("GreaterOrEqual", flat, first, dtype=torch.bool)
    within = g.op("And", above, g.op("LessOrEqual", flat, last, dtype=torch.bool))
    kept = g.op("Where", within, place, g.full(-1, wide), dtype=wide)
    rows = g.op("Unsqueeze", kept, g.ints([1]))
    hits = g.op("Equal", rows, g.tensor(torch.arange(bins, dtype=wide)), dtype=torch.bool)
    return g.op("ReduceSum", g.cast(hits, wide), g.ints([0]), keepdims=0)


@form("bincount")
def bincount(g: Graph, x: Ref, weights: Ref | None = None, shortest: int = 0) -> Ref:
    """How often each number stands there: ones, or weights, are added at its place."""
    need(x.ndim == 1 and isinstance(shortest, int))
    dtype = torch.int64 if weights is None else g.result.dtype
    places = g.cast(x, torch.int64)
    seen = g.op("Concat", places, g.ints([shortest - 1]), axis=0)  # of no numbers there is no largest one
    count = g.op("Add", g.reduce("ReduceMax", seen, [0], True), g.ints([1]), shape=(1,))
    zeros = g.op("ConstantOfShape", count, value=torch.zeros(1, dtype=dtype), dtype=dtype)
    added = g.expand(g.full(1, dtype), x.sizes) if weights is None else g.cast(weights, dtype)
    return g.op("ScatterElements", zeros, places, added, axis=0, reduction="add", dtype=dtype)
