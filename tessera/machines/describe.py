"""A machine as numbers that a cost model reads.

In: a name, or a JSON file. Out: a `Machine`, which prints every figure with its unit and its source. A figure is what
one device has, unless its name says otherwise: a unit is a multiprocessor of a GPU, or a core of a CPU. Rates are
dense, and decimal; sizes of memories inside the chip are binary. A figure that is not known is not there, and whoever
asks for it is told which machine lacks it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from tessera.util.errors import OptionError

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
    "link": ("B/s", "to other devices, all links together, one way, by kind"),
    "box": ("", "devices that the fastest of these links join"),
    "launch": ("s", "of the host, for one kernel"),
    "call": ("s", "of the host, for one operator of PyTorch"),
    "fork": ("s", "to start a team of threads"),
}
_DATA = "data"


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
    def matrix_flops(self) -> float:
        """In 16 bits; what plain units do where there are no matrix units."""
        return self.figures["matrix.bfloat16"].value if "matrix.bfloat16" in self.figures else self.flops

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
    if path.suffix == ".json":
        if not path.is_file():
            raise OptionError(f"machine: there is no file {path}")
        return read(path.stem, path.read_text(encoding="utf-8"))
    names = known()
    if str(which).lower() not in names:
        raise OptionError(f"machine: unknown {str(which)!r}; there are {', '.join(names)}, or a JSON file")
    key = str(which).lower()
    return read(key, (files(__package__) / _DATA / f"{key}.json").read_text(encoding="utf-8"))


@functools.cache
def known() -> tuple[str, ...]:
    names = (file.name for file in (files(__package__) / _DATA).iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in names if name.endswith(".json")))


def read(key: str, text: str) -> Machine:
    """A description, checked: every figure is one of `FIGURES`, is a positive number and says where it comes from."""
    try:
        data = json.loads(text)
        head = [data["name"], data["kind"], data["architecture"]]
        figures = {name: Figure(float(value), str(source)) for name, (value, source) in data["figures"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise OptionError(f"{key}: expected name, kind, architecture and figures as [value, source]; {why}") from None
    for name, figure in figures.items():
        if name.partition(".")[0] not in FIGURES:
            raise OptionError(f"{key}: unknown figure {name!r}; the figures are {', '.join(FIGURES)}")
        if figure.value <= 0 or not figure.source.strip():
            raise OptionError(f"{key}: expected {name} to be a positive number with a source, got {figure}")
    return Machine(key, *head, figures)


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
