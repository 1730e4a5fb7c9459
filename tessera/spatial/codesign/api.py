"""`tessera.codesign`: what to change in a machine for a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch.export import ExportedProgram

from tessera.ir.trace import Trace
from tessera.machines.find import spatial_machine
from tessera.machines.spatial import SpatialMachine
from tessera.spatial.capture import captured
from tessera.spatial.codesign.fields import Dial, axis, current, text
from tessera.spatial.codesign.findings import (
    NOTHING,
    Ask,
    Elasticity,
    Knee,
    asks,
    dials_of,
    elasticity,
    front,
    grid,
    knee,
)
from tessera.spatial.codesign.points import Bench, Point
from tessera.util.errors import OptionError

MOST = 256  # points of a grid
ASKED = 3


@dataclass(frozen=True)
class Codesign:
    """What a sweep found. `print` it, or take its `data()` as JSON."""

    machine: SpatialMachine
    base: Point
    points: list[Point]
    front: list[Point]
    elasticities: list[Elasticity]
    knees: list[Knee]
    asks: list[Ask]  # three at most, the best first
    together: Point | None  # all of them at once

    def data(self) -> dict[str, object]:
        """As JSON has it."""
        slopes = {e.dial.name: {"percent": e.percent, "coarse": e.coarse} for e in self.elasticities}
        knees = {k.dial.name: {"value": k.value, "within": k.within} for k in self.knees}
        wanted = [{"field": a.dial.name, "value": a.value, "gain": a.gain, "point": a.point.data()} for a in self.asks]
        return {
            "machine": self.machine.key, "base": self.base.data(), "points": [p.data() for p in self.points],
            "front": [p.data() for p in self.front], "elasticities": slopes, "nothing_beyond": knees, "asks": wanted,
            "together": self.together.data() if self.together else None, "assumed": sorted(self.machine.assumptions),
        }  # fmt: skip

    def __str__(self) -> str:
        lines = [f"{self.machine.name}: {told(self.base)}"]
        if self.points:
            lines += ["", f"The front, {len(self.front)} of {len(self.points)} points:"]
            lines += [f"  {told(p)}  {p.name}" for p in self.front]
        if self.knees:
            lines += ["", "Where more buys nothing:", *(f"  {_beyond(k)}" for k in self.knees)]
        if self.elasticities:
            lines += ["", "What one percent buys:"]
            lines += [f"  {e.dial.name:<18}{e!s:>9}{_fine(e)}" for e in self.elasticities]
        lines += ["", "What to ask for:" if self.asks else "No single field made twice as good saves time."]
        for number, ask in enumerate(self.asks, 1):
            saved = f"{ask.gain:.1%} of the time" if self.base.fits else "it fits then"
            lines.append(f"  {number}. {ask.name}: {saved}; {told(ask.point)}")
        if self.together and len(self.asks) > 1:
            lines.append(f"  together: {told(self.together)}")
        if owed := len(self.machine.assumptions):
            lines += ["", f"{owed} of {len(self.machine.sources)} numbers of {self.machine.key} are assumed."]
        return "\n".join(lines)


def codesign(
    model: Callable | ExportedProgram | Trace,
    *args: object,
    machine: str | Path | SpatialMachine,
    vary: Mapping[str, object] | None = None,
    chips: int = 1,
    points: int = 4,
    effort: str = "quick",
    seed: int = 0,
    **kwargs: object,
) -> Codesign:
    """Say which change of a spatial machine would make a model faster: every point is compiled and simulated.

    machine  a name, a TOML file, or what `tessera.machine` gives
    vary     fields and values: {"sram.size": "250MB..1GB", "link.bandwidth": "x0.5..x2", "vector.lanes": [32, 64]}
    chips    how many to use
    points   of each range
    effort   how many mappings are tried for each point: quick, normal or thorough
    seed     of the search
    """
    onto = machine if isinstance(machine, SpatialMachine) else spatial_machine(machine)
    axes = _axes(onto, vary, points)
    bench = Bench(captured(model, args, kwargs), onto, chips, effort, seed)
    _found(bench, axes)
    return _found(bench, axes)  # once more: a point may have become faster when a poorer one was known


def _found(bench: Bench, axes: dict[str, tuple[Dial, list[int]]]) -> Codesign:
    varied = [dial for dial, _ in axes.values()]
    swept = grid(bench, {dial.name: values for dial, values in axes.values()}) if axes else []
    wanted = asks(bench, dials_of(bench))
    base = bench.point({})
    useful = [ask for ask in wanted if ask.gain > NOTHING][:ASKED]
    turned = {d.name: d for d in (*varied, *(ask.dial for ask in wanted if ask.gain > NOTHING))}
    slopes = [slope for dial in turned.values() if base.fits and (slope := elasticity(bench, dial))]
    knees = [bend for dial, values in axes.values() if (bend := knee(bench, dial, values))]
    own = {dial.name: current(bench.machine, dial) for dial in varied}
    together = bench.point({ask.dial.name: ask.value for ask in useful}) if useful else None
    best, slopes = front(swept, varied, own), sorted(slopes, key=lambda e: -e.percent)
    return Codesign(bench.machine, base, swept, best, slopes, knees, useful, together)


def _axes(machine: SpatialMachine, vary: Mapping[str, object] | None, points: int) -> dict[str, tuple[Dial, list[int]]]:
    if vary is None:
        return {}
    if not vary or not isinstance(vary, Mapping):
        got = repr(vary) if vary else "an empty sweep"
        raise OptionError(f'vary: expected fields and values, such as {{"sram.size": "x0.5..x2"}}; got {got}')
    if points < 2:
        raise OptionError(f"points: expected 2 or more of each range, got {points}")
    axes = {name: axis(machine, name, given, points) for name, given in vary.items()}
    if len({dial.name for dial, _ in axes.values()}) < len(axes):
        raise OptionError(f"vary: expected each field once, got {', '.join(axes)}")
    if (number := math.prod(len(values) for _, values in axes.values())) > MOST:
        raise OptionError(f"vary: expected at most {MOST} points, got {number:,}; give fewer values or fewer fields")
    return axes


def told(point: Point) -> str:
    if not point.fits:
        return f"refused: {point.reason}"
    energy = "" if point.joules is None else f", {point.joules * 1e6:,.3f} µJ"
    area = "" if point.area is None else f", {point.area:,.1f} mm²"
    return f"{point.cycles:,} cycles, {point.seconds * 1e6:,.3f} µs{energy}{area}"


def _beyond(knee: Knee) -> str:
    value = text(knee.dial.name, knee.value)
    if not knee.within:
        return f"{knee.dial.name}: {value}, the last one tried, still buys something"
    return f"{knee.dial.name}: {'below' if knee.dial.less else 'beyond'} {value}"


def _fine(slope: Elasticity) -> str:
    less = " for one percent less" if slope.dial.less else ""
    return f"{less}   (between neighbouring values)" if slope.coarse else less
