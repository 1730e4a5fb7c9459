"""Running sums, products and extremes along a dimension.

ONNX has running sums, and since opset 26 products. What it lacks is a reduction of a triangle: each element beside all
those before it.
"""

from __future__ import annotations

import math

import torch

from tessera.exporters.onnx.forms.common import axis, need
from tessera.exporters.onnx.forms.reduce import summable
from tessera.exporters.onnx.graph import Graph, Ref
from tessera.exporters.onnx.registry import form

LONGEST = 1024  # elements along a dimension that are written as a triangle


@form("cumsum")
def cumsum(g: Graph, x: Ref, dim: int, **_: object) -> Ref:
    x = summable(g, x)
    return g.op("CumSum", x, g.full(axis(dim, x.ndim), torch.int64)) if x.ndim else x


@form("cumprod", since=26)
def cumprod_whole(g: Graph, x: Ref, dim: int, **_: object) -> Ref:
    x = summable(g, x)
    return g.op("CumProd", x, g.full(axis(dim, x.ndim), torch.int64)) if x.ndim else x


def triangle(g: Graph, x: Ref, dim: int, otherwise: float) -> Ref:
    """With the dimension last: row i has the elements up to i, and `otherwise` behind them."""
    d = axis(dim, x.ndim)
    length = x.sizes[d]
    need(not g.result.dtype.is_complex and (not isinstance(length, int) or 0 < length <= LONGEST))
    order = [i for i in range(x.ndim) if i != d] + [d]
    row = g.unsqueeze(g.permute(x, order), -2)
    if isinstance(length, int):
        before = g.tensor(torch.ones(length, length, dtype=torch.bool).tril())
    else:
        count = g.scalar(length, torch.int64)
        place = g.op("Range", g.full(0, torch.int64), count, g.full(1, torch.int64), shape=[length])
        before = g.op("LessOrEqual", place, g.unsqueeze(place, 1), dtype=torch.bool)
    return g.op("Where", before, row, g.full(otherwise, x.dtype), dtype=x.dtype)


def back(g: Graph, x: Ref, dim: int, rank: int) -> Ref:
    """The last dimension where it was."""
    d = axis(dim, rank)
    order = [*range(d), rank - 1, *range(d, rank - 1)]
    return x if order == sorted(order) else g.op("Transpose", x, perm=order)


@form("cumprod")
def cumprod(g: Graph, x: Ref, dim: int, **_: object) -> Ref:
    if not x.ndim:
        return x
    return back(g, g.reduce("ReduceProd", triangle(g, summable(g, x), dim, 1), [x.ndim], False), dim, x.ndim)


def running(g: Graph, kind: str, x: Ref, dim: int, worst: float) -> list[Ref]:
    """The extreme so far, and where it stands: of equal ones the last."""
    if not x.ndim:
        return [x, g.full(0, torch.int64)]
    dtype = x.dtype
    if not x.is_float:
        x = g.cast(x, torch.int32) if dtype != torch.int64 else x
        limits = torch.iinfo(x.dtype)
        worst = limits.min if worst < 0 else limits.max
    rows = triangle(g, x, dim, worst)
    values = g.reduce(f"Reduce{kind}", rows, [x.ndim], False)
    places = g.op(f"Arg{kind}", rows, axis=-1, keepdims=0, select_last_index=1, dtype=torch.int64)
    return [back(g, out, dim, x.ndim) for out in (g.cast(values, dtype), places)]


@form("cummax")
def cummax(g: Graph, x: Ref, dim: int) -> list[Ref]:
    return running(g, "Max", x, dim, -math.inf)


@form("cummin")
def cummin(g: Graph, x: Ref, dim: int) -> list[Ref]:
    return running(g, "Min", x, dim, math.inf)


@form("logcumsumexp")
def logcumsumexp(g: Graph, x: Ref, dim: int) -> Ref:
    if not x.ndim:
        return x
    need(x.is_float)
    rows = triangle(g, x, dim, -math.inf)
    top = g.reduce("ReduceMax", rows, [x.ndim], True)
    held = g.op("Where", g.op("IsInf", top, dtype=torch.bool), g.full(0, x.dtype), top, dtype=x.dtype)
    total = g.reduce("ReduceSum", g.op("Exp", g.op("Sub", rows, held)), [x.ndim], False)
    return back(g, g.op("Add", g.op("Log", total), g.op("Squeeze", held, g.ints([x.ndim]))), dim, x.ndim)
