"""Operators that only move elements: reshapes, concatenations, slices."""

from __future__ import annotations

import math

import torch

from tessera.frontends.onnx.errors import OnnxError
from tessera.frontends.onnx.interpreter import Context
from tessera.frontends.onnx.operators.allocation import allowed
from tessera.frontends.onnx.registry import operator
from tessera.frontends.onnx.values import number, numbers
from tessera.ir.size_rules import left_over

Tensor = torch.Tensor


@operator("Identity", moves=True)
def identity(x: object) -> object:
    return x


@operator("Shape")
def shape_of(x: Tensor, *, start: int = 0, end: int | None = None) -> Tensor:
    return torch.tensor(list(x.shape)[start:end], dtype=torch.int64)


@operator("Size")
def size_of(x: Tensor) -> Tensor:
    return torch.tensor(math.prod(x.shape), dtype=torch.int64)


def _reshaped(x: Tensor, target: list[int], allowzero: int = 0) -> Tensor:
    sizes = [x.shape[i] if type(n) is int and n == 0 and not allowzero else n for i, n in enumerate(target)]
    return x.reshape(left_over(x.shape, sizes))


@operator("Reshape", 5, moves=True, sizes=(1,))
def reshape(x: Tensor, shape: Tensor, *, allowzero: int = 0) -> Tensor:
    return _reshaped(x, numbers(shape), allowzero)


@operator("Reshape", 1, 4, moves=True)
def reshape_by_attribute(x: Tensor, *, shape: list[int]) -> Tensor:
    return _reshaped(x, shape)


@operator("Flatten", moves=True)
def flatten(x: Tensor, *, axis: int = 1) -> Tensor:
    axis = axis + x.ndim if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@operator("Transpose", moves=True)
def transpose(x: Tensor, *, perm: list[int] | None = None) -> Tensor:
    return x.permute(perm if perm is not None else list(range(x.ndim))[::-1])


@operator("Squeeze", 13, moves=True, sizes=(1,))
def squeeze(x: Tensor, axes: Tensor | None = None) -> Tensor:
    return x.squeeze() if axes is None else x.squeeze(tuple(numbers(axes)))


@operator("Squeeze", 1, 12, moves=True)
def squeeze_by_attribute(x: Tensor, *, axes: list[int] | None = None) -> Tensor:
    return x.squeeze() if axes is None else x.squeeze(tuple(axes))


def _unsqueezed(x: Tensor, axes: list[int]) -> Tensor:
    rank = x.ndim + len(axes)
    for axis in sorted(a + rank if a < 0 else a for a in axes):
        x = x.unsqueeze(axis)
    return x


@operator("Unsqueeze", 13, moves=True, sizes=(1,))
def unsqueeze(x: Tensor, axes: Tensor) -> Tensor:
    return _unsqueezed(x, numbers(axes))


@operator("Unsqueeze", 1, 12, moves=True)
def unsqueeze_by_attribute(x: Tensor, *, axes: list[int]) -> Tensor:
    return _unsqueezed(x, axes)


@operator("Concat", 4, moves=True)
def concat(*xs: Tensor, axis: int) -> Tensor:
    return torch.cat(xs, axis)


@operator("Concat", 1, 3, moves=True)
def concat_of_channels(*xs: Tensor, axis: int = 1) -> Tensor:
    return torch.cat(xs, axis)


@operator("Split", 13, moves=True, sizes=(1,))
def split(
    x: Tensor, lengths: Tensor | None = None, *, axis: int = 0, num_outputs: int | None = None, context: Context
) -> tuple:
    if lengths is not None:
        return torch.split(x, numbers(lengths), axis)
    count = len(context.node.outputs)
    if num_outputs not in (None, count):
        raise OnnxError(f"{context.node}: expected num_outputs={count}, as many as it has, got {num_outputs}")
    return _equal_parts(x, count, axis)


