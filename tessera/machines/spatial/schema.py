"""A spatial machine as a tree of frozen dataclasses; one class for each table of its file.

A field's form stands beside it and is the only check of its value. Sizes are bytes, the clock is hertz, a width is
bytes a cycle. What a number owes to whom stands in `SpatialMachine.sources`.
"""

from __future__ import annotations

import functools
import hashlib
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from typing import Any

from tessera.machines.spatial import forms
from tessera.machines.spatial.grid import Core, Edge, Network

DTYPES = (
    "bool", "uint8", "int8", "int16", "int32", "int64", "float8_e4m3fn", "float8_e5m2", "float16", "bfloat16",
    "float32", "float64",
)  # fmt: skip
# Functions of the vector unit by the number of their operands. The infix ones print as operators.
INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==",
    "ne": "!=",
}  # fmt: skip
REDUCTIONS = ("sum", "max", "min", "argmax", "argmin")
_UNARY = (
    "neg exp expm1 log log1p sqrt rsqrt tanh erf gelu gelu_tanh silu sigmoid softplus relu abs sign sin cos floor ceil "
    "round trunc asin acos atan asinh acosh atanh erfinv erfcx lgamma digamma i0 i0e i1 i1e ndtri"
)
_BINARY = (
    "maximum minimum pow remainder atan2 copysign gcd bitwise_and bitwise_or bitwise_xor bitwise_left_shift "
    "bitwise_right_shift"
)
FUNCTIONS: dict[str, int] = {
    **dict.fromkeys(INFIX, 2),
    **dict.fromkeys(REDUCTIONS, 1),
    **dict.fromkeys(_UNARY.split(" "), 1),
    **dict.fromkeys(_BINARY.split(" "), 2),
    "where": 3,
}
PORTS = 1 << 12  # units, ports or banks of a core: each is a thing that a schedule knows
WIDEST, LONGEST = (
    1 << 20,
    1 << 30,
)  # of an array, or lanes; cycles of a way: listings hold their sums


LABEL, SHOWN = 18, 10  # columns of the name of a field, and of a value, where it needs no more


def _as_written(value: Any) -> str:
    """A value with its unit, as the file has it."""
    return ", ".join(f"{name} {of}" for name, of in value.items()) if isinstance(value, dict) else str(value)


def _of(form: forms.Form, default: Any = MISSING) -> Any:
    return field(metadata={"form": form}, default=default)


@dataclass(frozen=True)
class Chip:
    clock: float = _of(forms.quantity("Hz", 1))
    grid: tuple[int, int] = _of(forms.grid)


@dataclass(frozen=True)
class Matrix:
    rows: int = _of(forms.whole(1, WIDEST))
    columns: int = _of(forms.whole(1, WIDEST))
    count: int = _of(forms.whole(1, PORTS))
    stationary: str = _of(forms.choice("weight", "input", "output"))
    loading: str = _of(forms.choice("serial", "overlapped"))
    passes: Mapping[str, float] = _of(forms.table(1e-3, *DTYPES))


@dataclass(frozen=True)
class Vector:
    lanes: int = _of(forms.whole(1, WIDEST))
    cycles: Mapping[str, float] = _of(forms.table(1e-3, "default", "move", *FUNCTIONS))

    def cycles_of(self, function: str) -> float:
        return self.cycles.get(function, self.cycles["default"])


@dataclass(frozen=True)
class Sram:
    size: int = _of(forms.size)
    banks: int = _of(forms.whole(1, PORTS))
    read_ports: int = _of(forms.whole(1, PORTS))
    write_ports: int = _of(forms.whole(1, PORTS))
    width: int = _of(forms.size)
    align: int = _of(forms.size)

    @property
    def bank_size(self) -> int:
        return self.size // self.banks


@dataclass(frozen=True)
class Copy:
    engines: int = _of(forms.whole(0, PORTS))


@dataclass(frozen=True)
class Link:
    topology: str = _of(forms.choice("mesh", "torus"))
    width: int = _of(forms.size)
    latency: int = _of(forms.whole(1, LONGEST))
    jitter: int = _of(forms.whole(0, LONGEST))
    reduce: bool = _of(forms.flag)


@dataclass(frozen=True)
class Host:
    """`latency` and `rate`: cycles until the host has begun and its result can come back, and bytes a cycle that it
    works through; None where nobody says, and then it computes nothing."""

    cores: tuple[tuple[int, ...], ...] = _of(forms.places)
    width: int = _of(forms.size)
    latency: int | None = _of(forms.whole(1, LONGEST), None)
    rate: int | None = _of(forms.size, None)

    @property
    def computes(self) -> bool:
        return self.latency is not None and self.rate is not None


@dataclass(frozen=True)
class Dram:
    cores: tuple[tuple[int, ...], ...] = _of(forms.places)
    size: int = _of(forms.size)
    width: int = _of(forms.size)
    latency: int = _of(forms.whole(0, LONGEST))


@dataclass(frozen=True)
class Chips:
    """How chips are joined; link i of a chip ends at `gates[i % len(gates)]`."""

    count: int = _of(forms.whole(1))
    topology: str = _of(forms.choice("all", "ring", "mesh", "torus"))
    width: int = _of(forms.size)
    latency: int = _of(forms.whole(1, LONGEST))
    jitter: int = _of(forms.whole(0, LONGEST))
    gates: tuple[tuple[int, ...], ...] = _of(forms.places)
    shape: tuple[int, int] | None = _of(forms.grid, None)


