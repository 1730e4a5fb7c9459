"""Reductions and what is made of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tessera.exporters.onnx.forms.common import axes, axis, need
from tessera.exporters.onnx.forms.elementwise import convert
from tessera.exporters.onnx.graph import Graph, Ref
from tessera.exporters.onnx.registry import form


def reduced(g: Graph, kind: str, x: Ref, dims: object, keepdim: bool) -> Ref:
    """Of a scalar there is nothing to reduce."""
    return x if not x.ndim else g.reduce(kind, x, axes(dims, x.ndim), keepdim)


def summable(g: Graph, x: Ref) -> Ref:
    """In the dtype of the result; narrow integers in a wide one."""
    dtype = g.result.dtype
    need(not dtype.is_complex)
    return g.cast(x, dtype if dtype.is_floating_point or dtype == torch.int32 else torch.int64)


@form("sum")
def sum_(g: Graph, x: Ref, dims: object = None, keepdim: bool = False, **_: object) -> Ref:
    return reduced(g, "ReduceSum", summable(g, x), dims, keepdim)


@form("mean")
def mean(g: Graph, x: Ref, dims: object = None, keepdim: bool = False, **_: object) -> Ref:
    need(g.result.dtype.is_floating_point)
    return reduced(g, "ReduceMean", summable(g, x), dims, keepdim)


@form("prod.default")
def prod(g: Graph, x: Ref, **_: object) -> Ref:
    return reduced(g, "ReduceProd", summable(g, x), None, False)


@form("prod.dim_int")
def prod_dim(g: Graph, x: Ref, dim: int, keepdim: bool = False, **_: object) -> Ref:
    return reduced(g, "ReduceProd", summable(g, x), dim, keepdim)


def extreme(g: Graph, kind: str, x: Ref, dims: object, keepdim: bool) -> Ref:
    wide = x if x.is_float or x.dtype in (torch.int32, torch.int64) else g.cast(x, torch.int32)
    return convert(g, reduced(g, kind, wide, dims, keepdim), x.dtype)


@form("amax")
def amax(g: Graph, x: Ref, dims: object = (), keepdim: bool = False) -> Ref:
    return extreme(g, "ReduceMax", x, dims, keepdim)


@form("amin")
def amin(g: Graph, x: Ref, dims: object = (), keepdim: bool = False) -> Ref:
    return extreme(g, "ReduceMin", x, dims, keepdim)


@form("max.default")
def max_all(g: Graph, x: Ref) -> Ref:
    return extreme(g, "ReduceMax", x, None, False)


@form("min.default")
def min_all(g: Graph, x: Ref) -> Ref:
    return extreme(g, "ReduceMin", x, None, False)


def with_places(g: Graph, kind: str, x: Ref, dim: int, keepdim: bool) -> list[Ref]:
    """The extreme elements, and where each stands first."""
    if not x.ndim:
        return [x, g.full(0, torch.int64)]
    d = axis(dim, x.ndim)
    wide = x if x.is_float or x.dtype in (torch.int32, torch.int64) else g.cast(x, torch.int32)
    values = convert(g, g.reduce(f"Reduce{kind}", wide, [d], keepdim), x.dtype)
    return [values, g.op(f"Arg{kind}", wide, axis=d, keepdims=int(keepdim), dtype=torch.int64)]


@form("max.dim")
def max_dim(g: Graph, x: Ref, dim: int, keepdim: bool = False) -> list[Ref]:
    return with_places(g, "Max", x, dim, keepdim)


@form("min.dim")
def min_dim(g: Graph, x: Ref, dim: int, keepdim: bool = False) -> list[Ref]:
    return with_places(g, "Min", x, dim, keepdim)


def place_of(g: Graph, kind: str, x: Ref, dim: int | None, keepdim: bool) -> Ref:
    if not x.ndim:
        return g.full(0, torch.int64)
    if x.dtype not in (torch.float32, torch.float64, torch.int32):
        x = g.cast(x, torch.float32 if x.is_float else torch.int32 if x.dtype != torch.int64 else torch.int64)
    if dim is None:
        flat = g.op("Reshape", x, g.ints([-1]))
        out = g.op(kind, flat, axis=0, keepdims=0, dtype=torch.int64)
        return g.op("Reshape", out, g.ints([1] * x.ndim)) if keepdim else out
    return g.op(kind, x, axis=axis(dim, x.ndim), keepdims=int(keepdim), dtype=torch.int64)


@form("argmax")
def argmax(g: Graph, x: Ref, dim: int | None = None, keepdim: bool = False) -> Ref:
    return place_of(g, "ArgMax", x, dim, keepdim)


@form("argmin")
def argmin(g: Graph, x: Ref, dim: int | None = None, keepdim: bool = False) -> Ref:
    return place_of(g, "ArgMin", x, dim, keepdim)


@form("any _is_any_true")
def any_(g: Graph, x: Ref, dims: object = None, keepdim: bool = False) -> Ref:
    need(not x.dtype.is_complex)
    return convert(g, reduced(g, "ReduceMax", truths(g, x), dims, keepdim), g.result.dtype)


@form("all _is_all_true")
def all_(g: Graph, x: Ref, dims: object = None, keepdim: bool = False) -> Ref:
    need(not x.dtype.is_complex)
    return convert(g, reduced(g, "ReduceMin", truths(g, x), dims, keepdim), g.result.dtype)


def truths(g: Graph, x: Ref) -> Ref:
    return g.cast(convert(g, x, torch.bool), torch.int32)


@form("logsumexp special_logsumexp")
def logsumexp(g: Graph, x: Ref, dims: object, keepdim: bool = False) -> Ref:
    """Runtimes differ in what they do with infinities: the largest element is taken off first, unless it is one."""
    dtype = g.result.dtype
    need(dtype.is_floating_point)
    x = g.cast(x, dtype)
    if not x.ndim:
        return x
    listed = axes(dims, x.ndim)
    top = g.reduce("ReduceMax", x, listed, True)
    infinite = g.op("IsInf", top, dtype=torch.bool)
    held = g.op("Where", infinite, g.full(0, dtype), top, dtype=dtype)
    total = g.reduce("ReduceSum", g.op("Exp", g.op("Sub", x, held)), listed, keepdim)
    if not keepdim:
        held = g.op("Squeeze", held, None if listed is None else g.ints(listed))
    return g.op("Add", g.op("Log", total), held)


def deviations(g: Graph, x: Ref, dims: object, correction: object, keepdim: bool) -> tuple[Ref, Ref]:
    """The variance and the mean, which keeps its dimensions."""
    if not x.ndim:  # a row of one
        x, dims, keepdim = g.reshape(x, [1]), None, False
    listed = axes(dims, x.ndim)
    need(x.is_float)
    count = 1
    for d in range(x.ndim) if listed is None else listed:
        count = count * x.sizes[d]  # type: ignore[assignment]
    correction = 1 if correction is None else correction
    mean_ = g.reduce("ReduceMean", x, listed, True)
    left = g.op("Sub", x, mean_)
    squares = g.op("Mul", left, left)
    if correction == 0:
        return g.reduce("ReduceMean", squares, listed, keepdim), mean_
    total = g.reduce("ReduceSum", squares, listed, keepdim)
    if isinstance(count, int):
        divisor = g.full(max(count - correction, 0), x.dtype)  # type: ignore[operator,type-var]
    else:
        less = g.op("Sub", g.scalar(count, x.dtype), g.full(correction, x.dtype))
        divisor = g.op("Max", less, g.full(0, x.dtype))
    return g.op("Div", total, divisor), mean_


def _squeezed(g: Graph, x: Ref, dims: object, rank: int) -> Ref:
    listed = axes(dims, rank) if rank else None
    return g.op("Squeeze", x, None if listed is None else g.ints(listed))


@form("var.correction")
def var(g: Graph, x: Ref, dims: object = None, *, correction: object = None, keepdim: bool = False) -> Ref:
    return deviations(g, x, dims, correction, keepdim)[0]


@form("std.correction")
def std(g: Graph, x: Ref, dims: object = None, *, correction: object = None, keepdim: bool = False) -> Ref:
    return g.op("Sqrt", deviations(g, x, dims, correction, keepdim)[0])


@form("var_mean.correction")
def var_mean(g: Graph, x: Ref, dims: object = None, *, correction: object = None, keepdim: bool = False) -> list[Ref]:
    variance, mean_ = deviations(g, x, dims, correction, keepdim)
    return [variance, mean_ if keepdim and x.ndim else _squeezed(g, mean_, dims, x.ndim)]


@form("linalg_vector_norm norm.ScalarOpt_dim norm.Scalar")
def vector_norm(g: Graph, x: Ref, ord: object = 2, dims: object = None, keepdim: bool = False, **_: object) -> Ref:
    dtype = g.result.dtype
    ord = 2 if ord is None else ord
    need(not x.dtype.is_complex and isinstance(ord, (int, float)))
    x = g.cast(x, dtype)
    if ord == 2 and x.ndim:
        return g.op("Sqrt", reduced(g, "ReduceSumSquare", x, dims, keepdim))
    size = g.op("Abs", x)
    if not x.ndim:
        return convert(g, convert(g, size, torch.bool), dtype) if ord == 0 else size
    if ord == math.inf:
        return reduced(g, "ReduceMax", size, dims, keepdim)
    if ord == -math.inf:
        return reduced(g, "ReduceMin", size, dims, keepdim)
    if ord == 0:
        return reduced(g, "ReduceSum", g.cast(convert(g, x, torch.bool), dtype), dims, keepdim)
    if ord == 1:
        return reduced(g, "ReduceSum", size, dims, keepdim)
    total = reduced(g, "ReduceSum", g.op("Pow", size, g.full(ord, dtype)), dims, keepdim)
    return g.op("Pow", total, g.full(1 / ord, dtype))  # type: ignore[operator]


@form("count_nonzero.dim_IntList")
def count_nonzero(g: Graph, x: Ref, dims: Sequence[int]) -> Ref:
    return reduced(g, "ReduceSum", g.cast(convert(g, x, torch.bool), torch.int64), dims, False)


@form("prims.prod")
def prims_prod(g: Graph, x: Ref, dims: object, **_: object) -> Ref:
    return reduced(g, "ReduceProd", summable(g, x), dims, False)


@form("prims.sum")
def prims_sum(g: Graph, x: Ref, dims: object, **_: object) -> Ref:
    return reduced(g, "ReduceSum", summable(g, x), dims, False)
