"""Points of a sweep: a machine with some fields changed, compiled for and simulated.

In: a model and a machine. Out: a `Point` for every set of changes. What does not fit is a point without cycles that
says why. A point that was asked for before is not compiled again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch.export import ExportedProgram

from tessera.ir.trace import Trace
from tessera.machines.spatial import SpatialMachine
from tessera.spatial.codesign.fields import changed, text
from tessera.spatial.errors import SpaceError
from tessera.spatial.map import map_onto
from tessera.spatial.simulator.api import cost
from tessera.util.errors import MachineError


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

    model: ExportedProgram | Trace
    machine: SpatialMachine
    chips: int
    effort: str
    seed: int
    points: dict[frozenset, Point] = field(default_factory=dict)

    def point(self, changes: Mapping[str, int]) -> Point:
        own = {name: value for name, value in changes.items() if value != self.machine.value(name)}
        key = frozenset(own.items())
        if key not in self.points:
            self.points[key] = self._point(own)
        return self.points[key]

    def _point(self, changes: Mapping[str, int]) -> Point:
        try:
            machine = changed(self.machine, changes)
            program = map_onto(self.model, machine=machine, chips=self.chips, effort=self.effort, seed=self.seed)
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
