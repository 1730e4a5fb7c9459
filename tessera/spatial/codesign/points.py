"""Points of a sweep: a machine with some fields changed, compiled for and simulated.

In: a model and a machine. Out: a `Point` for every set of changes. What does not fit is a point without cycles that
says why. A point that was asked for before is not compiled again. More bandwidth, memory or links, and less latency,
should not cost time: where a point is slower than a poorer one, it is compiled with the tiles of that one too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tessera.machines.spatial import SpatialMachine
from tessera.spatial.capture import Captured
from tessera.spatial.codesign.fields import DIALS, changed, text
from tessera.spatial.errors import SpaceError
from tessera.spatial.map import map_onto
from tessera.spatial.simulator.api import cost
from tessera.util.errors import MachineError
from tessera.util.garbage import collection_paused

LONGER = ("matrix.rows", "matrix.columns", "chip.clock")  # of which more may take more cycles


@dataclass(frozen=True)
class Point:
    changes: Mapping[str, int]  # of fields, in their own unit
    cycles: int | None  # None: refused
    seconds: float
    bound: int = 0
    reason: str = ""  # what the bound is, or why it was refused
    joules: float | None = None
    area: float | None = None  # of a chip, mm²

    @property
    def fits(self) -> bool:
        return self.cycles is not None

    @property
    def name(self) -> str:
        return ", ".join(f"{name} = {text(name, value)}" for name, value in self.changes.items()) or "as it is"

    def data(self) -> dict[str, object]:
        seconds = self.seconds if self.fits else None
        return {
            "changes": dict(self.changes), "cycles": self.cycles, "seconds": seconds, "bound": self.bound,
            "reason": self.reason, "joules": self.joules, "area_mm2": self.area,
        }  # fmt: skip


@dataclass
class Bench:
    """Compiles and simulates one model for variants of one machine."""

    model: Captured
    machine: SpatialMachine
    chips: int
    effort: str
    seed: int
    points: dict[frozenset, Point] = field(default_factory=dict)

    def point(self, changes: Mapping[str, int]) -> Point:
        own = {name: value for name, value in changes.items() if value != self.machine.value(name)}
        key = frozenset(own.items())
        if key not in self.points:
            self.keep(self._point(own))
        return self.points[key]

    def keep(self, point: Point) -> None:
        """Keep a point; one that is slower than a poorer one with the tiles of that, where these make it faster."""
        fresh = [point]
        while fresh:
            point = fresh.pop()
            key = frozenset(point.changes.items())
            if key in self.points and self.points[key].seconds <= point.seconds:
                continue
            self.points[key] = point
            for other in list(self.points.values()):
                for poor, rich in ((point, other), (other, point)):
                    if poor.seconds < rich.seconds and self.poorer(poor, rich):
                        fresh.append(self._point(rich.changes, changed(self.machine, poor.changes)))

    def poorer(self, one: Point, other: Point) -> bool:
        """Nothing is better than in the other. Of arrays none is: a larger one takes longer to fill."""
        for name in {*one.changes, *other.changes}:
            value, more = (p.changes.get(name, self.machine.value(name)) for p in (one, other))
            if value != more and (name in LONGER or (value > more) != DIALS[name].less):
                return False
        return True

    @collection_paused()
    def _point(self, changes: Mapping[str, int], like: SpatialMachine | None = None) -> Point:
        try:
            machine = changed(self.machine, changes)
            program = map_onto(
                self.model,  # type: ignore[arg-type]  # captured once, for all points
                machine=machine,
                chips=self.chips,
                effort=self.effort,
                seed=self.seed,
                like=like,
            )
        except (SpaceError, MachineError) as error:
            return Point(changes, None, float("inf"), reason=str(error))
        # The simulator has the last word on the time, and counts the energy.
        report = cost(program)
        return Point(
            changes, report.cycles, report.seconds, program.bound, program.reasons[0], report.joules, self.area(machine)
        )

    def area(self, machine: SpatialMachine) -> float | None:
        """Of a chip: what the file says, and what is more or less of each part."""
        of = self.machine.area
        if of is None:
            return None
        cores = len(machine.cores())

        def parts(m: SpatialMachine) -> float:
            multipliers = m.matrix.rows * m.matrix.columns * m.matrix.count
            inside = of.sram * m.sram.size / 2**20 + of.matrix * multipliers + of.vector * m.vector.lanes
            return inside + of.link * m.link.width

        return of.chip + cores * (parts(machine) - parts(self.machine))
