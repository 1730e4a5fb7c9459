"""Pools over windows and over whole images."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from tessera.frontends.onnx.interpreter import Context
from tessera.frontends.onnx.operators.allocation import allowed
from tessera.frontends.onnx.operators.convolution import fits, justified, padded, paddings
from tessera.frontends.onnx.registry import operator
from tessera.frontends.onnx.values import numbers
from tessera.ir.types import size_hint

Tensor = torch.Tensor


def _windows(x: Tensor, kernel: list, strides: list, dilations: list, counts: list) -> Tensor:
    """[n, c, *counts, *kernel]: every window of a padded image."""
    for d, (k, s, dil, count) in enumerate(zip(kernel, strides, dilations, counts, strict=True)):
        axis = 2 + d
        starts = torch.arange(count, device=x.device).reshape(-1, 1) * s
        places = starts + torch.arange(k, device=x.device) * dil
        x = x.index_select(axis, places.reshape(-1)).unflatten(axis, (count, k))
        x = x.movedim(axis + 1, -1)
    return x


def _count(n: int, before: int, after: int, reach: int, stride: int, ceil: bool) -> int:
    """How many windows fit."""
    room = n + before + after - reach
    count = (-(-room // stride) if ceil else room // stride) + 1
    return count - 1 if ceil and (count - 1) * stride >= n + before else count  # the last window must begin inside


class _Room:
    """Sizes of a pool: padding, and how many windows there are."""

    def __init__(
        self,
        x: Tensor,
        kernel: list[int],
        strides: list[int] | None,
        dilations: list[int] | None,
        pads: list[int] | None,
        auto_pad: str,
        ceil_mode: int,
    ) -> None:
        ones = [1] * len(kernel)
        self.kernel, self.strides, self.dilations = kernel, strides or ones, dilations or ones
        self.sizes = list(x.shape[2:])
        self.before, self.after = paddings(self.sizes, kernel, self.strides, self.dilations, pads, auto_pad)
        self.counts, self.extra = [], []
        dims = zip(self.sizes, self.before, self.after, kernel, self.strides, self.dilations, strict=True)
        for n, p, q, k, s, d in dims:
            fits(n + p + q, k, d)
            reach = d * (k - 1) + 1
            count = _count(n, p, q, reach, s, bool(ceil_mode))
            self.counts.append(count)
            self.extra.append(max((count - 1) * s + reach - (n + p + q), 0))
        justified(f"windows of {kernel}", [*map(size_hint, self.counts), *kernel], self.sizes)

    @property
    def symmetric(self) -> bool:
        return self.before == self.after and self.halves and not any(self.extra)

    @property
    def halves(self) -> bool:
        """PyTorch pads by at most half a window."""
        return all(2 * p <= k for p, k in zip(self.before, self.kernel, strict=True))

    @property
    def rounded(self) -> bool | None:
        """PyTorch's `ceil_mode` that gives as many windows where padding counts for nothing; None: neither does. Where
        windows begin depends on the padding before alone, and PyTorch cuts off what reaches past the end."""
        if not self.halves:
            return None
        for ceil in (False, True):
            dims = zip(self.sizes, self.before, self.kernel, self.strides, self.dilations, strict=True)
            if self.counts == [_count(n, p, p, d * (k - 1) + 1, s, ceil) for n, p, k, s, d in dims]:
                return ceil
        return None

    def fill(self, x: Tensor, value: float) -> Tensor:
        return padded(x, self.before, [a + e for a, e in zip(self.after, self.extra, strict=True)], value)

    def windows(self, x: Tensor, value: float) -> Tensor:
        return _windows(self.fill(x, value), self.kernel, self.strides, self.dilations, self.counts)


_MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGE = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


@operator("MaxPool")
def max_pool(
    x: Tensor,
    *,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: list[int] | None = None,
    kernel_shape: list[int],
    pads: list[int] | None = None,
    storage_order: int = 0,
    strides: list[int] | None = None,
    context: Context,
) -> Tensor | tuple[Tensor, Tensor]:
    room = _Room(x, kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    rank = len(kernel_shape)
    places_wanted = context.wants(1)
    lowest = float("-inf") if x.is_floating_point() else torch.iinfo(x.dtype).min
    if rank in _MAX and not places_wanted and x.is_floating_point():
        if (ceil := room.rounded) is not None:
            return _MAX[rank](x, kernel_shape, room.strides, room.before, room.dilations, ceil)
        return _MAX[rank](room.fill(x, lowest), kernel_shape, room.strides, 0, room.dilations)
    windows = room.windows(x, lowest).flatten(-rank)
    if not places_wanted:
        return windows.amax(-1)
    values, best = windows.max(-1)
    return values, _pool_places(x, room, best, storage_order)


def _pool_places(x: Tensor, room: _Room, best: Tensor, storage_order: int) -> Tensor:
    """Where in the whole tensor each largest element stands."""
    rank, sizes = len(room.kernel), list(x.shape[2:])
    coordinates = []
    for d in reversed(range(rank)):
        tap = best % room.kernel[d]
        best = torch.div(best, room.kernel[d], rounding_mode="floor")
        shape = [1] * x.ndim
        shape[2 + d] = -1
        start = torch.arange(room.counts[d], device=x.device).reshape(shape) * room.strides[d] - room.before[d]
        coordinates.insert(0, start + tap * room.dilations[d])
    order = range(rank) if not storage_order else reversed(range(rank))
    flat = torch.zeros_like(coordinates[0])
    for d in order:
        flat = flat * sizes[d] + coordinates[d]
    images = torch.arange(x.shape[0] * x.shape[1], device=x.device).reshape(x.shape[0], x.shape[1], *[1] * rank)
    return flat + images * math.prod(sizes)


@operator("AveragePool")
def average_pool(
    x: Tensor,
    *,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    dilations: list[int] | None = None,
    kernel_shape: list[int],
    pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> Tensor:
    room = _Room(x, kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    rank = len(kernel_shape)
    if room.symmetric and rank in _AVERAGE and all(d == 1 for d in room.dilations):
        return _AVERAGE[rank](x, kernel_shape, room.strides, room.before, False, bool(count_include_pad))
    if not count_include_pad and room.rounded is not None and rank in _AVERAGE and all(d == 1 for d in room.dilations):
        return _AVERAGE[rank](x, kernel_shape, room.strides, room.before, room.rounded, False)
    total = room.windows(x, 0.0).flatten(-rank).sum(-1)
    ones = torch.ones((1, 1, *x.shape[2:]), dtype=x.dtype, device=x.device)
    if count_include_pad:  # padding that the file asks for counts; what a last window lacks does not
        ones = padded(ones, room.before, room.after, 1.0)
        missing = padded(ones, [0] * rank, room.extra, 0.0)
        counts = _windows(missing, room.kernel, room.strides, room.dilations, room.counts)
    else:
        counts = room.windows(ones, 0.0)
    return total / counts.flatten(-rank).sum(-1)


@operator("LpPool")
def lp_pool(
    x: Tensor,
    *,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: list[int] | None = None,
    kernel_shape: list[int],
    p: float = 2,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> Tensor:
    room = _Room(x, kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    windows = room.windows(x, 0.0).flatten(-len(kernel_shape))
    return windows.abs().pow(p).sum(-1).pow(1.0 / p)


def _inner(x: Tensor) -> list[int]:
    return list(range(2, x.ndim))


@operator("GlobalAveragePool")
def global_average_pool(x: Tensor) -> Tensor:
    return x.mean(_inner(x), keepdim=True)


@operator("GlobalMaxPool")
def global_max_pool(x: Tensor) -> Tensor:
    return x.amax(_inner(x), keepdim=True)


@operator("GlobalLpPool")
def global_lp_pool(x: Tensor, *, p: float = 2) -> Tensor:
    return x.abs().pow(p).sum(_inner(x), keepdim=True).pow(1.0 / p)


@operator("MaxUnpool", 9, sizes=(2,))
def max_unpool(
    x: Tensor,
    places: Tensor,
    output_shape: Tensor | None = None,
    *,
    kernel_shape: list[int],
    pads: list[int] | None = None,
    strides: list[int] | None = None,
    context: Context,
) -> Tensor:
    """Elements back at their places, zeros elsewhere. Places count in the image as the pool saw it."""
    rank = len(kernel_shape)
    strides = strides or [1] * rank
    before, after = (pads or [0] * 2 * rank)[:rank], (pads or [0] * 2 * rank)[rank:]
    pooled = zip(x.shape[2:], strides, kernel_shape, before, after, strict=True)
    sizes = [(n - 1) * s + k - p - q for n, s, k, p, q in pooled]
    allowed([*x.shape[:2], *sizes], x.element_size(), context)
    inner = x.new_zeros(math.prod(x.shape[:2]) * math.prod(sizes))
    out = inner.scatter(0, places.reshape(-1), x.reshape(-1)).reshape(*x.shape[:2], *sizes)
    if output_shape is None:
        return out
    wanted = numbers(output_shape)[2:]
    allowed([*x.shape[:2], *wanted], x.element_size(), context)
    return padded(out, [0] * rank, [w - n for w, n in zip(wanted, sizes, strict=True)])
