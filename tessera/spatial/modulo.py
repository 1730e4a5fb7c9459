"""Runs that overlap: the program begins again every so many cycles.

In: a schedule of one run, and the least interval, which `bounds` says. Out: schedules with growing intervals. Time is a
circle of `every` cycles for all that is held (modulo scheduling): a step begins at the first cycle, not before what it
waits for, at which the circle is free. Where no cycle is, it begins all the same, and who stands in its way is placed
once more. What there is only once (a cache, a tensor at the host) is done with before the next run comes to it.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator
from dataclasses import replace

from tessera.machines.spatial import SpatialMachine
from tessera.spatial.schedule import Lane, NoRoomError, Pass, Schedule, ranks
from tessera.spatial.steps import Step, Use, once

BUDGET = 6  # how often each step may be placed, on average
GROWTH = (1, 1.01, 1.02, 1.03, 1.05, 1.08, 1.12, 1.2, 1.3, 1.5, 1.75, 2, 2.5, 3, 4, 6, 8, 12, 16)


def overlapping(plain: Schedule, machine: SpatialMachine, least: int, hosted: Collection[str]) -> Iterator[Schedule]:
    """Schedules of the same steps, those with the shortest intervals first; at last the given one, whose next run
    begins when it has ended."""
    for every in dict.fromkeys(math.ceil(least * growth) for growth in GROWTH):
        if every >= plain.cycles:
            break
        try:
            timed = replace(_Rounds(plain.steps, machine, every).run(), every=every)
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
    """One unit, port, bank or link, held in every round at the same times, each by some step."""

    __slots__ = ("every", "owners")

    def __init__(self, every: int) -> None:
        super().__init__()
        self.every, self.owners = every, list[Step]()

    def earliest(self, at: int, duration: int) -> int:
        """The first free cycle; a round later, or still later, where none is free."""
        if duration > self.every:
            return at + self.every
        return at - at % self.every + super().earliest(at % self.every, duration)

    def rounds(self, start: int) -> Iterator[int]:
        """Its times, as far as anybody looks from within a round."""
        return (start % self.every + turn * self.every for turn in (-1, 0, 1, 2))

    def take(self, start: int, duration: int, owner: Step) -> None:
        for at in self.rounds(start):
            i = bisect_left(self.starts, at)
            self.starts.insert(i, at)
            self.ends.insert(i, at + duration)
            self.owners.insert(i, owner)

    def release(self, start: int) -> None:
        for at in self.rounds(start):
            i = bisect_left(self.starts, at)
            del self.starts[i], self.ends[i], self.owners[i]

    def holders(self, start: int, duration: int) -> list[Step]:
        """Who holds it in these cycles."""
        first = start % self.every
        among = slice(bisect_right(self.ends, first), bisect_left(self.starts, first + duration))
        return list(dict.fromkeys(self.owners[among]))


class _Rounds(Pass):
    """Places steps by rank, and those once more that others push away."""

    def __init__(self, steps: list[Step], machine: SpatialMachine, every: int) -> None:
        super().__init__(steps, machine, {s: s.after for s in steps}, {s: s.uses for s in steps}, ranks(steps))
        self.round = self.every = every
        self.users: dict[Step, list[tuple[Step, int]]] = {s: [] for s in steps}
        for s in steps:
            for before, delay in s.after:
                self.users[before].append((s, delay))
        self.waiting = [(self.rank[s], s.number, s) for s in steps]
        heapq.heapify(self.waiting)

    def lane(self) -> Lane:
        return _Circle(self.every)

    def circles(self, use: Use) -> list[_Circle]:
        return self.table(use.resource)  # type: ignore[return-value]

    def run(self) -> Schedule:
        last: dict[Step, int] = {}
        for _ in range(BUDGET * len(self.steps)):
            if not self.waiting:
                cycles = max((self.starts[s] + s.end for s in self.steps), default=0)
                return Schedule(self.steps, self.starts, self.lanes, cycles)
            _, _, step = heapq.heappop(self.waiting)
            at = max((self.starts[b] + delay for b, delay in step.after if b in self.starts), default=0)
            try:
                at = self.begin(self.held(step), at)
            except NoRoomError:
                at = max(at, last.get(step, -1) + 1)
            last[step] = at
            self.place(step, at)
            for user, delay in self.users[step]:
                if user in self.starts and self.starts[user] < at + delay:
                    self.push_away(user)
        raise NoRoomError

    def place(self, step: Step, at: int) -> None:
        """At a cycle, whoever holds what it needs there."""
        self.starts[step] = at
        for use in step.uses:
            begin, circles = at + use.offset, self.circles(use)
            if use.duration > self.every:
                raise NoRoomError
            held = [circle.holders(begin, use.duration) for circle in circles]
            free = sorted(range(len(circles)), key=lambda i: len(held[i]))[: use.count]
            for other in dict.fromkeys(other for i in free for other in held[i]):
                if other is step:  # it needs the same thing twice, and meets itself
                    raise NoRoomError
                self.push_away(other)
            for i in free:
                circles[i].take(begin, use.duration, step)
            self.lanes[step, use] = free

    def push_away(self, step: Step) -> None:
        at = self.starts.pop(step)
        for use in step.uses:
            for i in self.lanes.pop((step, use), ()):
                self.circles(use)[i].release(at + use.offset)
        heapq.heappush(self.waiting, (self.rank[step], step.number, step))
