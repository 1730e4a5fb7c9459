"""Runs of equations that repeat themselves, as equal layers do.

In: a trace, and for each equation what it has in common with others. Out: `Repeats`: where such a run begins, how many
equations a repeat has, how often it is repeated, and which inputs of the trace one repeat reads where the one before it
reads others. A repeat is a run of equations like the run before it, over values that stand as far away, over the same
values from before the first, or over inputs of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

from tessera.ir.equation import Equation, Special, Value
from tessera.ir.signature import signature
from tessera.ir.trace import Trace

PLACES = 16  # where a trace is looked at
LIKE = 12  # equations in a row that must be alike before more are compared
NEAREST = 2  # how many distances are tried at each place

Follows = Callable[[Value, Value], bool]


@dataclass(frozen=True)
class Repeats:
    first: int  # the equation with which it begins
    period: int  # equations
    count: int
    following: dict[Value, Value]  # an input that a repeat reads -> what the next one reads in its place

    @property
    def end(self) -> int:
        return self.first + self.count * self.period


def number(eqn: Equation) -> Hashable:
    """What an equation has in common with others; a Special is like no other."""
    return eqn if isinstance(eqn.op, Special) else signature(eqn)


def repeats(trace: Trace, numbers: Sequence[Hashable], least: int) -> Iterator[Repeats]:
    """Runs of at least so many repeats."""
    count = len(numbers)
    search = Search(trace, numbers)
    for place in range(count // (2 * PLACES), count - LIKE, max(1, count // PLACES)):
        for period in _periods(numbers, place):
            run = search.around(place, period)
            if run is not None and run.count >= least:
                yield run


def _periods(numbers: Sequence[Hashable], place: int) -> Iterator[int]:
    """How far behind a place the same equations stand again: the nearest ones."""
    wanted, met = numbers[place : place + LIKE], 0
    for other in range(place + 1, len(numbers) - LIKE):
        if numbers[other] == wanted[0] and numbers[other : other + LIKE] == wanted:
            yield other - place
            met += 1
            if met == NEAREST:
                return


class Search:
    """Equations that repeat, around a place. `follows` says of two inputs whether a repeat may read the second where
    the one before it reads the first."""

    def __init__(self, trace: Trace, numbers: Sequence[Hashable], follows: Follows | None = None) -> None:
        self.trace, self.numbers, self.follows = trace, numbers, follows
        self.maker = {v: (i, k) for i, eqn in enumerate(trace.equations) for k, v in enumerate(eqn.outputs) if v}
        written = set(trace.mutations.values())
        self.needed = {v: (v in written) for v in trace.results()}  # and whether an input holds them afterwards
        self.tried: list[tuple[int, range]] = []  # periods, and where they hold

    def around(self, place: int, period: int) -> Repeats | None:
        """The run of this period that a place stands in; None where it was looked at before."""
        if any(period == known and place in where for known, where in self.tried):
            return None
        self.following: dict[Value, Value] = {}
        self.preceding: dict[Value, Value] = {}
        self.before = -1  # the last equation that all repeats read
        first, last = place, place
        while last + period < len(self.numbers) and self.alike(last, period):
            last += 1
        while first and self.alike(first - 1, period):
            first -= 1
        self.tried.append((period, range(first, last)))
        first = max(first, self.before + 1)
        return Repeats(first, period, (last + period - first) // period, self.following)

    def alike(self, i: int, period: int) -> bool:
        """An equation, and the one a period later."""
        one, other = self.trace.equations[i], self.trace.equations[i + period]
        if self.numbers[i] != self.numbers[i + period]:
            return False
        if [self.needed.get(v) for v in one.results()] != [self.needed.get(v) for v in other.results()]:
            return False
        return all(self.correspond(x, y, period) for x, y in zip(one.inputs(), other.inputs(), strict=True))

    def correspond(self, x: Value, y: Value, period: int) -> bool:
        earlier, later = self.maker.get(x), self.maker.get(y)
        if earlier is not None and later == (earlier[0] + period, earlier[1]):
            return True
        if x is y:
            self.before = max(self.before, -1 if earlier is None else earlier[0])
            return x not in self.following and x not in self.preceding
        if earlier is not None or later is not None or (self.follows is not None and not self.follows(x, y)):
            return False
        return self.following.setdefault(x, y) is y and self.preceding.setdefault(y, x) is x
