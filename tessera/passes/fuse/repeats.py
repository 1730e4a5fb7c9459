"""A trace that repeats itself, as equal layers do, made short; and regions of the short one, made long again.

In: a trace. Out: `Short`, the same program with a few of its repeats left, and where the others were. A repeat is a run
of equations like the run before it: the same operators, constants and types, over values that stand as far away, over
the same values from before the first, or over inputs of its own. `Short.extended` says of regions of the short program
which ones the whole program has. It gives None where they do not repeat themselves too; then the whole program has to
be asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tessera.ir.equation import Equation, Special, Value
from tessera.ir.signature import signature
from tessera.ir.trace import Trace

KEPT = 3  # repeats that are left at each end: what stands next to others may be fused in another way
LEAST = 3  # repeats that are worth taking out
PLACES = 16  # where a trace is looked at
LIKE = 12  # equations in a row that must be alike before more are compared


@dataclass(frozen=True)
class Short:
    trace: Trace
    period: int  # equations
    cut: int  # the first equation that is left out
    gap: int  # equations that are left out

    def extended(self, regions: list[list[int]]) -> list[list[int]] | None:
        """Regions of the whole program, of those of the short one; None where they do not repeat."""
        before, last, after = (self._beginning(regions, self.cut + i * self.period) for i in (-2, -1, 0))
        if _moved(before, self.period) != last or _moved(last, self.period) != after:
            return None
        reach = self.cut  # of what begins before the last repeat; that itself may reach into the next one
        if any(region[-1] >= reach + (region in last) * self.period for region in regions if region[0] < self.cut):
            return None
        whole = [region for region in regions if region[0] < self.cut]
        for offset in range(self.period, self.gap + 1, self.period):
            whole += _moved(last, offset)
        whole += [[i + self.gap for i in region] for region in regions if region[0] >= self.cut]
        members = [i for region in whole for i in region]
        return sorted(whole) if len(members) == len(set(members)) else None

    def _beginning(self, regions: list[list[int]], place: int) -> list[list[int]]:
        """Regions that begin in the repeat which begins here."""
        return [region for region in regions if place <= region[0] < place + self.period]


def _moved(regions: list[list[int]], offset: int) -> list[list[int]]:
    return [[i + offset for i in region] for region in regions]


def shortened(trace: Trace) -> Short | None:
    """The trace without most of the repeats of one run of equations; None where nothing repeats often."""
    count = len(trace.equations)
    if trace.symbols or count < (2 * KEPT + LEAST) * 2:
        return None
    numbers = [_number(eqn) for eqn in trace.equations]
    run = _Run(trace, numbers)
    for place in range(count // (2 * PLACES), count - LIKE, max(1, count // PLACES)):
        for period in _periods(numbers, place):
            if (short := run.without_repeats(place, period)) is not None:
                return short
    return None


def _number(eqn: Equation) -> object:
    return eqn if isinstance(eqn.op, Special) else signature(eqn)  # a Special is like no other


def _periods(numbers: list[object], place: int) -> Iterator[int]:
    """How far behind a place, at most, the same equations stand again: the nearest two."""
    like, found = numbers[place : place + LIKE], 0
    for other in range(place + 1, len(numbers) - LIKE):
        if numbers[other] == like[0] and numbers[other : other + LIKE] == like:
            yield other - place
            found += 1
            if found == 2:
                return


class _Run:
    """Equations that repeat, around a place."""

    def __init__(self, trace: Trace, numbers: list[object]) -> None:
        self.trace, self.numbers, self.maker = trace, numbers, trace.places()
        written = set(trace.mutations.values())
        outputs = set(trace.results())
        self.needed = {v: (v in written) for v in outputs}  # results, and whether an input holds them afterwards
        self.tried: list[tuple[int, range]] = []  # periods, and where they hold; too few repeats

    def without_repeats(self, place: int, period: int) -> Short | None:
        if any(period == known and place in where for known, where in self.tried):
            return None
        self.inputs: dict[Value, Value] = {}  # what a repeat reads -> what the next one reads in its place
        self.sources: dict[Value, Value] = {}  # the other way round
        self.before = -1  # the last equation that all repeats read
        first, last = place, place
        while last + period < len(self.numbers) and self.alike(last, period):
            last += 1
        while first and self.alike(first - 1, period):
            first -= 1
        self.tried.append((period, range(first, last)))
        first = max(first, self.before + 1)
        repeats = (last + period - first) // period
        gone = repeats - 2 * KEPT
        if gone < LEAST:
            return None
        return self.short(first + KEPT * period, gone * period, first, first + repeats * period, period)

    def alike(self, i: int, period: int) -> bool:
        """An equation, and the one a period later."""
        one, other = self.trace.equations[i], self.trace.equations[i + period]
        if self.numbers[i] != self.numbers[i + period]:
            return False
        if [self.needed.get(v) for v in one.results()] != [self.needed.get(v) for v in other.results()]:
            return False
        return all(self.correspond(x, y, period) for x, y in zip(one.inputs(), other.inputs(), strict=True))

    def correspond(self, x: Value, y: Value, period: int) -> bool:
        made, later = self.maker.get(x), self.maker.get(y)
        if made is not None and later is not None and later - made == period:
            return True
        if x is y:
            self.before = max(self.before, -1 if made is None else made)
            return x not in self.inputs and x not in self.sources
        if made is not None or later is not None:
            return False
        return self.inputs.setdefault(x, y) is y and self.sources.setdefault(y, x) is x

    def short(self, cut: int, gap: int, first: int, end: int, period: int) -> Short | None:
        equations = self.trace.equations
        gone = {v: i for i in range(cut, cut + gap) for v in equations[i].results()}
        behind: list[Equation] = []
        for i in range(cut + gap, len(equations)):
            reads = {v: gone[v] for v in equations[i].inputs() if v in gone}
            if reads and (i >= end or min(reads.values()) - gap < first):
                return None
            nearer = {v: self.moved(v, j, gap) for v, j in reads.items()}
            behind.append(equations[i].substitute(nearer) if reads else equations[i])
        trace = self.trace.with_(
            equations=(*equations[:cut], *behind),
            outputs=tuple(o for o in self.trace.outputs if not isinstance(o, Value) or o not in gone),
            mutations={target: v for target, v in self.trace.mutations.items() if v not in gone},
        )
        return Short(trace, period, cut, gap)

    def moved(self, v: Value, place: int, gap: int) -> Value:
        """The value that stands where `v` does, so many equations before it."""
        at = self.trace.equations[place].outputs.index(v)
        there = self.trace.equations[place - gap].outputs[at]
        assert there is not None
        return there
