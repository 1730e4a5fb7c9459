"""Matrix products and linear layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tessera.exporters.onnx.forms.common import need
from tessera.exporters.onnx.forms.reduce import vector_norm
from tessera.exporters.onnx.graph import Graph, Ref, same
from tessera.exporters.onnx.registry import form


def multiplied(g: Graph, a: Ref, b: Ref) -> Ref:
    """A runtime multiplies floats, and whole numbers of 32 and 64 bits."""
    dtype = g.result.dtype
    need(not dtype.is_complex)
    wide = dtype if dtype.is_floating_point or dtype in (torch.int32, torch.int64) else torch.int32
    return g.op("MatMul", g.cast(a, wide), g.cast(b, wide), dtype=wide)


@form("matmul mm bmm mv dot inner.vectors")
def matmul(g: Graph, a: Ref, b: Ref, *_: object) -> Ref:
    return multiplied(g, a, b)


@form("linear")
def linear(g: Graph, x: Ref, weight: Ref, bias: Ref | None = None) -> Ref:
    need(x.is_float and weight.ndim == 2)
    if x.ndim == 2 and (bias is None or bias.ndim == 1):
        return g.op("Gemm", x, weight, bias, transB=1)
    out = g.op("MatMul", x, g.transposed(weight))
    return out if bias is None else g.op("Add", out, bias)


@form("_linalg_det")
def det(g: Graph, x: Ref) -> list[Ref | None]:
    need(g.results[1:] == [None, None] and x.dtype == torch.float32)
    if same(x.sizes[-1], 0):
        return [g.expand(g.full(1, x.dtype), x.sizes[:-2]), None, None]
    return [g.op("Det", x), None, None]


@form("_linalg_slogdet")
def slogdet(g: Graph, x: Ref) -> list[Ref | None]:
    """The determinant itself may be too large or too small for a float: rows are brought to a like size first."""
    need(g.results[2:] == [None, None] and x.dtype == torch.float32)
    if same(x.sizes[-1], 0):
        one, zero = (g.expand(g.full(n, x.dtype), x.sizes[:-2]) for n in (1, 0))
        return [one, zero, None, None]
    largest = g.reduce("ReduceMax", g.op("Abs", x), [x.ndim - 1], True)
    empty = g.op("Equal", largest, g.full(0, x.dtype), dtype=torch.bool)
    size = g.op("Where", empty, g.full(1, x.dtype), largest, dtype=x.dtype)
    unit = g.op("Det", g.op("Div", x, size), shape=x.sizes[:-2])
    rows = g.reduce("ReduceSum", g.op("Log", size), [x.ndim - 2, x.ndim - 1], False)
    return [g.op("Sign", unit), g.op("Add", g.op("Log", g.op("Abs", unit)), rows), None, None]


@form("addmm")
def addmm(g: Graph, bias: Ref, a: Ref, b: Ref, beta: float = 1, alpha: float = 1) -> Ref:
    need(a.is_float)
    if same(a.sizes[1], 0):  # a sum of nothing: runtimes forget to scale what it is added to
        return g.expand(g.op("Mul", bias, g.full(beta, bias.dtype)), g.result.shape)
    return g.op("Gemm", a, b, bias, alpha=float(alpha), beta=float(beta))


def _added(g: Graph, bias: Ref, product: Ref, beta: float, alpha: float) -> Ref:
    """Among whole numbers the factors are whole, too."""
    dtype = g.result.dtype
    if not dtype.is_floating_point:
        beta, alpha = int(beta), int(alpha)
    if alpha != 1:
        product = g.op("Mul", product, g.full(alpha, dtype))
    if beta == 0:
        return product
    return g.op("Add", bias if beta == 1 else g.op("Mul", bias, g.full(beta, dtype)), product)


@form("baddbmm addmv")
def baddbmm(g: Graph, bias: Ref, a: Ref, b: Ref, beta: float = 1, alpha: float = 1) -> Ref:
    return _added(g, bias, multiplied(g, a, b), beta, alpha)


@form("addbmm")
def addbmm(g: Graph, bias: Ref, a: Ref, b: Ref, beta: float = 1, alpha: float = 1) -> Ref:
    return _added(g, bias, g.reduce("ReduceSum", multiplied(g, a, b), [0], False), beta, alpha)


@form("_trilinear")
def trilinear(
    g: Graph, a: Ref, b: Ref, c: Ref, at_a: Sequence[int], at_b: Sequence[int], at_c: Sequence[int],
    summed: Sequence[int], *_: object,
) -> Ref:  # fmt: skip
    wide = [g.unsqueeze(x, *at) if at else x for x, at in ((a, at_a), (b, at_b), (c, at_c))]
    return g.reduce("ReduceSum", g.op("Mul", g.op("Mul", wide[0], wide[1]), wide[2]), summed, False)


@form("_cdist_forward")
def cdist(g: Graph, a: Ref, b: Ref, p: float, *_: object) -> Ref:
    """Distances of all pairs: the norm of their differences."""
    left = g.op("Sub", g.unsqueeze(a, a.ndim - 1), g.unsqueeze(b, b.ndim - 2), shape=(*g.result.shape, a.sizes[-1]))
    return vector_norm(g, left, p, [-1], False)


@form("_grouped_mm transformers.grouped_mm_fallback")
def grouped_mm(g: Graph, a: Ref, b: Ref, offs: Ref | None = None, bias: Ref | None = None, *_: object) -> Ref:
    """Rows of one matrix in groups, each by a matrix of its own: every row is multiplied by the one of its group."""
    need(a.ndim == 2 and b.ndim == 3 and offs is not None and bias is None)
    rows = g.scalar(a.sizes[0], torch.int64)
    row = g.op("Range", g.full(0, torch.int64), rows, g.full(1, torch.int64))
    past = g.op("GreaterOrEqual", g.op("Unsqueeze", row, g.ints([1])), g.cast(offs, torch.int64), dtype=torch.bool)  # type: ignore[arg-type]
    group = g.op("ReduceSum", g.cast(past, torch.int64), g.ints([1]), keepdims=0)
    last = g.full(b.sizes[0] - 1, torch.int64)
    own = g.op("Gather", b, g.op("Min", group, last), axis=0)
    return g.op("Squeeze", g.op("MatMul", g.unsqueeze(a, 1), own), g.ints([1]))
