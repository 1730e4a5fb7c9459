"""Sorting and searching."""

from __future__ import annotations

import torch

from tessera.exporters.onnx.forms.common import axis, need
from tessera.exporters.onnx.graph import Graph, Ref
from tessera.exporters.onnx.registry import form


def best(g: Graph, x: Ref, k: object, dim: int, largest: bool) -> list[Ref]:
    """The k largest or smallest, in order; of equal ones the first comes first."""
    if not x.ndim:
        return [x, g.full(0, torch.int64)]
    wide = x if x.is_float or x.dtype in (torch.int32, torch.int64) else g.cast(x, torch.int32)
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
def kthvalue(g: Graph, x: Ref, k: int, dim: int = -1, keepdim: bool = False) -> list[Ref]:
    if not x.ndim:
        return best(g, x, k, dim, False)
    d = axis(dim, x.ndim)
    place = g.tensor(torch.tensor([k - 1])) if keepdim else g.full(k - 1, torch.int64)
    return [g.op("Gather", out, place, axis=d) for out in best(g, x, k, d, False)]


def _boundaries(g: Graph, x: Ref, edges: Ref, right: bool) -> Ref:
    """How many boundaries lie below."""
    need(edges.ndim == 1)
    dtype = torch.promote_types(x.dtype, edges.dtype)
    kind = "GreaterOrEqual" if right else "Greater"
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
