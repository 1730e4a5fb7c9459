"""Lowerings of max pooling with offsets, and of its gradient.

A window is unrolled: its elements are read one after another, each only where it lies in the tensor, and the largest so
far is kept with its number. The gradient gathers: an element looks at every window that covers it, and takes what
belongs to that window where the offset is its own. So nothing is written twice and nothing has to be cleared.
"""

from __future__ import annotations

import itertools
import math

import torch

from tessera.tile.from_trace.index import ZERO, Indices
from tessera.tile.from_trace.lower.rule import SELECT, Call, Reader, Rule, define
from tessera.tile.from_trace.lower.view import shape_of
from tessera.tile.from_trace.lower.windows import Tap, both, refuses, taps_of, under, windows_over
from tessera.tile.from_trace.values import NARROW, T

NUMBER = torch.int32  # in which offsets are compared
MOST = 49  # elements of a window: kernels of more take ten seconds and longer to compile


def _max_pool(reader: Reader, call: Call, at: Indices) -> T:
    kernel, stride, padding, dilation = call.args[1:5]
    n = len(kernel)  # type: ignore[arg-type]
    rest, shape = at[:-n], shape_of(call.first)[-n:]
    rows = [
        taps_of(reader, *one)  # type: ignore[arg-type]
        for one in zip(at[-n:], shape, kernel, stride, padding, dilation, strict=True)  # type: ignore[arg-type]
    ]
    best: T | None = None
    which = _first(reader, rows)
    for number, taps in enumerate(itertools.product(*rows)):
        tests = [tap.inside for tap in taps]
        x = under(reader, *tests).read(call.first, (*rest, *(tap.at for tap in taps)))
        x = x.rounded(call.first.dtype) if call.first.dtype in NARROW else x  # those that round to the same are equal
        inside = both(*tests)
        if best is None and inside is None:
            best = x
            continue
        best = x.like(-math.inf) if best is None else best
        wins = (x > best) | x.fn("isnan")
        wins = wins if inside is None else inside & wins
        best, which = wins.where(x, best), wins.where(which.like(number), which)
    assert best is not None
    return which if call.number else best


def _first(reader: Reader, rows: list[list[Tap]]) -> T:
    """The number of a window's first element that lies in the tensor: the largest one, where all are -inf."""
    first, factor = reader.emit.constant(0, NUMBER), 1
    for row in reversed(rows):
        for tap in row:
            if tap.after_start is not None:
                first = first + tap.after_start.where(first.like(0), first.like(factor))
        factor *= len(row)
    return first


def _max_pool_backward(reader: Reader, call: Call, at: Indices) -> T:
    grad, offsets, _, kernel, stride, padding, dilation = call.args[:7]
    n = len(kernel)  # type: ignore[arg-type]
    rest, many = at[:-n], shape_of(call.first)[-n:]
    every = [
        list(windows_over(reader, *one))  # type: ignore[arg-type]
        for one in zip(at[-n:], many, kernel, stride, padding, dilation, strict=True)  # type: ignore[arg-type]
    ]
    total: T | None = None
    for windows in itertools.product(*every):
        tests = [test for w in windows for test in w.covers]
        inner, place = under(reader, *tests), (*rest, *(w.at for w in windows))
        number = ZERO
        for w, size in zip(windows, kernel, strict=True):  # type: ignore[arg-type]
            number = number * size + w.number  # type: ignore[operator]
        own, covers = reader.emit.iota(number).to(NUMBER), both(*tests)
        if covers is not None:  # decided once for all channels: no offset is -1
            own = covers.where(own, own.like(-1))
        x = inner.read(grad, place)
        part = inner.read(offsets, place).to(NUMBER).eq(own).where(x, x.like(0))
        total = part if total is None else total + part
    assert total is not None
    return total


define("tessera.max_pool", Rule(SELECT, _max_pool, refuses=refuses(1, MOST), expensive=True))
define("tessera.max_pool_backward", Rule(SELECT, _max_pool_backward, refuses=refuses(3, MOST), expensive=True))
