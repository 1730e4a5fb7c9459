"""Machine files read and checked.

In: the text of a TOML file. Out: a `SpatialMachine`, or one `MachineError` that names the file, the line, the field,
what was expected and, for a wrong name, the nearest right one. Nothing in a file is executed.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, NoReturn

from tessera.machines import toml
from tessera.machines.spatial.forms import BadForm
from tessera.machines.spatial.grid import Core, Network
from tessera.machines.spatial.schema import REQUIRED, TABLES, SpatialMachine
from tessera.util.errors import MachineError

MOST_CORES = 1 << 24


def read(key: str, text: str) -> SpatialMachine:
    return _Reader(key, text).machine()


class _Reader:
    def __init__(self, key: str, text: str) -> None:
        self.key, self.text = key, text
        self.sources: dict[str, str] = {}

    def machine(self) -> SpatialMachine:
        data = toml.tables(self.key, self.text)
        for name in ("name", "kind"):
            if not isinstance(data.get(name), str):
                self.refuse("", name, f'expected {name} = "…"', missing=name not in data)
        if data["kind"] != "spatial":
            self.refuse("", "kind", f'expected kind = "spatial", got {data["kind"]!r}')
        tables = {name: value for name, value in data.items() if name not in ("name", "kind")}
        self.names("", tables, TABLES, REQUIRED)
        parts = {name: self.table(name, value) for name, value in tables.items()}
        described = SpatialMachine(self.key, data["name"], self.text, self.sources, **parts)
        self.check(described)
        return described

    def table(self, table: str, data: Any) -> Any:
        if not isinstance(data, dict):
            self.refuse("", table, f"expected a table [{table}]")
        known: dict[str, Field[Any]] = {f.name: f for f in fields(TABLES[table])}
        self.names(table, data, known, [n for n, f in known.items() if f.default is MISSING])
        return TABLES[table](**{name: self.value(table, known[name], value) for name, value in data.items()})

    def names(self, table: str, data: Iterable[str], known: Iterable[str], required: Iterable[str]) -> None:
        known = list(known)
        for name in data:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1, 0.5)
                hint = f"; did you mean {near[0]}?" if near else ""
                self.refuse(table, name, f"unknown; expected one of {', '.join(known)}{hint}")
        for name in required:
            if name not in data:
                self.refuse(table, name, "is missing", missing=True)

    def value(self, table: str, of: Field[Any], pair: Any) -> Any:
        if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[1], str) or not pair[1].strip():
            self.refuse(table, of.name, f'expected [value, "source"]: a number and where it comes from, got {pair!r}')
        if pair[1].strip(" :.").lower() == "assumed":
            self.refuse(table, of.name, f'expected why it is assumed, "assumed: why"; got {pair[1]!r}')
        self.sources[f"{table}.{of.name}"] = pair[1]
        try:
            return of.metadata["form"](pair[0])
        except BadForm as error:
            self.refuse(table, of.name, f"expected {error}; got {pair[0]!r}")

    def check(self, m: SpatialMachine) -> None:
        """What one field alone does not show."""
        if m.sram.size % m.sram.banks:
            self.refuse("sram", "banks", f"expected a divisor of sram.size, {m.sram.size}; got {m.sram.banks}")
        if m.sram.align > m.sram.bank_size:
            self.refuse("sram", "align", f"expected at most a bank, {m.sram.bank_size} B; got {m.sram.align}")
        if "default" not in m.vector.cycles:
            self.refuse("vector", "cycles", "expected a default for functions that are not named")
        rows, columns = m.chip.grid
        if rows * columns * m.chip_count > MOST_CORES:
            self.refuse("chip", "grid", f"expected at most {MOST_CORES} cores; got {rows * columns * m.chip_count}")
        if m.chips:
            shape = m.chips.shape
            if m.chips.topology in ("mesh", "torus") and (not shape or shape[0] * shape[1] != m.chips.count):
                self.refuse("chips", "shape", f"expected rows × columns = chips.count, {m.chips.count}; got {shape}")
            if not m.chips.gates and m.chips.count > 1:
                self.refuse("chips", "gates", "expected at least one core where links to other chips end")
        for a, b in m.dead.links:
            if len(a) != len(b):
                self.refuse("dead", "links", f"expected two places of one form; got {list(a)} and {list(b)}")
        named = {"dead": m.dead.cores + tuple(p for pair in m.dead.links for p in pair)}
        named |= {name: getattr(m, name).cores for name in ("host", "dram") if getattr(m, name)}
        named |= {"chips": m.chips.gates} if m.chips else {}
        for table, places in named.items():
            for place in places:
                if len(place) == 3 and table != "dead":
                    self.refuse(table, "", f"expected places [row, column], the same on every chip; got {list(place)}")
                if not m.network.inside(Core(*place) if len(place) == 3 else Core(0, *place)):
                    self.refuse(
                        table, "", f"expected places within {m.chip_count} × {rows}×{columns}; got {list(place)}"
                    )
        whole = Network(m.chip.grid, m.link, m.chips)
        for a, b in m.dead.links:
            here, there = (Core(*place) if len(place) == 3 else Core(0, *place) for place in (a, b))
            if there not in whole.neighbours(here):
                self.refuse("dead", "links", f"expected a link that the machine has; {list(a)} to {list(b)} is none")
        if m.network.all_dead:
            self.refuse("dead", "cores", "expected a core that is alive")
        if (alone := m.network.unreachable()) is not None:
            self.refuse("dead", "", f"expected cores that are connected; nothing reaches {alone}")

    def refuse(self, table: str, name: str, why: str, missing: bool = False) -> NoReturn:
        line = _line(self.text, table, "" if missing else name)
        label = f"{table}.{name}" if table and name else table or name
        raise MachineError(f"{self.key}, line {line}: {label}: {why}")


def _line(text: str, table: str, name: str) -> int:
    """Where a field stands, or its table, or the file's first line."""
    now, at = "", 1
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[+\s*([\w.-]+)", line):
            now = header[1]
            if now == table or (not table and now == name):
                at = number
        elif now == table and name and re.match(rf'\s*["\']?{re.escape(name)}["\']?\s*[=.]', line):
            return number
    return at


def vary(machine: SpatialMachine, changes: Mapping[str, Any], key: str | None = None) -> SpatialMachine:
    """The same machine with other values: `{"chip.grid": [4, 4], "sram.size": "1 MiB"}`. Their source says so."""
    data = tomllib.loads(machine.text)
    for name, value in changes.items():
        table, _, of = name.partition(".")
        if not of:
            raise MachineError(f"{machine.key}: expected the name of a field, such as sram.size; got {name!r}")
        data.setdefault(table, {})[of] = [value, f"assumed: a variant of {machine.key}"]
    head = [f"{name} = {_toml(data[name])}" for name in ("name", "kind")]
    body = []
    for table, values in data.items():
        if isinstance(values, dict):
            body += ["", f"[{table}]", *(f"{name} = {_toml(value)}" for name, value in values.items())]
    return read(key or machine.key, "\n".join([*head, *body, ""]))


def _toml(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            escaped = "".join(f"\\u{ord(c):04x}" if ord(c) < 32 or c in '"\\' or ord(c) == 127 else c for c in value)
            return f'"{escaped}"'
        case list() | tuple():
            return f"[{', '.join(map(_toml, value))}]"
        case dict():
            return f"{{ {', '.join(f'{name} = {_toml(of)}' for name, of in value.items())} }}"
    return repr(value)
