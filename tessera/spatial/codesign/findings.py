"""What a sweep says: the front, elasticities, where more buys nothing, and what to ask for.

In: a `Bench`, which compiles and simulates points. Out: plain records. Nothing here is estimated: each number is the
ratio of two simulated times.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tessera.spatial.codesign.fields import DIALS, Dial, current, snapped, text
from tessera.spatial.codesign.points import Bench, Point

STEP = 0.1  # of an elasticity, up and down
NOTHING = 0.005  # a change of the time that is none


@dataclass(frozen=True)
class Elasticity:
    """One percent more of a field (less of a latency) takes so many percent off the time."""

    dial: Dial
    percent: float
    low: Point
    high: Point

    def __str__(self) -> str:
        return f"{round(self.percent, 2) + 0.0:.2f} %"  # nothing is no less than nothing

    @property
    def coarse(self) -> bool:
        """The field has no values as near as ten percent."""
        low, high = (point.changes.get(self.dial.name) for point in (self.low, self.high))
        return low is not None and high is not None and high > low * (1 + 3 * STEP)


@dataclass(frozen=True)
class Knee:
    """The value of a field beyond which more of it (less of a latency) buys nothing."""

    dial: Dial
    value: int
    within: bool  # False: the last value tried still buys something


@dataclass(frozen=True)
class Ask:
    """One field changed twofold."""

    dial: Dial
    value: int
    point: Point
    gain: float  # the share of the time that it saves; 1 where only this makes the model fit

    @property
    def name(self) -> str:
        return f"{self.dial.name} = {text(self.dial.name, self.value)}"


def grid(bench: Bench, axes: Mapping[str, Sequence[int]]) -> list[Point]:
    """Every combination of the values."""
    return [bench.point(dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())]


def front(points: Sequence[Point], dials: Sequence[Dial], own: Mapping[str, int]) -> list[Point]:
    """The points that no other beats: faster, and with a smaller chip. Where nobody knows areas, with less of each
    field."""

    def costs(point: Point) -> tuple[float, ...]:
        if point.area is not None:
            return (point.area,)
        signs = ((-1 if dial.less else 1, dial.name) for dial in dials)
        return tuple(sign * point.changes.get(name, own[name]) for sign, name in signs)

    fitting = [p for p in points if p.fits]
    goals = [(p.seconds, *costs(p)) for p in fitting]

    def beaten(mine: tuple[float, ...]) -> bool:
        return any(other != mine and all(a <= b for a, b in zip(other, mine, strict=True)) for other in goals)

    kept = [p for p, mine in zip(fitting, goals, strict=True) if not beaten(mine)]
    return sorted(kept, key=lambda p: (p.seconds, p.area or 0))


def elasticity(bench: Bench, dial: Dial) -> Elasticity | None:
    """From recompiling with ten percent less and ten percent more, or the nearest values that the field can have."""
    now = current(bench.machine, dial)
    low, high = (snapped(bench.machine, dial, now * (1 + sign * STEP)) for sign in (-1, 1))
    low, high = (low if low != now else snapped(bench.machine, dial, now - 1)), (high if high != now else now + 1)
    less, more = bench.point({dial.name: low}), bench.point({dial.name: high})
    if not (less.fits and more.fits) or low in (0, high):
        return None
    slope = math.log(more.seconds / less.seconds) / math.log(high / low)
    return Elasticity(dial, slope if dial.less else -slope, less, more)


def knee(bench: Bench, dial: Dial, values: Sequence[int]) -> Knee | None:
    """Over the values of one field, the others as they are."""
    order = sorted(values, reverse=dial.less)
    times = [bench.point({dial.name: value}).seconds for value in order]
    if math.isinf(min(times)):
        return None
    at = next(i for i in range(len(order)) if times[i] <= (1 + NOTHING) * min(times[i:]))
    return Knee(dial, order[at], at < len(order) - 1)


def asks(bench: Bench, dials: Sequence[Dial]) -> list[Ask]:
    """Every field twice as good, the change that saves most first."""
    base = bench.point({})
    answers = []
    for dial in dials:
        now = current(bench.machine, dial)
        value = snapped(bench.machine, dial, now / 2 if dial.less else 2 * now)
        if value == now:
            continue
        point = bench.point({dial.name: value})
        if point.fits:
            answers.append(Ask(dial, value, point, 1 - point.seconds / base.seconds if base.fits else 1.0))
    return sorted(answers, key=lambda ask: -ask.gain)


def dials_of(bench: Bench) -> list[Dial]:
    """The fields that this machine has. The clock is left out: twice the clock is twice as fast, whatever the model."""
    machine = bench.machine
    used = [d for d in DIALS.values() if d.name != "chip.clock" and getattr(machine, d.name.partition(".")[0])]
    return [d for d in used if bench.chips > 1 or not d.name.startswith("chips.")]
