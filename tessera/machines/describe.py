"""A machine as numbers that a cost model reads.

In: a name, or a TOML file; or a JSON file, as `tessera bench machine` writes what it measured. Out: a `Machine`, which
prints every figure with its unit and its source. A figure is what one device has, unless its name says otherwise: a
unit is a multiprocessor of a GPU, or a core of a CPU. Rates are dense, and decimal; sizes of memories inside the chip
are binary. A figure that is not known is not there, and whoever asks for it is told which machine lacks it.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from tessera.machines import toml
from tessera.machines.spatial import forms
from tessera.util.errors import MachineError, OptionError

# name -> (unit, meaning). A name with a dot has a dtype or a kind of link behind it.
FIGURES = {
    "units": ("", "multiprocessors, or cores"),
    "clock": ("Hz", "at full load"),
    "memory": ("B", "main memory"),
    "bandwidth": ("B/s", "of main memory, as a copy reaches it, bytes read and written"),
    "peak_bandwidth": ("B/s", "of main memory, as promised"),
    "triad_bandwidth": ("B/s", "of main memory, as the sum of two vectors reaches it"),
    "l2_bandwidth": ("B/s", "as a copy reaches it that stays in the cache which all units share"),
    "l2": ("B", "cache that all units share"),
    "l1": ("B", "cache of a unit"),
    "shared": ("B", "shared memory of a unit"),
    "shared_block": ("B", "shared memory that one block may have"),
    "registers": ("", "of 32 bits, of a unit"),
    "registers_thread": ("", "of 32 bits, that one thread may have"),
    "threads": ("", "resident on a unit"),
    "vector_bits": ("bit", "of a vector register"),
    "vector_registers": ("", "of a unit"),
    "vector_pipes": ("", "fused multiply-adds on vectors that a unit begins in a cycle"),
    "flops": ("FLOP/s", "of plain units, by dtype"),
    "matrix": ("FLOP/s", "of matrix units, by dtype"),
    "sustained": ("FLOP/s", "of matrix units in large products, for as long as a step takes, by dtype"),
    "attention": ("FLOP/s", "of causal attention in 16 bits, over heads of 128 and thousands of tokens, by direction"),
    "link": ("B/s", "to other devices, all links together, one way, by kind"),
    "devices": ("", "that one switch joins"),
    "power": ("W", "of the board"),
    "launch": ("s", "of the host, for one kernel"),
    "call": ("s", "of the host, for one operator of PyTorch"),
    "kernel": ("s", "of a GPU, for one that does nothing and was launched before the last one was done"),
    "fork": ("s", "to start a team of threads"),
}
_DATA = "data"
LAUNCH = 4e-6


@dataclass(frozen=True)
class Figure:
    value: float
    source: str


@dataclass(frozen=True, repr=False, eq=False)
class Machine:
    """What one device can do; `print` it, or read `machine["matrix.bfloat16"]`. A machine is equal to itself alone."""

    key: str  # the name it is asked for by
    name: str
    kind: str  # "gpu" or "cpu"
    architecture: str  # "sm_90", "x86-64-v4", "armv8.2-a"
    figures: Mapping[str, Figure]

    def __getitem__(self, figure: str) -> float:
        if figure not in self.figures:
            raise OptionError(f"{self.name}: nothing is known of {figure!r}; known are {', '.join(self.figures)}")
        return self.figures[figure].value

    def __contains__(self, figure: str) -> bool:
        return figure in self.figures

    def first_of(self, *figures: str) -> float:
        """The first of these figures that is known."""
        return self[next((name for name in figures if name in self.figures), figures[-1])]

    def size(self, figure: str) -> int:
        """A figure that counts something: bytes, registers, threads."""
        return int(self[figure])

    @property
    def units(self) -> int:
        return self.size("units")

    @property
    def capability(self) -> int:
        """Of a GPU, as `sm_90` says it: 90."""
        return int(self.architecture.removeprefix("sm_"))

    @property
    def copies_in_bulk(self) -> bool:
        """Whether one instruction of a GPU copies a tile between memory and shared memory (TMA)."""
        return self.capability >= 90

    @property
    def bandwidth(self) -> float:
        return self["bandwidth"]

    @property
    def flops(self) -> float:
        return self["flops.float32"]

    @property
    def cycles(self) -> float:
        """Of all units together, in a second."""
        return self.units * self["clock"]

    @property
    def launch(self) -> float:
        """Seconds of the host for one kernel; where a description does not say, what hosts of these years take."""
        known = self.figures.get("launch")
        return known.value if known else LAUNCH

    @property
    def matrix_flops(self) -> float:
        """In 16 bits; what plain units do where there are no matrix units."""
        return self.first_of("matrix.bfloat16", "flops.float32")

    def data(self) -> dict[str, object]:
        """As a description's file holds it."""
        figures = {name: [f.value, f.source] for name, f in self.figures.items()}
        return {"name": self.name, "kind": self.kind, "architecture": self.architecture, "figures": figures}

    def __repr__(self) -> str:
        return f"<Machine {self.key}: {self.name}, {self.architecture}>"

    def __str__(self) -> str:
        lines = [f"{self.name} ({self.architecture})"]
        rows = [(name, figure_text(name, f.value), f.source) for name, f in self.figures.items()]
        widths = [max(len(row[i]) for row in rows) for i in range(2)]
        return "\n".join([*lines, *(f"  {a:<{widths[0]}}  {b:>{widths[1]}}  {c}" for a, b, c in rows)])


