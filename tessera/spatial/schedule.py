"""When each step begins: list scheduling over tables of what is held.

In: steps. Out: the cycle at which each begins. The step with the longest way to the end goes first; it begins at the
first cycle at which all it waits for is there and all it holds is free, be it in a gap. The same steps give the same
schedule; small ones are searched for better orders.
"""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect_left, bisect_right
from dataclasses import dataclass

from tessera.machines.spatial import SpatialMachine
from tessera.spatial.steps import Resource, Step, Use


class Lane:
    """One unit, port, bank or link: the times at which it is held."""

    __slots__ = ("ends", "starts")

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []

    def earliest(self, at: int, duration: int) -> int:
        """The first cycle, not before `at`, from which it is free that long."""
        i = bisect_right(self.ends, at)
        starts, ends = self.starts, self.ends
        while i < len(starts) and starts[i] < at + duration:
            at = max(at, ends[i])
            i += 1
        return at

    def hold(self, start: int, end: int) -> None:
        """Neighbouring times become one."""
        i = bisect_left(self.starts, start)
        joins_left = i > 0 and self.ends[i - 1] == start
        joins_right = i < len(self.starts) and self.starts[i] == end
        if joins_left and joins_right:
            self.ends[i - 1] = self.ends.pop(i)
            self.starts.pop(i)
        elif joins_left:
            self.ends[i - 1] = end
        elif joins_right:
            self.starts[i] = start
        else:
            self.starts.insert(i, start)
            self.ends.insert(i, end)


@dataclass(eq=False)
class Schedule:
    steps: list[Step]
    starts: dict[Step, int]
    lanes: dict[tuple[Step, Use], list[int]]  # which of several ports, arrays or engines
    cycles: int
    every: int | None = None  # cycles after which the next run begins; None: after all of them


SHAKES, WORTH = 60, 8000  # orders that are tried, at most; and the steps of all of them together
VAIN = 2400  # the steps of those in a row that bring nothing
REACH = (0.05, 0.15, 0.4)  # how far a step is moved, of all cycles
SHORT = 16  # a step so many times shorter goes before another that ends as far from the end


After = dict[Step, list[tuple[Step, int]]]  # what each step waits for, and how many cycles after its start


def schedule(steps: list[Step], machine: SpatialMachine, window: int = 0) -> Schedule:
    """The step with the longest way to the end first; with a window, all in order and few at once."""
    after = {s: s.after for s in steps}
    uses = {s: s.uses for s in steps}
    if window:
        return Pass(steps, machine, after, uses, {s: (0, s.number) for s in steps}, window).run()
    return Pass(steps, machine, after, uses, ranks(steps)).run()


