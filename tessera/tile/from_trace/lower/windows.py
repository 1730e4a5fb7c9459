"""Windows of pools: which elements a window has, which windows cover an element, and where either lies in the tensor.

Both are unrolled. What a condition is needed for is only what the ranges of the indices do not prove.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tessera.ir.equation import Arg
from tessera.ops.families import per_dimension
from tessera.tile.from_trace.index import ZERO, Index, Unlowerable, never_negative
from tessera.tile.from_trace.lower.rule import Call, Reader
from tessera.tile.from_trace.lower.view import shape_of
from tessera.tile.from_trace.values import T


@dataclass(frozen=True)
class Tap:
    """One element of a window in one dimension: its number there, its index, and where it lies in the tensor."""

    number: int
    at: Index
    inside: T | None  # None: everywhere
    after_start: T | None  # it does not lie before the first element; None: nowhere it does


def taps_of(
    reader: Reader, o: Index, size: Index, kernel: int, stride: int, padding: int, dilation: int = 1
) -> list[Tap]:
    """Of window `o`. Conditions are on the window's number, which all taps share."""
    taps = []
    for number in range(kernel):
        shift = number * dilation - padding
        at = o * stride + shift
        before = _bound(reader, o, -(shift // stride), below=False) if shift < 0 else None
        if size.constant is None:
            past = None if proved(reader, size - 1 - at) else reader.emit.iota(at) < reader.emit.iota(size)
        else:
            past = _bound(reader, o, (size.constant - 1 - shift) // stride + 1, below=True)
        taps.append(Tap(number, at, both(before, past), before))
    return taps


def proved(reader: Reader, e: Index) -> bool:
    low = reader.ranges.low(e)
    return low is not None and never_negative(low)


def _bound(reader: Reader, o: Index, bound: int, below: bool) -> T | None:
    """Whether an index is below a bound, or not; None where that is known to hold."""
    if proved(reader, bound - 1 - o if below else o - bound):
        return None
    test = reader.emit.iota(o) < bound
    return test if below else ~test


def both(*tests: T | None) -> T | None:
    all_hold: T | None = None
    for test in tests:
        if test is not None:
            all_hold = test if all_hold is None else all_hold & test
    return all_hold


def under(reader: Reader, *tests: T | None) -> Reader:
    for test in tests:
        reader = reader if test is None else reader.under(test)
    return reader


@dataclass(frozen=True)
class Window:
    """One that may cover an element, in one dimension: its number, the element's number in it, and whether it does."""

    at: Index
    number: Index
    covers: tuple[T, ...]


def windows_over(
    reader: Reader, i: Index, many: Index, kernel: int, stride: int, padding: int, dilation: int = 1
) -> Iterator[Window]:
    """Those of `many` that may cover element `i`, in their own order, in which PyTorch adds them up on a CPU."""
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
        if not proved(reader, at):
            tests.append(emit.iota(start) >= before)
        if not proved(reader, many - 1 - at):
            end = many + before
            tests.append(emit.iota(start) < (emit.iota(end) if end.constant is None else end.constant))
        if not proved(reader, last - number):
            tests.append(emit.iota(number) <= last)
        if exact != ZERO:
            tests.append(emit.iota(exact).eq(0))
        yield Window(at, number, tuple(tests))


def refuses(position: int, most: int, n: int | None = None) -> Callable[[Call], str]:
    """Why a call has no lowering. `position` is that of the windows' sizes among its arguments, `most` how many of
    their elements are unrolled; `n` dimensions a window has, where the call may say one size for all of them."""

    def reason(call: Call) -> str:
        sizes: Arg = call.args[position]
        many = math.prod(per_dimension(sizes, n) if n else sizes)  # type: ignore[arg-type]
        if many > most:
            return f"windows of {many} elements are more than {most}, too many to be unrolled"
        try:
            for v in (*call.eqn.inputs(), *call.eqn.results()):
                shape_of(v)
        except Unlowerable as why:
            return str(why)
        return "" if call.eqn.results()[0].tensor.is_float else "it pools integers"

    return reason
