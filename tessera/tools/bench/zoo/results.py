"""The measurements of the zoo: one `Cell` a model and contestant, kept in a file that a later run goes on from.

A cell is taken over from the file only where it would come out the same: machine, versions and the model's definition
are what they were. What Tessera took is measured anew unless the caller says otherwise, since it is Tessera that
changes. Cells of other machines or definitions stay in the file until they are measured again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import tessera
from tessera.tools.bench.model_contestants import OURS
from tessera.tools.bench.zoo.registry import Entry
from tessera.tools.machine import machine
from tessera.util.errors import OptionError

OK, WRONG, ERROR, LATE = "ok", "wrong", "error", "timeout"
Key = tuple[str, str, str, str]


@dataclass(frozen=True)
class Cell:
    """What one contestant did with one job, or why it did not. Times in seconds, memory in bytes."""

    job: str
    size: str
    device: str  # cpu or cuda
    who: str
    definition: str  # a hash of what is computed
    here: dict[str, str]  # the machine and its versions
    status: str
    why: str = ""
    seconds: float | None = None  # of a step, the median
    samples: list[float] = field(default_factory=list)
    peak: int | None = None
    first: float | None = None
    host: float | None = None
    floor: float | None = None
    error: float | None = None  # of the loss or the result, relative to its size, against float32
    gradient_error: float | None = None  # the worst of all gradients
    eager_error: float | None = None  # the same of eager
    eager_gradient_error: float | None = None
    kernels: list[tuple[str, int, float]] = field(default_factory=list)  # the largest: name, launches, seconds a step
    wall: float = 0.0  # of the whole measurement
    beside: int = 1  # so many compiled at the same time
    code: str = ""  # a hash of Tessera's own sources

    @property
    def key(self) -> Key:
        return self.job, self.size, self.device, self.who


def here(device: str) -> dict[str, str]:
    """What must be the same for a measurement to be taken over."""
    name = torch.cuda.get_device_name() if device == "cuda" else machine().cpu
    return {
        "device": name,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "transformers": _version("transformers"),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


@functools.cache
def code() -> str:
    """A hash of Tessera's sources, without its tools: which state of the code was measured."""
    root = Path(tessera.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        if "tools" not in path.relative_to(root).parts:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


class Results:
    """The cells of a file and of this run. `shown` are those that this run measured or took over."""

    def __init__(self, cells: Iterable[Cell] = (), path: Path | None = None) -> None:
        self.cells = {cell.key: cell for cell in cells}
        self.path = path
        self.shown: dict[Key, Cell] = {}

    @classmethod
    def of_file(cls, path: Path | None) -> Results:
        if path is None or not path.exists():
            return cls(path=path)
        known = {f.name for f in fields(Cell)}
        cells = json.loads(path.read_text()).get("cells")
        if cells is None:
            raise OptionError(f"--json: expected a file that the zoo wrote, got another in {path}")
        return cls((Cell(**{name: x for name, x in one.items() if name in known}) for one in cells), path)

    def reusable(self, key: Key, entry: Entry, place: dict[str, str], ours: bool, retry: bool = False) -> Cell | None:
        """The cell of an earlier run, if it still says what a new one would say."""
        cell = self.cells.get(key)
        if cell is None or (cell.definition, cell.here) != (entry.definition, place):
            return None
        if (cell.who == OURS and not ours) or (retry and cell.status in (ERROR, LATE)):
            return None
        return cell

    def add(self, cell: Cell) -> None:
        """A cell of this run, written at once: the run may be stopped at any time."""
        self.cells[cell.key] = self.shown[cell.key] = cell
        if self.path is not None:
            beside = self.path.with_name(self.path.name + ".part")
            beside.write_text(json.dumps(self.document(), indent=1) + "\n")
            beside.replace(self.path)

    def show(self, cell: Cell) -> None:
        self.shown[cell.key] = cell

    def document(self) -> dict[str, object]:
        return {"suite": "zoo", "machine": asdict(machine()), "cells": [asdict(cell) for cell in self.cells.values()]}
