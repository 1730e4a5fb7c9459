"""Runs that overlap: the program begins again every so many cycles.

In: a schedule of one run, and the least interval, which `bounds` says. Out: schedules with growing intervals. Time is a
circle of `every` cycles for all that is held: a step begins at the first cycle, not before what it waits for, at which
the circle is free (modulo scheduling). What there is only once (a cache, a tensor at the host) is done with before the
next run comes to it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import replace

from tessera.machines.spatial import SpatialMachine
from tessera.spatial.schedule import Lane, NoRoomError, Pass, Schedule, ranks
from tessera.spatial.steps import once

GROWTH = (1, 1.01, 1.02, 1.03, 1.05, 1.08, 1.12, 1.2, 1.3, 1.5, 1.75, 2, 2.5, 3, 4, 6, 8, 12, 16)


def overlapping(plain: Schedule, machine: SpatialMachine, least: int, hosted: Collection[str]) -> Iterator[Schedule]:
    """Schedules of the same steps, those with the shortest intervals first; at last the given one, whose next run
    begins when it has ended."""
    for every in dict.fromkeys(math.ceil(least * growth) for growth in GROWTH):
        if every >= plain.cycles:
            break
        try:
            timed = replace(_Rounds(plain, machine, every).run(), every=every)
        except NoRoomError:
            continue
        if all(last - first <= every for first, last in spans(timed, hosted).values()):
            yield timed
    yield replace(plain, every=max(plain.cycles, 1))


def spans(timed: Schedule, hosted: Collection[str]) -> dict[object, tuple[int, int]]:
    """From when to when a run touches what there is only once."""
    found: dict[object, tuple[int, int]] = {}
    for step in timed.steps:
        start = timed.starts[step]
        for key, begin, end in once(step, hosted):
            first, last = found.get(key, (start + begin, start + end))
            found[key] = min(first, start + begin), max(last, start + end)
    return found


class _Circle(Lane):
    """One unit, port, bank or link, held in every round at the same times."""

    __slots__ = ("every",)

    def __init__(self, every: int) -> None:
        super().__init__()
        self.every = every

    def earliest(self, at: int, duration: int) -> int:
        """The first free cycle; a round later, or still later, where none is free."""
        if duration > self.every:
            return at + self.every
        return at - at % self.every + super().earliest(at % self.every, duration)

    def hold(self, start: int, end: int) -> None:
        first = start % self.every
        for turn in (-1, 0, 1, 2):  # as far as anybody looks from within a round
            super().hold(first + turn * self.every, first + turn * self.every + end - start)


class _Rounds(Pass):
    def __init__(self, plain: Schedule, machine: SpatialMachine, every: int) -> None:
        steps = plain.steps
        super().__init__(steps, machine, {s: s.after for s in steps}, {s: s.uses for s in steps}, ranks(steps))
        self.round = every

    def lane(self) -> Lane:
        return _Circle(int(self.round))