@functools.cache
def machine(which: str | Path) -> Machine:
    """The machine of that name, or the one that a file describes; the same object every time."""
    path = Path(which)
    if path.suffix in (".json", ".toml"):
        if not path.is_file():
            raise OptionError(f"machine: there is no file {path}")
        text = path.read_text(encoding="utf-8")
        return read_json(path.stem, text) if path.suffix == ".json" else read(path.stem, text)
    key = str(which).lower()
    if key not in known():
        raise OptionError(f"machine: unknown {str(which)!r}; there are {', '.join(known())}, or a TOML or JSON file")
    return read(key, shipped()[key][1])


@functools.cache
def shipped() -> dict[str, tuple[str, str]]:
    """The machines that come with Tessera, by name: what kind each is, and its file."""
    texts = {
        file.name.removesuffix(".toml"): file.read_text(encoding="utf-8")
        for file in (files(__package__) / _DATA).iterdir()
        if file.name.endswith(".toml")
    }
    return {name: (kind_of(text), text) for name, text in sorted(texts.items())}


def kind_of(text: str) -> str:
    """What a machine's file says it is, without reading all of it."""
    line = re.search(r'^kind = "(\w+)"', text, re.MULTILINE)
    return line[1] if line else ""


@functools.cache
def known(kind: str | None = None) -> tuple[str, ...]:
    """The names of all GPUs and CPUs, or of one kind."""
    return tuple(name for name, (of, _) in shipped().items() if of == kind or (kind is None and of in ("gpu", "cpu")))


def read(key: str, text: str) -> Machine:
    """A TOML file, checked. `[device]` has the figures without a dot, the other tables those of their name."""
    data = toml.tables(key, text)
    head: dict[str, str] = {}
    for name in ("name", "kind", "architecture"):
        value = data.pop(name, None)
        if not isinstance(value, str):
            raise MachineError(f'{key}: expected {name} = "…", got {value!r}')
        head[name] = value
    figures: dict[str, Figure] = {}
    for table, fields in data.items():
        if not isinstance(fields, dict):
            raise MachineError(f"{key}: expected name, kind, architecture and tables of figures; got {table!r}")
        for field, pair in fields.items():
            name = field if table == "device" else f"{table}.{field}"
            figures[name] = _figure(key, name, pair)
    return _checked(Machine(key, head["name"], head["kind"], head["architecture"], figures))


def _figure(key: str, name: str, pair: object) -> Figure:
    """From `["4.8 TB/s", "who says so"]`."""
    if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[1], str):
        raise MachineError(f'{key}: {name}: expected [value, "source"]: a number and where it comes from, got {pair!r}')
    if (known := FIGURES.get(name.partition(".")[0])) is None:
        raise MachineError(f"{key}: unknown figure {name!r}; the figures are {', '.join(FIGURES)}")
    try:
        value = forms.quantity(known[0], most=1e18)(pair[0]) if known[0] else forms.whole(0)(pair[0])
    except forms.BadForm as error:
        raise MachineError(f"{key}: {name}: expected {error}; got {pair[0]!r}") from None
    return Figure(float(value), pair[1])


def read_json(key: str, text: str) -> Machine:
    """As `Machine.data` gives it, checked."""
    try:
        data = json.loads(text)
        head = [data["name"], data["kind"], data["architecture"]]
        figures = {name: Figure(float(value), str(source)) for name, (value, source) in data["figures"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"
        raise OptionError(f"{key}: expected name, kind, architecture and figures as [value, source]; {why}") from None
    return _checked(Machine(key, *head, figures))


def _checked(described: Machine) -> Machine:
    """Every figure is one of `FIGURES`, is a positive number and says where it comes from."""
    key = described.key
    for name, figure in described.figures.items():
        if name.partition(".")[0] not in FIGURES:
            raise OptionError(f"{key}: unknown figure {name!r}; the figures are {', '.join(FIGURES)}")
        if not 0 < figure.value < math.inf or not figure.source.strip():
            raise OptionError(f"{key}: expected {name} to be a positive number with a source, got {figure}")
    return described


_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_BINARY = ((2**30, "Gi"), (2**20, "Mi"), (2**10, "Ki"))


def figure_text(figure: str, value: float) -> str:
    """The value of a figure with its unit."""
    unit, _ = FIGURES[figure.partition(".")[0]]
    if not unit:
        return f"{value:g}"
    if unit == "s":
        return f"{value * 1e6:.4g} µs"
    steps = _BINARY if unit == "B" and value < 2**30 else _PREFIXES
    for size, prefix in steps:
        if value >= size:
            return f"{value / size:.4g} {prefix}{unit}"
    return f"{value:g} {unit}"
