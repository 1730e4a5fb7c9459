"""Lowerings of average pooling and of its gradient.

A window is unrolled: its elements are read one after another, each only where it lies in the tensor, and their sum is
divided by their number. The gradient gathers: an element adds up its share of every window that covers it. How many
elements count is a product of numbers by dimension, each a constant wherever windows do not reach over an edge.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from tessera.ir.equation import Arg, Value
from tessera.ops.average_pool import UNROLLED
from tessera.ops.families import per_dimension
from tessera.tile.from_trace.index import Index, Indices
from tessera.tile.from_trace.lower.rule import SELECT, Call, Reader, Rule, define
from tessera.tile.from_trace.lower.view import shape_of
from tessera.tile.from_trace.lower.windows import both, proved, refuses, taps_of, under, windows_over
from tessera.tile.from_trace.values import T, wide

NUMBER = torch.int32  # in which elements are counted


@dataclass(frozen=True)
class Average:
    """The windows of a call, with every default filled in, and what their sums are divided by."""

    kernel: list[int]
    stride: list[int]
    padding: list[int]
    include_pad: bool
    divisor: int | None

    @staticmethod
    def of(n: int, kernel: Arg, stride: Arg, padding: Arg, _: Arg, include_pad: Arg, divisor: Arg = None) -> Average:
        stride = stride if stride or isinstance(stride, int) else kernel
        windows = (per_dimension(sizes, n) for sizes in (kernel, stride, padding))
        return Average(*windows, bool(include_pad), divisor)  # type: ignore[arg-type]

    def count(self, reader: Reader, o: Index, many: Index, size: Index, d: int) -> int | T:
        """How many elements window `o` of `many` has in one dimension."""
        step, before, kernel = self.stride[d], self.padding[d], self.kernel[d]
        if self.divisor is not None:
            return 1
        end = size + before if self.include_pad else size
        whole = proved(reader, end + before - kernel - (many - 1) * step)  # no window reaches past the end
        if whole and (self.include_pad or not before):
            return kernel
        start = o * step - before
        first, last = _number(reader, start), _number(reader, start + kernel)
        first = first if self.include_pad or not before else first.fn("maximum", 0)
        return (last if whole else last.fn("minimum", _number(reader, end))) - first


def _number(reader: Reader, e: Index) -> T:
    return reader.emit.iota(e).to(NUMBER)


def _from_zero(total: T, divisor: int) -> T:
    """A sum that began with zero (0.0 where all of it is -0.0), divided."""
    total = total + 0.0
    return total if divisor == 1 else total / divisor


def _avg_pool(n: int, reader: Reader, call: Call, at: Indices) -> T:
    pool = Average.of(n, *call.args[1:])
    rest, place, sizes, many = at[:-n], at[-n:], shape_of(call.first)[-n:], shape_of(call.out)[-n:]
    counts = [pool.count(reader, place[d], many[d], sizes[d], d) for d in range(n)]
    windows = zip(place, sizes, pool.kernel, pool.stride, pool.padding, strict=True)
    taps = [[(tap.at, tap.inside, None) for tap in taps_of(reader, *one)] for one in windows]
    same = math.prod((c for c in counts if isinstance(c, int)), start=pool.divisor or 1)
    total = _from_zero(_summed(reader, call.first, rest, taps), same)
    varying = [c for c in counts if isinstance(c, T)]
    return total / math.prod(varying[1:], start=varying[0]).to(total.dtype) if varying else total


def _avg_pool_backward(reader: Reader, call: Call, at: Indices) -> T:
    kernel, *others = call.args[2:-1]
    n = len(kernel)  # type: ignore[arg-type]
    pool = Average.of(n, kernel, *others)
    rest, place, sizes, many = at[:-n], at[-n:], shape_of(call.out)[-n:], shape_of(call.first)[-n:]
    divisor, every = pool.divisor or 1, []
    for d, one in enumerate(zip(place, many, pool.kernel, pool.stride, pool.padding, strict=True)):
        windows = list(windows_over(reader, *one))
        counts = [pool.count(reader, w.at, many[d], sizes[d], d) for w in windows]
        divisor *= counts[0] if isinstance(counts[0], int) else 1
        every.append([(w.at, both(*w.covers), _share(c, call)) for w, c in zip(windows, counts, strict=True)])
    return _from_zero(_summed(reader, call.first, rest, every), divisor)


Part = tuple[Index, T | None, T | None]  # an index in one dimension, where it counts (None: everywhere), by how much


def _summed(reader: Reader, x: Value, place: Indices, parts: Sequence[Sequence[Part]]) -> T:
    """The sum over all parts of every dimension after `place`; each dimension's factors are applied to its own sums."""
    if not parts:
        return reader.read(x, place)
    total: T | None = None
    for at, where, factor in parts[0]:
        one = _summed(under(reader, where), x, (*place, at), parts[1:])
        one = one if factor is None else one * factor
        one = one if where is None else where.where(one, 0.0)
        total = one if total is None else total + one
    assert total is not None
    return total


def _share(count: int | T, call: Call) -> T | None:
    """What an element gets of a window with so many; None where all windows have the same."""
    return None if isinstance(count, int) else 1.0 / count.to(wide(call.out.dtype))


for _n in (1, 2, 3):
    define(f"avg_pool{_n}d", Rule(SELECT, partial(_avg_pool, _n), refuses=refuses(1, UNROLLED, _n), expensive=True))
define("tessera.avg_pool_backward", Rule(SELECT, _avg_pool_backward, refuses=refuses(2, UNROLLED), expensive=True))
