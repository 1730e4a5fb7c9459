"""Attention, whole where the opset has it."""

from __future__ import annotations

import math

import torch

from tessera.exporters.onnx.forms.common import need
from tessera.exporters.onnx.graph import Graph, Ref, same
from tessera.exporters.onnx.registry import form
from tessera.ir.types import Size, size_key

NAME = "scaled_dot_product_attention"


def rows_that_see(g: Graph, mask: Ref) -> Ref:
    """Whether a query may look at any key: where it may not, PyTorch gives zeros, and runtimes what they like."""
    if mask.dtype == torch.bool:
        top = g.reduce("ReduceMax", g.cast(mask, torch.int32), [mask.ndim - 1], True)
        return g.cast(top, torch.bool)
    top = g.reduce("ReduceMax", mask, [mask.ndim - 1], True)
    return g.op("Greater", top, g.full(-math.inf, mask.dtype), dtype=torch.bool)


@form(NAME, since=23)
def attention(
    g: Graph, q: Ref, k: Ref, v: Ref, mask: Ref | None = None, dropout: float = 0.0, causal: bool = False, *,
    scale: float | None = None, enable_gqa: bool = False,
) -> Ref:  # fmt: skip
    need(dropout == 0 and q.ndim == k.ndim == v.ndim == 4 and q.is_float and not isinstance(scale, torch.SymFloat))
    need(same(q.sizes[0], k.sizes[0]) and same(k.sizes[1], v.sizes[1]) and (enable_gqa or same(q.sizes[1], k.sizes[1])))
    need(mask is None or mask.dtype in (torch.bool, q.dtype))
    need(not any(same(n, 0) for x in (q, k, v) for n in x.sizes))
    # ONNX Runtime gives zeros for heads of halves that do not fill its vectors.
    need(q.dtype != torch.float16 or all(isinstance(x.sizes[3], int) and x.sizes[3] % 8 == 0 for x in (q, v)))
    factor = None if scale is None else float(scale)
    out = g.op("Attention", q, k, v, _broad(g, mask, q, k), is_causal=int(causal), scale=factor)
    if mask is None:
        return out
    return g.op(
        "Where", g.once(("rows", mask.name), lambda: rows_that_see(g, mask)), out, g.full(0, q.dtype), dtype=q.dtype
    )


def _broad(g: Graph, mask: Ref | None, q: Ref, k: Ref) -> Ref | None:
    """Runtimes want the last two dimensions of a mask as long as queries and keys are."""
    if mask is None or (mask.ndim > 1 and same(mask.sizes[-2], q.sizes[2]) and same(mask.sizes[-1], k.sizes[2])):
        return mask
    return g.expand(mask, [*mask.sizes[:-2], q.sizes[2], k.sizes[2]])


@form(NAME)
def attention_parts(
    g: Graph, q: Ref, k: Ref, v: Ref, mask: Ref | None = None, dropout: float = 0.0, causal: bool = False, *,
    scale: float | None = None, enable_gqa: bool = False,
) -> Ref:  # fmt: skip
    width = q.sizes[-1]
    need(dropout == 0 and not enable_gqa and q.is_float and min(q.ndim, k.ndim, v.ndim) >= 2)
    need(isinstance(scale, (int, float)) or (scale is None and isinstance(width, int) and width > 0))
    dtype = q.dtype
    factor = scale if scale is not None else 1 / math.sqrt(width)  # type: ignore[arg-type]
    order = [*range(k.ndim - 2), k.ndim - 1, k.ndim - 2]
    scores = g.op("MatMul", g.op("Mul", q, g.full(factor, dtype)), g.permute(k, order))
    if causal:
        rows, columns = q.sizes[-2], k.sizes[-2]
        seen = g.once(("causal", size_key(rows), size_key(columns)), lambda: _causal(g, rows, columns))
        scores = g.op("Where", seen, scores, g.full(-math.inf, dtype), dtype=dtype)
    if mask is not None and mask.dtype == torch.bool:
        scores = g.op("Where", mask, scores, g.full(-math.inf, dtype), dtype=dtype)
    elif mask is not None:
        scores = g.op("Add", scores, g.cast(mask, dtype))
    out = g.op("MatMul", g.op("Softmax", scores, axis=-1), v)
    if mask is None:
        return out
    return g.op(
        "Where", g.once(("rows", mask.name), lambda: rows_that_see(g, mask)), out, g.full(0, dtype), dtype=dtype
    )


def _causal(g: Graph, rows: Size, columns: Size) -> Ref:
    """Queries by keys: true up to the diagonal."""
    first, second = (
        g.op("Range", g.full(0, torch.int64), g.scalar(n, torch.int64), g.full(1, torch.int64)) for n in (rows, columns)
    )
    return g.op("GreaterOrEqual", g.op("Unsqueeze", first, g.ints([1])), second, dtype=torch.bool)
