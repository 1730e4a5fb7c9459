"""Pooling, and max pooling that remembers small offsets.

    max_pool           the largest element of every window, and which of the window's elements it is, counted row by row
    max_pool_backward  from those offsets, the gradient of what was pooled

PyTorch's own operators are kept whole and differentiated by its formula, which keeps an index of 64 bits for every
window. The two operators here carry the same in one byte; `passes/decompose/pool_offsets` puts them where kernels
compute them. Here stands what they compute, in PyTorch: the offsets are its indices, told otherwise. Spatial dimensions
are the last ones, as many as `kernel` has. As in PyTorch the first of equal elements is the largest, and the last NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tessera.ops.families import per_element
from tessera.ops.op import declare

MOST = 127  # elements of a window that a byte counts
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}  # by the number of dimensions

library = torch.library.Library("tessera", "FRAGMENT")
library.define(
    "max_pool(Tensor x, int[] kernel, int[] stride, int[] padding, int[] dilation, bool ceil_mode) -> (Tensor, Tensor)"
)
library.define(
    "max_pool_backward(Tensor grad, Tensor offsets, SymInt[] size, int[] kernel, int[] stride, int[] padding, "
    "int[] dilation, bool channels_last) -> Tensor"
)

Sizes = Sequence[int]
aten = torch.ops.aten


def _check(op: str, kernel: Sizes, *others: Sizes) -> None:
    if not 1 <= len(kernel) <= 3 or any(len(sizes) != len(kernel) for sizes in others):
        raise ValueError(f"tessera::{op}: expected 1 to 3 numbers each, got {kernel}, {', '.join(map(str, others))}")
    if math.prod(kernel) > MOST:
        raise ValueError(f"tessera::{op}: expected windows of at most {MOST} elements, got {list(kernel)}")


def _flat(kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes) -> tuple[Sizes, Sizes, Sizes, Sizes]:
    """The same windows along a row, as windows over a plane of one row."""
    return [1, *kernel], [1, *stride], [0, *padding], [1, *dilation]


def _indexed(x: Tensor, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, ceil_mode: bool) -> list[Tensor]:
    """PyTorch's result and its indices into the spatial dimensions, written out row by row."""
    if len(kernel) == 1:
        rows = _flat(kernel, stride, padding, dilation)
        return [v.squeeze(-2) for v in aten.max_pool2d_with_indices(x.unsqueeze(-2), *rows, ceil_mode)]
    op = aten.max_pool2d_with_indices if len(kernel) == 2 else aten.max_pool3d_with_indices
    return list(op(x, kernel, stride, padding, dilation, ceil_mode))


def _starts(shape: Sizes, stride: Sizes, padding: Sizes, device: torch.device) -> list[Tensor]:
    """Where windows start in every spatial dimension, to stand beside what was pooled."""
    n = len(stride)
    starts = []
    for d, (size, step, before) in enumerate(zip(shape[-n:], stride, padding, strict=True)):
        start = torch.arange(size, device=device) * step - before
        starts.append(start.reshape([-1 if k == d else 1 for k in range(n)]))
    return starts


def _max_pool(
    x: Tensor, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, ceil_mode: bool
) -> tuple[Tensor, Tensor]:
    _check("max_pool", kernel, stride, padding, dilation)
    values, left = _indexed(x, kernel, stride, padding, dilation, ceil_mode)
    starts = _starts(values.shape, stride, padding, x.device)
    offsets, factor = torch.zeros_like(left), 1
    for d in reversed(range(len(kernel))):
        size = x.shape[x.ndim - len(kernel) + d]
        place, left = (left, left) if d == 0 else (left % size, left // size)
        # PyTorch's index of a window of nothing but -inf may lie outside of it
        offsets += ((place - starts[d]) // dilation[d]).clamp(0, kernel[d] - 1) * factor
        factor *= kernel[d]
    return values, offsets.to(torch.int8)


def _max_pool_backward(
    grad: Tensor,
    offsets: Tensor,
    size: Sizes,
    kernel: Sizes,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    channels_last: bool,
) -> Tensor:
    _check("max_pool_backward", kernel, stride, padding, dilation)
    if len(kernel) == 1:
        rows = _flat(kernel, stride, padding, dilation)
        plane = [*size[:-1], 1, size[-1]]
        return _max_pool_backward(grad.unsqueeze(-2), offsets.unsqueeze(-2), plane, *rows, False).squeeze(-2)
    starts = _starts(grad.shape, stride, padding, grad.device)
    taps = torch.unravel_index(offsets.long(), list(kernel))
    index, inside, factor = torch.zeros_like(offsets, dtype=torch.int64), torch.ones_like(offsets, dtype=torch.bool), 1
    for d in reversed(range(len(kernel))):
        length, place = size[len(size) - len(kernel) + d], starts[d] + taps[d] * dilation[d]
        index += place * factor
        inside &= (place >= 0) & (place < length)
        factor *= length
    grad, index = torch.where(inside, grad, 0), torch.where(inside, index, 0)  # a window may have no element at all
    two = len(kernel) == 2
    op = aten.max_pool2d_with_indices_backward if two else aten.max_pool3d_with_indices_backward
    ceil_mode = _larger(size, grad.shape, kernel, stride, padding, dilation)
    return op(grad, gradient(grad, size, channels_last), kernel, stride, padding, dilation, ceil_mode, index)


def _larger(size: Sizes, pooled: Sizes, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes) -> bool:
    """Windows reach past the end: sizes were rounded up."""
    n = len(kernel)
    ends = zip(size[-n:], pooled[-n:], kernel, stride, padding, dilation, strict=True)
    return any(many > (length + 2 * p - d * (k - 1) - 1) // s + 1 for length, many, k, s, p, d in ends)


def gradient(grad: Tensor, size: Sizes, channels_last: bool) -> Tensor:
    layout = FORMATS[len(size)] if channels_last else torch.contiguous_format
    return torch.empty(list(size), dtype=grad.dtype, device=grad.device, memory_format=layout)


def _empty(
    x: Tensor, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, ceil_mode: bool
) -> tuple[Tensor, Tensor]:
    _check("max_pool", kernel, stride, padding, dilation)
    values, _ = _indexed(x, kernel, stride, padding, dilation, ceil_mode)
    return values, torch.empty_like(values, dtype=torch.int8)


def _empty_gradient(
    grad: Tensor,
    offsets: Tensor,
    size: Sizes,
    kernel: Sizes,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    channels_last: bool,
) -> Tensor:
    _check("max_pool_backward", kernel, stride, padding, dilation)
    return gradient(grad, size, channels_last)


for _name, _meaning, _types in (
    ("max_pool", _max_pool, _empty),
    ("max_pool_backward", _max_pool_backward, _empty_gradient),
):
    library.impl(_name, _meaning, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tessera::{_name}", _types, lib=library)

max_pool = torch.ops.tessera.max_pool.default
max_pool_backward = torch.ops.tessera.max_pool_backward.default

POOLS = [
    f"{kind}{n}d" for kind in ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool") for n in (1, 2, 3)
]

for _name in POOLS:
    declare(f"aten.{_name}.default", "pool", cost=per_element(4))
for _name in ("max_pool", "max_pool_backward"):
    declare(f"tessera.{_name}", "pool", cost=per_element(4))
