"""Embeddings that are summed in bags, and repeated elements: sums over a table of which belongs to which."""

from __future__ import annotations

import math

import torch

from tessera.exporters.onnx.forms.common import need
from tessera.exporters.onnx.forms.reduce import vector_norm
from tessera.exporters.onnx.graph import INT64_MAX, Graph, Ref
from tessera.exporters.onnx.registry import form


def counted(g: Graph, count: Ref) -> Ref:
    """The numbers from zero up to one that the program computes."""
    return g.op("Range", g.full(0, torch.int64), count, g.full(1, torch.int64))


@form("repeat_interleave.Tensor")
def repeat_interleave(g: Graph, repeats: Ref, *_: object, **__: object) -> Ref:
    """Each place as often as it says: how many ends lie at or before an element."""
    ends = g.op("CumSum", g.cast(repeats, torch.int64), g.full(0, torch.int64))
    total = g.op("ReduceSum", g.cast(repeats, torch.int64), keepdims=0)
    past = g.op("GreaterOrEqual", g.op("Unsqueeze", counted(g, total), g.ints([1])), ends, dtype=torch.bool)
    return g.op("ReduceSum", g.cast(past, torch.int64), g.ints([1]), keepdims=0)


@form("embedding_renorm")
def embedding_renorm(g: Graph, weight: Ref, ids: Ref, longest: float, order: float) -> Ref:
    """Rows that are looked up, and are longer than they may be, made as long."""
    need(isinstance(weight.sizes[0], int))
    length = vector_norm(g, weight, order, [1], True)
    over = g.op("Greater", length, g.full(longest, weight.dtype), dtype=torch.bool)
    scale = g.op("Div", g.full(longest, weight.dtype), g.op("Add", length, g.full(1e-7, weight.dtype)))
    rows = g.tensor(torch.arange(weight.sizes[0]))  # type: ignore[arg-type]
    flat = g.op("Reshape", g.cast(ids, torch.int64), g.ints([-1, 1]))
    used = g.reduce("ReduceMax", g.cast(g.op("Equal", flat, rows, dtype=torch.bool), torch.int32), [0], False)
    both = g.op("And", over, g.op("Unsqueeze", g.cast(used, torch.bool), g.ints([1])))
    return g.op("Where", both, g.op("Mul", weight, scale), weight, dtype=weight.dtype)


@form("embedding_bag _embedding_bag _embedding_bag_forward_only")
def embedding_bag(
    g: Graph, weight: Ref, ids: Ref, offsets: Ref, _: bool = False, mode: int = 0, sparse: bool = False,
    factors: Ref | None = None, last_offset: bool = False, padding: int | None = -1,
) -> list[Ref | None]:  # fmt: skip
    need(g.results[1:] == [None] * 3 and ids.ndim == 1)
    dtype = weight.dtype
    rows = g.op("Gather", weight, ids, axis=0)
    if factors is not None:
        rows = g.op("Mul", rows, g.op("Unsqueeze", factors, g.ints([1])))
    starts = g.slice(offsets, 0, 0, -1) if last_offset else offsets
    starts = g.op("Unsqueeze", g.cast(starts, torch.int64), g.ints([1]))
    ends = g.slice(offsets, 0, 1, INT64_MAX)
    if not last_offset:
        ends = g.op("Concat", ends, g.cast(g.ints([ids.sizes[0]]), offsets.dtype), axis=0)
    ends = g.op("Unsqueeze", g.cast(ends, torch.int64), g.ints([1]))
    place = counted(g, g.scalar(ids.sizes[0], torch.int64))
    late = g.op("GreaterOrEqual", place, starts, dtype=torch.bool)
    own = g.op("And", late, g.op("Less", place, ends, dtype=torch.bool))
    if padding is not None and padding >= 0:
        own = g.op("And", own, g.op("Not", g.op("Equal", ids, g.full(padding, ids.dtype), dtype=torch.bool)))
    count = g.reduce("ReduceSum", g.cast(own, dtype), [1], True)
    if mode == 2:
        wide = g.op("Where", g.op("Unsqueeze", own, g.ints([2])), rows, g.full(-math.inf, dtype), dtype=dtype)
        top = g.reduce("ReduceMax", wide, [1], False)
        some = g.op("Greater", count, g.full(0, dtype), dtype=torch.bool)
        return [g.op("Where", some, top, g.full(0, dtype), dtype=dtype), None, None, None]
    total = g.op("MatMul", g.cast(own, dtype), rows)
    if mode == 1:
        total = g.op("Div", total, g.op("Max", count, g.full(1, dtype)))
    return [total, None, None, None]


@form("embedding_bag.padding_idx")
def embedding_bag_padded(
    g: Graph, weight: Ref, ids: Ref, offsets: Ref, by_frequency: bool, mode: int, sparse: bool, factors: Ref | None,
    last_offset: bool, padding: int | None,
) -> list[Ref | None]:  # fmt: skip
    """Here a negative row counts from the end, and None says that there is none."""
    need(isinstance(weight.sizes[0], int))
    row = -1 if padding is None else padding % int(weight.sizes[0])
    return embedding_bag(g, weight, ids, offsets, by_frequency, mode, sparse, factors, last_offset, row)
