"""Convolutions by their forms: windows are maps, so that no image is copied out."""

from __future__ import annotations

import math

import torch

from tessera.spatial.importer.importer import Importer, Movable, form, sizes
from tessera.spatial.importer.values import Item, Lazy
from tessera.spatial.maps import Map, padded


def pixel_by_pixel(im: Importer, x: Item) -> Lazy:
    """An image whose channels lie side by side, so that a window is a few rectangles; otherwise it is laid out anew."""
    x = im.values.plain(x)
    if all(p.strides[1] in (0, 1) for p in x.index.pieces):
        return x
    return im.values.relaid(x, [0, *range(2, len(x.shape)), 1])


@form("convolution conv1d conv2d _convolution")
def convolution(im: Importer, x: Item, w: Item, b: Item | None, stride: list[int], padding: list[int] | str,
                dilation: list[int], *rest: object) -> Item:  # fmt: skip
    """A product for each group: of windows, which are maps, by the weights. Results lie pixel by pixel."""
    assert im.eqn is not None
    if im.eqn.opname in ("convolution", "_convolution"):
        transposed, _, groups = rest[:3]
    else:
        transposed, groups = False, rest[0] if rest else 1
    if isinstance(padding, str) or len(im.values.lazy(x).shape) != len(im.values.lazy(w).shape):
        return NotImplemented
    assert isinstance(groups, int)
    sides = [p for pad in reversed(padding) for p in (pad, pad)]
    if transposed:
        x, w, sides = _spread(im, x, w, stride, sides, dilation, rest[1], groups)
        stride = [1] * len(stride)
    kernel = im.values.lazy(w).shape[2:]
    count = len(kernel)

    def windows(t: Map) -> Map:
        """[groups, pixels, kernel · channels of a group]"""
        t = padded(t, sides)
        n, c, *outer = t.shape
        pixels = [(outer[d] - dilation[d] * (kernel[d] - 1) - 1) // stride[d] + 1 for d in range(count)]
        steps = [[0] * (2 + 2 * count) for _ in t.shape]
        steps[0][0] = steps[1][1] = 1
        for d in range(count):
            steps[2 + d][2 + d], steps[2 + d][2 + count + d] = stride[d], dilation[d]
        t = t.view((n, c, *pixels, *kernel), [0] * t.ndim, steps)
        t = t.reshape(n, groups, c // groups, *t.shape[2:])
        t = t.permute(1, 0, *range(3, 3 + count), *range(3 + count, 3 + 2 * count), 2)
        return t.reshape(groups, n * math.prod(pixels), math.prod(kernel) * (c // groups))

    def arranged(t: Movable) -> Movable:
        """[groups, kernel · channels of a group, results of a group]"""
        t = t.reshape(groups, t.shape[0] // groups, *t.shape[1:])
        t = t.permute(0, *range(3, 3 + count), 2, 1)
        return t.reshape(groups, math.prod(t.shape[1:-1]), t.shape[-1])

    columns = im.relaid(pixel_by_pixel(im, x), windows)  # type: ignore[arg-type]
    y = im.product(columns, im.relaid(w, arranged))  # [groups, pixels, results]
    shape = sizes(im.eqn.results()[0])

    def back(t: Map) -> Map:
        t = t.reshape(groups, shape[0], *shape[2:], shape[1] // groups)
        return t.permute(1, 0, t.ndim - 1, *range(2, t.ndim - 1)).reshape(*shape)

    y = Lazy(shape, y.dtype, y.tree, tuple(back(o) for o in y.operands), y.name, y.source)
    if b is None:
        return y
    return im.apply("add", y, im.relaid(b, lambda t: t.reshape(*t.shape, *[1] * count)))


def _spread(im: Importer, x: Item, w: Item, stride: list[int], sides: list[int], dilation: list[int],
            beyond: object, groups: int) -> tuple[Item, Item, list[int]]:  # fmt: skip
    """A transposed convolution as a plain one: of pixels with zeros between them, by the kernel turned round."""
    assert isinstance(beyond, list)
    kernel = im.values.lazy(w).shape[2:]

    def dilated(t: Map) -> Map:
        """Each pixel with so many zeros behind it, but for the last one."""
        for d, step in enumerate(stride, 2):
            before, n, behind = t.shape[:d], t.shape[d], t.shape[d + 1 :]
            t = padded(t.reshape(*before, n, 1, *behind), [0, 0] * len(behind) + [0, step - 1])
            t = padded(t.reshape(*before, n * step, *behind), [0, 0] * len(behind) + [0, 1 - step])
        return t

    def turned_round(t: Movable) -> Movable:
        """[inputs, results of a group, …] as [results, inputs of a group, …], from the last place to the first"""
        t = t.reshape(groups, t.shape[0] // groups, *t.shape[1:])
        t = t.permute(0, 2, 1, *range(3, 3 + len(kernel)))
        t = t.reshape(t.shape[0] * t.shape[1], *t.shape[2:])
        if isinstance(t, torch.Tensor):
            return t.flip(list(range(2, t.ndim)))
        steps = [[(1 if d < 2 else -1) * int(d == e) for e in range(t.ndim)] for d in range(t.ndim)]
        return t.view(t.shape, [0, 0, *(n - 1 for n in kernel)], steps)

    reach = [step * (n - 1) for step, n in zip(dilation, kernel, strict=True)]
    wide = [r - p for r, p in zip(reversed(reach), sides[::2], strict=True)]
    more = [n for side, extra in zip(wide, reversed(beyond), strict=True) for n in (side, side + extra)]
    return im.relaid(pixel_by_pixel(im, x), dilated), im.relaid(w, turned_round), more  # type: ignore[arg-type]
