"""Layers and functions without a form, written out in PyTorch's own words as those of `written_out` are."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from tessera.spatial.importer.written_out import WRITTEN, rows_of, written

Tensor = torch.Tensor
LSTM = 2  # as PyTorch's library for CPUs numbers its layers


@written("avg_pool1d avg_pool2d avg_pool3d", asks=True)
def avg_pool(
    name: str, x: Tensor, kernel: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = (0,),
    ceil_mode: bool = False, count_include_pad: bool = True, divisor: int | None = None,
) -> Tensor:  # fmt: skip
    """The sum of a window over how many it counts: all, or those that are no padding."""
    n = int(name[-2])
    kernel, padding = (list(s) * (n if len(s) == 1 else 1) for s in (kernel, padding))
    stride = list(stride) * (n if len(stride) == 1 else 1) or kernel
    if ceil_mode:
        return NotImplemented
    sides = [p for pad in reversed(padding) for p in (pad, pad)]

    def windows(t: Tensor) -> Tensor:
        t = F.pad(t, sides)
        for d in range(n):
            t = t.unfold(x.ndim - n + d, kernel[d], stride[d])
        return t.sum(list(range(-n, 0)))

    if divisor is None and not count_include_pad:
        return windows(x) / windows(torch.ones(x.shape[-n:], dtype=x.dtype).expand(x.shape))
    return windows(x) / (divisor or math.prod(kernel))


@written("mkldnn_rnn_layer")
def lstm(
    x: Tensor, w: Tensor, u: Tensor, b: Tensor, c: Tensor, hidden: Tensor, cell: Tensor, reverse: bool,
    batch_sizes: Sequence[int], mode: int, width: int, layers: int, biases: bool, both_ways: bool, batch_first: bool,
    train: bool,
) -> object:  # fmt: skip
    """A layer in one direction, step by step; what the inputs give is one product for all steps."""
    if mode != LSTM or layers != 1 or both_ways or batch_first or batch_sizes or train:
        return NotImplemented
    given = F.linear(x, w, b + c if biases else None)
    shape, h, s, steps = hidden.shape, hidden.reshape(-1, width), cell.reshape(-1, width), {}
    for at in reversed(range(x.shape[0])) if reverse else range(x.shape[0]):
        i, f, g, o = (given[at] + F.linear(h, u)).split(width, -1)
        s = torch.sigmoid(f) * s + torch.sigmoid(i) * torch.tanh(g)
        h = steps[at] = torch.sigmoid(o) * torch.tanh(s)
    every = torch.stack([steps[at] for at in range(x.shape[0])])
    return every, h.reshape(shape), s.reshape(shape), torch.zeros(0)


@written("_embedding_bag _embedding_bag_forward_only")
def embedding_bag(
    table: Tensor, places: Tensor, offsets: Tensor, scale_grad: bool = False, mode: int = 0, sparse: bool = False,
    weights: Tensor | None = None, include_last: bool = False, padding: int = -1,
) -> object:  # fmt: skip
    """Bags of one size: as many places for each."""
    bags = offsets.shape[0] - include_last
    if padding >= 0 or not bags or places.numel() % bags:
        return NotImplemented
    rows = rows_of(table, places)
    rows = rows if weights is None else rows * weights.unsqueeze(-1)
    rows = rows.reshape(bags, -1, table.shape[1])
    return [rows.sum(1), rows.mean(1), rows.amax(1)][mode], *(torch.zeros(0, dtype=torch.int64) for _ in range(3))


@written("_grouped_mm transformers.grouped_mm_fallback")
def grouped_mm(
    x: Tensor, w: Tensor, ends: Tensor | None = None, bias: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Rows in groups whose ends are data, each by its own matrix. All rows go through all of them."""
    if ends is None or bias is not None or x.ndim != 2 or w.ndim != 3:
        return NotImplemented
    rows, ends = torch.arange(x.shape[0]), ends.reshape(-1, 1)
    begins = torch.cat([torch.zeros(1, 1, dtype=ends.dtype), ends[:-1]])
    mine = ((rows >= begins) & (rows < ends)).unsqueeze(-1)  # [groups, rows, 1]
    every = torch.matmul(x.unsqueeze(0), w)
    return torch.where(mine, every, torch.zeros((), dtype=every.dtype)).sum(0).to(dtype or x.dtype)


@written("_cdist_forward")
def cdist(a: Tensor, b: Tensor, p: float, mode: int | None = None) -> Tensor:
    difference = (a.unsqueeze(-2) - b.unsqueeze(-3)).abs()
    if p == 2:
        return (difference * difference).sum(-1).sqrt()
    return difference.sum(-1) if p == 1 else difference.amax(-1) if p == math.inf else NotImplemented


@written("div floor_divide", asks=True)
def whole_quotient(name: str, a: Tensor, b: object, *, rounding_mode: str | None = "floor") -> Tensor:
    """Of integers: what is left over is taken off first, so that the division has no remainder."""
    other = b if isinstance(b, Tensor) else torch.full((), b)  # type: ignore[call-overload]
    kind = torch.promote_types(a.dtype, other.dtype) if other.ndim else torch.result_type(a, other)
    a, other = a.to(kind), other.to(kind)
    if kind.is_floating_point:
        return torch.floor(a / other) if rounding_mode == "floor" else torch.trunc(a / other)
    left = torch.remainder(a, other) if rounding_mode == "floor" else torch.fmod(a, other)
    return ((a - left).double() / other.double()).to(kind)


@written("fmod")
def fmod(a: Tensor, b: object) -> Tensor:
    left = torch.remainder(a.abs(), torch.abs(b) if isinstance(b, Tensor) else abs(b))  # type: ignore[arg-type]
    return torch.where(a < 0, -left, left)


WRITTEN |= {
    "log2": lambda x: torch.log(x) / math.log(2),
    "log10": lambda x: torch.log(x) / math.log(10),
    "exp2": lambda x: torch.exp(x * math.log(2)),
    "tan": lambda x: torch.sin(x) / torch.cos(x),
    "sinh": lambda x: (torch.expm1(x) - torch.expm1(-x)) / 2,
    "cosh": lambda x: (torch.exp(x) + torch.exp(-x)) / 2,
    "erfc": lambda x: 1 - torch.erf(x),
    "hypot": lambda a, b: torch.sqrt(a * a + b * b),
    "logical_xor": lambda a, b: (a != 0) != (b != 0),
    "bitwise_xor": lambda a, b: a != b if a.dtype == torch.bool else NotImplemented,
}
