"""The fields of a machine that a sweep may change, and their values.

In: a machine, the name of a field, and what a user writes: `"250MB..1GB"`, `"x0.5..x2"`, `[32, 64]`. Out: whole numbers
in the field's own unit, in order, the machine's own among them; or one error that says what was expected.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from tessera.machines.spatial import SpatialMachine, forms
from tessera.machines.spatial.read import vary
from tessera.machines.spatial.schema import TABLES
from tessera.util.errors import OptionError

_NUMBER = re.compile(r"(x)?\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z/]*)")


@dataclass(frozen=True)
class Dial:
    """A field that an architect can turn, and which way is better."""

    name: str
    less: bool = False
    per_second: bool = False  # the user gives bytes a second, the file has bytes a cycle

    @property
    def better(self) -> str:
        return "less" if self.less else "more"


DIALS = {
    dial.name: dial
    for dial in (
        Dial("matrix.rows"), Dial("matrix.columns"), Dial("matrix.count"), Dial("vector.lanes"), Dial("sram.size"),
        Dial("sram.width"), Dial("sram.read_ports"), Dial("sram.write_ports"), Dial("sram.banks"),
        Dial("copy.engines"), Dial("link.width"), Dial("link.latency", less=True), Dial("host.width"),
        Dial("dram.width"), Dial("dram.latency", less=True), Dial("chips.width"), Dial("chips.latency", less=True),
        Dial("chip.clock"), Dial("link.jitter", less=True), Dial("chips.jitter", less=True), Dial("dram.size"),
    )
}  # fmt: skip
MAY_BE_NONE = ("link.jitter", "chips.jitter", "dram.latency", "copy.engines")
WIDTHS = ("sram", "link", "host", "dram", "chips")


def dial(machine: SpatialMachine, name: str) -> Dial:
    """The field of that name, which this machine must have; `link.bandwidth` is `link.width` by the second."""
    table, _, of = name.partition(".")
    bandwidth = of == "bandwidth" and table in WIDTHS
    known = DIALS.get(f"{table}.width" if bandwidth else name)
    if known is None or getattr(machine, table) is None:
        here = [*(n for n in DIALS if getattr(machine, n.partition(".")[0]) is not None)]
        here += [f"{t}.bandwidth" for t in WIDTHS if getattr(machine, t) is not None]
        near = difflib.get_close_matches(name, here, 1, 0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise OptionError(f"vary: {machine.key} has no field {name!r} to vary; expected {', '.join(here)}{hint}")
    return Dial(known.name, known.less, bandwidth)


def axis(machine: SpatialMachine, name: str, given: object, points: int) -> tuple[Dial, list[int]]:
    """The values of one field, in order; of a range so many, each the same share above the one before."""
    of = dial(machine, name)
    match given:
        case str() if ".." in given:
            low, high = (_value(machine, of, end) for end in given.split("..", 1))
            if not 0 < low <= high:
                raise OptionError(f"vary: {name}: expected a range from a smaller value to a larger one, got {given!r}")
            values = [low * (high / low) ** (i / max(points - 1, 1)) for i in range(points)]
        case str():
            values = [_value(machine, of, part) for part in given.split(",") if part.strip()]
        case Sequence():
            values = [_value(machine, of, part) for part in given]
        case _:
            values = [_value(machine, of, given)]
    if not values:
        raise OptionError(f"vary: {name}: expected at least one value, got {given!r}")
    return of, sorted({*(snapped(machine, of, value) for value in values), current(machine, of)})


def current(machine: SpatialMachine, of: Dial) -> int:
    return int(machine.value(of.name))


def snapped(machine: SpatialMachine, of: Dial, value: float) -> int:
    """The nearest value that the field can have."""
    whole = max(round(value), 0 if of.name in MAY_BE_NONE else 1)
    if of.name == "sram.size":
        step = math.lcm(machine.sram.banks, machine.sram.align)
        whole = max(round(whole / step), 1) * step
    return whole


def changed(machine: SpatialMachine, values: Mapping[str, int]) -> SpatialMachine:
    """The machine with these fields."""
    return vary(machine, {name: _as_written(name, value) for name, value in values.items()}) if values else machine


def text(name: str, value: int) -> str:
    return str(_as_written(name, value))


def _as_written(name: str, value: int) -> Any:
    """As a machine's file has it: with a unit where the field has a dimension."""
    unit = _unit(name)
    if unit == "B":
        for size, prefix in ((2**30, "Gi"), (2**20, "Mi"), (2**10, "Ki")):
            if value >= size and value % size == 0:
                return f"{value // size} {prefix}B"
    return f"{value} {unit}" if unit else value


def _unit(name: str) -> str:
    table, _, of = name.partition(".")
    form = next(f.metadata["form"] for f in fields(TABLES[table]) if f.name == of)
    return "B" if form is forms.size else "Hz" if name == "chip.clock" else ""


def _value(machine: SpatialMachine, of: Dial, given: object) -> float:
    unit = "B/s" if of.per_second else _unit(of.name)
    example = f'"64 {unit}" or "1.5 M{unit}"' if unit else "64"
    expected = f"vary: {of.name}: expected numbers such as {example}, or factors such as x2; got {given!r}"
    match = _NUMBER.fullmatch(str(given).strip())
    if match is None:
        raise OptionError(expected)
    times, number, behind = match.groups()
    if times:
        if behind:
            raise OptionError(expected)
        return float(number) * current(machine, of)
    prefix = behind.removesuffix(unit)
    if not behind.endswith(unit) or prefix not in forms.PREFIXES or (prefix and not unit):
        raise OptionError(expected if not unit or behind else f"{expected}, without its unit")
    value = float(number) * forms.PREFIXES[prefix]
    return value / machine.chip.clock if of.per_second else value
