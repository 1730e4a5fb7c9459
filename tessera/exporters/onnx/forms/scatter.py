"""Writing by indices, into a copy."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tessera.exporters.onnx.forms.arithmetic import floor_divide
from tessera.exporters.onnx.forms.common import axis, need, summing
from tessera.exporters.onnx.forms.index import addresses
from tessera.exporters.onnx.forms.shape import diagonal_places
from tessera.exporters.onnx.graph import INT64_MAX, Graph, Ref, same
from tessera.exporters.onnx.registry import form

_REDUCTIONS = {"sum": "add", "add": "add", "prod": "mul", "multiply": "mul", "amax": "max", "amin": "min"}
_SINCE_18 = ("max", "min")


def scattered(g: Graph, x: Ref, dim: int, index: Ref, source: Ref, reduction: str | None) -> Ref:
    need(reduction not in _SINCE_18 or g.opset >= 18)
    need(not any(same(n, 0) for n in index.sizes))
    if not x.ndim or not index.ndim:
        need(x.ndim <= 1 and index.ndim <= 1)
        wide = summing(x.dtype) if reduction else x.dtype
        data, places, new = (_vector(g, v) for v in (g.cast(x, wide), index, g.cast(source, wide)))
        out = g.op("ScatterElements", data, places, new, axis=0, reduction=reduction)
        return g.op("Reshape", out, g.ints(x.sizes))
    for i in range(index.ndim):  # of a longer source, what the index names
        if not same(source.sizes[i], index.sizes[i]):
            source = Ref(g.slice(source, i, 0, index.sizes[i]).name, source.dtype, source.shape)
    wide = summing(x.dtype) if reduction else x.dtype
    out = g.op(
        "ScatterElements", g.cast(x, wide), index, g.cast(source, wide), axis=axis(dim, x.ndim), reduction=reduction
    )
    return g.cast(out, x.dtype)


def _vector(g: Graph, x: Ref) -> Ref:
    return x if x.ndim else g.reshape(x, [1])


@form("scatter.src scatter.reduce")
def scatter(g: Graph, x: Ref, dim: int, index: Ref, source: Ref, reduce: str | None = None, **_: object) -> Ref:
    return scattered(g, x, dim, index, source, _REDUCTIONS[reduce] if reduce else None)


@form("scatter.value scatter.value_reduce")
def scatter_value(g: Graph, x: Ref, dim: int, index: Ref, value: object, reduce: str | None = None, **_: object) -> Ref:
    need(not any(same(n, 0) for n in index.sizes))
    source = g.expand(g.scalar(value, x.dtype), index.sizes)
    return scattered(g, x, dim, index, source, _REDUCTIONS[reduce] if reduce else None)


@form("scatter_add")
def scatter_add(g: Graph, x: Ref, dim: int, index: Ref, source: Ref) -> Ref:
    return scattered(g, x, dim, index, source, "add")


@form("scatter_reduce.two")
def scatter_reduce(
    g: Graph, x: Ref, dim: int, index: Ref, source: Ref, reduce: str, *, include_self: bool = True
) -> Ref:
    if reduce == "mean":
        return scatter_mean(g, x, dim, index, source, include_self)
    need(reduce in _REDUCTIONS and not any(same(n, 0) for n in index.sizes))
    if not include_self:  # what will be written begins as what changes nothing
        neutral = g.expand(g.full(neutral_of(reduce, x.dtype), x.dtype), index.sizes)
        x = Ref(scattered(g, x, dim, index, neutral, None).name, x.dtype, x.shape)
    return scattered(g, x, dim, index, source, _REDUCTIONS[reduce])


def scatter_mean(g: Graph, x: Ref, dim: int, index: Ref, source: Ref, include_self: bool) -> Ref:
    """The sum, by how many there are of each; of integers rounded down."""
    need(x.dtype is not torch.bool)
    if not (x.ndim and index.ndim):
        row, at, added = (t if t.ndim else g.reshape(t, [1]) for t in (x, index, source))
        return g.reshape(scatter_mean(g, row, 0, at, added, include_self), x.sizes)
    one, zero = g.full(1, x.dtype), g.full(0, x.dtype)
    base = x
    if not include_self:
        base = Ref(scattered(g, x, dim, index, g.expand(zero, index.sizes), None).name, x.dtype, x.shape)
    total = scattered(g, base, dim, index, source, "add")
    first = g.expand(one if include_self else zero, x.sizes)
    count = scattered(g, first, dim, index, g.expand(one, index.sizes), "add")
    divisor = g.op("Max", count, one)
    return g.op("Div", total, divisor) if x.is_float else floor_divide(g, total, divisor)


def neutral_of(reduce: str, dtype: torch.dtype) -> float | int | bool:
    if reduce in ("sum", "prod"):
        return 0 if reduce == "sum" else 1
    if dtype.is_floating_point:
        return math.inf if reduce == "amin" else -math.inf
    info = torch.iinfo(dtype)
    return info.max if reduce == "amin" else info.min


# --- a part of a tensor in place of another ---


def placed(g: Graph, x: Ref, part: Ref, dim: int, start: object, end: object) -> Ref:
    parts = [part]
    if not (isinstance(start, int) and start == 0):
        parts.insert(0, g.slice(x, dim, 0, start))
    if not (isinstance(end, int) and end == INT64_MAX) and not same(end, x.sizes[dim]):  # type: ignore[arg-type]
        parts.append(g.slice(x, dim, end, INT64_MAX))
    return part if len(parts) == 1 else g.op("Concat", *parts, axis=dim, dtype=x.dtype)


@form("slice_scatter")
def slice_scatter(
    g: Graph, x: Ref, source: Ref, dim: int = 0, start: object = None, end: object = None, step: object = 1
) -> Ref:
    d = axis(dim, x.ndim)
    need(isinstance(step, int) and step == 1)
    size, length = x.sizes[d], source.sizes[d]
    start = 0 if start is None else start
    need(not isinstance(start, Ref) and not isinstance(end, Ref))
    if isinstance(start, int) and start < 0:
        start = start + size if not isinstance(size, int) else max(start + size, 0)
    if isinstance(start, int) and isinstance(size, int):
        start = min(start, size)
    full = g.expand(g.cast(source, x.dtype), [*x.sizes[:d], length, *x.sizes[d + 1 :]])
    return placed(g, x, full, d, start, start + length)  # type: ignore[operator]


@form("select_scatter")
def select_scatter(g: Graph, x: Ref, source: Ref, dim: int, index: object) -> Ref:
    need(not isinstance(index, Ref))
    d = axis(dim, x.ndim)
    if isinstance(index, int) and index < 0:
        index = index + x.sizes[d]
    part = g.unsqueeze(g.cast(source, x.dtype), d)
    return placed(g, x, part, d, index, index + 1)  # type: ignore[operator]


@form("diagonal_scatter")
def diagonal_scatter(g: Graph, x: Ref, source: Ref, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Ref:
    a, b = axis(dim1, x.ndim), axis(dim2, x.ndim)
    rows, columns, length = x.sizes[a], x.sizes[b], source.sizes[-1]
    order = [*(i for i in range(x.ndim) if i not in (a, b)), a, b]
    turned = g.permute(x, order)
    flat = g.reshape(turned, [*turned.sizes[:-2], rows * columns])
    index = g.expand(diagonal_places(g, columns, length, offset), source.sizes)
    out = g.op("ScatterElements", flat, index, g.cast(source, x.dtype), axis=-1, shape=flat.shape)
    inverse = [order.index(i) for i in range(x.ndim)]
    return g.permute(g.reshape(out, turned.sizes), inverse)


@form("masked_scatter")
def masked_scatter(g: Graph, x: Ref, mask: Ref, source: Ref) -> Ref:
    """The first elements of the source, one for each place that is true."""
    shape = g.result.shape
    places = g.op("Transpose", g.op("NonZero", g.expand(mask, shape), dtype=torch.int64), perm=[1, 0])
    count = g.op("Shape", places, start=0, end=1, dtype=torch.int64, shape=(1,))
    flat = g.op("Reshape", g.cast(source, x.dtype), g.ints([-1]))
    first = g.op("Slice", flat, g.ints([0]), count, g.ints([0]))
    return g.op("ScatterND", g.expand(x, shape), places, first)


@form("as_strided_scatter")
def as_strided_scatter(
    g: Graph, x: Ref, source: Ref, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> Ref:
    need(x.ndim == 1 and all(isinstance(n, int) for n in (*size, *stride, offset or 0)))
    places = g.tensor(addresses(size, stride, offset or 0).reshape(-1))
    return g.op("ScatterElements", x, places, g.op("Reshape", g.cast(source, x.dtype), g.ints([-1])), axis=0)


@form("index_reduce")
def index_reduce(g: Graph, x: Ref, dim: int, index: Ref, source: Ref, reduce: str, *, include_self: bool = True) -> Ref:
    need(include_self and reduce in _REDUCTIONS and x.ndim > 0 and index.ndim == 1)
    d = axis(dim, x.ndim)
    places = g.expand(g.reshape(index, [*[1] * d, index.sizes[0], *[1] * (x.ndim - d - 1)]), source.sizes)
    return scattered(g, x, d, g.cast(places, torch.int64), source, _REDUCTIONS[reduce])