def ranks(steps: list[Step]) -> dict[Step, tuple[int, int]]:
    """Earlier batches first, then what is farthest from the end. Of steps about as far, short ones first: a send before
    the product that would hold its bank for long."""
    longest = urgency(steps)
    return {s: (s.batch, s.duration // SHORT - longest[s]) for s in steps}


def polished(best: Schedule, machine: SpatialMachine, rounds: int = 3) -> Schedule:
    """A schedule that is not longer: all steps as late as they can, last ones first; then as early as they can, in the
    order which that gives. Steps that hold others up move together, and what they left is used."""
    steps, current = best.steps, best
    ends = {s: s.end for s in steps}
    back: After = {s: [] for s in steps}
    for s in steps:
        for before, delay in s.after:
            back[before].append((s, delay + ends[s] - ends[before]))
    mirrored = {
        s: [Use(u.resource, ends[s] - u.offset - u.duration, u.duration, u.count) for u in s.uses] for s in steps
    }
    after, uses = {s: s.after for s in steps}, {s: s.uses for s in steps}
    for _ in range(rounds):
        rank = {s: (0, -(current.starts[s] + ends[s])) for s in steps}
        late = Pass(steps[::-1], machine, back, mirrored, rank).run()
        rank = {s: (0, -(late.starts[s] + ends[s])) for s in steps}
        current = Pass(steps, machine, after, uses, rank).run()
        if current.cycles >= best.cycles:
            break
        best = current
    return best


def searched(best: Schedule, machine: SpatialMachine, least: int) -> Schedule:
    """A schedule that is not longer, of few steps: the order of the best so far is shaken, and that polished. Some
    order gives the shortest schedule, and small programs have few. Ends at `least`, which none is shorter than, and
    where several in a row bring nothing: in large programs most do not."""
    chance, steps = random.Random(0), best.steps
    after, uses = {s: s.after for s in steps}, {s: s.uses for s in steps}
    vain, patience = 0, max(1, VAIN // max(len(steps), 1))
    for number in range(min(SHAKES, WORTH // max(len(steps), 1))):
        if best.cycles <= least or vain == patience:
            break
        reach = best.cycles * REACH[number % len(REACH)]
        rank = {s: (s.batch, best.starts[s] + int(chance.uniform(-reach, reach))) for s in steps}
        tried = polished(Pass(steps, machine, after, uses, rank).run(), machine)
        vain = 0 if tried.cycles < best.cycles else vain + 1
        if not vain:
            best = tried
    return best


class NoRoomError(Exception):
    """No cycle of a round is free."""


class Pass:
    """Places steps one by one; of those that wait for nothing, the one of least rank. Whoever has waited for `round`
    cycles in vain has seen all there is."""

    round: float = math.inf

    def __init__(
        self, steps: list[Step], machine: SpatialMachine, after: After, uses: dict[Step, list[Use]],
        rank: dict[Step, tuple[int, int]], window: int = 0,
    ) -> None:  # fmt: skip
        self.steps, self.machine, self.window = steps, machine, window
        self.after, self.uses, self.rank = after, uses, rank
        self.tables: dict[Resource, list[Lane]] = {}
        self.starts: dict[Step, int] = {}
        self.lanes: dict[tuple[Step, Use], list[int]] = {}

    def run(self) -> Schedule:
        users: dict[Step, list[Step]] = {s: [] for s in self.steps}
        missing = {s: len(self.after[s]) for s in self.steps}
        for s in self.steps:
            for before, _ in self.after[s]:
                users[before].append(s)
        ready = [(self.rank[s], s.number, s) for s in self.steps if not missing[s]]
        heapq.heapify(ready)
        begun: list[int] = []  # starts in the order of placing, for the window
        while ready:
            _, _, step = heapq.heappop(ready)
            at = max((self.starts[b] + delay for b, delay in self.after[step]), default=0)
            if self.window and len(begun) >= self.window:
                at = max(at, begun[-self.window])
            self.place(step, max(at, 0))
            begun.append(self.starts[step])
            for user in users[step]:
                missing[user] -= 1
                if not missing[user]:
                    heapq.heappush(ready, (self.rank[user], user.number, user))
        assert len(begun) == len(self.steps), "steps wait for each other"
        cycles = max((self.starts[s] + s.end for s in self.steps), default=0)
        return Schedule(self.steps, self.starts, self.lanes, cycles)

    def place(self, step: Step, at: int) -> None:
        held = self.held(step)
        at = self.starts[step] = self.begin(held, at)
        for use, lanes in held:
            begin = at + use.offset
            free = [i for i, lane in enumerate(lanes) if lane.earliest(begin, use.duration) == begin][: use.count]
            for i in free:
                lanes[i].hold(begin, begin + use.duration)
            self.lanes[step, use] = free

    def held(self, step: Step) -> list[tuple[Use, list[Lane]]]:
        """What a step holds."""
        return [(use, self.table(use.resource)) for use in self.uses[step]]

    def begin(self, held: list[tuple[Use, list[Lane]]], at: int) -> int:
        """The first cycle at which all is free."""
        last = at + self.round
        while at < last:
            start = at
            for use, lanes in held:
                start = self.free(use, lanes, start + use.offset) - use.offset
            if start == at:
                return at
            at = start
        raise NoRoomError

    def free(self, use: Use, lanes: list[Lane], at: int) -> int:
        """The first cycle from which enough lanes are free."""
        if len(lanes) == 1:
            return lanes[0].earliest(at, use.duration)
        last = at + self.round
        while at < last:
            times = sorted(lane.earliest(at, use.duration) for lane in lanes)
            if times[use.count - 1] == at:
                return at
            at = times[use.count - 1]
        raise NoRoomError

    def table(self, resource: Resource) -> list[Lane]:
        if (known := self.tables.get(resource)) is None:
            known = self.tables[resource] = [self.lane() for _ in range(capacity(resource, self.machine))]
        return known

    def lane(self) -> Lane:
        return Lane()


def capacity(resource: Resource, machine: SpatialMachine) -> int:
    """How many there are of a resource."""
    match resource:
        case ("read", _):
            return machine.sram.read_ports
        case ("write", _):
            return machine.sram.write_ports
        case ("unit", _, "matrix"):
            return machine.matrix.count
        case ("unit", _, "copy"):
            return machine.copy.engines
    return 1


def urgency(steps: list[Step]) -> dict[Step, int]:
    """The longest way from the start of each step to the end, as if sums of one matrix on one core had to be taken one
    after the other: then results of the first leave while the next is computed."""
    longest = {s: s.end for s in steps}
    before = _sum_before(steps)
    for s in reversed(steps):
        for b, delay in s.after:
            longest[b] = max(longest[b], delay + longest[s])
        if (b := before.get(s)) is not None:
            longest[b] = max(longest[b], b.duration + longest[s])
    return longest


def _sum_before(steps: list[Step]) -> dict[Step, Step]:
    """For the first product of a sum: the last one of the sum before it."""
    last_before: dict[Step, Step] = {}
    last: dict[tuple, Step] = {}
    for s in steps:
        if s.kind == "product" and s.target is not None:
            key = s.core, s.target.tile.home
            if key in last and not s.add:
                last_before[s] = last[key]
            last[key] = s
    return last_before
