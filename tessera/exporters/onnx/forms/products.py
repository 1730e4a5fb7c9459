"""Matrix products and linear layers."""

from __future__ import annotations

import torch

from tessera.exporters.onnx.forms.common import need
from tessera.exporters.onnx.graph import Graph, Ref
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


@form("addmm")
def addmm(g: Graph, bias: Ref, a: Ref, b: Ref, beta: float = 1, alpha: float = 1) -> Ref:
    need(a.is_float)
    return g.op("Gemm", a, b, bias, alpha=float(alpha), beta=float(beta))


def _added(g: Graph, bias: Ref, product: Ref, beta: float, alpha: float) -> Ref:
    dtype = g.result.dtype
    if alpha != 1:
        product = g.op("Mul", product, g.full(alpha, dtype))
    if beta == 0:
        return product
    return g.op("Add", bias if beta == 1 else g.op("Mul", bias, g.full(beta, dtype)), product)


@form("baddbmm addmv")
def baddbmm(g: Graph, bias: Ref, a: Ref, b: Ref, beta: float = 1, alpha: float = 1) -> Ref:
    need(a.is_float)
    return _added(g, bias, multiplied(g, a, b), beta, alpha)


@form("addbmm")
def addbmm(g: Graph, bias: Ref, a: Ref, b: Ref, beta: float = 1, alpha: float = 1) -> Ref:
    need(a.is_float)
    return _added(g, bias, g.reduce("ReduceSum", multiplied(g, a, b), [0], False), beta, alpha)


@form("linalg_det det")
def det(g: Graph, x: Ref) -> Ref:
    need(x.dtype in (torch.float32, torch.float64) and x.ndim >= 2)
    return g.op("Det", x)
