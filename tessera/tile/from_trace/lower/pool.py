"""Lowerings of max pooling with offsets, and of its gradient.

A window is unrolled: its elements are read one after another, each only where it lies in the tensor, and the largest so
far is kept with its number. The gradient gathers: an element looks at every window that covers it, and takes what
belongs to that window where the offset is its own. So nothing is written twice and nothing has to be cleared.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from tessera.tile.from_trace.index import ZERO, Index, Indices, Unlowerable, never_negative
from tessera.tile.from_trace.lower.rule import SELECT, Call, Reader, Rule, define
from tessera.tile.from_trace.lower.view import shape_of
from tessera.tile.from_trace.values import NARROW, T

NUMBER = torch.int32  # in which offsets are compared
MOST = 49  # elements of a window: kernels of more take ten seconds and longer to compile


@dataclass(frozen=True)
class Tap:
    """One element of a window in one dimension: its number there, its index, and where it lies in the tensor."""

    number: int
    at: Index
    inside: T | None  # None: everywhere
    after_start: T | None  # it does not lie before the first element; None: nowhere it does


def _taps(reader: Reader, o: Index, size: Index, kernel: int, stride: int, padding: int, dilation: int) -> list[Tap]:
    """Of window `o`. Conditions are on the window's number, which all taps share."""
    taps = []
    for number in range(kernel):
        shift = number * dilation - padding
        at = o * stride + shift
        before = _bound(reader, o, -(shift // stride), below=False) if shift < 0 else None
        if size.constant is None:
            past = None if _proved(reader, size - 1 - at) else reader.emit.iota(at) < reader.emit.iota(size)
        else:
            past = _bound(reader, o, (size.constant - 1 - shift) // stride + 1, below=True)
        taps.append(Tap(number, at, _both(before, past), before))
    return taps


def _proved(reader: Reader, e: Index) -> bool:
    low = reader.ranges.low(e)
    return low is not None and never_negative(low)


def _bound(reader: Reader, o: Index, bound: int, below: bool) -> T | None:
    """Whether an index is below a bound, or not; None where that is known to hold."""
    if _proved(reader, bound - 1 - o if below else o - bound):
        return None
    test = reader.emit.iota(o) < bound
    return test if below else ~test


def _both(*tests: T | None) -> T | None:
    all_hold: T | None = None
    for test in tests:
        if test is not None:
            all_hold = test if all_hold is None else all_hold & test
    return all_hold


def _under(reader: Reader, *tests: T | None) -> Reader:
    for test in tests:
        reader = reader if test is None else reader.under(test)
    return reader


def _max_pool(reader: Reader, call: Call, at: Indices) -> T:
    kernel, stride, padding, dilation = call.args[1:5]
    n = len(kernel)  # type: ignore[arg-type]
    rest, shape = at[:-n], shape_of(call.first)[-n:]
    rows = [
        _taps(reader, *one)  # type: ignore[arg-type]
        for one in zip(at[-n:], shape, kernel, stride, padding, dilation, strict=True)  # type: ignore[arg-type]
    ]
    best: T | None = None
    which = _first(reader, rows)
    for number, taps in enumerate(itertools.product(*rows)):
        tests = [tap.inside for tap in taps]
        x = _under(reader, *tests).read(call.first, (*rest, *(tap.at for tap in taps)))
        x = x.rounded(call.first.dtype) if call.first.dtype in NARROW else x  # those that round to the same are equal
        inside = _both(*tests)
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


@dataclass(frozen=True)
class Window:
    """One that may cover an element, in one dimension: its number, the element's number in it, and whether it does."""

    at: Index
    number: Index
    covers: tuple[T, ...]


def _windows(
    reader: Reader, i: Index, windows: Index, kernel: int, stride: int, padding: int, dilation: int
) -> Iterator[Window]:
    """In their own order, in which PyTorch adds them up on a CPU."""
    ranges, emit, step, last = reader.ranges, reader.emit, Index.of(stride), kernel - 1
    for back in reversed(range(kernel if dilation > 1 else last // stride + 1)):
        if dilation > 1:  # element by element of a window: it has few, and reaches far
            before = -(-back * dilation // stride)
            place, number = i + padding - back * dilation + before * stride, Index.of(back)
            exact = ranges.mod(place, step)
        else:
            before, place = back, i + padding
            number, exact = ranges.mod(place, step) + back * stride, ZERO
        start = ranges.div(place, step)
        at = start - before
        tests = []
        if not _proved(reader, at):
            tests.append(emit.iota(start) >= before)
        if not _proved(reader, windows - 1 - at):
            end = windows + before
            tests.append(emit.iota(start) < (emit.iota(end) if end.constant is None else end.constant))
        if not _proved(reader, last - number):
            tests.append(emit.iota(number) <= last)
        if exact != ZERO:
            tests.append(emit.iota(exact).eq(0))
        yield Window(at, number, tuple(tests))


def _max_pool_backward(reader: Reader, call: Call, at: Indices) -> T:
    grad, offsets, _, kernel, stride, padding, dilation = call.args[:7]
    n = len(kernel)  # type: ignore[arg-type]
    rest, many = at[:-n], shape_of(call.first)[-n:]
    every = [
        list(_windows(reader, *one))  # type: ignore[arg-type]
        for one in zip(at[-n:], many, kernel, stride, padding, dilation, strict=True)  # type: ignore[arg-type]
    ]
    total: T | None = None
    for windows in itertools.product(*every):
        tests = [test for w in windows for test in w.covers]
        inner, place = _under(reader, *tests), (*rest, *(w.at for w in windows))
        number = ZERO
        for w, size in zip(windows, kernel, strict=True):  # type: ignore[arg-type]
            number = number * size + w.number  # type: ignore[operator]
        own, covers = reader.emit.iota(number).to(NUMBER), _both(*tests)
        if covers is not None:  # decided once for all channels: no offset is -1
            own = covers.where(own, own.like(-1))
        x = inner.read(grad, place)
        part = inner.read(offsets, place).to(NUMBER).eq(own).where(x, x.like(0))
        total = part if total is None else total + part
    assert total is not None
    return total


def _refuses(position: int) -> Callable[[Call], str]:
    """Why a call has no lowering; `position` is that of the windows' sizes among its arguments."""

    def refuses(call: Call) -> str:
        kernel = call.args[position]
        if math.prod(kernel) > MOST:  # type: ignore[arg-type]
            return f"windows of {math.prod(kernel)} elements are more than {MOST}, too many to be unrolled"  # type: ignore[arg-type]
        try:
            for v in (*call.eqn.inputs(), *call.eqn.results()):
                shape_of(v)
        except Unlowerable as reason:
            return str(reason)
        return "" if call.eqn.results()[0].tensor.is_float else "it pools integers"

    return refuses


define("tessera.max_pool", Rule(SELECT, _max_pool, refuses=_refuses(1), expensive=True))
define("tessera.max_pool_backward", Rule(SELECT, _max_pool_backward, refuses=_refuses(3), expensive=True))
