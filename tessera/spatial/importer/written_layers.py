"""Layers and functions without a form, written out in PyTorch's own words as those of `written_out` are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from tessera.ops.fake_quantize import PARTS as FAKE_QUANTIZE
from tessera.spatial.importer.written_out import WRITTEN, compared, rows_of, written
from tessera.torch_internals.operators import op_name

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


@written("adaptive_max_pool2d adaptive_max_pool3d")
def adaptive_max_pool(x: Tensor, size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The largest of each window and its place in the image; windows are about equal and may share elements."""
    n, image = len(size), x.shape[-len(size) :]
    sides = [[(i * m // of, -(-(i + 1) * m // of)) for i in range(of)] for m, of in zip(image, size, strict=True)]
    most, places = [], []
    for window in itertools.product(*sides):
        part = x[(..., *(slice(a, b) for a, b in window))].flatten(-n)
        most.append(part.amax(-1))
        rest, place, stride = part.argmax(-1), torch.zeros((), dtype=torch.int64), 1
        for (low, high), m in zip(reversed(window), reversed(image), strict=True):
            place = place + (rest % (high - low) + low) * stride
            rest, stride = rest // (high - low), stride * m
        places.append(place)
    shape = (*x.shape[:-n], *size)
    return torch.stack(most, -1).reshape(shape), torch.stack(places, -1).reshape(shape)


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
    """Offsets are data, so that every place is compared with where each bag begins and ends. Empty bags are zeros."""
    compared("embedding_bag", offsets.shape[0], places.numel())
    end = torch.full((1 - include_last,), places.numel(), dtype=offsets.dtype)
    begins, ends = offsets[: offsets.shape[0] - include_last], torch.cat([offsets[1:], end])
    at = torch.arange(places.numel())
    mine = (at >= begins.unsqueeze(-1)) & (at < ends.unsqueeze(-1)) & (places != padding)  # [bags, places]
    counts = mine.to(torch.int64).sum(-1, keepdim=True)
    rows = rows_of(table, places)
    rows = rows if weights is None else rows * weights.unsqueeze(-1)
    chosen = torch.where(mine.unsqueeze(-1), rows, torch.full((), -math.inf if mode == 2 else 0.0, dtype=rows.dtype))
    if mode == 2:
        bags = torch.where(counts > 0, chosen.amax(1), torch.zeros((), dtype=rows.dtype))
    else:
        bags = chosen.sum(1) / (counts.clamp(min=1) if mode else 1)
    return bags, *(torch.zeros(0, dtype=torch.int64) for _ in range(3))


@written("_trilinear")
def trilinear(
    a: Tensor, b: Tensor, c: Tensor, expand1: Sequence[int], expand2: Sequence[int], expand3: Sequence[int],
    dims: Sequence[int], unroll: int = 1,
) -> Tensor:  # fmt: skip
    """The product of three, each with dimensions of one put in, summed."""
    for at in sorted(expand1):
        a = a.unsqueeze(at)
    for at in sorted(expand2):
        b = b.unsqueeze(at)
    for at in sorted(expand3):
        c = c.unsqueeze(at)
    return (a * b * c).sum(list(dims))


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


@written("div floor_divide prims.div", asks=True)
def whole_quotient(name: str, a: Tensor, b: object, *, rounding_mode: str | None = None) -> Tensor:
    """What is left over is taken off first: so the division of integers has no remainder, and that of floats is not
    rounded up to the next whole number (1.0 // 0.1 is 9)."""
    rounding_mode = "floor" if name == "floor_divide" else rounding_mode or "trunc"
    other = b if isinstance(b, Tensor) else torch.full((), b)  # type: ignore[call-overload]
    kind = torch.promote_types(a.dtype, other.dtype) if other.ndim else torch.result_type(a, other)
    a, other = a.to(kind), other.to(kind)
    if kind.is_floating_point:
        return _whole(a, other) if rounding_mode == "floor" else torch.trunc(a / other)
    left = torch.fmod(a, other)
    whole = a - left
    quotient = (whole.double() / other.double()).to(kind)
    if kind == torch.int64:  # of more bits than a double holds: what is left of them is divided once more
        quotient = quotient + ((whole - quotient * other).double() / other.double()).to(kind)
    if rounding_mode == "trunc":
        return quotient
    return torch.where((left != 0) & ((left < 0) != (other < 0)), quotient - 1, quotient)


@written("pow")
def whole_power(a: object, b: object) -> Tensor:
    """Of integers: the squares of squares that the exponent's bits name. Beyond their type they wrap."""
    kind = torch.result_type(a, b)  # type: ignore[call-overload]
    if isinstance(b, int):
        square, result = a.to(kind), None  # type: ignore[attr-defined]
        for bit in range(b.bit_length()):
            if b >> bit & 1:
                result = square if result is None else result * square
            square = square * square
        return torch.ones_like(square) if result is None else result
    a, b = (x.to(kind) if isinstance(x, Tensor) else torch.full((), x, dtype=kind) for x in (a, b))  # type: ignore[call-overload]
    one = torch.ones((), dtype=kind)
    result, square = one, a
    for bit in range(8 * kind.itemsize - 1):
        result = torch.where((b >> bit) & 1 != 0, result * square, result)
        square = square * square
    inverse = torch.where(a == one, one, torch.where(a == -one, 1 - 2 * (b & 1), one - one))
    return torch.where(b < 0, inverse, result)


def _whole(a: Tensor, b: Tensor) -> Tensor:
    left = torch.fmod(a, b)
    quotient = (a - left) / b
    quotient = torch.where((left != 0) & ((b < 0) != (left < 0)), quotient - 1, quotient)
    whole = torch.floor(quotient)
    whole = torch.where(quotient - whole > 0.5, whole + 1, whole)
    whole = torch.where(quotient == 0, torch.copysign(torch.zeros((), dtype=a.dtype), a / b), whole)
    return torch.where(b == 0, a / b, whole)


@written("hypot")
def hypot(a: Tensor, b: Tensor) -> Tensor:
    """Over the larger one, whose square may be too large to hold. It may be 0 or infinite."""
    most, least = torch.maximum(a.abs(), b.abs()), torch.minimum(a.abs(), b.abs())
    part = least / most
    length = torch.where((most == 0) | (least == math.inf), most, most * torch.sqrt(part * part + 1))
    return torch.where((a.abs() == math.inf) | (b.abs() == math.inf), torch.full((), math.inf, dtype=a.dtype), length)


@written("erfc")
def erfc(x: Tensor) -> Tensor:
    """Where little is left of 1, by what it is scaled to."""
    return torch.where(x > 0.5, torch.special.erfcx(x.clamp(min=0.5)) * torch.exp(-x * x), 1 - torch.erf(x))


@written("fmod")
def fmod(a: Tensor, b: object) -> Tensor:
    if not a.dtype.is_floating_point:  # the least integer has no absolute value
        left = torch.remainder(a, b)  # type: ignore[call-overload]
        return torch.where((left != 0) & ((left < 0) != (a < 0)), left - b, left)
    left = torch.remainder(a.abs(), torch.abs(b) if isinstance(b, Tensor) else abs(b))  # type: ignore[arg-type]
    return torch.where(a < 0, -left, left)


WRITTEN |= {
    "log2": lambda x: torch.log(x) / math.log(2),
    "log10": lambda x: torch.log(x) / math.log(10),
    "exp2": lambda x: torch.exp(x * math.log(2)),
    "tan": lambda x: torch.sin(x) / torch.cos(x),
    "sinh": lambda x: (torch.expm1(x) - torch.expm1(-x)) / 2,
    "cosh": lambda x: (torch.exp(x) + torch.exp(-x)) / 2,
    "logical_xor": lambda a, b: (a != 0) != (b != 0),
    "bitwise_xor": lambda a, b: a != b if a.dtype == torch.bool else NotImplemented,
}

# Numbers of few bits, as training for them has them.
WRITTEN |= {op_name(op): parts for op, parts in FAKE_QUANTIZE.items()}