@dataclass(frozen=True)
class Level:
    """A tray of chips, a rack of trays, a cluster of racks."""

    count: int = _of(forms.whole(1))


@dataclass(frozen=True)
class Energy:
    """In picojoules: a multiplication with its sum, and a byte that moves."""

    mac: Mapping[str, float] = _of(forms.table(0, *DTYPES))
    sram: float = _of(forms.quantity("pJ"))
    link: float = _of(forms.quantity("pJ"))
    dram: float = _of(forms.quantity("pJ"), 0.0)
    chip_link: float = _of(forms.quantity("pJ"), 0.0)


@dataclass(frozen=True)
class Power:
    chip: float = _of(forms.quantity("W"))


@dataclass(frozen=True)
class Price:
    chip: float = _of(forms.quantity("USD"))


@dataclass(frozen=True)
class Area:
    """Of a whole chip; and of a MiB of memory, a multiplier, a lane, a byte of a link's width, where that is known."""

    chip: float = _of(forms.quantity("mm2"))
    sram: float = _of(forms.quantity("mm2"), 0.0)
    matrix: float = _of(forms.quantity("mm2"), 0.0)
    vector: float = _of(forms.quantity("mm2"), 0.0)
    link: float = _of(forms.quantity("mm2"), 0.0)


@dataclass(frozen=True)
class Dead:
    cores: tuple[tuple[int, ...], ...] = _of(forms.places, ())
    links: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = _of(forms.links, ())


TABLES: dict[str, type] = {
    "chip": Chip, "matrix": Matrix, "vector": Vector, "sram": Sram, "copy": Copy, "link": Link, "host": Host,
    "dram": Dram, "chips": Chips, "tray": Level, "rack": Level, "cluster": Level, "energy": Energy, "power": Power,
    "price": Price, "area": Area, "dead": Dead,
}  # fmt: skip
REQUIRED = ("chip", "matrix", "vector", "sram", "copy", "link")


@dataclass(frozen=True, eq=False, repr=False)
class SpatialMachine:
    """What a file says. `print` it for every number and its source. Two are equal when their files are."""

    key: str
    name: str
    text: str  # of the file
    sources: Mapping[str, str]  # "sram.size" -> who says so
    chip: Chip
    matrix: Matrix
    vector: Vector
    sram: Sram
    copy: Copy
    link: Link
    host: Host | None = None
    dram: Dram | None = None
    chips: Chips | None = None
    tray: Level | None = None
    rack: Level | None = None
    cluster: Level | None = None
    energy: Energy | None = None
    power: Power | None = None
    price: Price | None = None
    area: Area | None = None
    dead: Dead = Dead()
    kind = "spatial"

    @functools.cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    @functools.cached_property
    def network(self) -> Network:
        return Network(self.chip.grid, self.link, self.chips, self.dead.cores, self.dead.links)

    @property
    def chip_count(self) -> int:
        return self.chips.count if self.chips else 1

    def cores(self, chip: int = 0) -> tuple[Core, ...]:
        """The cores of a chip, row by row; dead ones are left out."""
        return self.network.cores(chip)

    def neighbours(self, core: Core) -> Mapping[Core, Edge]:
        """The cores that a link of this core leads to, on this chip and on others."""
        return self.network.neighbours(core)

    def edge(self, source: Core, target: Core) -> Edge | None:
        """The link from one core to another, or None where there is none."""
        return self.network.neighbours(source).get(target) if self.network.alive(source) else None

    def has_cores_of(self, other: SpatialMachine) -> bool:
        """The same cores, by the same names."""
        return (self.chip.grid, self.chip_count, self.dead) == (other.chip.grid, other.chip_count, other.dead)

    def has_host(self, core: Core) -> bool:
        return self.host is not None and core[1:] in self.host.cores

    def has_dram(self, core: Core) -> bool:
        return self.dram is not None and core[1:] in self.dram.cores

    def units(self, core: Core) -> tuple[str, ...]:
        """The names of everything on a core that can be busy, but for ports."""
        matrices = ("matrix",) if self.matrix.count == 1 else tuple(f"matrix{i}" for i in range(self.matrix.count))
        copies = tuple(f"copy{i}" for i in range(self.copy.engines))
        links = tuple(edge.unit for edge in self.neighbours(core).values())
        places = [name for name, has in (("dram", self.has_dram), ("host", self.has_host)) if has(core)]
        if self.host is not None and self.host.computes and self.has_host(core):
            places.append("call")
        return (*matrices, "vector", *copies, *links, *places)

    @property
    def assumptions(self) -> dict[str, str]:
        """The numbers that nobody has published, and why they are what they are."""
        return {name: source for name, source in self.sources.items() if source.startswith("assumed")}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SpatialMachine) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        rows, columns = self.chip.grid
        return f"<SpatialMachine {self.key}: {self.name}, {self.chip_count} × {rows}×{columns} cores>"

    def __str__(self) -> str:
        tables = tomllib.loads(self.text)
        rows = []
        for name, source in self.sources.items():
            table, _, of = name.partition(".")
            rows.append((name, _as_written(tables[table][of][0]), source))
        return "\n".join([self.name, *(f"  {a:<{LABEL}}  {b:<{SHOWN}}  {c}" for a, b, c in rows)])

    def value(self, name: str) -> Any:
        """Of a field by its name in the file, such as "sram.size"."""
        table, _, of = name.partition(".")
        return getattr(getattr(self, table), of)