def _equal_parts(x: Tensor, count: int, axis: int) -> tuple:
    """The last part is the smaller one where the parts cannot be equal."""
    length = -(-x.shape[axis] // count)
    starts = [min(i * length, x.shape[axis]) for i in range(count + 1)]
    return tuple(x.narrow(axis, a, b - a) for a, b in zip(starts, starts[1:], strict=False))


@operator("Split", 2, 12, moves=True)
def split_by_attribute(x: Tensor, *, split: list[int] | None = None, axis: int = 0, context: Context) -> tuple:
    return torch.split(x, split, axis) if split else _equal_parts(x, len(context.node.outputs), axis)


@operator("Split", 1, 1, moves=True)
def split_by_input(
    x: Tensor, lengths: Tensor | None = None, *, split: list[int] | None = None, axis: int = 0, context: Context
) -> tuple:
    given = numbers(lengths) if lengths is not None else split
    return torch.split(x, given, axis) if given else _equal_parts(x, len(context.node.outputs), axis)


def _sliced(x: Tensor, starts: list, ends: list, axes: list | None, steps: list | None) -> Tensor:
    axes = list(range(len(starts))) if axes is None else axes
    for start, end, axis, step in zip(starts, ends, axes, steps or [1] * len(starts), strict=True):
        length = x.shape[axis]
        if step > 0:
            place = [slice(None)] * (axis % x.ndim) + [slice(start, _end(end), step)]
            x = x[tuple(place)]
            continue
        # Backwards the first place is brought into the axis, as ONNX has it and Python has not.
        first = min(max(start if start >= 0 else start + length, 0), length - 1)
        last = min(max(end if end >= 0 else end + length, -1), first)
        places = torch.arange(first, last, step, device=x.device)
        x = x.index_select(axis, places)
    return x


def _end(n: object) -> object:
    return None if isinstance(n, int) and n >= 2**31 - 1 else n


@operator("Slice", 10, moves=True, sizes=(1, 2, 3, 4))
def slice_(x: Tensor, starts: Tensor, ends: Tensor, axes: Tensor | None = None, steps: Tensor | None = None) -> Tensor:
    optional = [None if t is None else numbers(t) for t in (axes, steps)]
    return _sliced(x, numbers(starts), numbers(ends), *optional)


@operator("Slice", 1, 9, moves=True)
def slice_by_attribute(x: Tensor, *, starts: list[int], ends: list[int], axes: list[int] | None = None) -> Tensor:
    return _sliced(x, starts, ends, axes, None)


@operator("Expand", 8, moves=True, sizes=(1,))
def expand(x: Tensor, shape: Tensor) -> Tensor:
    return x.expand(torch.broadcast_shapes(tuple(x.shape), tuple(numbers(shape))))


@operator("Tile", 6, moves=True, sizes=(1,))
def tile(x: Tensor, repeats: Tensor, *, context: Context) -> Tensor:
    counts = numbers(repeats)
    allowed([a * b for a, b in zip(x.shape, counts, strict=True)], x.element_size(), context)
    return x.repeat(counts)


@operator("Tile", 1, 5, moves=True, sizes=(1, 2))
def tile_one_axis(x: Tensor, tiles: Tensor, axis: Tensor) -> Tensor:
    counts = [1] * x.ndim
    counts[int(number(axis))] = int(number(tiles))
    return x.repeat(counts)


@operator("DepthToSpace", moves=True)
def depth_to_space(x: Tensor, *, blocksize: int, mode: str = "DCR") -> Tensor:
    n, c, h, w = x.shape
    inner = c // (blocksize * blocksize)
    if mode == "DCR":
        y = x.reshape(n, blocksize, blocksize, inner, h, w).permute(0, 3, 4, 1, 5, 2)
    else:
        y = x.reshape(n, inner, blocksize, blocksize, h, w).permute(0, 1, 4, 2, 5, 3)
    return y.reshape(n, inner, h * blocksize, w * blocksize)


@operator("SpaceToDepth", moves=True)
def space_to_depth(x: Tensor, *, blocksize: int, mode: str = "DCR") -> Tensor:
    n, c, h, w = x.shape
    y = x.reshape(n, c, h // blocksize, blocksize, w // blocksize, blocksize)
    y = y.permute(0, 3, 5, 1, 2, 4) if mode == "DCR" else y.permute(0, 1, 3, 5, 2, 4)
    return y.reshape(n, c * blocksize * blocksize, h // blocksize, w // blocksize)


@operator("Trilu", 14, moves=True, sizes=(1,))
def trilu(x: Tensor, k: Tensor | None = None, *, upper: int = 1) -> Tensor:
    diagonal = 0 if k is None else int(number(k))
    return torch.triu(x, diagonal) if upper else torch.tril(x, diagonal)


@operator("ReverseSequence", 10, moves=True)
def reverse_sequence(x: Tensor, lengths: Tensor, *, batch_axis: int = 1, time_axis: int = 0) -> Tensor:
    time = torch.arange(x.shape[time_axis], device=x.device).reshape(
        [-1 if d == time_axis else 1 for d in range(x.ndim)]
    )
    length = lengths.reshape([-1 if d == batch_axis else 1 for d in range(x.ndim)])
    places = torch.where(time < length, length - 1 - time, time)
    return x.gather(time_axis, places.expand(x.shape))


@operator("CenterCropPad", 18, moves=True, sizes=(1,))
def center_crop_pad(x: Tensor, shape: Tensor, *, axes: list[int] | None = None, context: Context) -> Tensor:
    for axis, wanted in zip(axes or range(x.ndim), numbers(shape), strict=True):
        allowed([*x.shape[:axis], wanted, *x.shape[axis:][1:]], x.element_size(), context)
        more = wanted - x.shape[axis]
        if more < 0:
            x = x.narrow(axis, -more // 2, wanted)
        elif more > 0:
            before, after = list(x.shape), list(x.shape)
            before[axis], after[axis] = more // 2, more - more // 2
            x = torch.cat([x.new_zeros(before), x, x.new_zeros(after)], axis)
    return x


@operator("TensorScatter", 24, moves=True)
def tensor_scatter(
    past: Tensor, update: Tensor, places: Tensor | None = None, *, axis: int = -2, mode: str = "linear"
) -> Tensor:
    """Write the rows of `update` into a cache, for each example from its own place on."""
    axis = axis % past.ndim
    steps = torch.arange(update.shape[axis], device=past.device)
    start = torch.zeros_like(steps[:1]).expand(past.shape[0]) if places is None else places
    rows = start.reshape(-1, 1) + steps
    if mode == "circular":
        rows = rows % past.shape[axis]
    sizes = [1] * past.ndim
    sizes[0], sizes[axis] = rows.shape[0], rows.shape[1]
    return past.scatter(axis, rows.reshape(sizes).expand(update.shape), update)
