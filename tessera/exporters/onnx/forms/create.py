"""Tensors made of nothing but sizes and numbers."""

from __future__ import annotations

import torch

from tessera.exporters.onnx.forms.common import need
from tessera.exporters.onnx.graph import Graph, Ref
from tessera.exporters.onnx.registry import form
from tessera.ir.types import SYMBOLIC

SMALL = 64  # elements of a fill that is written as a constant


def filled(g: Graph, value: object) -> Ref:
    """The result's shape, all of one value."""
    shape, dtype = g.result.shape, g.result.dtype
    need(not dtype.is_complex)
    static = all(isinstance(s, int) for s in shape)
    if isinstance(value, (Ref, *SYMBOLIC)):
        return g.expand(g.scalar(value, dtype), shape)
    count = 1
    for s in shape:
        count = count * s if static else SMALL + 1
    if static and count <= SMALL:  # type: ignore[operator]
        return g.full(value, dtype, shape)  # type: ignore[arg-type]
    return g.op("ConstantOfShape", g.ints(shape), value=torch.full((1,), value, dtype=dtype), dtype=dtype)  # type: ignore[arg-type]


@form("zeros zeros_like new_zeros empty empty_like new_empty empty_strided new_empty_strided empty_permuted")
def zeros(g: Graph, *_: object, **__: object) -> Ref:
    """Memory that nobody wrote holds zeros, too."""
    return filled(g, 0)


@form("zero")
def zero(g: Graph, x: Ref) -> Ref:
    return filled(g, 0)


@form("ones ones_like new_ones")
def ones(g: Graph, *_: object, **__: object) -> Ref:
    return filled(g, 1)


@form("full full_like new_full")
def full(g: Graph, _: object, *rest: object, **__: object) -> Ref:
    return filled(g, rest[-1])


@form("fill")
def fill(g: Graph, x: Ref, value: object) -> Ref:
    return filled(g, value)


@form("scalar_tensor")
def scalar_tensor(g: Graph, value: object, **_: object) -> Ref:
    return g.scalar(value, g.result.dtype)


@form("arange.start_step")
def arange(g: Graph, start: object, end: object, step: object = 1, **_: object) -> Ref:
    """Floats are counted in whole numbers first, so that there are as many as PyTorch makes."""
    dtype = g.result.dtype
    if not dtype.is_floating_point:
        wide = torch.int64
        out = g.op("Range", *(g.scalar(x, wide) for x in (start, end, step)), dtype=wide)
        return g.cast(out, dtype)
    count = g.scalar(g.result.shape[0], torch.int64)
    places = g.cast(g.op("Range", g.full(0, torch.int64), count, g.full(1, torch.int64)), dtype)
    scaled = places if step == 1 else g.op("Mul", places, g.scalar(step, dtype))
    return scaled if start == 0 else g.op("Add", scaled, g.scalar(start, dtype))


@form("arange.default")
def arange_end(g: Graph, end: object, **_: object) -> Ref:
    return arange(g, 0, end)


@form("arange.start")
def arange_start(g: Graph, start: object, end: object, **_: object) -> Ref:
    return arange(g, start, end)


@form("prims.iota")
def iota(g: Graph, length: object, *, start: object, step: object, **_: object) -> Ref:
    need(isinstance(start, int) and isinstance(step, int))
    return arange(g, start, start + length * step, step)  # type: ignore[operator]


@form("eye.default eye.m")
def eye(g: Graph, n: object, m: object = None, **_: object) -> Ref:
    dtype = g.result.dtype
    base = g.op("ConstantOfShape", g.ints(g.result.shape), value=torch.zeros(1), dtype=torch.float32)
    return g.cast(g.op("EyeLike", base), dtype)


@form("linspace.default")
def linspace(g: Graph, start: object, end: object, steps: int, **_: object) -> Ref:
    """From both ends, so that both are met exactly."""
    dtype = g.result.dtype
    need(dtype.is_floating_point and isinstance(steps, int) and all(type(x) in (int, float) for x in (start, end)))
    return g.tensor(torch.linspace(start, end, steps, dtype=dtype))  # type: ignore[arg-type]


@form("tril")
def tril(g: Graph, x: Ref, k: object = 0) -> Ref:
    return triangle(g, x, k, 0)


@form("triu")
def triu(g: Graph, x: Ref, k: object = 0) -> Ref:
    return triangle(g, x, k, 1)


def triangle(g: Graph, x: Ref, k: object, upper: int) -> Ref:
    narrow = x.dtype not in (torch.float32, torch.float64, torch.int64)
    wide = g.cast(x, torch.int64 if not x.is_float else torch.float32) if narrow else x
    return g.cast(g.op("Trilu", wide, g.scalar(k, torch.int64), upper=upper), x.dtype)


@form("_local_scalar_dense")
def item(g: Graph, x: Ref) -> Ref:
    """A number that the program goes on with."""
    wide = torch.float64 if x.is_float else torch.bool if x.dtype == torch.bool else torch.int64
    return g.cast(g.op("Reshape", x, g.tensor(torch.empty(0, dtype=torch.int64)), shape=()), wide)
