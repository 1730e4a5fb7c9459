"""Views and copies: what moves elements and computes nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tessera.exporters.onnx.forms.common import axis, need
from tessera.exporters.onnx.forms.elementwise import convert
from tessera.exporters.onnx.graph import INT64_MAX, Graph, Ref, same
from tessera.exporters.onnx.registry import form
from tessera.ir.types import Size

_UNPADDED = {torch.bool: torch.uint8, torch.int16: torch.int32}  # what runtimes have no Pad of, and what they have


@form("view.default reshape _unsafe_view view_copy.default flatten unflatten _reshape_alias view_as reshape_as ravel")
@form("_reshape_copy flatten.using_ints prims.view_of")
def view(g: Graph, x: Ref, *_: object, **__: object) -> Ref:
    return g.reshape(x, g.result.shape)


@form("squeeze squeeze_copy prims.squeeze")
def squeeze(g: Graph, x: Ref, dims: int | Sequence[int] | None = None) -> Ref:
    every = range(x.ndim) if dims is None else [dims] if isinstance(dims, int) else dims
    ones = sorted({axis(d, x.ndim) for d in every if x.ndim and same(x.sizes[axis(d, x.ndim)], 1)})
    return g.op("Squeeze", x, g.ints(ones), shape=g.result.shape) if ones else x


@form("unsqueeze unsqueeze_copy")
def unsqueeze(g: Graph, x: Ref, dim: int) -> Ref:
    return g.unsqueeze(x, axis(dim, x.ndim + 1))


@form("permute permute_copy")
def permute(g: Graph, x: Ref, dims: Sequence[int]) -> Ref:
    return g.permute(x, [axis(d, x.ndim) for d in dims])


@form("transpose.int transpose_copy.int swapaxes swapdims")
def transpose(g: Graph, x: Ref, a: int, b: int) -> Ref:
    order = list(range(x.ndim))
    if order:
        a, b = axis(a, x.ndim), axis(b, x.ndim)
        order[a], order[b] = order[b], order[a]
    return g.permute(x, order)


@form("t t_copy numpy_T mT")
def t(g: Graph, x: Ref) -> Ref:
    order = list(range(x.ndim))
    return g.permute(x, order[:-2] + order[-2:][::-1] if x.ndim > 2 else order[::-1])


@form("expand expand_copy expand_as broadcast_to")
def expand(g: Graph, x: Ref, *_: object, **__: object) -> Ref:
    return g.expand(x, g.result.shape)


@form("select.int select_copy.int")
def select(g: Graph, x: Ref, dim: int, index: object) -> Ref:
    return g.op("Gather", x, g.scalar(index, torch.int64), axis=axis(dim, x.ndim))


@form("slice.Tensor slice_copy.Tensor")
def slice_(g: Graph, x: Ref, dim: int = 0, start: object = None, end: object = None, step: int = 1) -> Ref:
    d = axis(dim, x.ndim)
    start = 0 if start is None else start
    end = INT64_MAX if end is None else end
    if isinstance(start, int) and start == 0 and step == 1 and same(x.sizes[d], g.result.shape[d]):
        return x
    return g.slice(x, d, start, end, step)


@form("narrow narrow_copy")
def narrow(g: Graph, x: Ref, dim: int, start: object, length: object) -> Ref:
    need(not isinstance(start, Ref) and not isinstance(length, Ref))
    d = axis(dim, x.ndim)
    if isinstance(start, int) and start < 0:
        start = start + x.sizes[d]
    return g.slice(x, d, start, start + length)  # type: ignore[operator]


@form("cat concat concatenate")
def cat(g: Graph, tensors: Sequence[Ref], dim: int = 0) -> Ref:
    """A vector of nothing joins with anything, as it always did."""
    kept = [x for x in tensors if not (len(g.result.shape) != 1 and x.ndim == 1 and same(x.sizes[0], 0))]
    need(bool(kept) and not g.result.dtype.is_complex)
    parts = [g.cast(x, g.result.dtype) for x in kept]
    return parts[0] if len(parts) == 1 else g.op("Concat", *parts, axis=axis(dim, len(g.result.shape)))


@form("stack")
def stack(g: Graph, tensors: Sequence[Ref], dim: int = 0) -> Ref:
    need(not g.result.dtype.is_complex)
    d = axis(dim, len(g.result.shape))
    parts = [g.unsqueeze(g.cast(x, g.result.dtype), d) for x in tensors]
    return parts[0] if len(parts) == 1 else g.op("Concat", *parts, axis=d)


@form("split.Tensor split_with_sizes split.sizes split_copy.Tensor split_with_sizes_copy")
@form("unsafe_split.Tensor unsafe_split_with_sizes")
def split(g: Graph, x: Ref, sizes: object, dim: int = 0) -> list[Ref]:
    d = axis(dim, x.ndim)
    if len(g.results) == 1:
        return [x]
    lengths = [t.shape[d] if t is not None else None for t in g.results]
    if None in lengths:  # nothing reads it: the others tell its size, or it does
        need(isinstance(sizes, (list, tuple)) and len(sizes) == len(lengths) or isinstance(sizes, (int, torch.SymInt)))
        if isinstance(sizes, (int, torch.SymInt)):
            lengths = [sizes if n is None and i < len(lengths) - 1 else n for i, n in enumerate(lengths)]
            if lengths[-1] is None:
                lengths[-1] = x.sizes[d] - sum(lengths[:-1])  # type: ignore[arg-type,operator]
        else:
            lengths = list(sizes)  # type: ignore[call-overload]
    return g.op("Split", x, g.ints(lengths), axis=d, outputs=len(lengths))


@form("chunk unsafe_chunk")
def chunk(g: Graph, x: Ref, chunks: int, dim: int = 0) -> list[Ref]:
    return split(g, x, -(-x.sizes[axis(dim, x.ndim)] // chunks), dim)


@form("unbind.int unbind_copy.int")
def unbind(g: Graph, x: Ref, dim: int = 0) -> list[Ref | None]:
    d = axis(dim, x.ndim)
    return [None if t is None else g.op("Gather", x, g.full(i, torch.int64), axis=d) for i, t in enumerate(g.results)]


@form("repeat tile")
def repeat(g: Graph, x: Ref, repeats: Sequence[object]) -> Ref:
    lead = len(g.result.shape) - x.ndim
    if lead > 0:
        x = g.reshape(x, [1] * lead + list(x.sizes))
    return g.op("Tile", x, g.ints([1] * -min(lead, 0) + list(repeats) if lead < 0 else list(repeats)))


@form("flip fliplr flipud")
def flip(g: Graph, x: Ref, dims: Sequence[int] | None = None) -> Ref:
    need(dims is not None)
    listed = [axis(d, x.ndim) for d in dims]  # type: ignore[union-attr]
    if not listed or not x.ndim:
        return x
    count = len(listed)
    ends = g.ints([-INT64_MAX] * count)
    return g.op("Slice", x, g.ints([-1] * count), ends, g.ints(listed), g.ints([-1] * count))


@form("roll")
def roll(g: Graph, x: Ref, shifts: Sequence[object], dims: Sequence[int] = ()) -> Ref:
    shape = x.sizes
    if not x.ndim or any(same(n, 0) for n in shape):
        return x
    if not dims:
        return g.reshape(_rolled(g, g.reshape(x, [-1]), 0, shifts[0], math.prod(shape)), shape)  # type: ignore[arg-type]
    for s, d in zip(shifts, dims, strict=True):
        x = _rolled(g, x, axis(d, x.ndim), s, shape[axis(d, len(shape))])
        x = Ref(x.name, x.dtype, shape)
    return x


def _rolled(g: Graph, x: Ref, d: int, shift: object, size: Size) -> Ref:
    """What begins at -shift, or as far round as that is, comes first."""
    start = -shift % size  # type: ignore[operator]
    if isinstance(start, int) and not start:
        return x
    return g.op("Concat", g.slice(x, d, start, INT64_MAX), g.slice(x, d, 0, start), axis=d)


@form("unfold unfold_copy")
def unfold(g: Graph, x: Ref, dim: int, size: int, step: int) -> Ref:
    """Windows along a dimension, which goes last; where a window begins, and what it holds, are sums of two ranges."""
    if not x.ndim:
        return g.reshape(x, [1]) if size else g.slice(g.reshape(x, [1]), 0, 0, 0)
    d = axis(dim, x.ndim)
    count = g.result.shape[d]
    starts = g.op("Range", g.full(0, torch.int64), g.scalar(count * step, torch.int64), g.full(step, torch.int64))
    within = g.tensor(torch.arange(size))
    places = g.op("Add", g.op("Unsqueeze", starts, g.ints([1])), within)
    out = g.op("Gather", x, places, axis=d)
    rank = x.ndim + 1
    order = [i for i in range(rank) if i != d + 1] + [d + 1]
    return g.op("Transpose", out, perm=order)


@form("diagonal diagonal_copy linalg_diagonal")
def diagonal(g: Graph, x: Ref, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Ref:
    a, b = axis(dim1, x.ndim), axis(dim2, x.ndim)
    rows, columns = x.sizes[a], x.sizes[b]
    rest = [i for i in range(x.ndim) if i not in (a, b)]
    flat = g.reshape(g.permute(x, [*rest, a, b]), [*(x.sizes[i] for i in rest), rows * columns])
    return g.op("Gather", flat, diagonal_places(g, columns, g.result.shape[-1], offset), axis=len(rest))


def diagonal_places(g: Graph, columns: Size, length: Size, offset: int) -> Ref:
    """Where a diagonal lies, with its two dimensions last and as one."""
    first, step = offset if offset >= 0 else -offset * columns, columns + 1
    if isinstance(first, int) and isinstance(step, int) and isinstance(length, int):
        return g.tensor(torch.arange(length) * step + first)
    ends = (g.scalar(n, torch.int64) for n in (first, first + length * step, step))
    return g.op("Range", *ends, shape=[length])


@form("movedim.int movedim.intlist moveaxis.int moveaxis.intlist")
def movedim(g: Graph, x: Ref, source: int | Sequence[int], target: int | Sequence[int]) -> Ref:
    froms = [axis(d, x.ndim) for d in ([source] if isinstance(source, int) else source)]
    tos = [axis(d, x.ndim) for d in ([target] if isinstance(target, int) else target)]
    order: list[int] = [-1] * x.ndim
    for s, t_ in zip(froms, tos, strict=True):
        order[t_] = s
    rest = iter(i for i in range(x.ndim) if i not in froms)
    return g.permute(x, [next(rest) if o < 0 else o for o in order])


@form("constant_pad_nd")
def constant_pad(g: Graph, x: Ref, pad: Sequence[object], value: object = 0) -> Ref:
    return padded(g, x, pad, "constant", g.scalar(value, x.dtype))


def padded(g: Graph, x: Ref, pad: Sequence[object], mode: str, value: Ref | None = None) -> Ref:
    """PyTorch says the last dimension first, begin and end side by side."""
    count = len(pad) // 2
    low, high = list(pad[0::2])[::-1], list(pad[1::2])[::-1]
    lead = [0] * (x.ndim - count)
    dtype = x.dtype
    if dtype in _UNPADDED:
        x, value = g.cast(x, _UNPADDED[dtype]), None if value is None else g.cast(value, _UNPADDED[dtype])
    cuts: list[tuple[int, int, int]] = []
    if mode != "constant":  # what a negative padding cuts off goes last, as what is copied may come from there
        for i, ends in enumerate(zip(low, high, strict=True), x.ndim - count):
            first, last = (-p if isinstance(p, int) and p < 0 else 0 for p in ends)
            cuts += [(i, first, -last or INT64_MAX)] if first or last else []
        low, high = ([max(p, 0) if isinstance(p, int) else p for p in side] for side in (low, high))
    out = g.op("Pad", x, g.ints([*lead, *low, *lead, *high]), value, mode=mode)
    for dim, first, last in cuts:
        out = g.slice(out, dim, first, last)
    return g.cast(out, dtype)


@form("reflection_pad1d reflection_pad2d reflection_pad3d")
def reflection_pad(g: Graph, x: Ref, pad: Sequence[object]) -> Ref:
    return padded(g, x, pad, "reflect")


@form("replication_pad1d replication_pad2d replication_pad3d")
def replication_pad(g: Graph, x: Ref, pad: Sequence[object]) -> Ref:
    return padded(g, x, pad, "edge")


@form("pixel_shuffle")
def pixel_shuffle(g: Graph, x: Ref, factor: int) -> Ref:
    need(x.ndim == 4 and x.is_float)
    return g.op("DepthToSpace", x, blocksize=factor, mode="CRD")


@form("copy")
def copy(g: Graph, x: Ref, source: Ref, *_: object) -> Ref:
    return convert(g, g.expand(source, x.sizes), x.dtype)
